"""Branching under shared luck, exactly: what pairing does to the covariance trace of a design, by enumeration.

A process with luck is one process for each outcome u of the luck, with the policy in common. Three ways to share u:
``independent`` (every branch draws its own), ``siblings`` (those of a root share it, roots do not; training has no such
arm, and this shows why) and ``paired`` (roots and siblings together). Trees, baselines and credit are the library's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from branchpoint.advantage import Tree, full_returns
from branchpoint.probe.cases import Design, fixed
from branchpoint.probe.enumerate import Estimates, Forest, Moments, exact, gradient
from branchpoint.probe.tabular import Mdp
from branchpoint.tree import Array, Segments

Sharing = Literal["independent", "siblings", "paired"]


@dataclass(frozen=True, eq=False)
class Lucky:
    """A process for each outcome of the luck, with its probability; ``marginal`` has the luck among its transitions."""

    outcomes: tuple[tuple[float, Mdp], ...]
    marginal: Mdp


@dataclass(frozen=True, eq=False)
class Roots:
    """What one root can grow into: probability [n], gradient with no root baseline [n, d], its change per unit of a
    root baseline [n, d], value [n], and expected steps."""

    p: Array
    x: Array
    h: Array
    value: Array
    cost: float

    @staticmethod
    def of(mdp: Mdp, design: Design, gamma: float) -> Roots:
        """By enumeration, through ``Tree(gamma)``: h is the change when a value-only root with return 1 joins."""
        forest, estimator = Forest(mdp, fixed(mdp, design)), Tree(gamma=gamma)
        grown = forest.roots()
        x, h, value = [], [], []
        for node in grown:
            one = Segments.of(forest.tree(node, value_only=1.0))
            zero = replace(one, reward=np.where(one.trained, one.reward, 0.0))
            x.append(gradient(mdp, zero, estimator.credit(zero)))
            h.append(x[-1] - gradient(mdp, one, estimator.credit(one)))
            value.append(float(full_returns(zero)[zero.children()[0][0]]))
        p = np.array(list(grown.values()))
        return Roots(p, np.array(x), np.array(h), np.array(value), float(p @ [forest.cost(n) for n in grown]))

    @staticmethod
    def mixture(parts: Sequence[tuple[float, Roots]]) -> Roots:
        """A root that draws its own luck."""
        return Roots(
            np.concatenate([q * r.p for q, r in parts]),
            np.concatenate([r.x for _, r in parts]),
            np.concatenate([r.h for _, r in parts]),
            np.concatenate([r.value for _, r in parts]),
            sum(q * r.cost for q, r in parts),
        )

    @property
    def mean(self) -> Array:
        """[d] the expected gradient."""
        return self.p @ (self.x - float(self.p @ self.value) * self.h)

    def trace(self, roots: float) -> float:
        """tr Cov of the mean over independent roots, each with the leave-one-out baseline of the others; ``roots`` > 1,
        and any real number: a budget over the cost of a root."""
        mu = float(self.p @ self.value)
        centred = self.p @ ((self.value - mu)[:, None] * self.h)
        outer = float(self.p @ (self.value - mu) ** 2 * (self.p @ np.sum(self.h**2, axis=1)) + centred @ centred)
        return _trace(self.p, self.x - mu * self.h) / roots + outer / (roots * (roots - 1))


def trace(lucky: Lucky, design: Design, gamma: float, sharing: Sharing, budget: float) -> float:
    """tr Cov of a group's gradient at a budget of steps: E_u of that given u, plus that of the mean given u."""
    if sharing == "independent":
        one = Roots.of(lucky.marginal, design, gamma)
        return one.trace(budget / one.cost)
    parts = [(q, Roots.of(mdp, design, gamma)) for q, mdp in lucky.outcomes]
    if sharing == "siblings":
        one = Roots.mixture(parts)
        return one.trace(budget / one.cost)
    cost = sum(q * r.cost for q, r in parts)
    within = sum(q * r.trace(budget / cost) for q, r in parts)
    return within + _trace(np.array([q for q, _ in parts]), np.array([r.mean for _, r in parts]))


def group_trace(lucky: Lucky, size: int, estimator: Estimates, paired: bool) -> float:
    """tr Cov of the gradient of a flat group of ``size`` rollouts, by enumeration of all groups."""

    def moments(mdp: Mdp) -> Moments:
        forest = Forest(mdp, fixed(mdp, Design((), (), True)))
        return exact(forest, forest.groups(size), estimator)

    if not paired:
        return moments(lucky.marginal).trace
    given = [(q, moments(mdp)) for q, mdp in lucky.outcomes]
    between = _trace(np.array([q for q, _ in given]), np.array([m.mean for _, m in given]))
    return sum(q * m.trace for q, m in given) + between


def _trace(p: Array, rows: Array) -> float:
    """sum of the variances of the columns."""
    centred = rows - p @ rows
    return float(p @ np.sum(centred**2, axis=1))


def counting(steps: int, right: float, least: int, flip: float) -> Lucky:
    """Of ``steps`` decisions (one parameter block a step), at least ``least`` right earn 1; the grader takes a success
    for a failure with probability ``flip``."""
    states = {(t, n): i for i, (t, n) in enumerate((t, n) for t in range(steps) for n in range(t + 1))}

    def after(t: int, n: int, outcomes: Mapping[bool, float]) -> tuple[tuple[float, float, int], ...]:
        if t + 1 < steps:
            return ((1.0, 0.0, states[t + 1, n]),)
        return tuple((p, float(n >= least and not flipped), -1) for flipped, p in outcomes.items())

    def mdp(outcomes: Mapping[bool, float]) -> Mdp:
        trans = tuple((after(t, n + 1, outcomes), after(t, n, outcomes)) for t, n in states)
        return Mdp(trans, ((right, 1 - right),) * len(states), tuple(t for t, _ in states))

    luck = {True: flip, False: 1 - flip}
    return Lucky(tuple((p, mdp({u: 1.0})) for u, p in luck.items()), mdp(luck))


def additive(rewards: Sequence[float], shifts: Sequence[Sequence[float]]) -> Lucky:
    """At each step one of two actions, each of probability 1/2, earns that step's reward; whatever was done, the reward
    is shifted by one of the step's ``shifts``, all equally likely."""
    last = len(rewards) - 1

    def mdp(shifts: Sequence[Sequence[float]]) -> Mdp:
        trans = tuple(
            tuple(tuple((1.0 / len(us), r + u, -1 if t == last else t + 1) for u in us) for r in (earned, 0.0))
            for t, (earned, us) in enumerate(zip(rewards, shifts, strict=True))
        )
        return Mdp(trans, ((0.5, 0.5),) * len(rewards), tuple(range(len(rewards))))

    luck = list(itertools.product(*shifts))
    return Lucky(tuple((1.0 / len(luck), mdp([(u,) for u in us])) for us in luck), mdp(shifts))


def reversing(rewards: Sequence[float], chance: float) -> Lucky:
    """As :func:`additive` without shifts, and a last step at which the first action earns 1 with this chance, and the
    second one does otherwise."""
    last = len(rewards)

    def mdp(luck: Mapping[bool, float]) -> Mdp:
        steps = tuple(tuple(((1.0, r, t + 1),) for r in (earned, 0.0)) for t, earned in enumerate(rewards))
        final = tuple(tuple((p, float(first == u), -1) for u, p in luck.items()) for first in (True, False))
        return Mdp((*steps, final), ((0.5, 0.5),) * (last + 1), tuple(range(last + 1)))

    both = {True: chance, False: 1 - chance}
    return Lucky(tuple((p, mdp({u: 1.0})) for u, p in both.items()), mdp(both))


def bandit(table: Sequence[Sequence[float]], luck: Sequence[float], pi: Sequence[float]) -> Lucky:
    """One decision: action a earns ``table[u][a]`` under luck u."""

    def mdp(weights: Mapping[int, float]) -> Mdp:
        arms = tuple(tuple((p, float(table[u][a]), -1) for u, p in weights.items()) for a in range(len(pi)))
        return Mdp((arms,), (tuple(pi),), (0,))

    whole = dict(enumerate(luck))
    return Lucky(tuple((p, mdp({u: 1.0})) for u, p in whole.items()), mdp(whole))
