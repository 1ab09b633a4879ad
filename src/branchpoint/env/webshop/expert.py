"""A scripted customer that plays from what it sees: searches by the goal's words, opens the best hits that it can pay
for, compares what each offers with what is wanted, and buys the first that has it all, else the best one seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from branchpoint.env.webshop import words
from branchpoint.world import Step

LOOKS = 5
"""So many products are opened at most before the best of them is taken."""

_MARK = re.compile(r"^\s*\[((?:clicked )?button)\] (.*) \[\1_\]$")
_ASIN = re.compile(r"[A-Z0-9]{10}")
_DOLLARS = re.compile(r"\$(\d+(?:\.\d+)?)")
_PRICE = re.compile(r" (\d+)(?: to (\d+))?(?: over)?(?: seen)?$")


class Price(NamedTuple):
    """A price in dollars, or the two ends of a range."""

    low: float
    high: float

    def strain(self, limit: float) -> float:
        """1 above the limit; 0.5 so far below it that something dearer is probably meant, since limits lie at most 40
        dollars above the price; else 0."""
        return 1.0 if self.low > limit else 0.5 if self.high < limit - 40 else 0.0


class View(NamedTuple):
    """A page as the customer sees it. ``goal``: where the page tells it. ``hits``: prices by what opens a product, in
    order. ``options`` and ``price``: of the product that is open."""

    page: str
    goal: str = ""
    hits: Mapping[str, Price] = {}
    options: Mapping[str, tuple[str, ...]] = {}
    price: Price = Price(0, 0)


class Reader(Protocol):
    """Reads the pages of a style and words its actions."""

    def read(self, step: Step) -> View: ...
    def search(self, step: Step, query: str, number: int) -> str: ...
    def open(self, hit: str) -> str: ...
    def pick(self, value: str) -> str: ...
    def press(self, button: str) -> str: ...


class Full:
    """The styles ``text`` and ``text_rich``."""

    def read(self, step: Step) -> View:
        page = _strings(step.observation)
        if "Buy Now" in page:
            at = max(i for i, text in enumerate(page) if text.startswith("Price: "))
            clickable = frozenset(action[len("click[") : -1] for action in step.actions)
            options = _options(page[page.index("< Prev") + 1 : at - 1], clickable)
            return View("item", page[0], options=options, price=_tag(page[at]))
        if any(text.startswith("Page ") for text in page[:4]):
            rows = zip(page, page[1:], page[2:], strict=False)
            hits = {code: _tag(tag) for code, _, tag in rows if _ASIN.fullmatch(code) and "$" in tag}
            return View("results", page[0], hits)
        return View("index", page[0])

    def search(self, step: Step, query: str, number: int) -> str:
        return f"search[{query}]"

    def open(self, hit: str) -> str:
        return f"click[{hit.lower()}]"

    def pick(self, value: str) -> str:
        return f"click[{value}]"

    def press(self, button: str) -> str:
        return {"buy": "click[buy now]", "prev": "click[< prev]", "back": "click[back to search]"}[button]


def _strings(observation: str) -> list[str]:
    """The visible strings of a page from the instruction on."""
    if " [SEP] " in observation:
        found = observation.split(" [SEP] ")
    else:
        lines = (_MARK.sub(r"\2", line) for line in observation.splitlines())
        found = [line.strip() for line in lines if line.strip()]
    return found[found.index("Instruction:") + 1 :]


def _tag(text: str) -> Price:
    amounts = [float(amount) for amount in _DOLLARS.findall(text)] or [0.0]
    return Price(amounts[0], amounts[-1])


def _options(texts: list[str], clickable: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Values by name: of the strings between the buttons and the title, those that can be clicked are values."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for text in texts:
        if text in clickable:
            values.append(text)
        else:
            values = options.setdefault(text, [])
    return {name: tuple(values) for name, values in options.items()}


class Brief:
    """The style ``compact``, with or without marks."""

    def __init__(self) -> None:
        self._marked: frozenset[str] = frozenset()

    def read(self, step: Step) -> View:
        first, *lines = step.observation.split("\n")
        if first.startswith("item "):
            pairs = (line.partition(": ") for line in lines if ": " in line)
            shown = {name: values.split(" , ") for name, _, values in pairs}
            self._marked = frozenset(v for values in shown.values() for v in values if v.startswith("* "))
            options = {name: tuple(v.removeprefix("* ") for v in values) for name, values in shown.items()}
            return View("item", options=options, price=_last(first))
        if first.startswith("page "):
            return View("results", hits={line.split(" ")[0]: _last(line) for line in lines})
        limit = lines.pop().removeprefix("under ") if lines and lines[-1].startswith("under ") else ""
        options = f" with {', and '.join(lines)}" if lines else ""
        priced = f", and price lower than {limit}.00 dollars" if limit else ""
        return View("index", first.removeprefix("want ") + options + priced)

    def search(self, step: Step, query: str, number: int) -> str:
        return step.actions[min(number, len(step.actions) - 1)]

    def open(self, hit: str) -> str:
        return f"open {hit}"

    def pick(self, value: str) -> str:
        return f"pick * {value}" if f"* {value}" in self._marked else f"pick {value}"

    def press(self, button: str) -> str:
        return button


def _last(line: str) -> Price:
    found = _PRICE.search(line)
    low, high = (found[1], found[2] or found[1]) if found else ("0", "0")
    return Price(float(low), float(high))


class Verdict(NamedTuple):
    """How a product fits: the values to choose, in order, and how much is missing (0: nothing known)."""

    choose: tuple[str, ...]
    missing: float


def judge(goal: str, offer: View) -> Verdict:
    """Which values to choose for a goal, and how much is wanted that the page does not offer."""
    wanted, text = words.parts(goal)
    named = dict(words.named(text))
    if named:
        picks = {name: named.get(name, "") for name in offer.options}
        picks = {name: value if value in offer.options[name] else "" for name, value in picks.items()}
    else:
        picks = {name: _mentioned(wanted, values) for name, values in offer.options.items()}
    missing = sum(not picks.get(name) for name in named) + offer.price.strain(words.limit(goal))
    return Verdict(tuple(filter(None, picks.values())), missing)


def _mentioned(wanted: str, values: tuple[str, ...]) -> str:
    """The value whose words stand in the goal, the longest of several; empty when none does."""
    said = set(re.findall(r"\w+", wanted))
    fits = [v for v in values if (own := set(re.findall(r"\w+", v))) and own <= said]
    return max(fits, key=len, default="")


class Expert:
    """Plays one episode: ``act(step)`` takes the steps in order, the reset's first."""

    def __init__(self, max_steps: int = 15, style: str = "text") -> None:
        self._left = max_steps
        self._say: Reader = Brief() if style == "compact" else Full()
        self._goal = ""
        self._searches = 0
        self._hits: list[str] = []
        self._verdicts: dict[str, Verdict] = {}
        self._open = ""
        self._final = ""
        self._chosen: list[str] | None = None

    def act(self, step: Step) -> str:
        """The next action."""
        self._left -= 1
        view = self._say.read(step)
        self._goal = self._goal or view.goal
        if view.page == "item":
            return self._at_item(view)
        if view.page == "results":
            return self._at_results(view)
        queries = words.queries(self._goal)
        self._searches += 1
        return self._say.search(step, queries[(self._searches - 1) % len(queries)], self._searches - 1)

    def _at_results(self, view: View) -> str:
        limit = words.limit(self._goal)
        if not self._hits:
            self._hits = sorted(view.hits, key=lambda hit: view.hits[hit].strain(limit))
        if not self._hits:
            return self._say.press("back")
        self._open = self._final or self._fresh()[0]
        return self._say.open(self._open)

    def _at_item(self, view: View) -> str:
        if self._chosen is None and self._open not in self._verdicts:
            self._verdicts[self._open] = judge(self._goal, view)
        if self._chosen is None and self._verdicts[self._open].missing:
            if not self._time_to_look():
                self._final = min(self._verdicts, key=lambda hit: self._verdicts[hit].missing)
            if self._final != self._open:
                return self._say.press("prev")
        if self._chosen is None:
            self._chosen = list(self._verdicts[self._open].choose)
        return self._say.pick(self._chosen.pop(0)) if self._chosen else self._say.press("buy")

    def _fresh(self) -> list[str]:
        return [hit for hit in self._hits if hit not in self._verdicts]

    def _time_to_look(self) -> bool:
        """Whether one more product can be opened, and then the best one be opened again, configured and bought."""
        wanted = max(1, len(words.named(words.parts(self._goal)[1])))
        return len(self._verdicts) < LOOKS and bool(self._fresh()) and self._left >= 4 + wanted
