"""The tools of the online shop. Texts, checks, their order and their results are those of tau-bench."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from branchpoint.env.tau.calls import Tool, array, text
from branchpoint.env.tau.common import COMMON, find_user
from branchpoint.env.tau.database import Database, Record, ToolError

REASONS = ("no longer needed", "ordered by mistake")


def find_user_id_by_email(db: Database, email: str) -> str:
    return find_user(db, lambda user: user["email"].lower() == email.lower())


def find_user_id_by_name_zip(db: Database, first_name: str, last_name: str, zip: str) -> str:
    wanted = (first_name.lower(), last_name.lower(), zip)

    def fits(user: Record) -> bool:
        name = user["name"]
        return (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted

    return find_user(db, fits)


def get_order_details(db: Database, order_id: str) -> str:
    return json.dumps(db.get("orders", order_id, "order not found"))


def get_product_details(db: Database, product_id: str) -> str:
    return json.dumps(db.get("products", product_id, "product not found"))


def list_all_product_types(db: Database) -> str:
    return json.dumps(dict(sorted((p["name"], p["product_id"]) for p in db.values("products"))))


def cancel_pending_order(db: Database, order_id: str, reason: str) -> str:
    _in_status(db, order_id, "pending", "non-pending order cannot be cancelled")
    if reason not in REASONS:
        raise ToolError("invalid reason")
    order = db.edit("orders", order_id)
    refunds = [_entry("refund", paid["amount"], paid["payment_method_id"]) for paid in order["payment_history"]]
    for refund in refunds:
        if "gift_card" in refund["payment_method_id"]:
            _add_to_balance(db, order, refund["payment_method_id"], refund["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    order["payment_history"] += refunds
    return json.dumps(order)


def exchange_delivered_order_items(
    db: Database, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> str:
    order = _in_status(db, order_id, "delivered", "non-delivered order cannot be exchanged")
    difference = round(_price_difference(db, order, item_ids, new_item_ids), 2)
    method = _payment_method(db, order, payment_method_id)
    _check_balance(method, difference, "insufficient gift card balance to pay for the price difference")
    order = db.edit("orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return json.dumps(order)


def modify_pending_order_items(
    db: Database, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> str:
    order = _in_status(db, order_id, "pending", "non-pending order cannot be modified")
    difference = _price_difference(db, order, item_ids, new_item_ids)
    method = _payment_method(db, order, payment_method_id)
    _check_balance(method, difference, "insufficient gift card balance to pay for the new item")
    order = db.edit("orders", order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_entry(kind, abs(difference), payment_method_id))
    if method["source"] == "gift_card":
        _add_to_balance(db, order, payment_method_id, -difference)
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, old)
        variant = db.get("products", item["product_id"], "product not found")["variants"].get(new)
        if variant is None:  # only when an item was replaced by one that the list replaces again
            raise ToolError(f"new item {new} not found or available")
        item |= {"item_id": new, "price": variant["price"], "options": variant["options"]}
    order["status"] = "pending (item modified)"
    return json.dumps(order)


def modify_pending_order_address(db: Database, order_id: str, **address: str) -> str:
    _in_status(db, order_id, "pending", "non-pending order cannot be modified")
    order = db.edit("orders", order_id)
    order["address"] = address
    return json.dumps(order)


def modify_user_address(db: Database, user_id: str, **address: str) -> str:
    db.get("users", user_id, "user not found")
    user = db.edit("users", user_id)
    user["address"] = address
    return json.dumps(user)


def modify_pending_order_payment(db: Database, order_id: str, payment_method_id: str) -> str:
    order = _in_status(db, order_id, "pending", "non-pending order cannot be modified")
    method = _payment_method(db, order, payment_method_id)
    paid = order["payment_history"]
    if len(paid) > 1 or paid[0]["transaction_type"] != "payment":
        raise ToolError("there should be exactly one payment for a pending order")
    before, amount = paid[0]["payment_method_id"], paid[0]["amount"]
    if before == payment_method_id:
        raise ToolError("the new payment method should be different from the current one")
    _check_balance(method, amount, "insufficient gift card balance to pay for the order")
    order = db.edit("orders", order_id)
    order["payment_history"] += [_entry("payment", amount, payment_method_id), _entry("refund", amount, before)]
    if method["source"] == "gift_card":
        _add_to_balance(db, order, payment_method_id, -amount)
    if "gift_card" in before:
        _add_to_balance(db, order, before, amount)
    return json.dumps(order)


def return_delivered_order_items(db: Database, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
    order = _in_status(db, order_id, "delivered", "non-delivered order cannot be returned")
    _payment_method(db, order, payment_method_id)
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolError("payment method should be either the original payment method or a gift card")
    for _ in _missing(order, item_ids):
        raise ToolError("some item not found")
    order = db.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)


def _in_status(db: Database, order_id: str, status: str, otherwise: str) -> Record:
    order = db.get("orders", order_id, "order not found")
    if order["status"] != status:
        raise ToolError(otherwise)
    return order


def _payment_method(db: Database, order: Record, method_id: str) -> Record:
    methods = db.get("users", order["user_id"], "user not found")["payment_methods"]
    if method_id not in methods:
        raise ToolError("payment method not found")
    return methods[method_id]


def _check_balance(method: Record, amount: float, otherwise: str) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolError(otherwise)


def _add_to_balance(db: Database, order: Record, method_id: str, amount: float) -> None:
    _payment_method(db, order, method_id)
    card = db.edit("users", order["user_id"])["payment_methods"][method_id]
    card["balance"] = round(card["balance"] + amount, 2)


def _entry(kind: str, amount: float, method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def _missing(order: Record, item_ids: list[str]) -> Iterator[str]:
    """The ids that are asked for more often than the order has them, in turn."""
    held, asked = Counter(item["item_id"] for item in order["items"]), Counter(item_ids)
    return (item_id for item_id in item_ids if asked[item_id] > held[item_id])


def _item(order: Record, item_id: str) -> Record:
    for item in order["items"]:
        if item["item_id"] == item_id:
            return item
    raise ToolError(f"{item_id} not found")


def _price_difference(db: Database, order: Record, item_ids: list[str], new_item_ids: list[str]) -> float:
    """What the new items cost more than the old ones, checked in pairs."""
    for item_id in _missing(order, item_ids):
        raise ToolError(f"{item_id} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolError("the number of items to be exchanged should match")
    difference = 0
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, old)
        variant = db.get("products", item["product_id"], "product not found")["variants"].get(new)
        if variant is None or not variant["available"]:
            raise ToolError(f"new item {new} not found or available")
        difference += variant["price"] - item["price"]
    return difference


_ORDER = text("order id with its #, e.g. '#W0000000'")
_METHOD = text("id of one of the user's payment methods, e.g. 'gift_card_0000000'; see the user or order details")
_ITEMS = array("item ids of the order, e.g. '1008292230'; repeat an id for each piece", text("item id"))
_NEW_ITEMS = array("the new item ids, each of the same product as the item in its place", text("item id"))
_ADDRESS = {
    "address1": text("first line, e.g. '123 Main St'"),
    "address2": text("second line, e.g. 'Apt 1', or ''"),
    "city": text("city"),
    "state": text("state, e.g. 'CA'"),
    "country": text("country, e.g. 'USA'"),
    "zip": text("zip code, e.g. '12345'"),
}
_ASK = "Explain it to the user and get an explicit yes first."
_SWAP = {"order_id": _ORDER, "item_ids": _ITEMS, "new_item_ids": _NEW_ITEMS, "payment_method_id": _METHOD}

TOOLS = {
    tool.name: tool
    for tool in (
        COMMON["calculate"],
        Tool(
            "cancel_pending_order",
            "write",
            f"Cancel a pending order. {_ASK} Payments go back: at once to a gift card, else in 5 to 7 business days.",
            {"order_id": _ORDER, "reason": text("'no longer needed' or 'ordered by mistake'")},
            cancel_pending_order,
        ),
        Tool(
            "exchange_delivered_order_items",
            "write",
            f"Exchange items of a delivered order for others of the same product, once an order. {_ASK}",
            _SWAP,
            exchange_delivered_order_items,
        ),
        Tool(
            "find_user_id_by_email", "read", "Find a user id by email.", {"email": text("email")}, find_user_id_by_email
        ),
        Tool(
            "find_user_id_by_name_zip",
            "read",
            "Find a user id by name and zip code, when the email is not known or not found.",
            {"first_name": text("first name"), "last_name": text("last name"), "zip": text("zip code, e.g. '12345'")},
            find_user_id_by_name_zip,
        ),
        Tool("get_order_details", "read", "Status and details of an order.", {"order_id": _ORDER}, get_order_details),
        Tool(
            "get_product_details",
            "read",
            "The items of a product with options, price and availability.",
            {"product_id": text("product id, e.g. '6086499569'; not an item id")},
            get_product_details,
        ),
        COMMON["get_user_details"],
        Tool(
            "list_all_product_types",
            "read",
            "The names and product ids of all 50 products.",
            {},
            list_all_product_types,
        ),
        Tool(
            "modify_pending_order_address",
            "write",
            f"Change where a pending order goes. {_ASK}",
            {"order_id": _ORDER, **_ADDRESS},
            modify_pending_order_address,
        ),
        Tool(
            "modify_pending_order_items",
            "write",
            f"Replace items of a pending order by others of the same product, once an order. {_ASK}",
            _SWAP,
            modify_pending_order_items,
        ),
        Tool(
            "modify_pending_order_payment",
            "write",
            f"Change how a pending order is paid. {_ASK}",
            {"order_id": _ORDER, "payment_method_id": _METHOD},
            modify_pending_order_payment,
        ),
        Tool(
            "modify_user_address",
            "write",
            f"Change a user's default address. {_ASK}",
            {"user_id": text("user id, e.g. 'sara_doe_496'"), **_ADDRESS},
            modify_user_address,
        ),
        Tool(
            "return_delivered_order_items",
            "write",
            f"Return items of a delivered order. {_ASK} The refund goes to the original payment method or a gift card.",
            {"order_id": _ORDER, "item_ids": _ITEMS, "payment_method_id": _METHOD},
            return_delivered_order_items,
        ),
        COMMON["think"],
        COMMON["transfer_to_human_agents"],
    )
}
