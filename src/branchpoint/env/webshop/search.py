"""Search over the products: BM25 as Lucene computes it, with Lucene's English analysis.

``bm25s`` keeps the index and adds up the scores, ``PyStemmer`` stems. Lucene rounds the length of a document to one
byte, which ``bm25s`` does not; so the index is built without length normalisation (b = 0) and normalised here.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import numpy as np

from branchpoint.env.webshop.catalog import products

K1, B, HITS = 0.9, 0.4, 50
"""The parameters of the original's search engine (Anserini's defaults), and how many hits it returns."""

_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was
will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_EMOJI = (
    "[\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733\u2734"
    "\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1\u27b0\u27bf\u2b05-\u2b07\u2b50\u2b55"
    "\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
)
_IDEOGRAPH = "[\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
_RUN = rf"(?:(?!{_IDEOGRAPH})\w)+"
_JOIN = r"(?:(?<=[^\W\d_])[:·.'’](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))"  # within a word, within a number
_TOKEN = re.compile(f"{_EMOJI}|{_IDEOGRAPH}|{_RUN}(?:{_JOIN}{_RUN})*")
_MEASURED = re.compile("[aeiou][^aeiou]|[^aeiou]y[^aeiou]")  # a vowel, then a consonant: Porter's m > 0
_LONGEST = 255


@functools.cache
def _stemmer() -> Any:
    try:
        import Stemmer
    except ImportError as error:
        raise ImportError('WebShop needs PyStemmer: pip install "branchpoint[webshop]"') from error
    return Stemmer.Stemmer("porter")


@functools.lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Porter's stem as Lucene has it: with the two later rules of Porter's own program (-bli to -ble, -logi to -log),
    which Snowball's ``porter``, the algorithm as published, lacks."""
    if word.endswith("bly"):
        word = word[:-1] + "e"
    elif word.endswith(("logy", "logies")) and _MEASURED.search(word[: word.rindex("log")]):
        word = word[: word.rindex("log") + 3]
    return word if len(word) < 3 else _stemmer().stemWord(word)


def tokens(text: str) -> list[str]:
    """The stems of a text: words by Unicode's rules, emoji and ideographs one by one; no stop words, no possessives."""
    out = []
    for word in _TOKEN.findall(text.lower()):
        bare = word[:-2] if word.endswith(("'s", "’s")) else word
        if bare not in STOP_WORDS and bare.strip("_") and len(bare) <= _LONGEST:
            out.append(stem(bare))
    return out


def rounded(length: int) -> int:
    """The length that Lucene remembers of a document in one byte: exact below 40, then four significant bits."""
    over = length - 24
    shift = max(0, over.bit_length() - 4)
    return length if over < 0 else 24 + ((over >> shift) << shift)


def _bm25s() -> Any:
    """The package, without its progress bars (by its own switch): ``tqdm`` starts a thread and shares memory even for
    hidden bars, and a process that does cannot be forked."""
    before = os.environ.get("DISABLE_TQDM")
    os.environ["DISABLE_TQDM"] = "1"
    try:
        import bm25s
    except ImportError as error:
        raise ImportError('WebShop needs bm25s: pip install "branchpoint[webshop]"') from error
    finally:
        if before is None:
            del os.environ["DISABLE_TQDM"]
        else:
            os.environ["DISABLE_TQDM"] = before
    return bm25s


class Engine:
    """The index of all products."""

    def __init__(self) -> None:
        """Raises ImportError when ``bm25s`` is not installed."""
        bm25s = _bm25s()
        documents = [tokens(product.indexed) for product in products()]
        self._index = bm25s.BM25(k1=K1, b=0.0, method="lucene", dtype="float64")
        self._index.index(documents, create_empty_token=False, show_progress=False)
        _normalise(self._index.scores, [len(document) for document in documents])
        asins = [product.asin for product in products()]
        self._tie = np.argsort(np.argsort(asins))

    def search(self, query: str) -> tuple[int, ...]:
        """The numbers of the best 50 products at most, best first; equal scores by asin, as in the original."""
        ids = self._index.get_tokens_ids(tokens(query))
        if not ids:
            return ()
        scores = self._index.get_scores_from_ids(ids).astype(np.float32)  # Lucene's own precision decides ties
        found = np.flatnonzero(scores)
        order = np.lexsort((self._tie[found], -scores[found]))
        return tuple(found[order[:HITS]].tolist())


def _normalise(index: Any, lengths: list[int]) -> None:
    """Replace every score idf * tf / (tf + k1) by idf * tf / (tf + k1 * norm), norm = 1 - b + b * length / mean."""
    data, documents, columns = index["data"], index["indices"], index["indptr"]
    frequency = np.diff(columns)
    idf = np.repeat(np.log1p((len(lengths) - frequency + 0.5) / (frequency + 0.5)), frequency)
    norm = 1 - B + B * np.array([rounded(n) for n in lengths]) / np.mean(lengths)
    data[:] = idf / (1 + norm[documents] * (idf / data - 1))


@functools.cache
def engine() -> Engine:
    """The engine of this process; building it takes half a second."""
    return Engine()


@functools.lru_cache(maxsize=8192)
def search(query: str) -> tuple[int, ...]:
    """What :meth:`Engine.search` finds; recent answers are kept."""
    return engine().search(query)
