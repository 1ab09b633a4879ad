"""Where to fork: the variance of every design, predicted from where an episode's return variance arises.

An episode is cut into Q equal parts (quarters, where it is measured). A :class:`Profile` says of each part what it
costs, how much score it holds and how much return variance is added in it. A design forks at some of the boundaries;
between two forks lies a segment. With B independent roots, K_l children at the l-th fork, n_l = B K_1 .. K_l parallel
copies of segment l, D_l its expected sum of |S|^2 and w_l the return variance that it adds, the random-effects model
(docs/math.md, section 5) gives for the tree estimator

    q_l     = w_l + sum_{m>l} w_m / prod_{l<j<=m} K_j           variance of one child's value, given where it started
    e_0^2   = q_0 / (B - 1)                                     error of the roots' leave-one-out baseline
    gamma_l = (K_l-1)/q_l / [(K_l-1)/q_l + 1/(e_{l-1}^2 + w_{l-1})]
    e_l^2   = 1 / [(K_l-1)/q_l + 1/(e_{l-1}^2 + w_{l-1})]
    F       = sum_l (D_l / n_l) (q_l + e_l^2)                   the trace of the gradient's covariance

so a design costs nothing to try on paper. gamma_l is the best linear weight of the siblings of level l against what the
levels above know. F takes |S|^2 as independent of the return: it fails for confident policies whose success needs every
step, which is why a plan has to be watched (:mod:`branchpoint.lagged`). Profiles must come from *earlier* data, else
the estimator is biased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np

from branchpoint.tree import Array

WIDTHS = ((2, 3, 4, 6, 8), (2, 3, 4))
"""Widths on the menu: for designs with one fork, and for each fork of designs with two."""
MARGIN = 0.05
"""A fork has to promise this much less variance than the flat group, else the group stays flat."""


class PlanError(ValueError):
    """There is nothing to plan from; one line that says what is missing."""


@dataclass(frozen=True, slots=True)
class Profile:
    """An episode in equal parts: ``cost`` (steps) of each, ``score`` (expected sum of |S|^2 in it), ``variance`` (of
    the return, added in it). Raises PlanError for numbers that are no profile."""

    cost: tuple[float, ...]
    score: tuple[float, ...]
    variance: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.cost) == len(self.score) == len(self.variance) > 0:
            raise PlanError("profile: cost, score and variance need one number for each part")
        for name in ("cost", "score", "variance"):
            values = getattr(self, name)
            if not all(math.isfinite(v) and v >= 0 for v in values):
                raise PlanError(f"profile: {name} holds {values}; numbers of at least 0 are due")
        if sum(self.cost) <= 0:
            raise PlanError("profile: an episode costs nothing; there is nothing to share out")

    @property
    def informative(self) -> bool:
        """Whether there is any variance to place: outcomes that differ, and choices that could make the difference."""
        return sum(self.variance) > 0 and sum(self.score) > 0

    @property
    def explained(self) -> tuple[float, ...]:
        """At each inner boundary, the share rho of the return's variance that the prefix explains. Raises PlanError
        when there is no variance."""
        total = sum(self.variance)
        if not total > 0:
            raise PlanError("profile: all returns are alike, so no share of their variance is defined")
        return tuple(float(v) for v in np.cumsum(self.variance)[:-1] / total)

    def segments(self, cuts: Sequence[int]) -> Profile:
        """The profile of the segments between these boundaries."""
        edges = [0, *cuts, len(self.cost)]
        if any(a >= b for a, b in pairwise(edges)):
            raise PlanError(f"cuts {tuple(cuts)} do not increase inside 1 .. {len(self.cost) - 1}")

        def summed(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[a:b]) for a, b in pairwise(edges))

        return Profile(summed(self.cost), summed(self.score), summed(self.variance))


@dataclass(frozen=True, slots=True)
class Plan:
    """A design and what it promises.

    ``at``: the forks as fractions of the episode; ``roots`` B, whole or not; ``gamma`` of each fork; ``cost`` of the
    group in the profile's steps; ``trace`` F; ``gain``: F times cost over that of the flat group (1 = flat, less is
    better).
    """

    at: tuple[float, ...]
    widths: tuple[int, ...]
    gamma: tuple[float, ...]
    roots: float
    cost: float
    trace: float
    gain: float

    @property
    def design(self) -> tuple[tuple[float, int], ...]:
        """Where it forks, and into how many."""
        return tuple(zip(self.at, self.widths, strict=True))

    def __str__(self) -> str:
        if not self.at:
            return f"flat, {self.roots:g} roots"
        forks = " and ".join(f"{k} children at {a:.0%}" for a, k in zip(self.at, self.widths, strict=True))
        return f"{self.roots:.3g} roots, {forks}"


def trace(segments: Profile, widths: Sequence[int], roots: float) -> tuple[float, tuple[float, ...]]:
    """F and the gammas of a design (see the module). ``segments`` has one part more than there are widths.

    Where both the siblings' and the inherited baseline are exact, gamma is 0. Raises PlanError for fewer than 2 roots
    (more than 1 where not whole): a single root has no baseline.
    """
    if not roots > 1:
        raise PlanError(f"roots: {roots:g} leave a root without others to compare it with; more than 1 are needed")
    w, k = segments.variance, [1, *widths]
    q = [0.0] * len(w)
    for level in reversed(range(len(w))):
        q[level] = w[level] + (q[level + 1] / k[level + 1] if level + 1 < len(w) else 0.0)
    copies, error, total, gammas = roots, q[0] / (roots - 1), 0.0, []
    for level, width in enumerate(k):
        if level:
            copies *= width
            known, siblings = error + w[level - 1], (width - 1) * (error + w[level - 1])
            gammas.append(siblings / (siblings + q[level]) if siblings + q[level] > 0 else 0.0)
            error = known * (1 - gammas[-1])
        total += segments.score[level] / copies * (q[level] + error)
    return total, tuple(gammas)


def predict(
    profile: Profile, budget: float, cuts: Sequence[int] = (), widths: Sequence[int] = (), whole: bool = False
) -> Plan:
    """The plan of one design. ``budget``: what a group may cost, in full-length rollouts.

    ``whole``: a whole number of roots, the most that the budget pays for. Raises PlanError where that is not enough.
    """
    segments = profile.segments(cuts)
    each = sum(c * n for c, n in zip(segments.cost, np.cumprod([1, *widths]).tolist(), strict=True))
    episode = sum(profile.cost)
    roots, flat = budget * episode / each, budget
    if whole:
        roots, flat = math.floor(roots + 1e-9), math.floor(budget + 1e-9)
        if roots < 2:
            raise PlanError(f"budget: {budget:g} rollouts do not pay for two roots that fork")
    found, gammas = trace(segments, widths, roots)
    reference = trace(profile.segments(()), (), flat)[0] * flat * episode
    cost = roots * each
    at = tuple(c / len(profile.cost) for c in cuts)
    gain = found * cost / reference if reference > 0 else 1.0
    return Plan(at, tuple(widths), gammas, float(roots), float(cost), found, gain)


def menu(
    profile: Profile, budget: float, depth: int = 1, whole: bool = False, allowed: Sequence[int] | None = None
) -> tuple[Plan, ...]:
    """Every design with up to ``depth`` forks (at most 2) that the budget pays for, best promise first. The flat group
    is always among them. ``allowed``: boundaries to fork at (None: all inner ones). Raises PlanError where the budget
    does not pay for two rollouts."""
    found = [predict(profile, budget, whole=whole)]
    for level in range(1, depth + 1):
        for cuts in combinations(range(1, len(profile.cost)) if allowed is None else allowed, level):
            for widths in product(WIDTHS[level - 1], repeat=level):
                try:
                    found.append(predict(profile, budget, cuts, widths, whole))
                except PlanError:  # fewer than two roots: not on the menu
                    continue
    return tuple(sorted(found, key=lambda p: (p.gain, len(p.at))))


def choose(
    profile: Profile,
    budget: float,
    depth: int = 1,
    margin: float = MARGIN,
    whole: bool = False,
    allowed: Sequence[int] | None = None,
) -> Plan:
    """The best of the :func:`menu`, or the flat group where nothing beats it by the margin."""
    best = menu(profile, budget, depth, whole, allowed)[0]
    return best if best.gain <= 1 - margin else predict(profile, budget, whole=whole)


def isotonic(values: Sequence[float] | Array, weights: Sequence[float] | Array | None = None) -> Array:
    """The non-decreasing sequence closest to ``values`` in weighted least squares (pool adjacent violators)."""
    ones = np.ones(len(values)) if weights is None else weights
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(np.asarray(values, np.float64), np.asarray(ones, np.float64), strict=True):
        pool = (float(value), float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, length = pools.pop()
            both = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / both if both > 0 else mean, both, length + pool[2])
        pools.append(pool)
    return np.repeat([p[0] for p in pools], [p[2] for p in pools])


def ideal(noise: Sequence[float] | Array, cost: Sequence[float] | Array | None = None) -> tuple[Array, float]:
    """What branching can bring at best, with a perfect critic as the baseline.

    ``noise`` v: the gradient's variance that each part adds; the trace is sum v/n at the cost sum n c. The best
    n ~ sqrt(PAV(v / c)), and its trace at equal cost over the flat group's is (sum c sqrt(PAV))^2 / (sum c sum v).
    Returns n, scaled to start at 1 (or at 0 where the first parts add none), and that ratio.
    """
    v = np.asarray(noise, np.float64)
    c = np.ones(len(v)) if cost is None else np.asarray(cost, np.float64)
    if not np.sum(v) > 0:
        raise PlanError("noise: there is none, so no allocation is better than another")
    rate = np.sqrt(np.maximum(isotonic(v / c, c), 0.0))
    first = rate[0] if rate[0] > 0 else 1.0
    return rate / first, float(np.sum(c * rate) ** 2 / (np.sum(c) * np.sum(v)))
