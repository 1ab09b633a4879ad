"""What can be read off a goal's text without seeing the shop: the price limit, and words to search for."""

from __future__ import annotations

import re

_PRICE = re.compile(r",? and price lower than (\d+\.\d\d) dollars$")
_OPENING = re.compile(r"^find me ")
_OPTIONS = re.compile(r" with ((?:(?! with )[^:,])+: .*)$")
_NAME = re.compile(r"(?:^|, and )([^:,]+): ")
_CUT = re.compile(r",? (?:with|for|and|that|which|in) |[,.?!;] ")
_BLANKS = re.compile(r"[\s\[\]]+")
MOST = 8


def limit(goal: str) -> float:
    """The price limit in dollars; infinite when none is named."""
    found = _PRICE.search(goal)
    return float(found[1]) if found else float("inf")


def parts(goal: str) -> tuple[str, str]:
    """What is wanted, in lower case, and the options (``color: red, and size: 5``); no price, no "find me"."""
    wanted = _OPENING.sub("", _PRICE.sub("", goal.strip().lower()))
    found = _OPTIONS.search(wanted)
    return (wanted[: found.start()], found[1]) if found else (wanted, "")


def named(options: str) -> list[tuple[str, str]]:
    """Name and value of each option of :func:`parts`."""
    found = list(_NAME.finditer(options))
    ends = [match.start() for match in found[1:]] + [len(options)]
    return [(match[1], options[match.end() : end]) for match, end in zip(found, ends, strict=False)]


def queries(goal: str) -> tuple[str, ...]:
    """Up to 8 texts to search for, all cut from the goal: everything, without the options, with their values only, and
    the single phrases. The first ones find the most."""
    wanted, options = parts(goal)
    values = " ".join(value for _, value in named(options))
    phrases = [phrase for phrase in _CUT.split(wanted) if phrase]
    texts = [f"{wanted} {options}", wanted, f"{phrases[-1]} {values}" if phrases else "", *phrases]
    clean = (_BLANKS.sub(" ", text).strip() for text in texts)
    return tuple(dict.fromkeys(text for text in clean if text))[:MOST]
