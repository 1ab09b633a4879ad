"""Token log-probabilities, the clipped surrogate and the KL penalty: pure functions on vectors of tokens.

Axes: n tokens, V vocabulary. Log-probabilities are taken in float32, or in float64 when the logits are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 1 << 25
"""Entries of a logits matrix that may be kept at a time: 128 MiB in float32."""

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def distribution(
    logits: Tensor,
    temperature: float = 1.0,
    allowed: tuple[Tensor, Tensor] | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """[n, V'] log-probabilities of the distribution that is sampled from.

    ``log_softmax(logits / T)`` over the allowed ids: restriction to the admissible tokens, top-k and top-p all come as
    the set that was kept, and both sides renormalise over it. ``allowed``: (row [m], id [m]) pairs; rows that do not
    occur are unrestricted, ids that are not listed get -inf. ``vocabulary``: ids from here on do not exist (a padded
    embedding). Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; greedy decoding has no log-probabilities, give a positive number"
        )
    logits = logits[..., :vocabulary]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    if allowed is not None and len(allowed[0]):
        rows, ids = allowed
        barred = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        barred[rows] = True
        barred[rows, ids] = False
        logits = logits.masked_fill(barred, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def token_logprobs(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """[n] the log-probability of each token, from a :func:`distribution` [n, V']."""
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """[n] ``-sum p log p`` in nats, from a :func:`distribution` [n, V']; barred ids add nothing."""
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, up: Tensor, down: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The scalar ``-sum(up min(r, 1 + c_high) + down max(r, 1 - c_low))``, r = exp(logprob - old_logprob).

    With ``up`` and ``down`` summed over the leaves below a token this is the sum of those leaves' PPO-clip losses
    ``-min(r A, clip(r, 1 - c_low, 1 + c_high) A)`` (Schulman et al. 2017, Eq. 7): for A >= 0 the minimum is
    ``A min(r, 1 + c_high)``, for A < 0 it is ``A max(r, 1 - c_low)``. Summing signed advantages first is not the same
    once a ratio is clipped. All arguments [n].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return -(up * ratio.clamp(max=1 + clip_high) + down * ratio.clamp(min=1 - clip_low)).sum()


def clipped(logprobs: Tensor, old_logprobs: Tensor, up: Tensor, down: Tensor, low: float, high: float) -> Tensor:
    """[n] bool: whether clipping takes away some of a token's gradient."""
    ratio = torch.exp(logprobs - old_logprobs)
    return ((up > 0) & (ratio > 1 + high)) | ((down < 0) & (ratio < 1 - low))


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[n] ``exp(-d) - 1 + d`` with d = log pi - log ref, never negative (Schulman 2020, "Approximating KL divergence").

    Its mean over tokens drawn from pi is KL(pi || ref). Its gradient ``(1 - exp(-d)) grad log pi`` pulls pi towards
    ref; in the mean that is the gradient of KL(ref || pi), the usual GRPO penalty.
    """
    d = logprobs - reference
    return torch.expm1(-d) + d


def read(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    allowed: Pairs | None = None,
    vocabulary: int | None = None,
    at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """([n], [n]) the log-probability of each token and, without gradient, the entropy it was drawn at.

    ``hidden`` [n, H] are the predictors' hidden states, ``head`` turns them into logits; the other arguments are those
    of :func:`distribution`, ``allowed`` sorted by row. At most ``at_once`` logits exist at a time: larger inputs go
    through the head in chunks, which are computed again on the way back instead of being kept.
    """

    def chunk(part: Tensor, ids: Tensor, sets: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        table = distribution(head(part), temperature, sets, vocabulary)
        with torch.no_grad():
            uncertainty = entropy(table)
        return token_logprobs(table, ids), uncertainty

    n, device = len(tokens), tokens.device
    width = getattr(head, "out_features", None) or (head(hidden[:1]).shape[-1] if n else 1)
    size = max(1, at_once // width)
    if n <= size:
        return chunk(hidden, tokens, _between(allowed, 0, n, device))
    parts = []
    for lo in range(0, n, size):
        own = slice(lo, lo + size)
        sets = _between(allowed, lo, lo + size, device)
        parts.append(checkpoint(chunk, hidden[own], tokens[own], sets, use_reentrant=False))
    return torch.cat([lp for lp, _ in parts]), torch.cat([h for _, h in parts])


def _between(allowed: Pairs | None, lo: int, hi: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The pairs of the rows [lo, hi), counted from lo."""
    if allowed is None:
        return None
    rows, ids = allowed
    a, b = np.searchsorted(rows, [lo, hi])
    return torch.tensor(rows[a:b] - lo, device=device), torch.tensor(ids[a:b], device=device)
