"""What the shop shows: pages as lists of pieces, and the two texts made of them.

``text`` joins the visible strings of a page. ``text_rich`` puts each on a line of its own and marks what can be clicked
and what was. Both are the original's, string by string; its web pages are not built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from branchpoint.env.webshop.catalog import Product

PER_PAGE = 10
SEARCH, BACK, PREVIOUS, NEXT, BUY = "Search", "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
ATTRIBUTES = "Attributes"


class Piece(NamedTuple):
    """A visible string. ``link``: a product's asin; ``option``: a value that can be chosen, ``name`` its option."""

    text: str
    kind: Literal["plain", "button", "link", "option"] = "plain"
    name: str = ""


Page = tuple[Piece, ...]


def _plain(*texts: str) -> Iterator[Piece]:
    """Strings as a browser keeps them: none of an empty one, a blank of blanks on one line."""
    for text in texts:
        if text.strip():
            yield Piece(text)
        elif text and "\n" not in text:
            yield Piece(" ")


def _buttons(*texts: str) -> Iterator[Piece]:
    return (Piece(text, "button") for text in texts)


def _head(goal: str) -> Iterator[Piece]:
    yield from _plain("Instruction:", goal)
    yield from _buttons(BACK)


def index(goal: str) -> Page:
    """The first page: the search bar."""
    return (*_plain("WebShop", "Instruction: ", goal), *_buttons(SEARCH))


def results(goal: str, found: Sequence[Product], number: int) -> Page:
    """One page of what a search found, ten products a page."""
    shown = found[(number - 1) * PER_PAGE : number * PER_PAGE]
    pieces = [*_head(goal), Piece(f"Page {number} (Total results: {len(found)})")]
    pieces += _buttons(*((PREVIOUS, NEXT) if number > 1 else (NEXT,)))
    for product in shown:
        pieces += [Piece(product.asin, "link"), *_plain(product.title, product.tag)]
    return tuple(pieces)


def item(goal: str, product: Product, attributes: bool) -> Page:
    """A product with its options. ``attributes``: there is a page of them."""
    pieces = [*_head(goal), *_buttons(PREVIOUS)]
    for name, values in product.options.items():
        pieces += [*_plain(name), *(Piece(value, "option", name) for value in values)]
    pieces += [*_plain(product.title, f"Price: {product.tag}", "Rating: N.A.")]
    return (*pieces, *_buttons(*SUB_PAGES, *((ATTRIBUTES,) if attributes else ()), BUY))


def sub(goal: str, product: Product, name: str) -> Page:
    """One of a product's further pages. There are no reviews in the data, so that page is empty."""
    texts: Iterable[str] = ()
    if name == "Description":
        texts = (product.description,)
    elif name == "Features":
        texts = (f" {bullet}" for bullet in product.bullets)
    elif name == ATTRIBUTES:
        own = (f" {attribute}" for attribute in product.attributes)
        texts = (*own, product.category, product.query, product.levels)
    return (*_head(goal), *_buttons(PREVIOUS), *_plain(*texts))


def done(score: float) -> Page:
    """After the purchase."""
    return tuple(_plain("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", str(score)))


def text(page: Page) -> str:
    """The visible strings of a page."""
    return " [SEP] ".join(piece.text.strip() for piece in page)


def rich(page: Page, address: str = "", seen: Collection[str] = ()) -> str:
    """The visible strings of a page, a line each, with marks.

    ``address``: the end of the page's address, in which the original looks for a value in double quotes to tell whether
    it was chosen; ``seen``: the asins of products that were opened.
    """
    lines, notes = [], []
    for piece in page:
        gap = {"link": "\n", "option": "  "}.get(piece.kind, "")
        pressed = (
            piece.text in seen if piece.kind == "link" else piece.kind == "option" and f'"{piece.text}"' in address
        )
        if piece.kind == "plain":
            lines.append(piece.text)
        else:
            mark = "clicked button" if pressed else "button"
            lines.append(f"{gap}[{mark}] {piece.text} [{mark}_]")
        if piece.kind == "option" and pressed:
            notes.insert(0, f"You have clicked {piece.text}.")
    return "".join(f"{line}\n" for line in (*notes, *lines))


def targets(page: Page) -> dict[str, Piece]:
    """What can be clicked, by what is written in ``click[...]``: buttons and products first, then options. Of equal
    texts the last counts."""
    clickable = [p for p in page if p.kind in ("button", "link") and p.text != SEARCH]
    options = [p for p in page if p.kind == "option"]
    return {p.text.lower() if p.kind != "option" else p.text: p for p in (*clickable, *options)}
