"""The sampler's key/value store, and the attention function that reads and writes it.

All new tokens of one engine step travel through the model as one row ``[1, T]``; attention alone knows which session a
token belongs to. Sessions own a *slot* of the store; a forked session also reads the slots of those it came from, up
to its fork, and siblings read such a shared prefix together: once for all of them instead of once each. Single tokens
(decoding) are batched, grouped by the length of their own rows rounded up to ``BLOCK``; long chunks (prefill) attend
one session at a time. A session's arithmetic thus depends on where it was forked but never on who else is in the batch,
which makes its results the same bit for bit alone and in company (float32 on one CPU thread; see ``MIN_ROWS``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 64
MIN_ROWS = 4
"""A row of a matrix product is the same bits for any number of rows from 4 on (MKL, 24 shapes), so rows are padded."""
SHARE = 64
"""Fewer rows than these are copied by a fork that writes, instead of being read where they are."""
PARTS = 4
"""A context reads at most so many slots of others: forks of forks of forks copy what lies deeper."""
SHORT = 8
"""Chunks of up to so many tokens are batched with those of other sessions; longer ones read keys and values once."""
NAME = "branchpoint_sampler"
"""The name under which the attention function is registered with transformers."""

Run = tuple[int, int, int]
"""Single tokens ``lo:hi`` of the row, and a slot."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one session in a step: ``length`` tokens from position ``start`` on, in ``slot``.

    ``shared``: the context that others wrote, as (slot, rows) from position 0 on; the session's own rows follow it.
    A few tokens are as well taken as so many singles (:func:`cut`): each attends to all that is written in this step up
    to itself. ``lag`` counts them.
    """

    slot: int
    start: int
    length: int
    shared: tuple[tuple[int, int], ...] = ()
    lag: int = 0

    @property
    def row(self) -> int:
        """The row of its slot that the first token goes to."""
        return self.start - sum(n for _, n in self.shared)

    @property
    def width(self) -> int:
        """The session's own rows up to the first token, rounded up to whole blocks."""
        return rounded(self.row + 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Chunks of the same shape attend as one batch."""
        return (self.width, *(n for _, n in self.shared))


@dataclass(frozen=True, slots=True)
class _Group:
    """Single tokens ``lo:hi`` of the row whose contexts have the same shape.

    ``runs`` are adjacent slots, from the given one on; ``shared`` has, for each part of a shared context, its rows and
    the tokens that read it from the same slot.
    """

    lo: int
    hi: int
    width: int
    runs: tuple[Run, ...]
    shared: tuple[tuple[int, tuple[Run, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where the T tokens of one step read and write. Singles come first, then longer chunks, then padding."""

    store: KVStore
    slots: torch.Tensor  # [t] int64, the slot of every real token
    positions: torch.Tensor  # [t] int64, its position
    places: torch.Tensor  # [t] int64, its row of the slot
    singles: int
    groups: tuple[_Group, ...]
    tail: torch.Tensor  # [singles, 1, BLOCK] 0 or -inf: the last block of each single token's own rows
    chunks: tuple[tuple[int, Chunk, torch.Tensor | None], ...]  # row offset, chunk, mask (None: causal from 0)
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows(self, heads: int) -> torch.Tensor:
        """[t * heads] where the tokens' keys go, in a layer of the store seen as rows."""
        if heads not in self._rows:
            head = torch.arange(heads, device=self.slots.device)
            slots = (self.slots[:, None] * heads + head) * self.store.capacity
            self._rows[heads] = (slots + self.places[:, None]).flatten()
        return self._rows[heads]


def rounded(length: int) -> int:
    """``length`` rounded up to a whole number of blocks."""
    return -(-length // BLOCK) * BLOCK


def cut(chunk: Chunk) -> list[Chunk]:
    """The chunk, or its tokens as singles if it has at most ``SHORT``."""
    if chunk.length > SHORT:
        return [chunk]
    return [Chunk(chunk.slot, chunk.start + i, 1, chunk.shared, i) for i in range(chunk.length)]


def order(chunk: Chunk) -> tuple[Any, ...]:
    """The sort key that puts chunks into the order a plan needs; tokens of one session stay in order."""
    if chunk.length == 1:
        return (0, chunk.shape, chunk.shared, chunk.lag, chunk.slot)
    return (1, chunk.start, chunk.slot)


def plan(store: KVStore, chunks: Sequence[Chunk]) -> Plan:
    """The plan of one step; ``chunks`` are sorted by :func:`order`."""
    singles = [c for c in chunks if c.length == 1]
    slots = [c.slot for c in singles]
    positions = [c.start for c in singles]
    places = [c.row for c in singles]
    long: list[tuple[int, Chunk, torch.Tensor | None]] = []
    for c in chunks[len(singles) :]:
        long.append((len(slots), c, _mask(c, store.device)))
        slots += [c.slot] * c.length
        positions += range(c.start, c.start + c.length)
        places += range(c.row, c.row + c.length)
    at = torch.tensor(places)
    last = at[: len(singles)] % BLOCK
    closed = torch.arange(BLOCK) > last[:, None]
    tail = torch.zeros(closed.shape, dtype=store.dtype).masked_fill_(closed, float("-inf"))
    device = store.device
    return Plan(
        store=store,
        slots=torch.tensor(slots).to(device),
        positions=torch.tensor(positions).to(device),
        places=at.to(device),
        singles=len(singles),
        groups=_groups(singles),
        tail=tail[:, None].to(device),
        chunks=tuple(long),
    )


def _mask(c: Chunk, device: torch.device) -> torch.Tensor | None:
    if c.start == 0:
        return None
    keys = torch.arange(c.start + c.length, device=device)
    return keys[None, :] <= keys[c.start :, None]


def _groups(singles: Sequence[Chunk]) -> tuple[_Group, ...]:
    groups: list[_Group] = []
    for lo, hi in _alike(range(len(singles)), lambda i: singles[i].shape):
        neighbours = _alike(range(lo, hi), lambda i: singles[i].slot - i)
        shared: list[tuple[int, tuple[Run, ...]]] = []
        for k, (_, rows) in enumerate(singles[lo].shared):
            readers = _alike(range(lo, hi), lambda i, k=k: singles[i].shared[k])
            shared.append((rows, tuple((a, b, singles[a].shared[k][0]) for a, b in readers)))
        runs = tuple((a, b, singles[a].slot) for a, b in neighbours)
        groups.append(_Group(lo, hi, singles[lo].width, runs, tuple(shared)))
    return tuple(groups)


def _alike(of: range, key: Callable[[int], Any]) -> list[tuple[int, int]]:
    """The stretches (lo, hi) of a range over which the key stays the same."""
    stretches = (list(indices) for _, indices in groupby(of, key))
    return [(s[0], s[-1] + 1) for s in stretches]


class KVStore:
    """Keys and values of all sessions: per layer two tensors [slots, kv_heads, capacity, d], growing as needed.

    Layers appear when they are first written, so the store needs no knowledge of the model's shapes, and each grows
    when it is next used: where memory ends in the middle of that, layers differ in size but none is wrong, and the
    others grow later. When the last slot comes back all memory is given up (the learner's step wants it). Everything is
    finite at all times: stale rows are masked, and a mask turns a finite number, but not a NaN, into nothing.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._clear()

    def _clear(self) -> None:
        self.slots, self.capacity = MIN_ROWS, 4 * BLOCK
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._free = list(range(self.slots))

    @property
    def used(self) -> int:
        """The number of slots in use."""
        return self.slots - len(self._free)

    def take(self) -> int:
        """The lowest free slot: neighbours stay neighbours, so that their attention runs as one product."""
        if not self._free:
            self._free = list(range(self.slots, 2 * self.slots))
            self.slots *= 2
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def give(self, slot: int, spoilt: bool = False) -> None:
        """Frees a slot. ``spoilt``: it may hold values that are not finite, and is wiped."""
        if spoilt:
            with torch.inference_mode():
                for pair in self.layers.values():
                    for tensor in pair:
                        tensor[slot : slot + 1].zero_()  # nothing where the layer has never grown so far
        self._free.append(slot)
        if not self.used:
            self._clear()

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` rows in every slot."""
        if length > self.capacity:
            self.capacity = max(-(-length // (4 * BLOCK)) * 4 * BLOCK, rounded(self.capacity * 5 // 4))

    def copy(self, source: int, target: int, length: int, row: int = 0) -> None:
        """Copies the first ``length`` rows of a slot to those of another from ``row`` on, in all layers."""
        for index in self.layers:
            for tensor in self._grown(index):
                tensor[target, :, row : row + length] = tensor[source, :, :length]

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; ``like`` is [T, kv_heads, d]."""
        if index not in self.layers:
            shape = (self.slots, like.shape[1], self.capacity, like.shape[2])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._grown(index)

    def _grown(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer with all its slots and rows. One tensor at a time: the peak is one tensor above the total."""
        for i in (0, 1):
            old = self.layers[index][i]
            if old.shape[0] != self.slots or old.shape[2] != self.capacity:
                new = old.new_zeros((self.slots, old.shape[1], self.capacity, old.shape[3]))
                new[: old.shape[0], :, : old.shape[2]] = old
                other = self.layers[index][1 - i]
                self.layers[index] = (other, new) if i else (new, other)
        return self.layers[index]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv_plan: Plan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for ``AttentionInterface``: query [1, heads, T, d], key and value [1, kv_heads, T, d] of new tokens.

    Returns [1, T, heads, d]. Padding tokens get zeros. Raises ValueError for variants it does not compute.
    """
    if kv_plan is None:
        raise ValueError(f"attention {NAME!r} runs inside the sampler only: use its `switched` context to select it")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"the in-process sampler needs standard attention; this model uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return mix(kv_plan, int(module.layer_idx), q, k, v, scale)[None], None  # pyright: ignore[reportArgumentType]


def mix(p: Plan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Writes the new keys and values [T, kv_heads, d] of a layer to the store and attends with query [T, heads, d].

    Returns [T, heads, d], contiguous. Padding tokens get zeros.
    """
    keys, values = p.store.layer(layer, key)
    real = len(p.slots)
    rows = p.rows(key.shape[1])
    keys.view(-1, keys.shape[-1]).index_copy_(0, rows, key[:real].reshape(-1, keys.shape[-1]))
    values.view(-1, values.shape[-1]).index_copy_(0, rows, value[:real].reshape(-1, values.shape[-1]))
    out = query.new_zeros(query.shape)
    if p.singles:
        _decode(p, query, keys, values, scale, out)
    repeats = query.shape[1] // key.shape[1]
    for row, c, mask in p.chunks:
        parts = (*c.shared, (c.slot, c.row + c.length))
        k, v = (torch.cat([x[slot, :, :n] for slot, n in parts], 1) for x in (keys, values))
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        q = query[row : row + c.length].transpose(0, 1)[None]
        o = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale)
        out[row : row + c.length] = o[0].transpose(0, 1)
    return out


def _decode(
    p: Plan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """One token a session: scores, softmax and mixture as batched products.

    A session's own rows are a product of its own, over adjacent slots without a copy; the tokens that read a shared
    part are the rows of one product. The softmax runs over all parts at once, so nothing is approximated.
    """
    n, (_, heads, d), kv = p.singles, query.shape, keys.shape[1]
    q = (query[:n] * scale).reshape(n * kv, heads // kv, d)
    mixed = out[:n].view(n * kv, heads // kv, d)
    for g in p.groups:
        own = q.new_empty(((g.hi - g.lo) * kv, heads // kv, g.width))
        for lo, hi, slot in g.runs:
            k = keys[slot : slot + hi - lo].flatten(0, 1)[:, : g.width]
            torch.bmm(q[lo * kv : hi * kv], k.transpose(1, 2), out=own[(lo - g.lo) * kv : (hi - g.lo) * kv])
        own.view(g.hi - g.lo, heads, g.width)[..., -BLOCK:].add_(p.tail[g.lo : g.hi])
        parts = [own]
        for rows, readers in g.shared:
            part = [_together(q[lo * kv : hi * kv], keys[slot, :, :rows].transpose(1, 2)) for lo, hi, slot in readers]
            parts.append(torch.cat(part))
        weights = (torch.cat(parts, -1) if g.shared else own).softmax(-1)
        own, *shared = weights.split([x.shape[-1] for x in parts], -1) if g.shared else (weights,)
        for lo, hi, slot in g.runs:
            v = values[slot : slot + hi - lo].flatten(0, 1)[:, : g.width]
            torch.bmm(own[(lo - g.lo) * kv : (hi - g.lo) * kv], v, out=mixed[lo * kv : hi * kv])
        for part, (rows, readers) in zip(shared, g.shared, strict=True):
            for lo, hi, slot in readers:
                read = part[(lo - g.lo) * kv : (hi - g.lo) * kv]
                mixed[lo * kv : hi * kv] += _together(read, values[slot, :, :rows])


def _together(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [tokens * kv_heads, r, a] times y [kv_heads, a, b], shared by the tokens: [tokens * kv_heads, r, b].

    At least ``MIN_ROWS`` rows a product.
    """
    kv, (total, r, a) = len(y), x.shape
    rows = x.view(total // kv, kv, r, a).transpose(0, 1).reshape(kv, -1, a)
    count = rows.shape[1]
    if count < MIN_ROWS:
        rows = F.pad(rows, (0, 0, 0, MIN_ROWS - count))
    product = torch.bmm(rows, y)[:, :count].view(kv, total // kv, r, -1)
    return product.transpose(0, 1).reshape(total, r, -1)
