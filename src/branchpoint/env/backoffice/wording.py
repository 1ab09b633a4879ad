"""The customer's message: several phrasings of one meaning, and a terse one for small models; and reading it back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from branchpoint.env.backoffice.render import Style
from branchpoint.env.backoffice.scenario import Request, Scenario

WORDINGS = 3
_ORDER = {False: "order {order}", True: "the {item} order of day {day}"}
_PHRASES: dict[str, tuple[str, ...]] = {
    "cancel_unpaid": (
        "Please cancel {ref}; I have not paid for it yet.",
        "I changed my mind about {ref}. Nothing is paid so far, so just cancel it.",
        "Could you cancel {ref}? It is still unpaid.",
    ),
    "cancel_refund": (
        "Please cancel {ref} and refund everything I paid for it.",
        "I no longer want {ref}. I paid already: cancel it and give the money back.",
        "Could you cancel {ref} and return the full amount?",
    ),
    "change_address": (
        'Please send {ref} to "{address}" instead.',
        'I have moved. The new address for {ref} is "{address}".',
        'Could you change where {ref} goes to "{address}"?',
    ),
    "damaged_refund": (
        "In {ref}, damaged on arrival: {units} x {item}. Please refund that part.",
        "I opened {ref} and found this damaged: {units} x {item}. I would like the money for that back.",
        "Could you refund part of {ref}? Damaged: {units} x {item}.",
    ),
    "reserve_ship": (
        "Please reserve everything in {ref} and ship it with {carrier} delivery on day {ship_day}.",
        "I am waiting for {ref}. Reserve all its items, then ship it: {carrier} delivery on day {ship_day}.",
        "Could you get {ref} moving? Reserve what it needs and ship by {carrier} delivery on day {ship_day}.",
    ),
    "ship_reserved": (
        "Please ship {ref} with {carrier} delivery on day {ship_day}; all is reserved already.",
        "All of {ref} is put aside. Let it go out by {carrier} delivery on day {ship_day}.",
        "Could you ship {ref}? I want {carrier} delivery on day {ship_day}.",
    ),
    "ticket_order": (
        "Please open a {priority} priority {category} ticket about {ref}{summary}.",
        "I need someone to look at {ref}: open a {priority} priority {category} ticket on it{summary}.",
        "Could you open a {priority} priority {category} ticket for {ref}{summary}?",
    ),
    "ticket_plain": (
        "Please open a {priority} priority {category} ticket{summary}; it is about no order.",
        "No order is concerned, but open a {priority} priority {category} ticket for me{summary}.",
        "Could you open a {priority} priority {category} ticket{summary}? No order has to do with it.",
    ),
}
_TERSE = {
    "cancel_unpaid": "cancel {ref}",
    "cancel_refund": "cancel {ref} and refund",
    "change_address": 'send {ref} to "{address}"',
    "damaged_refund": "refund damaged {units} x {item} of {ref}",
    "reserve_ship": "reserve and ship {ref} {carrier} delivery on day {ship_day}",
    "ship_reserved": "ship {ref} {carrier} delivery on day {ship_day}",
    "ticket_order": "{priority} priority {category} ticket for {ref}{summary}",
    "ticket_plain": "{priority} priority {category} ticket{summary}",
}
_GREETINGS = ("Hello, this is {}.", "Good morning. You will find me as {}.", "Hi! I am {}.")


def message(s: Scenario, style: Style, wording: int | None = None) -> str:
    """What the customer writes, and how many tool calls are allowed. ``wording`` None: the task's own."""
    variant = s.wording if wording is None else wording
    contact = f'"{s.contact}"' if " " in s.contact else s.contact
    if style == "compact":
        lines = [_TERSE[r.template].format(**_facts(r)) for r in s.requests]
        return f"customer {contact} calls {s.budget} : {' ; '.join(lines)}"
    texts = [_PHRASES[r.template][(variant + k) % WORDINGS].format(**_facts(r)) for k, r in enumerate(s.requests)]
    lines = [f"{k}. {text}" for k, text in enumerate(texts, 1)]
    head = _GREETINGS[variant % WORDINGS].format(contact)
    return "\n".join([head, *lines, f"(You may make {s.budget} tool calls; finish is free.)"])


def _facts(r: Request) -> dict[str, str | int]:
    return {
        "ref": _ORDER[r.described].format(order=r.order, item=r.item, day=r.day),
        "item": r.item,
        "units": r.units,
        "address": r.address,
        "carrier": r.carrier,
        "ship_day": r.ship_day,
        "category": r.category,
        "priority": r.priority,
        "summary": f' with the summary "{r.summary}"' if r.summary else "",
    }


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as an agent reads it. ``verb``: cancel, address, refund, ship or ticket. Absent facts are None."""

    verb: str
    order: str | None
    day: int | None
    item: str | None
    damaged: tuple[int, str] | None
    address: str | None
    shipment: tuple[str, int] | None
    ticket: tuple[str, str] | None  # priority, category
    summary: str | None

    def fits(self, day: int, items: list[str]) -> bool:
        """Whether an order of this day with these items is the one described."""
        return self.day == day and self.item in items


@dataclass(frozen=True, slots=True)
class Reading:
    contact: str
    wishes: tuple[Wish, ...]


def understand(text: str) -> Reading:
    """Who asks for what. Raises ValueError when the text is no customer's message."""
    contact = re.search(r'(?:customer|this is|find me as|I am) (?:"([^"]+)"|(\S+?))(?:\.?\s|\.?$)', text)
    if contact is None:
        raise ValueError(f"no customer is named in {text[:80]!r}")
    if text.startswith("customer "):
        parts = text.split(" : ", 1)[1].split(" ; ")
    else:
        parts = re.findall(r"^[0-9]+\. (.*)$", text, re.MULTILINE)
    return Reading(contact[1] or contact[2], tuple(_wish(p) for p in parts))


def _wish(text: str) -> Wish:
    order = re.search(r"\border (O[0-9]{4})", text)
    described = re.search(r"the (\w+) order of day ([0-9]+)", text)
    damaged = re.search(r"([0-9]+) x (\w+)", text)
    shipment = re.search(r"(\w+) delivery on day ([0-9]+)", text)
    ticket = re.search(r"(\w+) priority (\w+) ticket", text)
    quoted = re.search(r'(with the summary )?"([^"]*)"', text)
    address = quoted[2] if quoted and not quoted[1] else None
    verb = "ticket" if ticket else "ship" if shipment else "refund" if damaged else "address" if address else "cancel"
    return Wish(
        verb,
        order[1] if order else None,
        int(described[2]) if described else None,
        described[1] if described else None,
        (int(damaged[1]), damaged[2]) if damaged else None,
        address,
        (shipment[1], int(shipment[2])) if shipment else None,
        (ticket[1], ticket[2]) if ticket else None,
        quoted[2] if quoted and quoted[1] else None,
    )
