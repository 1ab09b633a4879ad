"""Credit: what every token of a tree receives, and the pieces that estimators are made of. See :mod:`.advantage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from branchpoint.tree import Array, Segments, seal

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """What each token of ``Segments`` receives (all [N], 0 where not sampled or not trained).

    ``up`` >= 0 and ``down`` <= 0 are kept apart because a token shared by several leaves may be pushed both ways and
    PPO clips the two directions differently. ``share`` is the token's weight in KL, entropy and the normaliser: the
    shares of one depth sum to at most 1, except where an estimator gives every token the share 1 (``bpo`` with
    ``normaliser`` sum). ``informative``: whether anything but zero was given (a group whose members all scored alike
    carries no signal). Read-only.
    """

    up: Array
    down: Array
    share: Array

    def __post_init__(self) -> None:
        seal(self)
        for name in ("up", "down", "share"):
            value = getattr(self, name)
            if value.ndim != 1 or not np.all(np.isfinite(value)):
                raise ValueError(f"credit.{name} must be a finite vector")
        if np.any(self.up < 0) or np.any(self.down > 0) or np.any(self.share < 0):
            raise ValueError("credit needs up >= 0, down <= 0 and share >= 0")

    @property
    def informative(self) -> bool:
        return bool(np.any(self.up) or np.any(self.down))

    @staticmethod
    def of(segments: Segments, advantage: Array, weight: Array) -> Credit:
        """One advantage A and one weight w a segment: up = w max(A, 0), down = w min(A, 0), share = w."""
        w = np.where(segments.trained, weight, 0.0)
        return Credit(
            up=segments.to_tokens(w * np.maximum(advantage, 0.0)),
            down=segments.to_tokens(w * np.minimum(advantage, 0.0)),
            share=segments.to_tokens(w),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What a critic learns from one tree (all [N], 0 where ``weight`` is): ``value`` is regressed on, ``observed`` the
    plain return-to-go, and ``predicted`` the critic's value before the update. Read-only."""

    value: Array
    weight: Array
    observed: Array
    predicted: Array

    def __post_init__(self) -> None:
        seal(self)

    @staticmethod
    def join(parts: Sequence[Targets]) -> Targets:
        """The targets of several trees, concatenated."""
        names = ("value", "weight", "observed", "predicted")
        return Targets(**{n: np.concatenate([np.zeros(0), *(getattr(p, n) for p in parts)]) for n in names})

    @property
    def explained_variance(self) -> float | None:
        """1 - Var(observed - predicted) / Var(observed), weighted; None where all returns are equal."""
        if not np.any(self.weight > 0):
            return None
        spread, left = (self._variance(x) for x in (self.observed, self.observed - self.predicted))
        return 1.0 - left / spread if spread > ROUNDING * float(np.max(self.observed**2)) else None

    def _variance(self, x: Array) -> float:
        centred = x - np.average(x, weights=self.weight)
        return float(np.average(centred**2, weights=self.weight))


class Strategy(BaseModel):
    """An estimator's settings. ``critic``: whether its ``credit`` needs the values of one."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    critic: ClassVar[bool] = False


def full_returns(segments: Segments) -> Array:
    """[S] P_e + U_e: the rewards before the segment plus its return-to-go. The return R at a leaf."""
    before = segments.sum_down(segments.reward) - segments.reward
    return before + segments.mean_up(segments.reward)


def trained_mass(segments: Segments) -> Array:
    """[S] the product over the path of one over the number of siblings that lead to something trained.

    Equal to ``segments.mass`` when all branches are trained. Value-only siblings take no weight: which branches are
    trained is part of the design, so the weights of the others are known beforehand and still sum to 1.
    """
    carries = (segments.sum_up(segments.trained.astype(float)) > 0).tolist()
    parent = segments.parent.tolist()
    count = [0] * len(parent)
    for s in range(1, len(parent)):
        count[parent[s]] += carries[s]
    mass = [1.0] * len(parent)
    for s in range(1, len(parent)):
        mass[s] = mass[parent[s]] / count[parent[s]] if carries[s] else 0.0
    return np.array(mass)


def refuse_look_ahead(segments: Segments, kind: str) -> None:
    if np.any(np.isnan(segments.propensity)):
        raise ValueError(
            f"estimator {kind!r} is unbiased only for forks chosen from the history before them, but this tree has"
            " forks that were chosen after their parent had finished (fork.propensity is None): whether a step is"
            " selected then depends on its action and return. Use a predictable scheduler (fixed, threshold, random,"
            " equally_spaced), or estimator 'bpo' if the bias is what you want to study"
        )


def rounded(difference: Array, returns: Array) -> Array:
    """``difference`` with what is only rounding of the returns set to 0."""
    scale = float(np.max(np.abs(returns), initial=0.0))
    return np.where(np.abs(difference) <= ROUNDING * scale, 0.0, difference)


def mean(values: Array) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def leave_one_out_difference(values: Array) -> Array:
    """x_i - mean of the others; 0 for a single value."""
    n = len(values)
    return (values - mean(values)) * (n / (n - 1)) if n > 1 else np.zeros(n)


def leaf_returns(segments: Segments) -> Array:
    """[L] the full returns of the leaves."""
    return segments.sum_down(segments.reward)[segments.leaf]


def leafwise(segments: Segments, advantage: Array) -> Credit:
    """Credit from one advantage a leaf [L]: of every token, the sums over the leaves below; each weighs 1/L."""
    trained = segments.trained[segments.leaf]
    w = trained / max(1, int(np.sum(trained)))

    def tokens(values: Array) -> Array:
        spread = np.zeros(len(segments.leaf))
        spread[segments.leaf] = values
        return segments.to_tokens(segments.sum_up(spread) * segments.trained)

    return Credit(
        up=tokens(w * np.maximum(advantage, 0.0)),
        down=tokens(w * np.minimum(advantage, 0.0)),
        share=tokens(w),
    )
