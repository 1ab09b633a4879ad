"""A scripted customer that plays from what it sees: searches by the goal's words, opens the best hits that it can pay
for, compares what each offers with what is wanted, and buys the first that has it all, else the best one seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from branchpoint.env.webshop import words
from branchpoint.world import Step

LOOKS = 4
"""So many products are opened at most before the best of them is taken."""

_MARK = re.compile(r"^\s*\[((?:clicked )?button)\] (.*) \[\1_\]$")
_ASIN = re.compile(r"[A-Z0-9]{10}")
_DOLLARS = re.compile(r"\$(\d+(?:\.\d+)?)")
_NAME = re.compile(r"(?:^|, and )([^:,]+): ")


class Hit(NamedTuple):
    """A product on a page of results; ``price``: the highest it can cost."""

    asin: str
    title: str
    price: float


class Offer(NamedTuple):
    """A product's page: its options by name, and the highest price."""

    title: str
    options: Mapping[str, tuple[str, ...]]
    price: float


class Verdict(NamedTuple):
    """How a product fits: the values to choose, in order, and what is missing (0: nothing known)."""

    choose: tuple[str, ...]
    missing: float


def strings(observation: str) -> list[str]:
    """The visible strings of a page, of either style, from the instruction on."""
    if " [SEP] " in observation:
        found = observation.split(" [SEP] ")
    else:
        lines = (_MARK.sub(r"\2", line) for line in observation.splitlines())
        found = [line.strip() for line in lines if line.strip()]
    return found[found.index("Instruction:") + 1 :]


def hits(page: list[str]) -> list[Hit]:
    """The products of a page of results."""
    rows = zip(page, page[1:], page[2:], strict=False)
    return [Hit(code, title, _highest(tag)) for code, title, tag in rows if _ASIN.fullmatch(code) and "$" in tag]


def _highest(tag: str) -> float:
    return max(map(float, _DOLLARS.findall(tag)), default=float("inf"))


def offer(page: list[str], clickable: frozenset[str]) -> Offer:
    """What a product page offers; ``clickable``: what can be clicked on it, which tells values from names."""
    at = max(i for i, text in enumerate(page) if text.startswith("Price: "))
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for text in page[page.index("< Prev") + 1 : at - 1]:
        if text in clickable:
            values.append(text)
        else:
            values = options.setdefault(text, [])
    return Offer(page[at - 1], {name: tuple(v) for name, v in options.items()}, _highest(page[at]))


def judge(goal: str, product: Offer) -> Verdict:
    """Which values to choose for a goal, and how much is wanted that the page does not offer."""
    wanted, options = words.parts(goal)
    named = _NAME.findall(options)
    picks = {name: _pick(f"{name}: ", options, values) for name, values in product.options.items()}
    if not named:
        picks = {name: _mentioned(wanted, values) for name, values in product.options.items()}
    missing = sum(not picks.get(name) for name in named) + (product.price > words.limit(goal))
    return Verdict(tuple(filter(None, picks.values())), missing)


def _pick(prefix: str, options: str, values: tuple[str, ...]) -> str:
    """The value that the goal names for an option, the longest of several; empty when the page has none."""
    starts = [m.end() for m in re.finditer(rf"(?:^|, and ){re.escape(prefix)}", options)]
    fits = [v for v in values for at in starts if re.match(rf"{re.escape(v)}(?:$|, and )", options[at:])]
    return max(fits, key=len, default="")


def _mentioned(wanted: str, values: tuple[str, ...]) -> str:
    """The value whose words stand in the goal, the longest of several; empty when none does."""
    said = set(re.findall(r"\w+", wanted))
    fits = [v for v in values if (own := set(re.findall(r"\w+", v))) and own <= said]
    return max(fits, key=len, default="")


class Expert:
    """Plays one episode: ``act(step)`` takes the steps in order, the reset's first."""

    def __init__(self, max_steps: int = 15) -> None:
        self._left = max_steps
        self._queries: list[str] = []
        self._hits: list[Hit] = []
        self._verdicts: dict[str, Verdict] = {}
        self._open = ""
        self._final = ""
        self._chosen: list[str] | None = None

    def act(self, step: Step) -> str:
        """The next action."""
        self._left -= 1
        page = strings(step.observation)
        if "Buy Now" in page:
            return self._at_item(page, step)
        if any(text.startswith("Page ") for text in page[:4]):
            return self._at_results(page)
        if not self._hits and not self._queries:
            self._queries = list(words.queries(page[0]))
        return f"search[{self._queries.pop(0) if self._queries else page[0]}]"

    def _at_results(self, page: list[str]) -> str:
        limit = words.limit(page[0])
        if not self._hits:
            self._hits = sorted(hits(page), key=lambda hit: hit.price > limit)
        if not self._hits:
            return "click[back to search]"
        fresh = [hit.asin for hit in self._hits if hit.asin not in self._verdicts]
        if self._final or not fresh:
            self._open = self._final or self._best()
        else:
            self._open = fresh[0]
        return f"click[{self._open.lower()}]"

    def _at_item(self, page: list[str], step: Step) -> str:
        clickable = frozenset(action[len("click[") : -1] for action in step.actions)
        if self._open not in self._verdicts:
            self._verdicts[self._open] = judge(page[0], offer(page, clickable))
        verdict = self._verdicts[self._open]
        if not self._settled(verdict):
            self._final = self._best() if len(self._verdicts) >= LOOKS else ""
            if self._final != self._open:
                return "click[< prev]"
        if self._chosen is None:
            self._chosen = list(verdict.choose)
        return f"click[{self._chosen.pop(0)}]" if self._chosen else "click[buy now]"

    def _settled(self, verdict: Verdict) -> bool:
        """Whether to buy what is open: it has all, it was decided on, or there is no time to look further."""
        return not verdict.missing or self._open == self._final or self._left < 6 + len(verdict.choose)

    def _best(self) -> str:
        return min(self._verdicts, key=lambda asin: self._verdicts[asin].missing)
