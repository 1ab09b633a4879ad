"""The menu: the compact calls that make sense to an agent that has seen what it has seen so far.

Nothing hidden enters: ids, amounts and quantities come from the customer's message and from observations. Calls about
what the customer mentioned come first and always stay; calls of the same kinds about other things fill the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from branchpoint.env.backoffice.calls import Call, call
from branchpoint.env.backoffice.desk import CARRIERS, CATEGORIES, LAST_DAY, PRIORITIES, TODAY
from branchpoint.env.backoffice.luck import RETRY_AFTER
from branchpoint.env.backoffice.scenario import FREE_TEXT
from branchpoint.env.backoffice.wording import Reading

FINISH = call("finish", summary="done").compact()
_ALWAYS = (FINISH, *(call("wait", seconds=s).compact() for s in RETRY_AFTER))


@dataclass(frozen=True, slots=True)
class Seen:
    """What an agent knows. ``orders``: by id, the details shown last, None where only the id was seen. ``rows``: day
    and items of listed orders. ``due``: refundable amounts shown for an order. ``pages``: calls for the next page."""

    reading: Reading
    customers: frozenset[str] = frozenset()
    orders: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    rows: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    due: Mapping[str, frozenset[int]] = field(default_factory=dict)
    pages: frozenset[str] = frozenset()

    @staticmethod
    def first(reading: Reading) -> Seen:
        """What the customer's message alone shows."""
        return Seen(reading, orders={w.order: None for w in reading.wishes if w.order})

    def note(self, asked: Call, answer: Mapping[str, Any]) -> Seen:
        """What is known after an answer (as the agent saw it)."""
        if "error" in answer:
            return self
        seen = self
        if answer.get("next_offset") is not None:
            further = call(asked.tool, **{**asked.args, "offset": answer["next_offset"]}).compact()
            seen = replace(seen, pages=seen.pages | {further})
        for row in answer.get("customers", ()):
            seen = replace(seen, customers=seen.customers | {row["customer"]})
        if isinstance(answer.get("customer"), str):
            seen = replace(seen, customers=seen.customers | {answer["customer"]})
        if "orders" in answer:
            rows = {r["order"]: (r["day"], tuple(r["items"])) for r in answer["orders"]}
            ids = {i: seen.orders.get(i) for i in rows}
            return replace(seen, rows={**seen.rows, **rows}, orders={**seen.orders, **ids})
        return seen._note_order(asked, answer)

    def _note_order(self, asked: Call, answer: Mapping[str, Any]) -> Seen:
        order = answer.get("order")
        if not isinstance(order, str):
            return self
        seen = self
        shown = {answer[k] for k in ("refund_due", "refundable") if k in answer}
        if amounts := {a for a in shown if a > 0}:
            seen = replace(seen, due={**seen.due, order: seen.due.get(order, frozenset()) | amounts})
        if asked.tool == "get_order":
            seen = replace(seen, orders={**seen.orders, order: answer})
        return seen

    def relevant(self, order: str) -> bool:
        """Whether the customer's message is about this order, as far as the agent can tell."""
        day, items = self.rows.get(order, (None, ()))
        details = self.orders.get(order)
        if details is not None:
            day, items = details.get("day", day), tuple(i["name"] for i in details.get("items", ()))
        return any(w.order == order or (day is not None and w.fits(day, list(items))) for w in self.reading.wishes)


def menu(seen: Seen, most: int) -> tuple[str, ...]:
    """The calls on offer, sorted: every call about what was mentioned, then others up to ``most`` in all."""
    calls: dict[str, None] = dict.fromkeys(_ALWAYS)
    calls.update(dict.fromkeys(_reads(seen)))
    calls.update(dict.fromkeys(_mentioned(seen)))
    for other in _others(seen):
        if len(calls) >= most:
            break
        calls.setdefault(other)
    return tuple(sorted(calls))


def _reads(seen: Seen) -> Iterator[str]:
    yield f"search_customers query={_quote(seen.reading.contact)}"
    yield from sorted(seen.pages)
    for customer in sorted(seen.customers):
        yield f"list_orders customer={customer}"
    for order in sorted(seen.orders):
        yield f"get_order order={order}"


def _mentioned(seen: Seen) -> Iterator[str]:
    wishes = seen.reading.wishes
    orders = [o for o in sorted(seen.orders) if seen.relevant(o)]
    shipments = sorted({w.shipment for w in wishes if w.shipment})
    addresses = sorted({w.address for w in wishes if w.address})
    for order in orders:
        yield _cancel(order)
        yield from (_ship(order, carrier, day) for carrier, day in shipments)
        yield from (f"update_shipping_address order={order} address={_quote(a)}" for a in addresses)
        yield from (_refund(order, amount) for amount in _amounts(seen, order, True))
        yield from _reservations(seen, order)
    summaries = sorted({w.summary or FREE_TEXT for w in wishes})
    tickets = sorted({w.ticket for w in wishes if w.ticket})
    for (priority, category), customer in product(tickets, sorted(seen.customers)):
        for summary, order in product(summaries, (None, *orders)):
            yield _ticket(customer, category, priority, summary, order)


def _others(seen: Seen) -> Iterator[str]:
    """Calls of the same kinds about other orders, amounts, days and categories: what a careless agent might do."""
    orders = sorted(seen.orders)
    yield from (_cancel(o) for o in orders)
    for order in orders:
        yield from (_refund(order, amount) for amount in _amounts(seen, order, False))
        yield from _reservations(seen, order)
    yield from (f"get_customer customer={c}" for c in sorted(seen.customers))
    days = range(TODAY + 1, LAST_DAY + 1)
    yield from (_ship(o, carrier, day) for day, carrier, o in product(days, CARRIERS, orders))
    for category, priority, customer in product(CATEGORIES, PRIORITIES, sorted(seen.customers)):
        yield from (_ticket(customer, category, priority, FREE_TEXT, o) for o in (None, *orders))
    skus = {i["sku"] for d in seen.orders.values() if d for i in d.get("items", ())}
    yield from (f"check_inventory sku={s}" for s in sorted(skus))


def _amounts(seen: Seen, order: str, mentioned: bool) -> list[int]:
    """Refunds that can be read off or computed: whole balances, and units of an item times its price."""
    amounts = set(seen.due.get(order, ()))
    damaged = {w.damaged for w in seen.reading.wishes if w.damaged}
    for item in (seen.orders[order] or {}).get("items", ()):
        for units in range(1, item["quantity"] + 1):
            if not mentioned or (units, item["name"]) in damaged:
                amounts.add(units * item["unit_price"])
    return sorted(amounts)


def _reservations(seen: Seen, order: str) -> Iterator[str]:
    for item in (seen.orders[order] or {}).get("items", ()):
        for lacking in sorted({item["quantity"], item["quantity"] - item["reserved"]}):
            if lacking > 0 and item["reserved"] < item["quantity"]:
                yield f"reserve_stock sku={item['sku']} quantity={lacking} order={order}"


def _cancel(order: str) -> str:
    return f"cancel_order order={order} reason={FREE_TEXT}"


def _refund(order: str, amount: int) -> str:
    return f"issue_refund order={order} amount={amount} reason={FREE_TEXT}"


def _ship(order: str, carrier: str, day: int) -> str:
    return f"schedule_shipment order={order} carrier={carrier} day={day}"


def _ticket(customer: str, category: str, priority: str, summary: str, order: str | None) -> str:
    about = "" if order is None else f" order={order}"
    return f"create_ticket customer={customer} category={category} priority={priority} summary={_quote(summary)}{about}"


def _quote(text: str) -> str:
    return f'"{text}"' if " " in text else text
