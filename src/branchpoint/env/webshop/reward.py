"""The published reward: how well a purchase fits the goal (Yao et al., 2022, https://arxiv.org/abs/2207.01206).

    score = type * (attributes + options + price) / (wanted attributes + wanted options + 1)

``attributes`` and ``options`` count what was wanted and is there, ``price`` is 1 within the limit. ``type`` is 1, or
less when the product is of another kind. Fuzzy comparisons are those of ``thefuzz``, which the original uses, computed
by ``rapidfuzz``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from branchpoint.env.webshop.catalog import Product
from branchpoint.env.webshop.goals import Goal, Option

_COLOURS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow
"""
COLOURS = tuple(_COLOURS.split())
Rule = Literal["pairs", "values"]

ALIKE = 85
"""Texts are alike above this ratio (0 to 100)."""

_LATIN_1 = dict.fromkeys(range(128, 256))


class Outcome(NamedTuple):
    """A graded purchase. ``score`` is in [0, 1]; 1 is a success."""

    score: float
    type: float
    attributes: int
    options: int
    price: bool


@functools.cache
def _rapidfuzz() -> tuple[Callable[..., float], Callable[[Any], str]]:
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise ImportError('WebShop needs rapidfuzz: pip install "branchpoint[webshop]"') from error
    return fuzz.token_set_ratio, utils.default_process


@functools.lru_cache(maxsize=65536)
def ratio(one: str, other: str) -> int:
    """The token set ratio of two texts, 0 to 100, rounded; as ``thefuzz`` prepares them: without the characters 128 to
    255, in lower case, anything but letters and digits read as a blank."""
    token_set_ratio, process = _rapidfuzz()
    return round(token_set_ratio(process(one.translate(_LATIN_1)), process(other.translate(_LATIN_1))))


def grade(
    goal: Goal, wanted: Product, bought: Product, price: float, chosen: Sequence[str], rule: Rule = "pairs"
) -> Outcome:
    """The outcome of buying a product with the chosen option values at a price; ``wanted``: the goal's own product."""
    kind = type_score(wanted, bought)
    attributes = sum(_has(bought, attribute) for attribute in goal.attributes)
    options = count_options(goal.options, chosen, rule)
    cheap = price <= goal.limit
    parts = len(goal.attributes) + len(goal.options) + 1
    return Outcome(kind * ((attributes + options + cheap) / parts), kind, attributes, options, cheap)


def type_score(wanted: Product, bought: Product) -> float:
    """1 for a product of the same kind, 0.5 for another one with a like title, 0.1 or 0 when the title is unlike.

    The kind is the same when the query or two levels of the category agree, or more than a fifth of the wanted title's
    nouns are in the other one.
    """
    shared = len(set(wanted.nouns) & set(bought.nouns))
    title = shared / len(wanted.nouns) if wanted.nouns else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    same = wanted.query == bought.query or len(_levels(wanted) & _levels(bought)) >= 2 or title > 0.2
    return 1.0 if same else 0.5


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.levels.split("›")}


def _has(product: Product, attribute: str) -> bool:
    """Whether a product has an attribute: one alike is listed, or the words stand in its texts."""
    if any(ratio(own, attribute) > ALIKE for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def count_options(wanted: Sequence[Option], chosen: Sequence[str], rule: Rule = "pairs") -> int:
    """How many of the wanted options are like a chosen value.

    ``pairs`` is the original's rule for options with a name: it compares with the name and value as one text, which
    the very value that is wanted can fail ("rectangular" counts as "tan"). ``values`` compares with the value alone.
    """
    texts = [option[1] if rule == "values" and not isinstance(option, str) else option for option in wanted]
    values = [colour(value) for value in chosen]
    return sum(any(ratio(value, _words(option)) > ALIKE for value in values) for option in texts)


def colour(value: str) -> str:
    """The first colour of the list that is part of the value, else the value."""
    return next((name for name in COLOURS if name in value), value)


def _words(option: Option) -> str:
    """What a chosen value is compared with. The original hands over a name and its value as a Python tuple: only a
    name or value that *is* a colour counts as one, else the tuple is written out."""
    if isinstance(option, str):
        return colour(option)
    return next((name for name in COLOURS if name in option), str(option))
