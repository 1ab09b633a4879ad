"""What an agent writes: a tool call as a JSON object, or plain text for the user.

``{"name": tool, "arguments": {...}}``, bare or between ``<tool_call>`` tags, is a call. Text that begins with neither
``{`` nor ``<tool_call>`` goes to the user, as does a call of ``respond`` with the argument ``content``. A text that
begins like a call and is none is :class:`Malformed`: nothing runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LONGEST = 4000
"""Characters of an action beyond which it is refused unread."""
_LARGEST = 10**9
_BRACKETS = 200  # far below the depth at which JSON and copies of it stop working
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
_INTEGER = "-?(?:0|[1-9][0-9]{0,8})"
_REPLY = r"[^{<\s][^\x00]*"

Schema = Mapping[str, Any]
"""A JSON schema of the few kinds that tools need."""


def text(about: str, *choices: str) -> Schema:
    """A string, one of the choices if there are any."""
    return {"type": "string", "description": about} | ({"enum": list(choices)} if choices else {})


def integer(about: str) -> Schema:
    """A whole number."""
    return {"type": "integer", "description": about}


def number(about: str) -> Schema:
    """A finite number."""
    return {"type": "number", "description": about}


def array(about: str, items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "description": about, "items": items}


def record(**properties: Schema) -> Schema:
    """An object in which all of these are required. More keys are allowed."""
    return {"type": "object", "properties": properties, "required": list(properties)}


@dataclass(frozen=True, slots=True)
class Tool:
    """``run(database, **arguments)`` returns the text for the agent or raises ToolError. All arguments are required."""

    name: str
    kind: Literal["read", "write", "control"]
    about: str
    args: Mapping[str, Schema]
    run: Callable[..., str]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool, in the shape that chat templates take."""
        function = {"name": self.name, "description": self.about, "parameters": record(**self.args)}
        return {"type": "function", "function": function}

    @property
    def grammar(self) -> str:
        """Matches the calls that :meth:`Call.text` writes."""
        return rf'\{{"name": "{self.name}", "arguments": {_fields(self.args)}\}}'


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a known tool with arguments of the right types, in the order of its schema."""

    tool: Tool
    args: Mapping[str, Any]

    def text(self) -> str:
        """The call as an agent writes it."""
        return json.dumps({"name": self.tool.name, "arguments": dict(self.args)}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """Text for the user."""

    content: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A text that is neither. ``problem`` is short."""

    problem: str


Tools = Mapping[str, Tool]


def grammar(tools: Tools) -> str:
    """A regular expression that every call with its arguments in schema order, and every reply, matches in full."""
    return "|".join([*(f"(?:{tool.grammar})" for tool in tools.values()), _REPLY])


def _fields(properties: Mapping[str, Schema]) -> str:
    return r"\{" + ", ".join(f'"{name}": {_pattern(schema)}' for name, schema in properties.items()) + r"\}"


def _pattern(schema: Schema) -> str:
    kind = schema["type"]
    if kind == "array":
        item = _pattern(schema["items"])
        return rf"\[(?:{item}(?:, {item})*)?\]"
    if kind == "object":
        return _fields(schema["properties"])
    if kind == "string":
        return '"(?:' + "|".join(map(re.escape, schema["enum"])) + ')"' if "enum" in schema else _STRING
    return _INTEGER if kind == "integer" else _INTEGER + r"(?:\.[0-9]{1,4})?"


def parse(action: str, tools: Tools) -> Call | Reply | Malformed:
    """What an action says. Never raises, however long or odd it is."""
    if len(action) > LONGEST:
        return Malformed(f"longer than {LONGEST} characters")
    action = action.strip()
    if not action:
        return Malformed("empty")
    if "<tool_call>" in action:
        found = _TAGGED.findall(action)
        if len(found) != 1 or action.count("<tool_call>") != 1:
            return Malformed("write exactly one complete tool_call block")
        action = found[0].strip()
    elif action[0] != "{":
        return Reply(action) if _encodable(action) else Malformed("not valid Unicode")
    if action.count("[") + action.count("{") > _BRACKETS:
        return Malformed("too many brackets")
    try:
        value = json.loads(action, object_pairs_hook=_unique)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            value["arguments"] = json.loads(value["arguments"], object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return Malformed("not one valid JSON object")
    return _checked(value, tools)


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _checked(value: Any, tools: Tools) -> Call | Reply | Malformed:
    if not isinstance(value, dict) or set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
        return Malformed("a call is an object with exactly name (a string) and arguments")
    name, given = value["name"], value["arguments"]
    if not isinstance(given, dict):
        return Malformed("arguments must be an object")
    if not _encodable(json.dumps(given, ensure_ascii=False)):
        return Malformed("not valid Unicode")
    if name == "respond":
        content = given.get("content")
        fits = set(given) == {"content"} and isinstance(content, str) and content.strip()
        return Reply(str(content).strip()) if fits else Malformed("respond takes exactly content, a text")
    if name not in tools:
        return Malformed(f"no tool {name[:40]!a}")
    tool = tools[name]
    if unknown := sorted(set(given) - set(tool.args)):
        return Malformed(f"{name} takes no {unknown[0][:40]!a}")
    if problem := _problem(record(**tool.args), given, ""):
        return Malformed(f"{name}: {problem}")
    return Call(tool, {key: given[key] for key in tool.args})


def _problem(schema: Schema, value: Any, where: str) -> str:
    """Why a value does not fit a schema, or ""."""
    kind, at = schema["type"], where or "arguments"
    if kind == "string":
        if not isinstance(value, str):
            return f"{at} must be a string"
        return "" if value in schema.get("enum", (value,)) else f"{at} must be one of {', '.join(schema['enum'])}"
    if kind in ("integer", "number"):
        types = int if kind == "integer" else int | float
        if not isinstance(value, types) or isinstance(value, bool):
            return f"{at} must be {'an integer' if kind == 'integer' else 'a number'}"
        return "" if abs(value) <= _LARGEST else f"{at} is out of range"  # NaN is refused, too
    if kind == "array":
        if not isinstance(value, list):
            return f"{at} must be an array"
        return next(filter(None, (_problem(schema["items"], v, f"{at}[{i}]") for i, v in enumerate(value))), "")
    if not isinstance(value, dict):
        return f"{at} must be an object"
    for name, inner in schema["properties"].items():
        path = f"{where}.{name}" if where else name
        problem = _problem(inner, value[name], path) if name in value else f"{path} is missing"
        if problem:
            return problem
    return ""
