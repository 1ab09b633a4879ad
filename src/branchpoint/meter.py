"""What a step of the learner did, and the sums that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a step did: means over its epochs; means over tokens are weighted with ``share``.

    ``loss`` is ``policy_loss`` plus the penalty and the critic's coefficient times ``value_loss`` (half the squared
    error, normalised like the policy's; 0 without a critic). ``kl``: k3 to the reference, nats. ``policy_entropy``: of
    the sampling distribution, nats. ``clip_share``: the part of the tokens that lost gradient to clipping. ``ratio``:
    importance ratio. ``drift``: the largest |learner - sampler| log-probability before the first update; on fresh
    rollouts it is rounding, or the sampler and the learner disagree. ``grad_norm``: before clipping. ``updates``: made;
    ``empty`` and ``nonfinite``: skipped because there was nothing to learn, or because the gradient was not finite.
    """

    loss: float = 0.0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    policy_entropy: float = 0.0
    clip_share: float = 0.0
    ratio: float = 0.0
    drift: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    tokens: int = 0  # forwarded in one epoch
    updates: int = 0
    empty: int = 0
    nonfinite: int = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(slots=True)
class Sums:
    """Running sums over the rows of one pass; ``share`` weighs the means over tokens."""

    share: float = 0.0
    loss: float = 0.0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    policy_entropy: float = 0.0
    clip_share: float = 0.0
    ratio: float = 0.0
    drift: float = 0.0

    def metrics(self, norm: float, rate: float, tokens: int) -> StepMetrics:
        mean = {
            name: getattr(self, name) / (self.share or 1.0) for name in ("kl", "policy_entropy", "clip_share", "ratio")
        }
        return StepMetrics(
            loss=self.loss, policy_loss=self.policy_loss, value_loss=self.value_loss, drift=self.drift,
            grad_norm=norm, lr=rate, tokens=tokens, **mean,
        )  # fmt: skip


def average(history: Sequence[StepMetrics]) -> StepMetrics:
    """Means over the epochs; counts are summed, and drift and tokens are those of the first."""
    rows = [m.as_dict() for m in history]
    out: dict[str, Any] = {f.name: sum(r[f.name] for r in rows) for f in fields(StepMetrics)}
    for name in out:
        if name not in ("updates", "empty", "nonfinite"):
            out[name] /= len(rows)
    return StepMetrics(**(out | {"drift": history[0].drift, "tokens": history[0].tokens}))


def changed(metrics: StepMetrics, **changes: int) -> StepMetrics:
    return StepMetrics(**(metrics.as_dict() | changes))  # pyright: ignore
