"""What the tools do: pure functions of a desk and a call. Amounts in cents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from branchpoint.env.backoffice.calls import Call
from branchpoint.env.backoffice.desk import LAST_DAY, TODAY, Desk, Item, Order, Ticket

PAGE = 5
Payload = dict[str, Any]


class Refused(Exception):
    """A structured error of a tool; ``payload`` is what the agent sees."""

    def __init__(self, code: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.payload: Payload = {"error": code, "message": message, **facts}


def run(desk: Desk, call: Call) -> tuple[Desk, Payload]:
    """The desk after a call, and what the tool answers; an error leaves the desk as it is."""
    try:
        return _TOOLS[call.tool](desk, call.args)
    except Refused as refused:
        return desk, refused.payload


def error(code: str, message: str, **facts: Any) -> Payload:
    """The shape of every error."""
    return Refused(code, message, **facts).payload


def _find(table: Mapping[str, Any], key: Any, what: str) -> Any:
    if key not in table:
        raise Refused("NOT_FOUND", f"there is no {what} {key}")
    return table[key]


def _order(desk: Desk, args: Mapping[str, Any]) -> Order:
    return _find(desk.orders, args["order"], "order")


def _still_open(order: Order) -> Order:
    if not order.open:
        raise Refused("INVALID_STATE", f"order {order.id} is {order.status}", status=order.status)
    return order


def _page(name: str, rows: Sequence[Payload], args: Mapping[str, Any]) -> Payload:
    offset = args.get("offset", 0)
    end = offset + PAGE
    return {
        name: list(rows[offset:end]),
        "total": len(rows),
        "offset": offset,
        "next_offset": end if end < len(rows) else None,
    }


def _search_customers(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    wanted = args["query"].strip().lower()
    rows = [
        {"customer": c.id, "name": c.name, "email": c.email, "phone": c.phone}
        for c in sorted(desk.customers.values(), key=lambda c: c.id)
        if wanted in c.name.lower() or wanted in c.email.lower() or wanted in c.phone
    ]
    return desk, _page("customers", rows, args)


def _get_customer(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    c = _find(desk.customers, args["customer"], "customer")
    return desk, {
        "customer": c.id,
        "name": c.name,
        "email": c.email,
        "phone": c.phone,
        "address": c.address,
        "tier": c.tier,
    }


def _list_orders(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    _find(desk.customers, args["customer"], "customer")
    mine = sorted((o for o in desk.orders.values() if o.customer == args["customer"]), key=lambda o: o.id)
    rows = [
        {"order": o.id, "status": o.status, "day": o.day, "items": [desk.products[i.sku].name for i in o.items]}
        for o in mine
    ]
    return desk, _page("orders", rows, args)


def _get_order(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    o = _order(desk, args)
    items = [
        {
            "sku": i.sku,
            "name": desk.products[i.sku].name,
            "quantity": i.quantity,
            "unit_price": i.unit_price,
            "reserved": i.reserved,
        }
        for i in o.items
    ]
    return desk, {
        "order": o.id,
        "customer": o.customer,
        "status": o.status,
        "day": o.day,
        "address": o.address,
        "items": items,
        "total": o.total,
        "refundable": o.refundable,
        "shipment": None if o.shipment is None else {"carrier": o.shipment[0], "day": o.shipment[1]},
    }


def _check_inventory(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    p = _find(desk.products, args["sku"], "product")
    return desk, {"sku": p.sku, "name": p.name, "price": p.price, "stock": p.stock}


def _update_shipping_address(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    o = _still_open(_order(desk, args))
    address = " ".join(args["address"].split())
    return desk.put(replace(o, address=address)), {"order": o.id, "address": address}


def _cancel_order(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    o = _still_open(_order(desk, args))
    released = sum(i.reserved for i in o.items)
    for item in o.items:
        if item.reserved:
            desk = desk.move(item.sku, item.reserved)
    bare = tuple(replace(i, reserved=0) for i in o.items)
    desk = desk.put(replace(o, status="cancelled", items=bare))
    return desk, {"order": o.id, "status": "cancelled", "released": released, "refund_due": o.refundable}


def _issue_refund(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    o, amount = _order(desk, args), args["amount"]
    if not o.paid:
        raise Refused("INVALID_STATE", f"order {o.id} was never paid", status=o.status)
    if o.status == "shipped":
        raise Refused("INVALID_STATE", f"order {o.id} is in transit", status=o.status)
    if amount > o.refundable:
        raise Refused("RULE_VIOLATION", f"at most {o.refundable} cents can be refunded", refundable=o.refundable)
    after = replace(o, refunds=(*o.refunds, amount))
    return desk.put(after), {"order": o.id, "refunded": amount, "refundable": after.refundable}


def _reserve_stock(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    product = _find(desk.products, args["sku"], "product")
    o, quantity = _still_open(_order(desk, args)), args["quantity"]
    item = next((i for i in o.items if i.sku == product.sku), None)
    if item is None:
        raise Refused("RULE_VIOLATION", f"{product.sku} is not on order {o.id}", lacking=0)
    lacking = item.quantity - item.reserved
    if quantity > lacking:
        raise Refused("RULE_VIOLATION", f"the order lacks {lacking} of it", lacking=lacking)
    if quantity > product.stock:
        raise Refused("RULE_VIOLATION", f"{product.stock} in stock", stock=product.stock)
    after = replace(item, reserved=item.reserved + quantity)
    items = tuple(after if i is item else i for i in o.items)
    desk = desk.put(replace(o, items=items)).move(product.sku, -quantity)
    return desk, {"order": o.id, "sku": product.sku, "reserved": after.reserved, "lacking": lacking - quantity}


def _lacking(items: Sequence[Item]) -> int:
    return sum(i.quantity - i.reserved for i in items)


def _schedule_shipment(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    o, day = _order(desk, args), args["day"]
    if o.status != "paid":
        raise Refused("INVALID_STATE", f"order {o.id} is {o.status}, not paid", status=o.status)
    if lacking := _lacking(o.items):
        raise Refused("RULE_VIOLATION", f"{lacking} units are not reserved", lacking=lacking)
    if not TODAY <= day <= LAST_DAY:
        raise Refused("RULE_VIOLATION", f"the day must be {TODAY} to {LAST_DAY}", last_day=LAST_DAY)
    carrier = args["carrier"]
    desk = desk.put(replace(o, status="shipped", shipment=(carrier, day)))
    return desk, {"order": o.id, "status": "shipped", "carrier": carrier, "day": day}


def _create_ticket(desk: Desk, args: Mapping[str, Any]) -> tuple[Desk, Payload]:
    customer = _find(desk.customers, args["customer"], "customer")
    order = args.get("order")
    if order is not None and _order(desk, args).customer != customer.id:
        raise Refused("RULE_VIOLATION", f"order {order} belongs to another customer")
    number = f"T{len(desk.tickets) + 1:04d}"
    summary = " ".join(args["summary"].split())
    ticket = Ticket(number, customer.id, args["category"], args["priority"], summary, order)
    answer = {"ticket": number, "customer": customer.id, "category": ticket.category, "priority": ticket.priority}
    return replace(desk, tickets=(*desk.tickets, ticket)), answer | ({} if order is None else {"order": order})


_TOOLS: Mapping[str, Callable[[Desk, Mapping[str, Any]], tuple[Desk, Payload]]] = {
    "search_customers": _search_customers,
    "get_customer": _get_customer,
    "list_orders": _list_orders,
    "get_order": _get_order,
    "check_inventory": _check_inventory,
    "update_shipping_address": _update_shipping_address,
    "cancel_order": _cancel_order,
    "issue_refund": _issue_refund,
    "reserve_stock": _reserve_stock,
    "schedule_shipment": _schedule_shipment,
    "create_ticket": _create_ticket,
}
