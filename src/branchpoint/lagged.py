"""What a planned scheduler learns from earlier updates' trees: the variance profile, and whether its design pays.

Both are sums that fade by ``memory`` each time they are added to, so they follow the policy; they go to JSON and back
unchanged. Everything is measured within a task and averaged over tasks.

The squared score of a token that was sampled with probability p, S = e_a - pi, is |S|^2 = (1-p)^2 + sum of the squares
of the other probabilities. A tree keeps p and the entropy H, which give the entropy H' of the others among themselves;
their squares sum to (1-p)^2 exp(-H') where they are equally likely (any number of them), and to more elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from branchpoint.advantage import Tree
from branchpoint.plan import PlanError, Profile, isotonic
from branchpoint.tree import Array, Ints, RolloutTree, Segments
from branchpoint.watch import Unit

PARTS = 4
"""Parts of an episode: quarters."""


class _Sums(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evidence(_Sums):
    """Faded sums over trees. ``within[k]``: the return variance that remains at boundary k (k = 0: at the start, within
    a task), over ``known[k]`` trees' mass; ``asked[k]``: trees that were to fork there; ``cost``, ``score``: of each
    part, over ``trees``."""

    trees: float = 0.0
    cost: tuple[float, ...] = (0.0,) * PARTS
    score: tuple[float, ...] = (0.0,) * PARTS
    within: tuple[float, ...] = (0.0,) * PARTS
    known: tuple[float, ...] = (0.0,) * PARTS
    asked: tuple[float, ...] = (0.0,) * PARTS

    def add(
        self, trees: Sequence[RolloutTree], forks: Sequence[int], expected: float, unit: Unit, memory: float
    ) -> Self:
        """With these trees, which were to fork at the boundaries ``forks`` of an episode of ``expected`` length."""
        found = [_Measured(s, expected, unit) for t in trees if len((s := Segments.of(t)).parent) > 1]
        if not found:
            return self
        asked = np.zeros(PARTS)
        asked[[0, *forks]] = 1.0
        spread = np.array([[m.variance(k) if asked[k] else (0.0, 0.0) for k in range(PARTS)] for m in found])
        keep = np.where(asked > 0, memory, 1.0)
        return self.model_copy(
            update={
                "trees": memory * self.trees + len(found),
                "cost": _faded(self.cost, memory, np.sum([m.cost for m in found], axis=0)),
                "score": _faded(self.score, memory, np.sum([m.score for m in found], axis=0)),
                "within": _faded(self.within, keep, spread[:, :, 0].sum(axis=0)),
                "known": _faded(self.known, keep, spread[:, :, 1].sum(axis=0)),
                "asked": _faded(self.asked, keep, asked * len(found)),
            }
        )

    @property
    def length(self) -> float:
        """The mean length of an episode. Raises PlanError before there is a tree."""
        if not self.trees > 0:
            raise PlanError("no earlier tree to learn from")
        return sum(self.cost) / self.trees

    def remaining(self) -> Array:
        """[PARTS + 1] the variance that remains at each boundary: made non-increasing, the unknown interpolated, 0 at
        the end. Raises PlanError before there is a group of two rollouts."""
        known = np.array([*self.known, 1.0])
        if not known[0] > 0:
            raise PlanError("no earlier group with two scored rollouts to learn from")
        values = np.array([*self.within, 0.0]) / np.where(known > 0, known, 1.0)
        at = np.flatnonzero(known > 0)
        curve = -isotonic(-values[at], [*known[at[:-1]], 1e12])
        return np.interp(np.arange(PARTS + 1), at, curve)

    def profile(self) -> Profile:
        """The profile that plans are made from. Raises PlanError where there is nothing to make it from."""
        if not self.trees > 0:
            raise PlanError("no earlier tree to learn from")
        scale = 1.0 / self.trees
        variance = np.maximum(-np.diff(self.remaining()), 0.0)
        return Profile(
            tuple(c * scale for c in self.cost), tuple(s * scale for s in self.score), tuple(map(float, variance))
        )


class Verdict(_Sums):
    """Whether a design pays: faded sums of d = (what the flat group would have) - (what the tree has), per tree, of the
    squared gradient at equal cost; trees whose outcomes are all alike say nothing and are not counted. ``design``:
    where it forks, and into how many."""

    design: tuple[tuple[float, int], ...] = ()
    count: float = 0.0
    total: float = 0.0
    square: float = 0.0
    tree: float = 0.0
    flat: float = 0.0

    def add(self, trees: Sequence[RolloutTree], gamma: Sequence[float], unit: Unit, memory: float) -> Self:
        """With these trees of one design, each measured as by :func:`squares`."""
        found = [squares(s, gamma, unit) for t in trees if len((s := Segments.of(t)).parent) > 1]
        pairs = [f for f in found if f is not None]
        if not any(f[0] > 0 or f[1] > 0 for f in pairs):
            return self
        tree, flat, cost, episode = (np.array(column) for column in zip(*pairs, strict=True))
        rollouts = float(np.sum(cost) / np.sum(episode))
        told = (tree > 0) | (flat > 0)
        tree, flat = tree[told], flat[told] / (rollouts - 1)
        d = flat - tree
        return self.model_copy(
            update={
                "count": memory * self.count + len(d),
                "total": memory * self.total + float(np.sum(d)),
                "square": memory * self.square + float(np.sum(d * d)),
                "tree": memory * self.tree + float(np.sum(tree)),
                "flat": memory * self.flat + float(np.sum(flat)),
            }
        )

    @property
    def ratio(self) -> float | None:
        """What the tree has over what the flat group would have (less is better); None without a signal."""
        return self.tree / self.flat if self.flat > 0 else None

    def lost(self, least: float) -> bool:
        """Whether, over at least so many trees, the design did not win."""
        return self.count >= least and self.flat > 0 and self.total <= 0

    def won(self, least: float) -> bool:
        """Whether it won by more than two standard errors."""
        if self.count < least:
            return False
        mean = self.total / self.count
        return mean > 2 * (max(self.square / self.count - mean * mean, 0.0) / self.count) ** 0.5


def squares(s: Segments, gamma: Sequence[float], unit: Unit) -> tuple[float, float, float, float] | None:
    """Of one tree: the sum of squares of the tree estimator's gradient, that of the flat group inside it times B - 1,
    the tree's cost and that of a rollout. None with fewer than two roots.

    One leaf drawn for each root, child by child, makes a flat group: independent roots, on-policy. Its sum over the
    draws is taken exactly. With B roots RLOO has the trace c / (B - 1), so dividing by N - 1 gives that of N rollouts,
    N the cost of the tree in rollouts. Gradients of different tokens count as orthogonal, on both sides alike.
    """
    roots = s.children()[0]
    if len(roots) < 2:
        return None
    norm = squared_scores(s)
    credit = Tree(gamma=tuple(gamma) or 0.5).credit(s)
    tree = float(np.sum((credit.up + credit.down) ** 2 * norm))
    total, path = s.sum_down(s.reward), s.sum_down(_by_segment(s, norm))
    moments = [s.mean_up(np.where(s.leaf, x, 0.0))[list(roots)] for x in (total, total**2, path, path * total)]
    mean, square, n0, n1 = moments
    n2 = s.mean_up(np.where(s.leaf, path * total**2, 0.0))[list(roots)]
    b = len(roots)
    others = (mean.sum() - mean) / (b - 1)
    noise = square - mean**2
    second = others**2 + (noise.sum() - noise) / (b - 1) ** 2
    flat = float(np.sum(n2 - 2 * n1 * others + n0 * second)) / b**2
    steps = _steps(s, unit)
    return tree, max(flat, 0.0) * (b - 1), float(np.sum(steps)), float(np.sum(s.mass * steps))


def squared_scores(s: Segments) -> Array:
    """[N] |S|^2 of every sampled token (see the module), 0 elsewhere."""
    p = np.exp(np.minimum(s.logprobs.astype(np.float64), 0.0))
    rest = 1.0 - p
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where(p > 0, -p * np.log(p), 0.0)
        inner = (s.entropies - own + np.where(rest > 0, rest * np.log(rest), 0.0)) / rest
    collision = np.exp(-np.maximum(np.where(np.isfinite(inner), inner, 0.0), 0.0))
    return np.where(s.sampled, rest**2 * (1.0 + collision), 0.0)


def boundaries(expected: float) -> Ints:
    """[PARTS - 1] the positions of the inner boundaries, as :class:`~branchpoint.scheduler.Fixed` rounds them."""
    return np.array([round(k / PARTS * expected) for k in range(1, PARTS)], np.int32)


def usable(expected: float) -> tuple[int, ...]:
    """The boundaries at which an episode of this length can fork: inside it, no two at one place."""
    places = boundaries(expected)
    return tuple(k for k, b in enumerate(places, 1) if 0 < b < expected and b not in places[: k - 1])


class _Measured:
    """One tree against the boundaries."""

    def __init__(self, s: Segments, expected: float, unit: Unit) -> None:
        self.s, self.children = s, s.children()
        steps = _steps(s, unit)
        self.place = s.turn.astype(np.float64) if unit == "turn" else s.sum_down(steps) - steps
        self.place[0] = -1.0
        self.bounds = boundaries(expected)
        part = np.searchsorted(self.bounds, self.place, side="right")
        mass = s.mass
        self.mass = mass
        self.cost = np.bincount(part, mass * steps, minlength=PARTS)
        self.score = np.bincount(part, mass * _by_segment(s, squared_scores(s)), minlength=PARTS)
        total = s.sum_down(s.reward)
        self.mean = s.mean_up(np.where(s.leaf, total, 0.0))
        self.square = s.mean_up(np.where(s.leaf, total**2, 0.0))

    def variance(self, k: int) -> tuple[float, float]:
        """The sum over the nodes at boundary k of mass times the variance of the return from there, and the mass that
        it is known for. A rollout that ended before has none left, which is known; one that went on without a sibling
        is not.

        At a node, from two leaves below different children, (R - R')^2 / 2, averaged over all such pairs: unbiased
        however the children forked themselves.
        """
        value, known = 0.0, 1.0
        for p, group in enumerate(self.children):
            if not group or not self._crosses(p, group[0], k):
                continue
            if len(group) < 2:
                known -= float(self.mass[p])
                continue
            m, q = self.mean[list(group)], self.square[list(group)]
            n = len(group)
            value += float(self.mass[p]) * float(np.mean(q) - (m.sum() ** 2 - np.sum(m**2)) / (n * (n - 1)))
        return value, max(known, 0.0)

    def _crosses(self, parent: int, child: int, k: int) -> bool:
        if k == 0:
            return parent == 0
        return bool(self.place[parent] < self.bounds[k - 1] <= self.place[child])


def _steps(s: Segments, unit: Unit) -> Array:
    """[S] the cost of each segment: 1 for an action, or its sampled tokens."""
    tokens = _by_segment(s, s.sampled.astype(np.float64))
    return tokens if unit == "token" else (tokens > 0).astype(np.float64)


def _by_segment(s: Segments, values: Array) -> Array:
    """[S] the sum over each segment's tokens."""
    return np.diff(np.concatenate([[0.0], np.cumsum(values)])[s.start])


def _faded(old: Sequence[float], memory: float | Array, new: Array | float) -> tuple[float, ...]:
    return tuple(map(float, np.asarray(old) * memory + new))
