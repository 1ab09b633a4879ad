"""How an agent of BFCL writes: a list of function calls in Python syntax, or text for the user, which ends the turn."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 4000
"""Characters of an action beyond which it is refused unread."""
_LARGEST = 1e30
_CODE = re.compile(r"[\[{]|[A-Za-z_][\w.]*\(")
_STRING = r"""(?:'(?:[^'\\\x00-\x1f]|\\['"\\nrt])*'|"(?:[^"\\\x00-\x1f]|\\['"\\nrt])*")"""
_INTEGER = "-?(?:0|[1-9][0-9]{0,14})"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]{{1,12}})?"
_SCALARS = {"string": _STRING, "integer": _INTEGER, "float": _NUMBER, "boolean": "(?:True|False)"}


@dataclass(frozen=True, slots=True)
class Call:
    """A function and plain arguments (JSON values, and tuples)."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def text(self) -> str:
        """The call as an agent writes it."""
        return f"{self.name}({', '.join([*map(repr, self.args), *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"


@dataclass(frozen=True, slots=True)
class Say:
    """Text for the user."""

    content: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A text that begins like calls and is none. ``problem`` is short."""

    problem: str


def parse(action: str) -> tuple[Call, ...] | Say | Malformed:
    """What an action says: ``f(a=1)``, ``[f(a=1), g()]``, ``{"name": "f", "arguments": {"a": 1}}`` or a list of such
    objects are calls; what begins otherwise is text. Never raises, however long or odd the action is."""
    if len(action) > LONGEST:
        return Malformed(f"longer than {LONGEST} characters")
    action = action.strip()
    if not action:
        return Malformed("empty")
    if not _CODE.match(action):
        return Say(action)
    try:
        calls = _from_json(action) if action.lstrip("[ \n")[:1] == "{" else _from_python(action)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return Malformed(
            'write [function(argument=value), ...] with plain values, or {"name": ..., "arguments": {...}}'
        )
    if not calls:
        return Malformed("no call in the list")
    plain = all(_plain(value) for call in calls for value in (*call.args, *call.kwargs.values()))
    return calls if plain else Malformed("arguments must be strings, numbers, booleans, lists or objects")


def _from_json(action: str) -> tuple[Call, ...]:
    value = json.loads(action)
    rows = value if isinstance(value, list) else [value]
    calls = tuple(Call(row["name"], (), dict(row["arguments"])) for row in rows)
    if not all(isinstance(call.name, str) and call.name.isidentifier() for call in calls):
        raise ValueError("no function name")
    return calls


def _from_python(action: str) -> tuple[Call, ...]:
    body = ast.parse(action, mode="eval").body
    return tuple(_call(node) for node in (body.elts if isinstance(body, ast.List) else [body]))


def _call(node: ast.expr) -> Call:
    match node:
        case ast.Call(
            func=ast.Name(id=name) | ast.Attribute(value=ast.Name(), attr=name), args=args, keywords=keywords
        ):
            kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
            if None not in kwargs and len(kwargs) == len(keywords):
                return Call(name, tuple(map(ast.literal_eval, args)), {str(k): v for k, v in kwargs.items()})
    raise ValueError("not a call")


def _plain(value: Any) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return abs(value) <= _LARGEST  # false for NaN, too
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return isinstance(value, dict) and all(isinstance(k, str) and _plain(k) and _plain(v) for k, v in value.items())


def grammar(functions: Sequence[Mapping[str, Any]]) -> str:
    """A regular expression that every list of calls with named arguments in documented order matches in full, and
    ``done``. ``functions``: the documents of BFCL."""
    call = "(?:" + "|".join(rf"{f['name']}\({_arguments(f['parameters'])}\)" for f in functions) + ")"
    return rf"\[{call}(?:, {call})*\]|done"


def _arguments(parameters: Mapping[str, Any]) -> str:
    """Required arguments first, as documented; then any of the others in order."""
    properties, required = parameters["properties"], parameters["required"]
    patterns = {name: f"{name}={_value(schema)}" for name, schema in properties.items()}
    first = ", ".join(patterns[name] for name in properties if name in required)
    rest = [patterns[name] for name in properties if name not in required]
    if first:
        return first + "".join(f"(?:, {pattern})?" for pattern in rest)
    starts = [pattern + "".join(f"(?:, {later})?" for later in rest[i + 1 :]) for i, pattern in enumerate(rest)]
    return f"(?:{'|'.join(starts)})?" if starts else ""


def _value(schema: Mapping[str, Any]) -> str:
    kind = schema["type"]
    if kind == "array":
        item = _value(schema["items"])
        return rf"\[(?:{item}(?:, {item})*)?\]"
    if kind == "dict":
        pair = rf"{_STRING}: (?:{_STRING}|{_NUMBER}|True|False)"
        return rf"\{{(?:{pair}(?:, {pair})*)?\}}"
    return _SCALARS[kind]
