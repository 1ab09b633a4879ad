"""Drawing one token for each of many sessions: pure functions over rows of logits.

All arithmetic is float64, and all sums over the vocabulary are cumulative sums: these add from left to right, so that a
row's result is the same bits whatever rows stand beside it and however far it is padded with minus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from branchpoint.tree import Array, Ints

_WIDTH = 16
"""Candidate rows are padded to a multiple of this, so that vectorised loops treat every row alike."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One entry a row. ``kept``: the ids that the token was drawn from, None where the whole vocabulary was open."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    entropies: list[float]
    kept: list[Ints | None]


def draw(
    logits: torch.Tensor,
    uniforms: Array,
    allowed: Sequence[Ints | None],
    temperature: float = 1.0,
    top_p: float = 1.0,
    greedy: bool = False,
) -> Drawn:
    """One token a row by inversion of its cumulative distribution.

    The distribution of a row is ``softmax(logits / temperature)`` renormalised over ``allowed`` (all ids if None), then
    over the smallest set of most probable ids whose mass reaches ``top_p``. ``greedy`` keeps the most probable id
    alone (the lowest of equals). ``logprobs`` and ``entropies`` (nats) are of that distribution, ``raw_logprobs`` of
    ``softmax(logits)``.

    Args:
        logits: [n, V] in any float type.
        uniforms: [n] in [0, 1).
        allowed: per row None or sorted ids below V, at least one.

    Raises ValueError for a row without a finite distribution.
    """
    x = logits.double()
    raw = _log_softmax(x)[0]
    if not bool(torch.isfinite(raw.amax(-1)).all()):
        raise ValueError("the model's logits are not finite")
    scaled = raw if temperature == 1.0 else x / temperature
    u = torch.from_numpy(np.asarray(uniforms, np.float64)).to(x.device)
    open_ = [i for i, ids in enumerate(allowed) if ids is None]
    closed = [i for i, ids in enumerate(allowed) if ids is not None]
    n = len(allowed)
    tokens, logprobs, entropies = x.new_zeros(n, dtype=torch.long), x.new_zeros(n), x.new_zeros(n)
    kept: list[Ints | None] = list(allowed)
    cut = greedy or top_p < 1.0
    if open_:
        rows = slice(None) if len(open_) == n else torch.tensor(open_, device=x.device)
        tokens[rows], logprobs[rows], entropies[rows], keep = _pick(scaled[rows], u[rows], top_p, greedy)
        if cut:
            for i, ids in zip(open_, _ids(keep), strict=True):
                kept[i] = ids
    if closed:
        rows = torch.tensor(closed, device=x.device)
        table = _table([ids for ids in allowed if ids is not None]).to(x.device)
        candidates = scaled[rows[:, None], table.clamp(min=0)].masked_fill_(table < 0, float("-inf"))
        choice, logprobs[rows], entropies[rows], keep = _pick(candidates, u[rows], top_p, greedy)
        tokens[rows] = table.gather(1, choice[:, None])[:, 0]
        if cut:
            for i, index in zip(closed, _ids(keep), strict=True):
                kept[i] = np.asarray(allowed[i], np.int32)[index]
    return Drawn(
        tokens.tolist(), logprobs.tolist(), raw.gather(1, tokens[:, None])[:, 0].tolist(), entropies.tolist(), kept
    )


def _table(sets: Sequence[Ints]) -> torch.Tensor:
    """[m, A] the sets as rows, filled up with -1."""
    width = -(-max(map(len, sets)) // _WIDTH) * _WIDTH
    table = np.full((len(sets), width), -1, np.int64)
    for row, ids in zip(table, sets, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)


def _log_softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the cumulative unnormalised masses."""
    shifted = x - x.amax(-1, keepdim=True)
    mass = shifted.exp().cumsum(-1)
    return shifted - mass[:, -1:].log(), mass


def _pick(
    x: torch.Tensor, u: torch.Tensor, top_p: float, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index, log-probability and entropy [n] of a draw from the rows' softmax, and the kept entries [n, A]."""
    logp, mass = _log_softmax(x)
    keep = logp > float("-inf")
    if greedy:
        best = (logp == logp.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
        keep = torch.zeros_like(keep).scatter_(1, best, True)
    elif top_p < 1.0:
        ordered, at = logp.exp().sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        keep &= torch.zeros_like(keep).scatter_(1, at, before < top_p)
    if greedy or top_p < 1.0:
        logp, mass = _log_softmax(x.masked_fill(~keep, float("-inf")))
    total = mass[:, -1]
    # Strictly below the total, so that the first entry above it always exists and always has mass of its own.
    point = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(mass, point[:, None], right=True)
    entropy = -(logp.exp() * logp).nan_to_num_(0.0).cumsum(-1)[:, -1]
    return index[:, 0], logp.gather(1, index)[:, 0], entropy.clamp_(min=0.0), keep


def _ids(keep: torch.Tensor) -> list[Ints]:
    """The positions that are kept, row by row."""
    return [np.flatnonzero(row).astype(np.int32) for row in keep.cpu().numpy()]
