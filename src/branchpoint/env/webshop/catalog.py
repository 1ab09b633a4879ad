"""The shipped products (see ``env/data/webshop``)."""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from branchpoint.world import EnvironmentFailure


@dataclass(frozen=True, slots=True)
class Wish:
    """An instruction for a product: its text, and the attributes and options that the reward looks for."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """``options``: values by option name, in the order of the page. ``prices``: one, or the two ends of a range in
    dollars; ``tag``: how it is shown. ``levels``: the category path. ``nouns``: of the title, as the reward compares
    them. ``synthetic`` and ``people``: the instructions written for it."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, ...]
    tag: str
    attributes: tuple[str, ...]
    category: str
    query: str
    levels: str
    nouns: tuple[str, ...]
    synthetic: Wish | None
    people: tuple[Wish, ...]

    @property
    def indexed(self) -> str:
        """The text that search looks in: title, description, first bullet and options, in lower case."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0], options]).lower()


def folder() -> Path:
    """Where the package data lie."""
    return Path(str(files("branchpoint.env") / "data" / "webshop"))


def _text(path: Path) -> str:
    try:
        return lzma.decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        raise EnvironmentFailure(f"WebShop file {path.name} is missing from {path.parent}") from None
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise EnvironmentFailure(f"WebShop file {path.name} is damaged ({error}): install the package again") from None


def _wish(row: Mapping[str, Any]) -> Wish:
    return Wish(row["text"], tuple(row["attributes"]), tuple(row.get("options", ())))


def _product(line: str) -> Product:
    row = json.loads(line)
    texts = {name: str(row[name]) for name in ("asin", "title", "description", "tag", "category", "query", "levels")}
    return Product(
        **texts,
        bullets=tuple(row["bullets"]),
        options={name: tuple(values) for name, values in row["options"].items()},
        prices=tuple(row["prices"]),
        attributes=tuple(row["attributes"]),
        nouns=tuple(row["nouns"]),
        synthetic=_wish(row["synthetic"]) if row["synthetic"] else None,
        people=tuple(map(_wish, row["people"])),
    )


def read_products(path: Path) -> tuple[Product, ...]:
    """The products of a ``.jsonl.xz`` file. Raises EnvironmentFailure naming file, line and what is wrong with it."""
    out = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            out.append(_product(line))
        except KeyError as error:
            raise EnvironmentFailure(f"WebShop file {path.name}, line {number}: no field {error.args[0]!r}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(f"WebShop file {path.name}, line {number}: not a product ({error})") from None
    return tuple(out)


@functools.cache
def products() -> tuple[Product, ...]:
    """All 1,000 products in the order of the data set."""
    return read_products(folder() / "products.jsonl.xz")


@functools.cache
def numbers() -> Mapping[str, int]:
    """The place of a product in :func:`products` by its asin."""
    return {product.asin: number for number, product in enumerate(products())}


@functools.cache
def human_texts() -> tuple[str, ...]:
    """12,087 instruction texts written by people, without the products they were written for."""
    return read_texts(folder() / "human_texts.json.xz")


def read_texts(path: Path) -> tuple[str, ...]:
    """A JSON list of texts. Raises EnvironmentFailure naming the file and what is wrong with it."""
    try:
        texts = json.loads(_text(path))
    except ValueError as error:
        raise EnvironmentFailure(f"WebShop file {path.name}: not a list of texts ({error})") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise EnvironmentFailure(f"WebShop file {path.name}: not a list of texts")
    return tuple(texts)
