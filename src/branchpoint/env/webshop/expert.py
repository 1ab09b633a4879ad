"""A scripted customer that plays from what it sees: searches by the goal's words, opens the best hits that it can pay
for, compares what each offers with what is wanted, and buys the first that has it all, else the best one seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from branchpoint.env.webshop import words
from branchpoint.world import Step

LOOKS = 5
"""So many products are opened at most before the best of them is taken."""

_MARK = re.compile(r"^\s*\[((?:clicked )?button)\] (.*) \[\1_\]$")
_ASIN = re.compile(r"[A-Z0-9]{10}")
_DOLLARS = re.compile(r"\$(\d+(?:\.\d+)?)")
_NAME = re.compile(r"(?:^|, and )([^:,]+): ")


class Price(NamedTuple):
    """A price in dollars, or the two ends of a range."""

    low: float
    high: float

    @classmethod
    def of(cls, tag: str) -> Price:
        """Of the tag that a page shows."""
        amounts = [float(amount) for amount in _DOLLARS.findall(tag)] or [0.0]
        return cls(amounts[0], amounts[-1])

    def strain(self, limit: float) -> float:
        """1 above the limit; 0.5 so far below it that something dearer is probably meant, since limits lie at most 40
        dollars above the price; else 0."""
        return 1.0 if self.low > limit else 0.5 if self.high < limit - 40 else 0.0


class Hit(NamedTuple):
    """A product on a page of results."""

    asin: str
    title: str
    price: Price


class Offer(NamedTuple):
    """A product's page: its title, its options by name, its price."""

    title: str
    options: Mapping[str, tuple[str, ...]]
    price: Price


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
    return [Hit(code, title, Price.of(tag)) for code, title, tag in rows if _ASIN.fullmatch(code) and "$" in tag]


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
    return Offer(page[at - 1], {name: tuple(v) for name, v in options.items()}, Price.of(page[at]))


def judge(goal: str, product: Offer) -> Verdict:
    """Which values to choose for a goal, and how much is wanted that the page does not offer."""
    wanted, options = words.parts(goal)
    named = _NAME.findall(options)
    picks = {name: _pick(f"{name}: ", options, values) for name, values in product.options.items()}
    if not named:
        picks = {name: _mentioned(wanted, values) for name, values in product.options.items()}
    missing = sum(not picks.get(name) for name in named) + product.price.strain(words.limit(goal))
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
            self._hits = sorted(hits(page), key=lambda hit: hit.price.strain(limit))
        if not self._hits:
            return "click[back to search]"
        self._open = self._final or self._fresh()[0]
        return f"click[{self._open.lower()}]"

    def _at_item(self, page: list[str], step: Step) -> str:
        if self._chosen is None and self._open not in self._verdicts:
            clickable = frozenset(action[len("click[") : -1] for action in step.actions)
            self._verdicts[self._open] = judge(page[0], offer(page, clickable))
        if self._chosen is None and self._verdicts[self._open].missing:
            if not self._time_to_look(page[0]):
                self._final = min(self._verdicts, key=lambda asin: self._verdicts[asin].missing)
            if self._final != self._open:
                return "click[< prev]"
        if self._chosen is None:
            self._chosen = list(self._verdicts[self._open].choose)
        return f"click[{self._chosen.pop(0)}]" if self._chosen else "click[buy now]"

    def _fresh(self) -> list[str]:
        return [hit.asin for hit in self._hits if hit.asin not in self._verdicts]

    def _time_to_look(self, goal: str) -> bool:
        """Whether one more product can be opened, and then the best one be opened again, configured and bought."""
        wanted = max(1, len(_NAME.findall(words.parts(goal)[1])))
        return len(self._verdicts) < LOOKS and bool(self._fresh()) and self._left >= 4 + wanted
