"""WebShop's search against real Lucene, and the parts of its analysis."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

from branchpoint.env.webshop import search
from branchpoint.env.webshop.catalog import products

pytest.importorskip("bm25s", reason="pip install 'branchpoint[webshop]'")
pytest.importorskip("Stemmer", reason="pip install 'branchpoint[webshop]'")

REFERENCE = Path(__file__).parent / "data" / "lucene_top50.jsonl.xz"


def test_the_ranking_is_that_of_lucene() -> None:
    rows = [json.loads(line) for line in lzma.decompress(REFERENCE.read_bytes()).decode().splitlines()]
    assert len(rows) == 200
    top, at_ten, at_fifty = 0.0, 0.0, 0.0
    for row in rows:
        right = [asin for asin, _ in row["hits"]]
        found = [products()[n].asin for n in search.engine().search(row["query"])]
        assert len(found) == len(right)
        top += found[0] == right[0]
        at_ten += len(set(found[:10]) & set(right[:10])) / len(right[:10])
        at_fifty += len(set(found) & set(right)) / len(right)
    assert top / 200 >= 0.995
    assert at_ten / 200 >= 0.998
    assert at_fifty / 200 >= 0.998


def test_scores_are_those_of_lucene() -> None:
    """Also their size, not only their order: few documents hold signs whose words this analysis counts otherwise."""
    rows = [json.loads(line) for line in lzma.decompress(REFERENCE.read_bytes()).decode().splitlines()]
    numbers = {product.asin: n for n, product in enumerate(products())}
    index = search.engine()._index
    off, all_hits = 0, 0
    for row in rows:
        scores = index.get_scores_from_ids(index.get_tokens_ids(search.tokens(row["query"])))
        off += sum(abs(scores[numbers[asin]] - score) > 2e-3 * score for asin, score in row["hits"])
        all_hits += len(row["hits"])
    assert off / all_hits < 0.03


def test_document_lengths_are_rounded_as_in_lucene() -> None:
    """The start of Lucene's length table: exact to 40, then steps of 2, 4, 8, 16."""
    steps = [*range(40), *range(40, 56, 2), *range(56, 88, 4), *range(88, 152, 8), *range(152, 280, 16)]
    assert sorted({search.rounded(n) for n in range(280)}) == steps
    assert all(search.rounded(n) == max(s for s in steps if s <= n) for n in range(280))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Women's running shoes, size 7.5", ["women", "run", "shoe", "size", "7.5"]),
        ("plant-based 1,000mg e.g. don't", ["plant", "base", "1,000mg", "e.g", "don't"]),
        ("The shade of a lamp", ["shade", "lamp"]),
        ("琥珀 guoba \U0001f338\U0001f338 ___ a_b", ["琥", "珀", "guoba", "\U0001f338", "\U0001f338", "a_b"]),
        ("…!? \x00", []),
        ("possibly technology technologies biology", ["possibl", "technolog", "technolog", "biologi"]),
        ("comfortably relational ponies is", ["comfort", "relat", "poni"]),
        ("x" * 256, []),
    ],
)
def test_text_is_cut_and_stemmed_as_by_lucene(text: str, tokens: list[str]) -> None:
    assert search.tokens(text) == tokens


def test_words_that_no_product_has_find_nothing() -> None:
    assert search.search("qqqqzzzz the of") == ()
    assert search.search("") == ()


def test_a_repeated_word_weighs_twice() -> None:
    """As in Lucene's query of a bag of words: doubling every word changes nothing, doubling one shifts the weight."""
    once, twice = search.search("red table lamp"), search.search("red table lamp red table lamp")
    assert once == twice
    stressed = search.search("red table lamp lamp lamp lamp")
    lamps = {n for n, product in enumerate(products()) if "lamp" in search.tokens(product.indexed)}
    assert len(lamps & set(stressed[:10])) > len(lamps & set(once[:10]))


def test_at_most_fifty_best_first_and_none_twice() -> None:
    found = search.search("women shirt")
    assert len(found) == len(set(found)) == search.HITS


@pytest.mark.parametrize(("module", "call"), [("bm25s", search.Engine), ("Stemmer", search._stemmer.__wrapped__)])
def test_a_missing_package_is_named_with_its_extra(module: str, call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"branchpoint\[webshop\]"):
        call()  # type: ignore[operator]
