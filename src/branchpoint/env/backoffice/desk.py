"""The state of the desk: customers, products, orders, tickets. Everything is immutable; a write returns a new desk.

Immutability is what makes a snapshot, and the stale view of a read, cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

TODAY = 100
LAST_DAY = TODAY + 7
CARRIERS = ("standard", "express")
CATEGORIES = ("billing", "delivery", "product", "account")
PRIORITIES = ("low", "normal", "high")

Status = Literal["pending", "paid", "shipped", "delivered", "cancelled"]


@dataclass(frozen=True, slots=True)
class Customer:
    id: str
    name: str
    email: str
    phone: str
    address: str
    tier: str


@dataclass(frozen=True, slots=True)
class Product:
    """``price`` in cents; ``stock`` is what can still be reserved."""

    sku: str
    name: str
    price: int
    stock: int


@dataclass(frozen=True, slots=True)
class Item:
    sku: str
    quantity: int
    unit_price: int
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """``paid``: money was received, whatever the status is now. ``refunds`` in cents."""

    id: str
    customer: str
    day: int
    status: Status
    paid: bool
    address: str
    items: tuple[Item, ...]
    refunds: tuple[int, ...] = ()
    shipment: tuple[str, int] | None = None

    @property
    def total(self) -> int:
        return sum(i.quantity * i.unit_price for i in self.items)

    @property
    def refundable(self) -> int:
        return self.total - sum(self.refunds) if self.paid else 0

    @property
    def open(self) -> bool:
        """Not yet shipped, not cancelled: may still be changed."""
        return self.status in ("pending", "paid")


@dataclass(frozen=True, slots=True)
class Ticket:
    id: str
    customer: str
    category: str
    priority: str
    summary: str
    order: str | None


@dataclass(frozen=True, slots=True)
class Desk:
    customers: Mapping[str, Customer]
    products: Mapping[str, Product]
    orders: Mapping[str, Order]
    tickets: tuple[Ticket, ...] = ()

    def put(self, order: Order) -> Desk:
        """The desk with an order replaced."""
        return replace(self, orders={**self.orders, order.id: order})

    def move(self, sku: str, units: int) -> Desk:
        """The desk with ``units`` more in stock."""
        product = self.products[sku]
        return replace(self, products={**self.products, sku: replace(product, stock=product.stock + units)})


def same(final: Desk, wanted: Desk, fixed: frozenset[str]) -> bool:
    """Whether two desks hold the same facts: the order of writes, ticket ids and free text do not matter.

    ``fixed``: the ticket summaries that the task prescribes; a wanted ticket with one of these must have it exactly.
    """
    if final.customers != wanted.customers or final.products != wanted.products:
        return False
    if final.orders.keys() != wanted.orders.keys():
        return False
    for i, order in wanted.orders.items():
        mine = final.orders[i]
        if mine is not order and _facts(mine) != _facts(order):
            return False
    return _same_tickets(final.tickets, wanted.tickets, fixed)


def _facts(order: Order) -> Order:
    return replace(order, refunds=tuple(sorted(order.refunds)))


def _same_tickets(final: tuple[Ticket, ...], wanted: tuple[Ticket, ...], fixed: frozenset[str]) -> bool:
    def about(t: Ticket) -> tuple[str | None, ...]:
        return (t.customer, t.category, t.priority, t.order)

    exact = Counter((*about(t), t.summary) for t in wanted if t.summary in fixed)
    have = Counter((*about(t), t.summary) for t in final)
    if exact - have:
        return False
    left: Counter[tuple[str | None, ...]] = Counter()
    for key, count in (have - exact).items():
        left[key[:-1]] += count
    return left == Counter(about(t) for t in wanted if t.summary not in fixed)
