"""Draws texts that a regular expression matches (the part of the syntax that our grammars use)."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

_LETTERS = "abcxyzABC0123456789 _-.,:;#'\"\\/()[]{}<>\n\t\x00é猫"


def sample(expression: str, rng: random.Random, most: int = 3) -> str:
    """One text; repeats run to ``most`` beyond their minimum. Raises ValueError for syntax it does not know."""
    text = _sequence(_tree(expression), rng, most)
    assert re.fullmatch(expression, text), text
    return text


@cache
def _tree(expression: str) -> Any:
    return re._parser.parse(expression)  # type: ignore[attr-defined]


def _sequence(tree: Any, rng: random.Random, most: int) -> str:
    return "".join(_node(str(op), value, rng, most) for op, value in tree)


def _node(op: str, value: Any, rng: random.Random, most: int) -> str:
    if op == "LITERAL":
        return chr(value)
    if op == "NOT_LITERAL":
        return rng.choice([c for c in _LETTERS if ord(c) != value])
    if op == "IN":
        return rng.choice([c for c in _LETTERS + "nrtbf" if _within(value, c)])
    if op == "BRANCH":
        return _sequence(rng.choice(value[1]), rng, most)
    if op == "SUBPATTERN":
        return _sequence(value[-1], rng, most)
    if op == "MAX_REPEAT":
        low, high, inner = value
        return "".join(_sequence(inner, rng, most) for _ in range(rng.randint(low, min(int(high), low + most))))
    raise ValueError(f"no drawing of {op}")


def _within(items: Any, letter: str) -> bool:
    inside = False
    for op, value in items:
        if str(op) == "LITERAL":
            inside |= ord(letter) == value
        elif str(op) == "RANGE":
            inside |= value[0] <= ord(letter) <= value[1]
        elif str(op) == "CATEGORY":
            inside |= letter.isspace()
        elif str(op) != "NEGATE":
            raise ValueError(f"no drawing of {op}")
    return inside != (str(items[0][0]) == "NEGATE")


ODD = (
    None,
    True,
    0,
    -1,
    10**40,
    1.5,
    float("inf"),
    "",
    "x",
    "\ud800",
    "\u202e\x00",
    "9" * 50,
    [],
    ["a", "a"],
    [1],
    {},
)
"""Values that no tool expects."""
