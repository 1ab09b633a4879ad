"""Goals: what the customer asks for, with the price limit, in the order and the splits of the published set-ups."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from branchpoint.env.webshop.catalog import Product, Wish, products

Source = Literal["synthetic", "human"]
Layout = Literal["paper", "verl-agent"]
Option = tuple[str, str] | str
"""A wanted option: a synthetic goal names the option and its value, a person only the value."""

NO_LIMIT = 1_000_000.0
_LIMITS = tuple(10.0 * n for n in range(1, 100))
_SHUFFLE_SEED = 233


@dataclass(frozen=True, slots=True)
class Goal:
    """``product``: its number in the catalogue. ``limit``: the highest price allowed, in dollars."""

    text: str
    product: int
    attributes: tuple[str, ...]
    options: tuple[Option, ...]
    limit: float


@functools.lru_cache(maxsize=8)
def prices(seed: int) -> tuple[float, ...]:
    """What each product costs, in dollars: its price, or one drawn uniformly from its range (93 of 1,000 products)."""
    return _draw(seed)[0]


@functools.lru_cache(maxsize=8)
def goals(source: Source, seed: int) -> tuple[Goal, ...]:
    """All goals of a source in their published order (6,910 synthetic, 13 human).

    Price limits are drawn after the prices from the generator of ``seed``: the goals of the original program when
    ``random.seed(seed)`` is called right before it loads its products. Its shuffle, with a seed of its own, follows.
    """
    costs, luck = _draw(seed)
    make = _synthetic if source == "synthetic" else _human
    made = [goal for number, product in enumerate(products()) for goal in make(number, product, costs[number], luck)]
    random.Random(_SHUFFLE_SEED).shuffle(made)
    return tuple(made)


def _draw(seed: int) -> tuple[tuple[float, ...], random.Random]:
    luck = random.Random(seed)
    return tuple(p.prices[0] if len(p.prices) == 1 else luck.uniform(*p.prices) for p in products()), luck


def _limit(price: float, luck: random.Random) -> tuple[float, str]:
    """A price limit and the words for it: the larger of two of the first four multiples of 10 above the price."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(luck.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _synthetic(number: int, product: Product, price: float, luck: random.Random) -> Iterator[Goal]:
    """One goal for every combination of the options' values; they share the price limit."""
    wish = product.synthetic
    if wish is None:
        return
    limit, priced = _limit(price, luck)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        with_options = " with " + ", and ".join(f"{name}: {value}" for name, value in options) if options else ""
        yield Goal(wish.text + with_options + priced, number, wish.attributes, options, limit)


def _human(number: int, product: Product, price: float, luck: random.Random) -> Iterator[Goal]:
    wishes: Sequence[Wish] = [wish for wish in product.people if wish.attributes]
    for wish in wishes:
        limit, priced = _limit(price, luck)
        yield Goal(wish.text.strip(".") + priced, number, wish.attributes, wish.options, limit)


SPLITS: Mapping[str, Mapping[str, tuple[int, int | None]]] = {
    "paper": {"test": (0, 500), "val": (500, 1500), "train": (1500, None)},
    "verl-agent": {"test": (0, 500), "val": (0, 500), "train": (500, None)},
}
"""First and last+1 place in the order of goals, by layout and split. ``paper`` is also that of RAGEN."""


def split_of(source: Source, layout: Layout, split: str, seed: int) -> range:
    """The places of a split's goals. Raises ValueError naming what does not exist; human goals are all ``test``."""
    if layout not in SPLITS:
        raise ValueError(f"layout is {layout!r}; use one of {', '.join(SPLITS)}")
    if split not in SPLITS[layout]:
        raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS[layout])}")
    first, last = SPLITS[layout][split]
    places = range(*slice(first, last).indices(len(goals(source, seed))))
    if not places:
        raise ValueError(f"split {split!r} has no {source} goals: all {len(goals(source, seed))} are in 'test'")
    return places
