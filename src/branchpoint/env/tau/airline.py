"""The tools of the airline. Texts, checks, their order and their results are those of tau-bench."""

from __future__ import annotations

import json
from collections.abc import Sequence

from branchpoint.env.tau.calls import Tool, array, integer, number, record, text
from branchpoint.env.tau.common import COMMON
from branchpoint.env.tau.database import Database, Record, ToolError

AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}
CABINS = ("basic_economy", "economy", "business")
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
"""Ids of new reservations, in turn; the last is used again."""
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")


def get_reservation_details(db: Database, reservation_id: str) -> str:
    return json.dumps(db.get("reservations", reservation_id, "user not found"))


def list_all_airports(db: Database) -> str:
    return json.dumps(AIRPORTS)


def search_direct_flight(db: Database, origin: str, destination: str, date: str) -> str:
    found = []
    for flight in db.values("flights"):
        if (flight["origin"], flight["destination"]) == (origin, destination) and _available(flight, date):
            found.append(_facts(flight) | flight["dates"][date])
    return json.dumps(found)


def search_onestop_flight(db: Database, origin: str, destination: str, date: str) -> str:
    arriving = [flight for flight in db.values("flights") if flight["destination"] == destination]
    found = []
    for first in db.values("flights"):
        if first["origin"] != origin or not _available(first, date):
            continue
        overnight = "+1" in first["scheduled_arrival_time_est"]
        date2 = f"2024-05-{int(date[-2:]) + 1}" if overnight else date
        for second in arriving:
            meets = second["origin"] == first["destination"]
            late = first["scheduled_arrival_time_est"] > second["scheduled_departure_time_est"]
            if meets and not late and _available(second, date2):
                # tau-bench shows seats and prices of the first day for the second flight, too
                legs = (first, date), (second, date2)
                found.append([_facts(leg) | leg["dates"].get(date, {}) | {"date": day} for leg, day in legs])
    return json.dumps(found)


def book_reservation(
    db: Database,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: str,
    cabin: str,
    flights: list[Record],
    passengers: list[Record],
    payment_methods: list[Record],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: str,
) -> str:
    db.get("users", user_id, "user not found")
    taken = [name for name in NEW_RESERVATIONS[:-1] if db.find("reservations", name)]
    reservation_id = NEW_RESERVATIONS[len(taken)]
    booked = [_with_price(db, flight, cabin, len(passengers)) for flight in flights]
    total = sum(flight["price"] * len(passengers) for flight in booked)
    total += (30 * len(passengers) if insurance == "yes" else 0) + 50 * nonfree_baggages
    _pay(db, user_id, payment_methods, total)
    reservation = {
        "reservation_id": reservation_id,
        "user_id": user_id,
        "origin": origin,
        "destination": destination,
        "flight_type": flight_type,
        "cabin": cabin,
        "flights": booked,
        "passengers": passengers,
        "payment_history": payment_methods,
        "created_at": "2024-05-15T15:00:00",
        "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    db.put("reservations", reservation_id, reservation)
    db.edit("users", user_id)["reservations"].append(reservation_id)
    return json.dumps(reservation)


def cancel_reservation(db: Database, reservation_id: str) -> str:
    db.get("reservations", reservation_id, "reservation not found")
    reservation = db.edit("reservations", reservation_id)
    paid = reservation["payment_history"]
    paid += [{"payment_id": entry["payment_id"], "amount": -entry["amount"]} for entry in paid]
    reservation["status"] = "cancelled"
    return json.dumps(reservation)


def send_certificate(db: Database, user_id: str, amount: float) -> str:
    methods = db.get("users", user_id, "user not found")["payment_methods"]
    name = next((name for name in NEW_CERTIFICATES if name not in methods), None)
    if name is None:
        raise ToolError("no more than 3 certificates can be sent")
    certificate = {"source": "certificate", "amount": amount, "id": name}
    db.edit("users", user_id)["payment_methods"][name] = certificate
    return f"Certificate {name} added to user {user_id} with amount {amount}."


def update_reservation_baggages(
    db: Database, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> str:
    reservation = db.get("reservations", reservation_id, "reservation not found")
    price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    reservation = _charge(db, reservation, payment_id, price)
    reservation["total_baggages"] = total_baggages
    reservation["nonfree_baggages"] = nonfree_baggages
    return json.dumps(reservation)


def update_reservation_flights(
    db: Database, reservation_id: str, cabin: str, flights: list[Record], payment_id: str
) -> str:
    """The cabin only sets prices: tau-bench does not store it."""
    reservation = db.get("reservations", reservation_id, "reservation not found")
    heads = len(reservation["passengers"])
    kept = {(f["flight_number"], f["date"]): f for f in reversed(reservation["flights"])}
    if cabin != reservation["cabin"]:
        kept = {}
    new = []
    for flight in flights:
        old = kept.get((flight["flight_number"], flight["date"]))
        new.append(_with_price(db, flight, cabin, heads) if old is None else flight | _leg(old, old["price"]))
    total = sum(f["price"] * heads for f in new) - sum(f["price"] for f in reservation["flights"]) * heads
    reservation = _charge(db, reservation, payment_id, total)
    reservation["flights"] = new
    return json.dumps(reservation)


def update_reservation_passengers(db: Database, reservation_id: str, passengers: list[Record]) -> str:
    reservation = db.get("reservations", reservation_id, "reservation not found")
    if len(passengers) != len(reservation["passengers"]):
        raise ToolError("number of passengers does not match")
    reservation = db.edit("reservations", reservation_id)
    reservation["passengers"] = passengers
    return json.dumps(reservation)


def _available(flight: Record, date: str) -> bool:
    return flight["dates"].get(date, {}).get("status") == "available"


def _facts(flight: Record) -> Record:
    return {key: value for key, value in flight.items() if key != "dates"}


def _leg(flight: Record, price: float) -> Record:
    return {"price": price, "origin": flight["origin"], "destination": flight["destination"]}


def _with_price(db: Database, wanted: Record, cabin: str, heads: int) -> Record:
    """What was asked for with price, origin and destination, if there are seats for all."""
    name, date = wanted["flight_number"], wanted["date"]
    flight = db.get("flights", name, f"flight {name} not found")
    day = flight["dates"].get(date)
    if day is None:
        raise ToolError(f"flight {name} not found on date {date}")
    if day["status"] != "available":
        raise ToolError(f"flight {name} not available on date {date}")
    if day["available_seats"][cabin] < heads:
        raise ToolError(f"not enough seats on flight {name}")
    return wanted | _leg(flight, day["prices"][cabin])


def _pay(db: Database, user_id: str, payments: Sequence[Record], total: float) -> None:
    """Check all payments, then take them. A certificate is used up, whatever was left of it."""
    methods = db.get("users", user_id, "user not found")["payment_methods"]
    for payment in payments:
        method = methods.get(payment["payment_id"])
        if method is None:
            raise ToolError(f"payment method {payment['payment_id']} not found")
        if method["source"] in ("gift_card", "certificate") and method["amount"] < payment["amount"]:
            raise ToolError(f"not enough balance in payment method {payment['payment_id']}")
    paid = sum(payment["amount"] for payment in payments)
    if paid != total:
        raise ToolError(f"payment amount does not add up, total price is {total}, but paid {paid}")
    methods = db.edit("users", user_id)["payment_methods"]
    for payment in payments:
        name = payment["payment_id"]
        if name not in methods:
            raise ToolError(f"payment method {name} was used twice")
        if methods[name]["source"] == "gift_card":
            methods[name]["amount"] -= payment["amount"]
        elif methods[name]["source"] == "certificate":
            del methods[name]


def _charge(db: Database, reservation: Record, payment_id: str, price: float) -> Record:
    """Take the price of a change (a negative one is paid back). Returns the reservation, open to change."""
    user_id = reservation["user_id"]
    method = db.get("users", user_id, "user not found")["payment_methods"].get(payment_id)
    if method is None:
        raise ToolError("payment method not found")
    if method["source"] == "certificate":
        raise ToolError("certificate cannot be used to update reservation")
    if method["source"] == "gift_card":
        if method["amount"] < price:
            raise ToolError("gift card balance is not enough")
        db.edit("users", user_id)["payment_methods"][payment_id]["amount"] -= price
    reservation = db.edit("reservations", reservation["reservation_id"])
    if price != 0:
        reservation["payment_history"].append({"payment_id": payment_id, "amount": price})
    return reservation


_USER = text("user id, e.g. 'sara_doe_496'")
_RESERVATION = text("reservation id, e.g. '8JX2WO'")
_DATE = text("date, e.g. '2024-05-01'")
_CABIN = text("cabin", *CABINS)
_FLIGHT = record(flight_number=text("flight number, e.g. 'HAT001'"), date=_DATE)
_PASSENGER = record(
    first_name=text("first name"), last_name=text("last name"), dob=text("date of birth, e.g. '1990-01-01'")
)
_PAYMENT_ID = text("id of one of the user's payment methods, e.g. 'credit_card_7815826'")
_PAYMENT = record(payment_id=_PAYMENT_ID, amount=number("amount to pay"))
_ROUTE = {"origin": text("airport code, e.g. 'JFK'"), "destination": text("airport code, e.g. 'LAX'")}
_BAGS = {
    "total_baggages": integer("bags of the reservation in all"),
    "nonfree_baggages": integer("bags of them that are paid for"),
}
_PASSENGERS = array("all passengers", _PASSENGER)
_BOOKING = {
    "user_id": _USER,
    **_ROUTE,
    "flight_type": text("kind of trip", "one_way", "round_trip"),
    "cabin": _CABIN,
    "flights": array("all flights, in order", _FLIGHT),
    "passengers": _PASSENGERS,
    "payment_methods": array("payments that add up to the price", _PAYMENT),
    **_BAGS,
    "insurance": text("travel insurance", "yes", "no"),
}

TOOLS = {
    tool.name: tool
    for tool in (
        Tool("book_reservation", "write", "Book a reservation.", _BOOKING, book_reservation),
        COMMON["calculate"],
        Tool(
            "cancel_reservation",
            "write",
            "Cancel a whole reservation.",
            {"reservation_id": _RESERVATION},
            cancel_reservation,
        ),
        Tool(
            "get_reservation_details",
            "read",
            "The details of a reservation.",
            {"reservation_id": _RESERVATION},
            get_reservation_details,
        ),
        COMMON["get_user_details"],
        Tool("list_all_airports", "read", "All airports and their cities.", {}, list_all_airports),
        Tool(
            "search_direct_flight",
            "read",
            "Direct flights between two airports on a date.",
            {**_ROUTE, "date": _DATE},
            search_direct_flight,
        ),
        Tool(
            "search_onestop_flight",
            "read",
            "Flights with one stop between two airports on a date.",
            {**_ROUTE, "date": _DATE},
            search_onestop_flight,
        ),
        Tool(
            "send_certificate",
            "write",
            "Send a user a certificate. Be careful!",
            {"user_id": _USER, "amount": number("its value")},
            send_certificate,
        ),
        COMMON["think"],
        COMMON["transfer_to_human_agents"],
        Tool(
            "update_reservation_baggages",
            "write",
            "Change the bags of a reservation.",
            {"reservation_id": _RESERVATION, **_BAGS, "payment_id": _PAYMENT_ID},
            update_reservation_baggages,
        ),
        Tool(
            "update_reservation_flights",
            "write",
            "Change the flights of a reservation.",
            {
                "reservation_id": _RESERVATION,
                "cabin": _CABIN,
                "flights": array("all flights of the new reservation, the unchanged ones, too", _FLIGHT),
                "payment_id": _PAYMENT_ID,
            },
            update_reservation_flights,
        ),
        Tool(
            "update_reservation_passengers",
            "write",
            "Change who travels; not how many.",
            {"reservation_id": _RESERVATION, "passengers": _PASSENGERS},
            update_reservation_passengers,
        ),
    )
}
