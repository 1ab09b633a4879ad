"""How hard a task is: everything that shapes its world, its requests, its luck and its looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from branchpoint.env.backoffice.luck import MIXTURES, Mixture
from branchpoint.env.backoffice.render import Style

TEMPLATES = (
    "cancel_unpaid",
    "cancel_refund",
    "change_address",
    "damaged_refund",
    "reserve_ship",
    "ship_reserved",
    "ticket_order",
    "ticket_plain",
)
CONTACTS = ("name", "email", "phone")
POOLS: Mapping[str, int] = {"train": 2000, "validation": 300, "test": 300, "diagnostic": 16}
DEMO: Mapping[str, Any] = {
    "requests": 1,
    "templates": ("cancel_unpaid", "cancel_refund", "ship_reserved", "ticket_order"),
    "contacts": ("name",),
    "described": 0.0,
    "customers": 2,
    "orders": 3,
    "products": 4,
    "items": 1,
    "quantity": 2,
    "ids": 40,
    "price_step": 500,
    "fixed_summaries": 0.0,
    "style": "compact",
    "menu": True,
    "menu_size": 40,
}
"""Dials of tasks that a model of a million parameters can learn; add ``p`` for luck."""


@dataclass(frozen=True, slots=True)
class Dials:
    """Raises ValueError for an unknown dial or a value out of range.

    ``requests``: at most so many a task. ``described``: probability that an order is given by day and item instead of
    its id. ``customers``, ``orders`` (a customer), ``products``, ``items`` (an order), ``quantity`` (an item): sizes of
    the world, the last four "at most". ``ids``: id numbers are below it. ``price_step``: prices in cents are its
    multiples. ``fixed_summaries``: probability that a ticket's summary is prescribed. ``wording``: which phrasing of
    the requests, None for the task's own. ``p``: rate of faults a call; ``q``: rate of false failures of the grader;
    ``luck``: which faults. ``style``: of observations; ``menu``: whether steps list at most ``menu_size`` actions.
    """

    requests: int = 3
    templates: tuple[str, ...] = TEMPLATES
    contacts: tuple[str, ...] = CONTACTS
    described: float = 0.4
    customers: int = 8
    orders: int = 7
    products: int = 16
    items: int = 3
    quantity: int = 3
    ids: int = 10000
    price_step: int = 1
    fixed_summaries: float = 0.3
    wording: int | None = None
    p: float = 0.0
    q: float = 0.0
    luck: Mixture = "training"
    style: Style = "json"
    menu: bool = False
    menu_size: int = 80

    def __post_init__(self) -> None:
        for name in ("templates", "contacts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, known in (("templates", TEMPLATES), ("contacts", CONTACTS)):
            given = getattr(self, name)
            if not given or set(given) - set(known):
                raise ValueError(f"{name} must be some of {', '.join(known)}; got {given!r}")
        for name, known in (("luck", tuple(MIXTURES)), ("style", get_args(Style))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        for name in ("p", "q", "described", "fixed_summaries"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability; got {getattr(self, name)!r}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        limits = {
            "requests": (1, 3),
            "customers": (1, 40),
            "orders": (self.requests, 12),
            "products": (self.items, 40),
            "items": (1, 3),
            "quantity": (1, 9),
            "ids": (max(self.customers * self.orders, self.products), 10000),
            "price_step": (1, 1000),
            "menu_size": (1, 1000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be {low} to {high} with the other dials as they are; got {value!r}")
        if self.menu and self.style != "compact":
            raise ValueError("menu lists compact calls; set style='compact' with it")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Dials:
        """The dials in a mapping such as ``Task.metadata`` (its ``split`` and ``index`` are passed over)."""
        given = {k: v for k, v in values.items() if k not in ("split", "index")}
        if unknown := set(given) - {f.name for f in fields(Dials)}:
            known = ", ".join(f.name for f in fields(Dials))
            raise ValueError(f"no dial {min(unknown)!r}; known: {known}")
        return Dials(**given)

    def json(self) -> dict[str, Any]:
        """JSON values that :meth:`of` reads back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @property
    def shape(self) -> tuple[Any, ...]:
        """The dials that the world, the requests and the plan depend on; the others change looks and luck only."""
        looks = ("wording", "p", "q", "luck", "style", "menu", "menu_size")
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in looks)
