"""Observations as text, and back: JSON, or a compact line of plain words.

Compact: ``key value key value ...``; a list of records is ``( key value ... ) ( ... )``, a list of words ``[ a b ]``,
nothing is ``none``. A value with a space is quoted.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

Style = Literal["json", "compact"]
_BARE = re.compile(r"[A-Za-z0-9_.'@+,/<>=-]+")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_INTEGER = re.compile(r"-?[0-9]+")
_OMITTED = {"message", "total", "offset", "shipment"}
"""What a compact line leaves out: it repeats other fields, or no decision needs it."""


def render(payload: dict[str, Any], style: Style) -> str:
    """The text that the agent sees."""
    if style == "json":
        return json.dumps(payload)
    short = {k: v for k, v in payload.items() if k not in _OMITTED}
    if "items" in payload:
        short.pop("address", None)
    for name in ("customers",):
        if name in payload:
            short[name] = [{k: v for k, v in row.items() if k in ("customer", "name")} for row in payload[name]]
    return _words(short)


def read(text: str, style: Style) -> dict[str, Any]:
    """What :func:`render` was given (without what the compact line leaves out). Raises ValueError for other text."""
    if style == "json":
        return json.loads(text)
    tokens = _TOKEN.findall(text)
    record, at = _record(tokens, 0)
    if at != len(tokens):
        raise ValueError(f"not an observation of the desk: {text[:80]!r}")
    return record


def _words(record: dict[str, Any]) -> str:
    return " ".join(f"{k} {_value(v)}" for k, v in record.items())


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return " ".join(f"( {_words(v)} )" for v in value)
        return " ".join(["[", *map(_value, value), "]"])
    text = str(value)
    if isinstance(value, str) and (not _BARE.fullmatch(text) or text == "none" or _INTEGER.fullmatch(text)):
        return json.dumps(text)
    return text


def _record(tokens: list[str], at: int) -> tuple[dict[str, Any], int]:
    out: dict[str, Any] = {}
    while at + 1 < len(tokens) and tokens[at] != ")":
        key = tokens[at]
        out[key], at = _read_value(tokens, at + 1)
    return out, at


def _read_value(tokens: list[str], at: int) -> tuple[Any, int]:
    if tokens[at] == "[":
        end = tokens.index("]", at)
        return [_scalar(t) for t in tokens[at + 1 : end]], end + 1
    if tokens[at] != "(":
        return _scalar(tokens[at]), at + 1
    rows: list[dict[str, Any]] = []
    while at < len(tokens) and tokens[at] == "(":
        row, at = _record(tokens, at + 1)
        rows.append(row)
        at += 1
    return rows, at


def _scalar(token: str) -> Any:
    if token == "none":
        return None
    if token[0] == '"':
        return json.loads(token)
    return int(token) if _INTEGER.fullmatch(token) else token
