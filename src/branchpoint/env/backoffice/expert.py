"""A scripted clerk that plays from what it sees: reads before it writes, tries again, waits, gives up on outages."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from branchpoint.env.backoffice.calls import TOOLS, Call, call
from branchpoint.env.backoffice.dials import Dials
from branchpoint.env.backoffice.render import read
from branchpoint.env.backoffice.scenario import FREE_TEXT
from branchpoint.env.backoffice.wording import Reading, Wish, understand
from branchpoint.world import Step, Task

T = TypeVar("T")
Asking: TypeAlias = Generator[Call, None, T]
"""Yields the calls whose answers it needs, in order, and returns what it found out."""


class Impossible(Exception):
    """A wish that cannot be served: what it needs is out of service, or does not exist."""


class Expert:
    """Plays one episode: ``act(step)`` takes the steps in order, the reset's first."""

    def __init__(self, task: Task) -> None:
        self._dials = Dials.of(task.metadata)
        self._asked: Call | None = None
        self._answers: dict[str, dict[str, Any]] = {}  # by compact call: what it answered
        self._dead: set[str] = set()
        self._doubtful: dict[str, int | None] = {}  # refunds that timed out: the refundable balance before
        self._wait = 0
        self._reading: Reading | None = None

    def act(self, step: Step) -> str:
        """The next call, in the task's style."""
        if self._reading is None:
            self._reading = understand(step.observation)
        else:
            self._learn(read(step.observation, self._dials.style))
        self._asked = self._next(self._reading)
        return self._asked.compact() if self._dials.style == "compact" else self._asked.json()

    def _learn(self, answer: dict[str, Any]) -> None:
        asked = self._asked
        assert asked is not None
        text, code = asked.compact(), answer.get("error")
        if code is None:
            self._answers[text] = answer
        elif code == "RATE_LIMITED":
            self._wait = answer.get("retry_after", 5)
        elif code == "TIMEOUT" and asked.tool == "create_ticket":
            self._answers[text] = {}  # no tool shows tickets: a second one is the worse mistake
        elif code == "TIMEOUT" and asked.tool == "issue_refund":
            # The order is forgotten, so that it is read again.
            order = self._answers.pop(call("get_order", order=asked.args["order"]).compact(), {})
            self._doubtful[text] = order.get("refundable")
        elif code in ("INVALID_STATE", "RULE_VIOLATION") and TOOLS[asked.tool].kind == "write":
            self._answers[text] = {}  # done before, by an attempt that timed out; else hopeless either way
        elif code not in ("TRANSIENT_FAILURE", "TIMEOUT"):
            self._dead.add(text)

    def _next(self, reading: Reading) -> Call:
        if self._wait:
            seconds, self._wait = self._wait, 0
            return call("wait", seconds=seconds)
        for wish in reading.wishes:
            try:
                for step in self._serve(wish, reading.contact):
                    if step.compact() in self._dead:
                        raise Impossible
                    if step.compact() not in self._answers:
                        return step
            except Impossible:
                continue
        return call("finish", summary="done")

    def _serve(self, wish: Wish, contact: str) -> Asking[None]:
        """The calls that serve a wish in order; each is answered by the time the next is asked for."""
        order: str | None = wish.order
        if order is None and wish.day is not None:
            customer = yield from self._find_customer(contact)
            order = yield from self._find_order(wish, customer)
        details: dict[str, Any] = {}
        if order is not None:
            details = yield from self._details(order)
        if wish.ticket is not None:
            customer = details.get("customer") or (yield from self._find_customer(contact))
            priority, category = wish.ticket
            about = {"category": category, "priority": priority, "summary": wish.summary or FREE_TEXT}
            yield call("create_ticket", customer=customer, order=order, **about)
        elif order is not None:
            yield from self._change(wish, order, details)

    def _change(self, wish: Wish, order: str, details: dict[str, Any]) -> Asking[None]:
        if wish.shipment is not None:
            for item in details.get("items", ()):
                if item["quantity"] > item["reserved"]:
                    lacking = item["quantity"] - item["reserved"]
                    yield call("reserve_stock", sku=item["sku"], quantity=lacking, order=order)
            yield call("schedule_shipment", order=order, carrier=wish.shipment[0], day=wish.shipment[1])
        elif wish.damaged is not None:
            units, name = wish.damaged
            prices = [i["unit_price"] for i in details.get("items", ()) if i["name"] == name]
            if not prices:
                raise Impossible
            yield from self._refund(order, units * prices[0], details)
        elif wish.address is not None:
            yield call("update_shipping_address", order=order, address=wish.address)
        else:
            cancelled = yield from self._ask(call("cancel_order", order=order, reason=FREE_TEXT))
            due = cancelled.get("refund_due", details.get("refundable", 0))
            if due:
                yield from self._refund(order, due, details)

    def _refund(self, order: str, amount: int, details: dict[str, Any]) -> Asking[None]:
        """A refund; after a time-out the order is read again to see whether the money left."""
        refund = call("issue_refund", order=order, amount=amount, reason=FREE_TEXT)
        text = refund.compact()
        if text in self._doubtful and details.get("refundable") != self._doubtful.pop(text):
            self._answers[text] = {}
        yield refund

    def _find_customer(self, contact: str) -> Asking[str]:
        found = yield from self._pages(call("search_customers", query=contact), "customers")
        if not found:
            raise Impossible
        return found[0]["customer"]

    def _find_order(self, wish: Wish, customer: str) -> Asking[str]:
        rows = yield from self._pages(call("list_orders", customer=customer), "orders", wish)
        for row in rows:
            if wish.fits(row["day"], row["items"]):
                return row["order"]
        raise Impossible

    def _pages(self, first: Call, name: str, wish: Wish | None = None) -> Asking[list[dict[str, Any]]]:
        """The rows of a list, page by page, until what is sought has come."""
        rows: list[dict[str, Any]] = []
        page: Call | None = first
        turned: set[str] = set()
        while page is not None:
            if page.compact() in turned:  # cut to nothing: only asking anew gets further
                del self._answers[page.compact()]
            turned.add(page.compact())
            answer = yield from self._ask(page, "next_offset")
            rows += answer.get(name, ())
            if any(wish is None or wish.fits(r["day"], r["items"]) for r in rows):
                break
            following = answer.get("next_offset")
            page = None if following is None else call(first.tool, **{**first.args, "offset": following})
        return rows

    def _details(self, order: str) -> Asking[dict[str, Any]]:
        """The order as first read, or nothing when it cannot be read: some wishes can be served unseen."""
        step = call("get_order", order=order)
        if step.compact() in self._dead:
            return {}
        return (yield from self._ask(step, "customer", "items", "refundable"))

    def _ask(self, step: Call, *needed: str) -> Asking[dict[str, Any]]:
        """The answer to a call, asked for again while a field that is needed is missing."""
        text = step.compact()
        if text in self._answers and not all(name in self._answers[text] for name in needed):
            del self._answers[text]
        yield step
        return self._answers[text]
