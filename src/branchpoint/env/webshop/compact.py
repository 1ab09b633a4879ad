"""The shop in few words, for small models: the goal is said once, titles are cut, actions are two words.

    want machine wash men's shirts with cotton      find 1
    color: black
    under 40
    page 1                                          open 2
    1 lee men's slim fit shirt 33
    2 ...
    item lee men's slim fit shirt long sleeve 33    pick black
    color: black , blue

Everything can be bought that can be bought in the other styles; the pages of description, features, reviews and
attributes are left out. With the dial ``mark``, a ``*`` stands before every option value that the goal names, on the
page and in the action, and ``over`` behind a price above the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from branchpoint.env.webshop import pages, words
from branchpoint.env.webshop.catalog import Product

LIST_WORDS, ITEM_WORDS = 5, 8
"""So many words of a title are shown among results and on a product's page."""

FINDS = ("find 1", "find 2", "find 3")
"""Stand for the first searches of :func:`words.queries`."""
_WORD = re.compile(r"[a-z0-9]+(?:[.'-][a-z0-9]+)*")


def index(goal: str) -> str:
    """The goal: what is wanted, a line for every option, the price limit rounded down."""
    wanted, options = words.parts(goal)
    lines = [f"want {wanted}", *(f"{name}: {value}" for name, value in words.named(options))]
    limit = words.limit(goal)
    return "\n".join(lines if math.isinf(limit) else [*lines, f"under {math.floor(limit)}"])


@dataclass(frozen=True, slots=True)
class Marks:
    """What the goal names: option values, in lower case, and the price limit in dollars. By default nothing."""

    values: frozenset[str] = frozenset()
    limit: float = math.inf

    @classmethod
    def of(cls, goal: str) -> Marks:
        """What a goal's text names."""
        return cls(frozenset(value for _, value in words.named(words.parts(goal)[1])), words.limit(goal))

    def value(self, value: str) -> str:
        """An option value, marked where the goal names it."""
        return f"* {value}" if value.lower() in self.values else value

    def price(self, product: Product) -> str:
        """In whole dollars, rounded up; a range as two numbers."""
        price = " to ".join(str(math.ceil(price)) for price in product.prices)
        return f"{price} over" if min(product.prices) > self.limit else price


def results(found: Sequence[Product], number: int, seen: Collection[str], marks: Marks) -> str:
    """A page of results: number, words of the title, price, and whether it was opened."""
    shown = found[(number - 1) * pages.PER_PAGE : number * pages.PER_PAGE]
    rows = [
        f"{place} {_title(product, LIST_WORDS)} {marks.price(product)}{' seen' if product.asin in seen else ''}"
        for place, product in enumerate(shown, 1)
    ]
    return "\n".join([f"page {number}", *rows])


def item(product: Product, chosen: Mapping[str, str], marks: Marks) -> str:
    """A product: words of the title, price, a line for every option, with its values or, once chosen, the value."""
    lines = [f"item {_title(product, ITEM_WORDS)} {marks.price(product)}"]
    for name, values in product.options.items():
        lines.append(
            f"{name} = {marks.value(chosen[name])}"
            if name in chosen
            else f"{name}: {' , '.join(map(marks.value, values))}"
        )
    return "\n".join(lines)


def done(score: float) -> str:
    """After the purchase."""
    return f"done {score:.2f}"


def actions(targets: Mapping[str, pages.Piece], marks: Marks) -> dict[str, str]:
    """The actions of a page other than the first, each with the argument of the click that it stands for."""
    buttons = {"next >": "next", "< prev": "prev", "back to search": "back", "buy now": "buy"}
    offered, place = {}, 0
    for argument, piece in targets.items():
        place += piece.kind == "link"
        if piece.kind == "link":
            offered[f"open {place}"] = argument
        elif piece.kind == "option":
            offered[f"pick {marks.value(argument)}"] = argument
        elif argument in buttons:
            offered[buttons[argument]] = argument
    return offered


def _title(product: Product, most: int) -> str:
    return " ".join(_WORD.findall(product.title.lower())[:most])
