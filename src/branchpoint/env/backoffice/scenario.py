"""One task: a desk, the customer's requests and the plan that serves them, all a function of (split, index, dials)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from branchpoint.env.backoffice import names
from branchpoint.env.backoffice.calls import Call, call
from branchpoint.env.backoffice.desk import (
    CARRIERS,
    CATEGORIES,
    PRIORITIES,
    TODAY,
    Customer,
    Desk,
    Item,
    Order,
    Product,
    Status,
)
from branchpoint.env.backoffice.dials import POOLS, Dials
from branchpoint.env.backoffice.tools import run
from branchpoint.noise import digest

T = TypeVar("T")
MOST_WRITES = 7
FREE_TEXT = "requested"
"""What the plan and the menu write where the text is free."""
_STATUS: dict[str, Status] = {
    "cancel_unpaid": "pending",
    "cancel_refund": "paid",
    "damaged_refund": "delivered",
    "reserve_ship": "paid",
    "ship_reserved": "paid",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One wish. ``order`` is None for a ticket without one; ``described``: named by ``day`` and ``item``."""

    template: str
    order: str | None = None
    described: bool = False
    day: int = 0
    item: str = ""
    units: int = 0
    address: str = ""
    carrier: str = ""
    ship_day: int = 0
    category: str = ""
    priority: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``contact`` is how the customer is named; ``wording`` the task's own phrasing; ``plan`` the writes that serve,
    ``wanted`` the desk after them."""

    desk: Desk
    wanted: Desk
    customer: str
    contact: str
    requests: tuple[Request, ...]
    plan: tuple[Call, ...]
    wording: int

    @property
    def budget(self) -> int:
        """Tool calls allowed: 7 + 2n for n writes, at most 21."""
        return min(7 + 2 * len(self.plan), 21)

    @property
    def fixed(self) -> frozenset[str]:
        """The ticket summaries that the customer prescribed."""
        return frozenset(r.summary for r in self.requests if r.summary)


class Draw:
    """Random choices for the generator, built on ``Random.random`` alone: the one stream that Python keeps stable."""

    def __init__(self, *key: str | int) -> None:
        self._next = random.Random(digest(0, "backoffice", *key)).random

    def below(self, n: int) -> int:
        return int(self._next() * n)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def chance(self, probability: float) -> bool:
        return self._next() < probability

    def sample(self, values: Sequence[T], n: int) -> list[T]:
        """``n`` distinct entries in random order."""
        swapped: dict[int, int] = {}
        out: list[T] = []
        for i in range(n):
            j = self.between(i, len(values) - 1)
            out.append(values[swapped.get(j, j)])
            swapped[j] = swapped.get(i, i)
        return out


@lru_cache(maxsize=512)
def _scenario(split: str, index: int, dials: Dials) -> Scenario:
    return _Builder(split, index, dials).build()


def scenario(split: str, index: int, dials: Dials) -> Scenario:
    """The scenario of a task; cached, for all its parts are immutable. Raises ValueError outside the pool."""
    if split not in POOLS or split == "diagnostic":
        raise ValueError(f"scenarios are drawn for train, validation and test; got {split!r}")
    if not 0 <= index < POOLS[split]:
        raise ValueError(f"{split} has tasks 0 to {POOLS[split] - 1}; got {index}")
    plain = replace(dials, wording=None, p=0.0, q=0.0, luck="training", style="json", menu=False, menu_size=80)
    return _scenario(split, index, plain)


def diagnostic(dials: Dials) -> tuple[int, ...]:
    """The first 16 validation tasks with 2 to 4 writes. Raises ValueError when the dials leave fewer."""
    fit = (i for i in range(POOLS["validation"]) if 2 <= len(scenario("validation", i, dials).plan) <= 4)
    found = tuple(i for i, _ in zip(fit, range(POOLS["diagnostic"]), strict=False))
    if len(found) < POOLS["diagnostic"]:
        raise ValueError(f"only {len(found)} validation tasks have 2 to 4 writes with these dials; widen templates")
    return found


class _Builder:
    def __init__(self, split: str, index: int, dials: Dials) -> None:
        self.split, self.dials = split, dials
        self.draw = Draw(split, index)

    def build(self) -> Scenario:
        d, dials = self.draw, self.dials
        products = self._products()
        customers = self._customers()
        client = d.pick(list(customers.values()))
        templates = [d.pick(dials.templates) for _ in range(d.between(1, dials.requests))]
        orders = self._orders(products, customers, client, templates)
        desk = Desk(customers, products, {o.id: o for o in sorted(orders, key=lambda o: o.id)})
        mine = [o for o in orders if o.customer == client.id]
        requests: list[Request] = []
        plan: list[Call] = []
        for template, order in zip(templates, mine, strict=False):
            request = self._request(template, order, desk, client)
            steps = _plan(request, order, desk)
            # Two equal tickets would be one wish said twice.
            if len(plan) + len(steps) <= MOST_WRITES and not any(s in plan for s in steps):
                requests.append(request)
                plan += steps
        contact = {"name": client.name, "email": client.email, "phone": client.phone}[d.pick(dials.contacts)]
        return Scenario(desk, _after(desk, plan), client.id, contact, tuple(requests), tuple(plan), d.below(1000))

    def _products(self) -> dict[str, Product]:
        d, dials = self.draw, self.dials
        skus = d.sample(range(dials.ids), dials.products)
        things = d.sample(names.PRODUCTS, dials.products)
        steps = max(1, 5000 // dials.price_step)
        return {
            f"SKU-{n:04d}": Product(f"SKU-{n:04d}", thing, dials.price_step * d.between(1, steps), d.between(40, 90))
            for n, thing in zip(skus, things, strict=True)
        }

    def _customers(self) -> dict[str, Customer]:
        d, n = self.draw, self.dials.customers
        numbers, lasts = d.sample(range(self.dials.ids), n), d.sample(names.LAST[self.split], n)
        phones = d.sample(range(10000), n)
        out: dict[str, Customer] = {}
        for number, last, phone in zip(numbers, lasts, phones, strict=True):
            first, i = d.pick(names.FIRST), f"C{number:04d}"
            email = f"{first}.{last}@mail.example".lower()
            tier = d.pick(("basic", "plus", "gold"))
            out[i] = Customer(i, f"{first} {last}", email, f"555-{phone:04d}", self._address(), tier)
        return out

    def _address(self) -> str:
        d = self.draw
        return f"{d.between(1, 99)} {d.pick(names.STREETS)} {d.pick(names.KINDS)}, {d.pick(names.TOWNS)}"

    def _orders(
        self, products: dict[str, Product], customers: dict[str, Customer], client: Customer, templates: list[str]
    ) -> list[Order]:
        """The client's orders first, one for each request; then others that could be mistaken for them."""
        d, most = self.draw, self.dials.orders
        owners = [client] * max(len(templates), d.between(1, most))
        for other in customers.values():
            if other is not client:
                owners += [other] * d.between(1, most)
        numbers = d.sample(range(self.dials.ids), len(owners))
        days = {c: d.sample(range(60, TODAY), most) for c in customers}
        orders: list[Order] = []
        for k, (owner, number) in enumerate(zip(owners, numbers, strict=True)):
            template = templates[k] if k < len(templates) else None
            orders.append(self._order(f"O{number:04d}", owner, days[owner.id].pop(), products, template))
        return orders

    def _order(
        self, number: str, owner: Customer, day: int, products: dict[str, Product], template: str | None
    ) -> Order:
        d, dials = self.draw, self.dials
        status: Status = d.pick(("pending", "paid", "paid", "shipped", "delivered", "cancelled"))
        if template == "change_address":
            status = d.pick(("pending", "paid"))
        elif template in _STATUS:
            status = _STATUS[template]
        skus = d.sample(list(products), d.between(1, dials.items))
        ready = template == "ship_reserved" or status in ("shipped", "delivered")
        ready = ready or (template is None and status == "paid" and d.chance(0.3))
        items = []
        for sku in skus:
            quantity = d.between(1, dials.quantity)
            items.append(Item(sku, quantity, products[sku].price, quantity if ready else 0))
        paid = status in ("paid", "shipped", "delivered") or (status == "cancelled" and d.chance(0.5))
        order = Order(number, owner.id, day, status, paid, owner.address, tuple(items))
        if status in ("shipped", "delivered"):
            order = replace(order, shipment=(d.pick(CARRIERS), day + d.between(1, 7)))
        if template is None and status in ("delivered", "cancelled") and paid and d.chance(0.5):
            order = replace(order, refunds=(items[0].unit_price,))
        return order

    def _request(self, template: str, order: Order, desk: Desk, client: Customer) -> Request:
        d, dials = self.draw, self.dials
        item = d.pick(order.items)
        thing = desk.products[item.sku].name
        described = d.chance(dials.described)
        base = Request(template, order.id, described, order.day, thing)
        if template == "damaged_refund":
            return replace(base, units=d.between(1, item.quantity))
        if template == "change_address":
            address = self._address()
            while address == order.address:
                address = self._address()
            return replace(base, address=address)
        if template in ("reserve_ship", "ship_reserved"):
            return replace(base, carrier=d.pick(CARRIERS), ship_day=TODAY + d.between(1, 7))
        if template in ("ticket_order", "ticket_plain"):
            summary = d.pick(names.SUMMARIES) if d.chance(dials.fixed_summaries) else ""
            base = replace(base, category=d.pick(CATEGORIES), priority=d.pick(PRIORITIES), summary=summary)
            return base if template == "ticket_order" else replace(base, order=None, described=False)
        return base


def _after(desk: Desk, plan: Sequence[Call]) -> Desk:
    for step in plan:
        desk, answer = run(desk, step)
        if "error" in answer:
            raise AssertionError(f"the plan fails at {step.compact()}: {answer}")
    return desk


def _plan(request: Request, order: Order, desk: Desk) -> list[Call]:
    """The writes that serve a request."""
    match request.template:
        case "cancel_unpaid" | "cancel_refund":
            steps = [call("cancel_order", order=order.id, reason=FREE_TEXT)]
            if order.refundable:
                steps.append(call("issue_refund", order=order.id, amount=order.refundable, reason=FREE_TEXT))
            return steps
        case "change_address":
            return [call("update_shipping_address", order=order.id, address=request.address)]
        case "damaged_refund":
            price = next(i.unit_price for i in order.items if desk.products[i.sku].name == request.item)
            amount = request.units * price
            return [call("issue_refund", order=order.id, amount=amount, reason=FREE_TEXT)]
        case "reserve_ship" | "ship_reserved":
            lacking = [(i.sku, i.quantity - i.reserved) for i in order.items if i.quantity > i.reserved]
            steps = [call("reserve_stock", sku=s, quantity=n, order=order.id) for s, n in lacking]
            ship = call("schedule_shipment", order=order.id, carrier=request.carrier, day=request.ship_day)
            return [*steps, ship]
        case _:
            summary = request.summary or FREE_TEXT
            about = {"category": request.category, "priority": request.priority, "order": request.order}
            return [call("create_ticket", customer=order.customer, summary=summary, **about)]
