"""The sampler's key/value store, and the attention function that reads and writes it.

All new tokens of one engine step travel through the model as one row ``[1, T]``; attention alone knows which session a
token belongs to. Sessions own a *slot* of the store. Single tokens (decoding) are batched, grouped by their session's
own length rounded up to ``BLOCK``; long chunks (prefill) attend one session at a time. A session's arithmetic thus
never depends on who else is in the batch, which makes its results the same bit for bit alone and in company (float32 on
one CPU thread; see ``MIN_ROWS``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 64
MIN_ROWS = 4
"""A row of a matrix product is the same bits for any number of rows from 4 on (MKL, 24 shapes), so rows are padded."""
SHORT = 8
"""Chunks of up to so many tokens are batched with those of other sessions; longer ones read keys and values once."""
NAME = "branchpoint_sampler"
"""The name under which the attention function is registered with transformers."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one session in a step: ``length`` tokens from position ``start`` on, in ``slot``.

    A few tokens are as well taken as so many singles (:func:`cut`): each attends to all that is written in this step up
    to itself. ``lag`` counts them.
    """

    slot: int
    start: int
    length: int
    lag: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Single tokens ``lo:hi`` of the row, with the same rounded context; ``runs`` are adjacent slots (lo, hi, slot)."""

    lo: int
    hi: int
    width: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where the T tokens of one step read and write. Singles come first, then longer chunks, then padding."""

    store: KVStore
    slots: torch.Tensor  # [t] int64, the slot of every real token
    positions: torch.Tensor  # [t] int64, its position
    singles: int
    groups: tuple[_Group, ...]
    tail: torch.Tensor  # [singles, 1, BLOCK] 0 or -inf: the last block of each single token's context
    chunks: tuple[tuple[int, Chunk, torch.Tensor | None], ...]  # row offset, chunk, mask (None: causal from 0)
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows(self, heads: int) -> torch.Tensor:
        """[t * heads] where the tokens' keys go, in a layer of the store seen as rows."""
        if heads not in self._rows:
            head = torch.arange(heads, device=self.slots.device)
            slots = (self.slots[:, None] * heads + head) * self.store.capacity
            self._rows[heads] = (slots + self.positions[:, None]).flatten()
        return self._rows[heads]


def rounded(length: int) -> int:
    """``length`` rounded up to a whole number of blocks."""
    return -(-length // BLOCK) * BLOCK


def cut(chunk: Chunk) -> list[Chunk]:
    """The chunk, or its tokens as singles if it has at most ``SHORT``."""
    if chunk.length > SHORT:
        return [chunk]
    return [Chunk(chunk.slot, chunk.start + i, 1, i) for i in range(chunk.length)]


def order(chunk: Chunk) -> tuple[int, int, int, int]:
    """The sort key that puts chunks into the order a plan needs; tokens of one session stay in order."""
    if chunk.length == 1:
        return (0, rounded(chunk.start + 1), chunk.lag, chunk.slot)
    return (1, chunk.start, 0, chunk.slot)


def plan(store: KVStore, chunks: Sequence[Chunk]) -> Plan:
    """The plan of one step; ``chunks`` are sorted by :func:`order`."""
    singles = [c for c in chunks if c.length == 1]
    slots = [c.slot for c in singles]
    positions = [c.start for c in singles]
    long: list[tuple[int, Chunk, torch.Tensor | None]] = []
    for c in chunks[len(singles) :]:
        long.append((len(slots), c, _mask(c, store.device)))
        slots += [c.slot] * c.length
        positions += range(c.start, c.start + c.length)
    at = torch.tensor(positions)
    last = at[: len(singles)] % BLOCK
    closed = torch.arange(BLOCK) > last[:, None]
    tail = torch.zeros(closed.shape, dtype=store.dtype).masked_fill_(closed, float("-inf"))
    device = store.device
    return Plan(
        store=store,
        slots=torch.tensor(slots).to(device),
        positions=at.to(device),
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
    out: list[_Group] = []
    lo, n = 0, len(singles)
    while lo < n:
        width = rounded(singles[lo].start + 1)
        runs: list[tuple[int, int, int]] = []
        hi = lo
        while hi < n and rounded(singles[hi].start + 1) == width:
            begin, slot = hi, singles[hi].slot
            hi += 1
            while hi < n and singles[hi].slot == slot + hi - begin and rounded(singles[hi].start + 1) == width:
                hi += 1
            runs.append((begin, hi, slot))
        out.append(_Group(lo, hi, width, tuple(runs)))
        lo = hi
    return tuple(out)


class KVStore:
    """Keys and values of all sessions: per layer two tensors [slots, kv_heads, capacity, d], growing as needed.

    Layers appear when they are first written, so the store needs no knowledge of the model's shapes. Everything is
    finite at all times: stale rows are masked, and a mask turns a finite number, but not a NaN, into nothing.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
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
            self._resize(2 * self.slots, self.capacity)
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def give(self, slot: int, spoilt: bool = False) -> None:
        """Frees a slot. ``spoilt``: it may hold values that are not finite, and is wiped."""
        if spoilt:
            with torch.inference_mode():
                for pair in self.layers.values():
                    for tensor in pair:
                        tensor[slot].zero_()
        self._free.append(slot)

    def reserve(self, length: int) -> None:
        """Makes room for contexts of ``length`` tokens."""
        if length > self.capacity:
            self._resize(self.slots, max(-(-length // (4 * BLOCK)) * 4 * BLOCK, rounded(self.capacity * 5 // 4)))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` rows of a slot, in all layers."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; ``like`` is [T, kv_heads, d]."""
        if index not in self.layers:
            shape = (self.slots, like.shape[1], self.capacity, like.shape[2])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]

    def _resize(self, slots: int, capacity: int) -> None:
        for index, pair in self.layers.items():  # one tensor at a time: the peak is one tensor above the total
            grown = []
            for old in pair:
                new = old.new_zeros((slots, old.shape[1], capacity, old.shape[3]))
                new[: old.shape[0], :, : old.shape[2]] = old
                grown.append(new)
            self.layers[index] = (grown[0], grown[1])
        self.slots, self.capacity = slots, capacity


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
        end = c.start + c.length
        k, v = keys[c.slot, :, :end], values[c.slot, :, :end]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        q = query[row : row + c.length].transpose(0, 1)[None]
        o = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale)
        out[row : row + c.length] = o[0].transpose(0, 1)
    return out


def _decode(
    p: Plan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """One token a session: scores, softmax and mixture as batched products over adjacent slots, without a copy."""
    n, (_, heads, d), kv = p.singles, query.shape, keys.shape[1]
    q = (query[:n] * scale).reshape(n * kv, heads // kv, d)
    mixed = out[:n].view(n * kv, heads // kv, d)
    for g in p.groups:
        scores = q.new_empty(((g.hi - g.lo) * kv, heads // kv, g.width))
        for lo, hi, slot in g.runs:
            k = keys[slot : slot + hi - lo].flatten(0, 1)[:, : g.width]
            torch.bmm(q[lo * kv : hi * kv], k.transpose(1, 2), out=scores[(lo - g.lo) * kv : (hi - g.lo) * kv])
        scores.view(g.hi - g.lo, heads, g.width)[..., -BLOCK:].add_(p.tail[g.lo : g.hi])
        weights = scores.softmax(-1)
        for lo, hi, slot in g.runs:
            v = values[slot : slot + hi - lo].flatten(0, 1)[:, : g.width]
            torch.bmm(weights[(lo - g.lo) * kv : (hi - g.lo) * kv], v, out=mixed[lo * kv : hi * kv])
