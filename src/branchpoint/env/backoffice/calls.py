"""Tool calls: what the tools take, and how a call is written and read.

Two forms parse to the same :class:`Call`: a JSON object ``{"name": ..., "arguments": {...}}``, bare or between
``<tool_call>`` tags, and the compact line ``tool arg=value ...``. Anything else is :class:`Malformed`: nothing runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from branchpoint.env.backoffice.desk import CARRIERS, CATEGORIES, LAST_DAY, PRIORITIES, TODAY

LONGEST = 4000
"""Characters of an action beyond which it is refused unread."""
_PLAIN = "[A-Za-z0-9_,.'@+-]"
_TEXT = "[A-Za-z0-9_ ,.'@+-]"
_BARE = re.compile(f"{_PLAIN}+")
_WORD = re.compile(r'[ \t]+([a-z_]+)=("(?:[^"\\\n]|\\.)*"|[^\s"=]+)')
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument. ``pattern`` matches the whole value; ``low`` and ``high`` bound an integer."""

    name: str
    about: str
    type: Literal["string", "integer"] = "string"
    required: bool = True
    pattern: str = ""
    choices: tuple[str, ...] = ()
    low: int = 0
    high: int = 10_000_000
    longest: int = 200

    @property
    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": self.type, "description": self.about}
        if self.type == "integer":
            return out | {"minimum": self.low, "maximum": self.high}
        if self.choices:
            return out | {"enum": list(self.choices)}
        return out | ({"pattern": f"^{self.pattern}$"} if self.pattern else {"maxLength": self.longest})

    @property
    def grammar(self) -> str:
        if self.type == "integer":
            return f"[0-9]{{1,{len(str(self.high))}}}"
        if self.choices:
            return f"({'|'.join(self.choices)})"
        return self.pattern or f'({_PLAIN}{{1,80}}|"{_TEXT}{{1,80}}")'

    def problem(self, value: str | int) -> str:
        """Why the tool refuses a value of the right type, or ""."""
        if isinstance(value, int):
            return "" if self.low <= value <= self.high else f"{self.name} must be {self.low} to {self.high}"
        if self.choices:
            return "" if value in self.choices else f"{self.name} must be one of {', '.join(self.choices)}"
        if self.pattern:
            return "" if re.fullmatch(self.pattern, value, re.ASCII) else f"{self.name} must look like {self.about}"
        return "" if 0 < len(value) <= self.longest else f"{self.name} must have 1 to {self.longest} characters"


@dataclass(frozen=True, slots=True)
class Tool:
    """``resources`` names the arguments that identify what a call touches: they key its luck."""

    name: str
    kind: Literal["read", "write", "control"]
    about: str
    args: tuple[Arg, ...]
    resources: tuple[str, ...] = ()
    listing: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool, in the shape that chat templates take."""
        parameters = {
            "type": "object",
            "properties": {a.name: a.schema for a in self.args},
            "required": [a.name for a in self.args if a.required],
            "additionalProperties": False,
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }

    @property
    def grammar(self) -> str:
        parts = [f" {a.name}={a.grammar}" if a.required else f"( {a.name}={a.grammar})?" for a in self.args]
        return self.name + "".join(parts)


_CUSTOMER = Arg("customer", "a customer id such as C0007", pattern="C[0-9]{4}")
_ORDER = Arg("order", "an order id such as O0042", pattern="O[0-9]{4}")
_SKU = Arg("sku", "a product id such as SKU-0012", pattern="SKU-[0-9]{4}")
_OFFSET = Arg("offset", "first entry to return", "integer", required=False, high=999)
_REASON = Arg("reason", "why, in free text")

TOOLS: Mapping[str, Tool] = {
    t.name: t
    for t in (
        Tool(
            "search_customers",
            "read",
            "Customers whose name, email or phone contains the query.",
            (Arg("query", "part of a name, email or phone"), _OFFSET),
            (),
            True,
        ),
        Tool("get_customer", "read", "All details of a customer.", (_CUSTOMER,), ("customer",)),
        Tool("list_orders", "read", "The orders of a customer.", (_CUSTOMER, _OFFSET), ("customer",), True),
        Tool("get_order", "read", "All details of an order; amounts in cents.", (_ORDER,), ("order",)),
        Tool("check_inventory", "read", "Price and available stock of a product.", (_SKU,), ("sku",)),
        Tool(
            "update_shipping_address",
            "write",
            "Change where an order goes; only before shipment.",
            (_ORDER, Arg("address", "the new address, in full")),
            ("order",),
        ),
        Tool(
            "cancel_order",
            "write",
            "Cancel an order before shipment; releases its reservations and says what must be refunded.",
            (_ORDER, _REASON),
            ("order",),
        ),
        Tool(
            "issue_refund",
            "write",
            "Refund cents of an order that was paid and is not in transit, at most the refundable balance.",
            (_ORDER, Arg("amount", "cents", "integer", low=1), _REASON),
            ("order",),
        ),
        Tool(
            "reserve_stock",
            "write",
            "Reserve units of an item for an order before shipment, at most what the order still lacks.",
            (_SKU, Arg("quantity", "units", "integer", low=1, high=999), _ORDER),
            ("sku", "order"),
        ),
        Tool(
            "schedule_shipment",
            "write",
            "Ship a paid, fully reserved order; the day must be within seven days of today.",
            (
                _ORDER,
                Arg("carrier", "the carrier", choices=CARRIERS),
                Arg("day", f"today is {TODAY}, the last day is {LAST_DAY}", "integer", high=999),
            ),
            ("order",),
        ),
        Tool(
            "create_ticket",
            "write",
            "Open a ticket for a customer, about an order or not.",
            (
                _CUSTOMER,
                Arg("category", "what it is about", choices=CATEGORIES),
                Arg("priority", "how urgent", choices=PRIORITIES),
                Arg("summary", "the matter, in free text"),
                Arg("order", _ORDER.about, required=False, pattern=_ORDER.pattern),
            ),
            ("customer", "order"),
        ),
        Tool("wait", "control", "Let time pass.", (Arg("seconds", "how long", "integer", low=1, high=600),)),
        Tool("finish", "control", "End the episode once every request is served.", (Arg("summary", "what was done"),)),
    )
}
GRAMMAR = "|".join(f"({t.grammar})" for t in TOOLS.values())
"""A regular expression (``re`` syntax) that every compact call in canonical argument order matches in full."""


@dataclass(frozen=True, slots=True)
class Call:
    """One well-formed call: a known tool and arguments of the right types. ``args`` is in schema order."""

    tool: str
    args: Mapping[str, str | int]

    @property
    def key(self) -> tuple[str | None, ...]:
        """The event this call is: tool and resource ids. Free text, amounts and offsets never enter."""
        ids = (self.args.get(name) for name in TOOLS[self.tool].resources)
        return (self.tool, *(None if i is None else str(i) for i in ids))

    @property
    def problem(self) -> str:
        """Why a tool refuses the values (range, choice, form), or ""."""
        for arg in TOOLS[self.tool].args:
            if arg.name in self.args and (problem := arg.problem(self.args[arg.name])):
                return problem
        return ""

    def compact(self) -> str:
        """``tool arg=value ...``: values with anything but word characters in quotes."""
        return " ".join([self.tool, *(f"{k}={_quoted(v)}" for k, v in self.args.items())])

    def json(self) -> str:
        """``{"name": ..., "arguments": {...}}``"""
        return json.dumps({"name": self.tool, "arguments": dict(self.args)})


@dataclass(frozen=True, slots=True)
class Malformed:
    """A text that is no call. ``problem`` is short, and never repeats more than a few characters of the text."""

    problem: str


def call(tool: str, **args: str | int | None) -> Call:
    """A call from Python; arguments that are None are left out. Raises ValueError when it is malformed."""
    made = _checked(tool, {k: v for k, v in args.items() if v is not None})
    if isinstance(made, Malformed):
        raise ValueError(made.problem)
    return made


def parse(text: str) -> Call | Malformed:
    """The call that a text writes in either form. Never raises, however long or odd the text is."""
    if len(text) > LONGEST:
        return Malformed(f"longer than {LONGEST} characters")
    text = text.strip()
    if not text:
        return Malformed("empty")
    if "<tool_call>" in text:
        found = _TAGGED.findall(text)
        if len(found) != 1 or text.count("<tool_call>") != 1:
            return Malformed("exactly one complete tool_call block a turn")
        return _from_json(found[0])
    return _from_json(text) if text[0] in "{[" else _from_line(text)


def _from_json(text: str) -> Call | Malformed:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            value["arguments"] = json.loads(value["arguments"], object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return Malformed("not one valid JSON object")
    if not isinstance(value, dict):
        return Malformed("JSON, but not an object")
    if set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
        return Malformed("the object needs exactly name (a string) and arguments")
    if not isinstance(value["arguments"], dict):
        return Malformed("arguments must be an object")
    return _checked(value["name"], value["arguments"])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _from_line(text: str) -> Call | Malformed:
    if "\n" in text or "\r" in text:
        return Malformed("one call a turn, on one line")
    name, _, _ = text.partition(" ")
    at, args = len(name), {}
    while at < len(text):
        found = _WORD.match(text, at)
        if found is None:
            return Malformed("after the tool, write arg=value with one space between")
        key, value = found.groups()
        if key in args:
            return Malformed(f"{key[:30]} is given twice")
        try:
            args[key] = json.loads(value) if value[0] == '"' else value
        except ValueError:
            return Malformed(f"the quoted value of {key[:30]} is not valid")
        at = found.end()
    return _checked(name, args)


def _checked(name: str, given: Mapping[str, Any]) -> Call | Malformed:
    tool = TOOLS.get(name)
    if tool is None:
        return Malformed("no such tool")
    if unknown := set(given) - {a.name for a in tool.args}:
        return Malformed(f"{name} takes no {min(unknown)[:30]!a}")
    args: dict[str, str | int] = {}
    for arg in tool.args:
        value = given.get(arg.name)
        if value is None and arg.name not in given:
            if arg.required:
                return Malformed(f"{name} needs {arg.name}")
            continue
        typed = _typed(arg, value)
        if typed is None:
            return Malformed(f"{arg.name} must be {'an integer' if arg.type == 'integer' else 'a string'}")
        args[arg.name] = typed
    return Call(name, args)


def _typed(arg: Arg, value: Any) -> str | int | None:
    """The value in the argument's type (an integer may come as a string), or None."""
    if arg.type == "string":
        return value if isinstance(value, str) else None
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _quoted(value: str | int) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


@cache
def schemas() -> tuple[dict[str, Any], ...]:
    """The JSON schemas of all tools."""
    return tuple(t.schema for t in TOOLS.values())
