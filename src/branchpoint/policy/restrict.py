"""Restricted decoding: which token ids may come next within an action.

An action is restricted to a list of admissible texts (a trie over their tokens) or to a regular expression. Both give,
before every token, the exact set of ids that can still lead to a well-formed action; the sampling distribution is
renormalised over it, and the learner is given the set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from branchpoint.tree import Ints


class Trie:
    """The token sequences of all admissible actions, each ended by the stop token. Immutable once built."""

    __slots__ = ("allowed", "children")

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        grouped: dict[int, list[Sequence[int]]] = {}
        for sequence in sequences:
            if len(sequence):
                grouped.setdefault(int(sequence[0]), []).append(sequence[1:])
        self.children: dict[int, Trie] = {token: Trie(rest) for token, rest in sorted(grouped.items())}
        self.allowed: Ints = np.fromiter(self.children, np.int32, len(self.children))
        self.allowed.flags.writeable = False


class Choice:
    """A position in a trie."""

    __slots__ = ("_at",)

    def __init__(self, trie: Trie) -> None:
        self._at = trie

    def allowed(self) -> Ints:
        """Sorted ids, empty after the stop token."""
        return self._at.allowed

    def advance(self, token: int) -> None:
        """Raises ValueError for a token that no admissible action has here."""
        if token not in self._at.children:
            raise ValueError(f"token {token} continues none of the admissible actions")
        self._at = self._at.children[token]


class Actions:
    """Makes tries of lists of actions; those of equal lists, and the tokens of equal actions, are made once."""

    def __init__(self, encode: Callable[[str], Ints], stop: int, limit: int = 4096) -> None:
        self._encode, self._stop, self._limit = encode, stop, limit
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._tries: dict[tuple[str, ...], Trie] = {}

    def start(self, actions: tuple[str, ...]) -> Choice:
        """The state before the first token. Raises ValueError for an empty action."""
        trie = self._tries.get(actions)
        if trie is None:
            for store in (self._tokens, self._tries):
                if len(store) >= self._limit:
                    store.clear()
            trie = self._tries[actions] = Trie([self._sequence(a) for a in actions])
        return Choice(trie)

    def _sequence(self, action: str) -> tuple[int, ...]:
        if action not in self._tokens:
            ids = tuple(int(i) for i in self._encode(action))
            if not ids or self._stop in ids:
                raise ValueError(f"admissible action {action!r} is empty or contains the stop token")
            self._tokens[action] = (*ids, self._stop)
        return self._tokens[action]


class Grammar:
    """A position in a regular expression, which the whole action has to match (by llguidance).

    Where the expression leaves a single text, only its canonical tokens are open. A leading space in the first token is
    accepted beside the expression: word tokens carry one.
    """

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Ints:
        """Sorted ids. Raises ValueError where the expression leaves no token."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocabulary]).astype(np.int32)
        if self._matcher.is_error() or not len(ids):
            raise ValueError(f"the grammar leaves no token: {self._matcher.get_error()}")
        ids.flags.writeable = False
        return ids

    def advance(self, token: int) -> None:
        """Raises ValueError for a token that does not fit."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not fit the grammar: {self._matcher.get_error()}")


class Grammars:
    """Makes grammars for a tokenizer of the Hugging Face kind (a fast one). Compiled expressions are kept."""

    def __init__(self, tokenizer: Any, stop: int, vocabulary: int) -> None:
        try:
            self._guide: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise ImportError('grammars need llguidance: pip install "branchpoint[grammar]"') from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("sampling.restrict 'grammar' needs a fast tokenizer (one with a backend_tokenizer)")
        self._tokenizer = self._guide.LLTokenizer(backend.to_str(), n_vocab=vocabulary, eos_token=stop)
        self._vocabulary = vocabulary
        self._compiled: dict[str, Any] = {}

    def start(self, expression: str) -> Grammar:
        """The state before the first token. Raises ValueError for an expression that does not compile."""
        if expression not in self._compiled:
            grammar = self._guide.LLMatcher.grammar_from_regex(f" ?(?:{expression})")
            matcher = self._guide.LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(f"grammar {expression!r} does not compile: {matcher.get_error()}")
            self._compiled[expression] = matcher
        return Grammar(self._compiled[expression].deep_copy(), self._vocabulary)
