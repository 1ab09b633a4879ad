"""Trees to rows of tokens: every token that several rollouts share goes through the model once.

A row is a depth-first listing of token tries. One integer a token, ``subtree_end``, holds the tree and keeps the trees
of a row apart: token i attends to token j iff ``j <= i < subtree_end[j]``. A run ``[a, b)`` of a depth-first listing,
together with the ancestors of ``a``, is a trie again with the same paths; that is how a tree larger than a row is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from branchpoint.advantage import Credit
from branchpoint.tree import Segments

Index = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]
Flag = npt.NDArray[np.bool_]

_AXES: dict[str, type] = {
    "tokens": np.int64,
    "position": np.int64,
    "subtree_end": np.int64,
    "predictor": np.int64,
    "source": np.int64,
    "sampled": np.bool_,
    "informative": np.bool_,
    "old_logprobs": np.float64,
    "up": np.float64,
    "down": np.float64,
    "share": np.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One row of T tokens. All arrays are read-only.

    ``position`` is the depth of a token on its path. ``predictor`` is the index *in the row* of the token before it on
    its path, whose output predicts it; -1 for the first token of a path, which nothing predicts. ``source`` is the
    token's index in the concatenation of the trees given to :func:`pack`; -1 for a repeat of a token that another row
    holds (a repeat carries no credit and no share). ``informative``: the token's tree gave some credit to something.

    ``allowed_start`` and ``allowed_ids`` list, token by token, the ids that it was chosen from (none listed: the whole
    vocabulary): token t owns ``allowed_ids[allowed_start[t]:allowed_start[t + 1]]``.
    Raises ValueError naming the field that is off.
    """

    tokens: Index  # [T]
    position: Index  # [T]
    subtree_end: Index  # [T]
    predictor: Index  # [T]
    source: Index  # [T]
    sampled: Flag  # [T], chosen by the policy, not a repeat
    informative: Flag  # [T]
    old_logprobs: Real  # [T], of the distribution sampled from; 0 where not sampled
    up: Real  # [T], >= 0
    down: Real  # [T], <= 0
    share: Real  # [T], >= 0
    allowed_start: Index  # [T + 1]
    allowed_ids: Index  # [sum of set sizes]

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name, dtype in _AXES.items():
            _freeze(self, name, dtype, n)
        _freeze(self, "allowed_start", np.int64, n + 1)
        _freeze(self, "allowed_ids", np.int64, None)
        self._check_tree(np.arange(n))
        self._check_weights()
        self._check_allowed()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weighed(self) -> Flag:
        """[T] whether a token counts in the loss or its metrics."""
        return (self.up != 0) | (self.down != 0) | (self.share != 0)

    def allowed(self, t: int) -> Index:
        """The ids token t was chosen from; empty where the whole vocabulary was open."""
        return self.allowed_ids[self.allowed_start[t] : self.allowed_start[t + 1]]

    def allowed_sets(self, where: Index) -> tuple[Index, Index] | None:
        """(row, id) pairs of the allowed sets of the tokens ``where`` [m], row = place in ``where``; None: all open."""
        sizes = np.diff(self.allowed_start)[where]
        if not sizes.any():
            return None
        ids = np.concatenate([self.allowed(t) for t in where[sizes > 0]])
        return np.repeat(np.arange(len(where)), sizes), ids

    def _check_tree(self, at: Index) -> None:
        end, before = self.subtree_end, self.predictor
        _require(np.all((end > at) & (end <= len(at))), "subtree_end must lie in (t, T]")
        _require(np.all((before >= -1) & (before < at)), "predictor must lie in [-1, t)")
        inner = before >= 0
        parent = before[inner]
        _require(np.all(end[inner] <= end[parent]), "subtree_end of a token reaches beyond its predictor's")
        _require(np.all(at[inner] < end[parent]), "predictor is not an ancestor")
        _require(np.all(self.position[inner] == self.position[parent] + 1), "position must be the depth in the path")
        _require(not np.any(self.position[~inner]), "position of a path's first token must be 0")

    def _check_weights(self) -> None:
        for name in ("old_logprobs", "up", "down", "share"):
            _require(np.all(np.isfinite(getattr(self, name))), f"{name} must be finite")
        _require(np.all(self.up >= 0), "up must be >= 0")
        _require(np.all(self.down <= 0), "down must be <= 0")
        _require(np.all(self.share >= 0), "share must be >= 0")
        _require(np.all(self.old_logprobs <= 1e-6), "old_logprobs must be <= 0")
        _require(not np.any(self.weighed & ~self.sampled), "up, down and share must be 0 where nothing was sampled")
        _require(
            not np.any(self.weighed & (self.predictor < 0)),
            "a path's first token carries credit but nothing predicts it; start the first observation with a token",
        )

    def _check_allowed(self) -> None:
        sizes = np.diff(self.allowed_start)
        _require(self.allowed_start[0] == 0 and np.all(sizes >= 0), "allowed_start must rise from 0")
        _require(self.allowed_start[-1] == len(self.allowed_ids), "allowed_start must end at len(allowed_ids)")
        owner = np.repeat(np.arange(len(self)), sizes)
        hit = np.zeros(len(self), bool)
        hit[owner[self.allowed_ids == self.tokens[owner]]] = True
        _require(np.all(hit | (sizes == 0)), "a token is not in its own allowed set")


def pack(trees: Sequence[tuple[Segments, Credit]], token_budget: int, *, prune: bool = True) -> list[PackedBatch]:
    """Micro-batches of at most ``token_budget`` tokens that together hold every tree exactly once.

    A tree that does not fit in a row is cut where the fewest tokens must be repeated per token placed (forks close to
    the root first, the middle of a path if need be); the repeats carry neither credit nor share, so sums over all rows
    are those of the whole trees. Pieces fill the rows first-fit, in order, so the result is a function of the input.
    ``prune`` leaves out tokens on which, and below which, nothing weighs (value-only rollouts).

    Raises ValueError when credit and segments disagree in length, or when one path alone exceeds the budget.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; give a positive number of tokens")
    rows: list[tuple[list[_Piece], int]] = []
    offset = 0
    for i, (segments, credit) in enumerate(trees):
        trie = _Trie.of(segments, credit, offset, i)
        offset += len(segments.tokens)
        for piece in _cut(trie.pruned() if prune else trie, token_budget, i):
            _place(rows, piece, token_budget)
    return [_join([piece.row() for piece in pieces]) for pieces, _ in rows]


def unpack(batches: Sequence[PackedBatch], values: Sequence[Any], size: int) -> Real:
    """[size] per-token values of the rows, back in the order of the trees' own tokens (concatenated).

    ``values``: one [T] vector a row. Tokens that were pruned get 0.
    """
    out = np.zeros(size, np.float64)
    for batch, value in zip(batches, values, strict=True):
        own = batch.source >= 0
        out[batch.source[own]] = np.asarray(value, np.float64)[own]
    return out


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(f"packed batch: {message}")


def _freeze(batch: PackedBatch, name: str, dtype: type, length: int | None) -> None:
    array = np.array(getattr(batch, name), dtype=dtype)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise ValueError(
            f"packed batch: {name} has shape {array.shape}; expected ({'*' if length is None else length},)"
        )
    array.flags.writeable = False
    object.__setattr__(batch, name, array)


@dataclass(frozen=True, slots=True, eq=False)
class _Trie:
    """One tree, token by token, depth-first. ``parent`` and ``end`` are indices into the trie itself."""

    parent: Index  # [n], -1 where nothing comes before
    end: Index  # [n], where the token's subtree ends
    depth: Index  # [n]
    columns: dict[str, npt.NDArray[Any]]  # the per-token fields of PackedBatch that do not depend on the row
    allowed: dict[int, npt.NDArray[Any]]  # token index -> ids

    @staticmethod
    def of(segments: Segments, credit: Credit, offset: int, index: int) -> _Trie:
        n, start = len(segments.tokens), segments.start
        for name in ("up", "down", "share"):
            if len(getattr(credit, name)) != n:
                raise ValueError(f"tree {index}: credit.{name} has {len(getattr(credit, name))} entries for {n} tokens")
        parent, end = np.arange(-1, n - 1), np.zeros(n, np.int64)
        last, stop = _segment_links(segments)
        for s in range(len(segments.parent)):
            if start[s] < start[s + 1]:
                parent[start[s]] = last[segments.parent[s]] if segments.parent[s] >= 0 else -1
                end[start[s] : start[s + 1]] = stop[s]
        columns = {
            "tokens": segments.tokens,
            "sampled": segments.sampled,
            "old_logprobs": segments.logprobs,
            "up": credit.up,
            "down": credit.down,
            "share": credit.share,
            "source": np.arange(offset, offset + n),
            "informative": np.full(n, credit.informative),
        }
        return _Trie(parent, end, _depths(parent), columns, dict(segments.allowed))

    def pruned(self) -> _Trie:
        """Without the subtrees in which nothing weighs."""
        weighs = (self.columns["up"] != 0) | (self.columns["down"] != 0) | (self.columns["share"] != 0)
        total = np.concatenate([[0], np.cumsum(weighs)])
        keep = total[self.end] > total[: len(weighs)]
        return self if keep.all() else self.take(np.flatnonzero(keep))

    def take(self, kept: Index) -> _Trie:
        """The trie of these tokens (sorted, closed under ancestors)."""
        parent = self.parent[kept]
        return _Trie(
            parent=np.where(parent < 0, -1, np.searchsorted(kept, parent)),
            end=np.searchsorted(kept, self.end[kept]),
            depth=self.depth[kept],
            columns={name: column[kept] for name, column in self.columns.items()},
            allowed={k: self.allowed[int(t)] for k, t in enumerate(kept) if int(t) in self.allowed},
        )

    def ancestors(self, t: int) -> Index:
        """The tokens before t on its path, root first."""
        path = np.zeros(self.depth[t], np.int64)
        for i in range(len(path) - 1, -1, -1):
            t = path[i] = self.parent[t]
        return path


def _segment_links(segments: Segments) -> tuple[Index, Index]:
    """Per segment: its last token (when empty its nearest ancestor's, -1 for none) and the end of its subtree."""
    start, parent = segments.start, segments.parent
    last, stop = np.zeros(len(parent), np.int64), np.array(start[1:], np.int64)
    for s in range(len(parent)):
        inherited = last[parent[s]] if parent[s] >= 0 else -1
        last[s] = start[s + 1] - 1 if start[s + 1] > start[s] else inherited
    for s in range(len(parent) - 1, 0, -1):
        stop[parent[s]] = max(stop[parent[s]], stop[s])
    return last, stop


def _depths(parent: Index) -> Index:
    depth = np.zeros(len(parent), np.int64)
    for t, p in enumerate(parent.tolist()):
        if p >= 0:
            depth[t] = depth[p] + 1
    return depth


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The tokens ``[a, b)`` of a trie and the ancestors of ``a``."""

    trie: _Trie
    a: int
    b: int

    @property
    def size(self) -> int:
        return self.b - self.a + int(self.trie.depth[self.a])

    def row(self) -> dict[str, npt.NDArray[Any]]:
        repeats = int(self.trie.depth[self.a])
        part = self.trie.take(np.concatenate([self.trie.ancestors(self.a), np.arange(self.a, self.b)]))
        row = {name: column.copy() for name, column in part.columns.items()}
        for name in ("up", "down", "share", "sampled", "old_logprobs"):
            row[name][:repeats] = 0
        row["source"][:repeats] = -1
        sizes = np.array([len(part.allowed.get(t, ())) if t >= repeats else 0 for t in range(self.size)], np.int64)
        ids = [part.allowed[t] for t in np.flatnonzero(sizes).tolist()]
        return row | {
            "position": part.depth,
            "subtree_end": part.end,
            "predictor": part.parent,
            "sizes": sizes,
            "allowed_ids": np.concatenate(ids) if ids else np.zeros(0, np.int64),
        }


def _cut(trie: _Trie, budget: int, index: int) -> list[_Piece]:
    n = len(trie.parent)
    if n and trie.depth.max() >= budget:
        longest = int(trie.depth.max()) + 1
        raise ValueError(
            f"token_budget is {budget}, but tree {index} has a path of {longest} tokens; a row must hold a whole path"
        )
    pieces, a = [], 0
    while a < n:
        b = min(n, a + budget - int(trie.depth[a]))
        if b < n:
            ends = np.arange(a + 1, b + 1)
            repeats = trie.depth[ends] / (ends - a)
            b = int(ends[len(ends) - 1 - np.argmin(repeats[::-1])])
        pieces.append(_Piece(trie, a, b))
        a = b
    return pieces


def _place(rows: list[tuple[list[_Piece], int]], piece: _Piece, budget: int) -> None:
    for i, (pieces, used) in enumerate(rows):
        if used + piece.size <= budget:
            rows[i] = ([*pieces, piece], used + piece.size)
            return
    rows.append(([piece], piece.size))


def _join(parts: list[dict[str, npt.NDArray[Any]]]) -> PackedBatch:
    shift, at = [], 0
    for part in parts:
        shift.append(at)
        at += len(part["tokens"])
    fields = {name: np.concatenate([p[name] for p in parts]) for name in (*_AXES, "allowed_ids")}
    fields["subtree_end"] = np.concatenate([p["subtree_end"] + s for p, s in zip(parts, shift, strict=True)])
    fields["predictor"] = np.concatenate(
        [np.where(p["predictor"] < 0, -1, p["predictor"] + s) for p, s in zip(parts, shift, strict=True)]
    )
    sizes = np.concatenate([p["sizes"] for p in parts])
    return PackedBatch(allowed_start=np.concatenate([[0], np.cumsum(sizes)]), **fields)
