"""The statistics of a comparison over seeds: areas, paired differences with intervals, steps to a threshold.

A run's curve is its success on validation against what training had spent, [(spent, success), ...] from spent 0 on,
joined by straight lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, product

import numpy as np

from branchpoint.noise import Noise
from branchpoint.probe.trace import t_quantile
from branchpoint.tree import Array

Curve = Sequence[tuple[float, float]]
_EXACT = 8
"""Up to so many seeds the bootstrap distribution is enumerated; there is nothing random in it then."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of two arms, seed by seed (same start, same tasks, same evaluation luck), and what they say.

    ``t``: mean +- t_{n-1} s / sqrt(n). ``bootstrap``: percentiles of the mean of n differences drawn with replacement;
    with few seeds it is too narrow (5 normal differences: a nominal 95 % covers about 82 %), which is why decisions use
    ``t``. ``p``: two-sided, of all sign flips of the differences; not below 2^(1-n). Both intervals are of ``level``.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    t: tuple[float, float]
    bootstrap: tuple[float, float]
    p: float
    level: float


def area(curve: Curve, amount: float) -> float:
    """The area under a curve up to ``amount``, divided by it: the mean success along the way, in [0, 1].

    Raises ValueError when the curve does not start at 0, does not advance, or does not reach the amount.
    """
    points = clipped(curve, amount)
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / amount


def clipped(curve: Curve, amount: float) -> list[tuple[float, float]]:
    """The curve up to ``amount``, with the interpolated point there as its last."""
    if not curve or curve[0][0] != 0:
        raise ValueError("a curve starts with the evaluation before the first update, at 0")
    if any(b[0] <= a[0] for a, b in pairwise(curve)):
        raise ValueError("what a curve is plotted against must grow from one evaluation to the next")
    if curve[-1][0] < amount:
        raise ValueError(f"the curve ends at {curve[-1][0]:g} of {amount:g}")
    inside = [p for p in curve if p[0] < amount]
    return [*inside, (amount, at(curve, amount))]


def at(curve: Curve, spent: float) -> float:
    """The height of a curve at a point within it."""
    x, y = zip(*curve, strict=True)
    return float(np.interp(spent, x, y))


def steps_to(curve: Curve, threshold: float, amount: float) -> float | None:
    """What was spent when the curve first reached the threshold; None: not within ``amount`` (censored there)."""
    points = clipped(curve, amount)
    if points[0][1] >= threshold:
        return 0.0
    for a, b in pairwise(points):
        if b[1] >= threshold:
            return a[0] + (b[0] - a[0]) * (threshold - a[1]) / (b[1] - a[1])
    return None


@dataclass(frozen=True, slots=True)
class Reached:
    """Steps to a threshold over seeds, all censored at the same budget. ``median``: None when half of the seeds or more
    did not reach it (it is the Kaplan-Meier median, since nothing is censored earlier). ``restricted``: the mean of
    min(steps, budget)."""

    reached: int
    seeds: int
    median: float | None
    restricted: float


def reached(steps: Sequence[float | None], amount: float) -> Reached:
    """The summary of one arm. Raises ValueError without any seed."""
    if not steps:
        raise ValueError("steps to a threshold of no seed")
    times = sorted(math.inf if s is None else s for s in steps)
    n = len(times)
    median = (times[(n - 1) // 2] + times[n // 2]) / 2
    restricted = sum(min(t, amount) for t in times) / n
    return Reached(sum(t < math.inf for t in times), n, median if median < math.inf else None, restricted)


def paired(
    arm: Mapping[int, float], other: Mapping[int, float], level: float = 0.95, noise: Noise | None = None
) -> Paired:
    """The arm less the other over their common seeds. ``noise`` draws the bootstrap where it is not enumerated.

    Raises ValueError for fewer than 2 common seeds.
    """
    seeds = tuple(sorted(set(arm) & set(other)))
    if len(seeds) < 2:
        raise ValueError("paired differences need 2 common seeds")
    d = np.array([arm[s] - other[s] for s in seeds], np.float64)
    mean, reach = (
        float(np.mean(d)),
        t_quantile(0.5 + level / 2, len(d) - 1) * float(np.std(d, ddof=1)) / math.sqrt(len(d)),
    )
    values, weights = resampled(d, noise or Noise(0))
    low, high = (weighted_quantile(values, weights, q) for q in ((1 - level) / 2, (1 + level) / 2))
    return Paired(
        seeds, tuple(d.tolist()), mean, (mean - reach, mean + reach), (low, high), sign_flips(d, noise), level
    )


def resampled(d: Array, noise: Noise, draws: int = 20_000) -> tuple[Array, Array]:
    """Means of resamples of d and their probabilities: all of them for few values, else drawn ones."""
    n = len(d)
    if n > _EXACT:
        picks = noise.at("bootstrap").integers(0, n, size=(draws, n))
        return np.mean(d[picks], axis=1), np.full(draws, 1 / draws)
    values, weights = [], []
    for picks in combinations_with_replacement(range(n), n):
        counts = np.bincount(picks, minlength=n)
        values.append(float(counts @ d) / n)
        weights.append(math.factorial(n) / math.prod(math.factorial(c) for c in counts.tolist()) / n**n)
    return np.array(values), np.array(weights)


def weighted_quantile(values: Array, weights: Array, q: float) -> float:
    """The smallest value at which the distribution function is at least q (rounding of sums allowed for)."""
    order = np.argsort(values, kind="stable")
    reach = np.cumsum(weights[order])
    return float(values[order][min(int(np.searchsorted(reach, q - 1e-12)), len(values) - 1)])


def sign_flips(d: Array, noise: Noise | None = None, draws: int = 20_000) -> float:
    """Two-sided p-value of mean 0 under symmetry: the part of sign patterns with a mean at least as far from 0.

    All 2^n patterns for n <= 14, else ``draws`` random ones, with the observed pattern counted.
    """
    n, seen = len(d), abs(float(np.mean(d))) - 1e-12
    if n <= 14:
        signs = np.array(list(product((1, -1), repeat=n)))
        return float(np.mean(np.abs(signs @ d) / n >= seen))
    signs = (noise or Noise(0)).at("signs").choice((1, -1), size=(draws, n))
    return float((1 + np.sum(np.abs(signs @ d) / n >= seen)) / (1 + draws))


def band(curves: Sequence[Curve], amount: float, points: int = 41) -> tuple[Array, Array, Array]:
    """Over seeds, at equal distances from 0 to ``amount``: places, mean, and standard error of the mean (0 for one)."""
    x = np.linspace(0, amount, points)
    y = np.array([[at(c, v) for v in x] for c in curves])
    error = np.std(y, axis=0, ddof=1) / math.sqrt(len(y)) if len(y) > 1 else np.zeros(points)
    return x, np.mean(y, axis=0), error
