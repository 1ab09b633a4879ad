"""The tree estimator on finite processes by an exact recursion of moments: what the planner is measured against.

Nothing of the library is used. A node's part of the gradient is X - c H, where c is the baseline that comes from
outside it; U is its value. The moments below are closed under adding an edge in front and under joining K children.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from branchpoint.tree import Branch, Fork, RolloutTree, Turn
from branchpoint.world import Task

FAMILIES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "plan.json").read_text())


@dataclass
class Moments:
    """E of U, U^2, X, UX, UH (vectors), |X|^2, <X,H>, |H|^2, and the steps; E H = 0."""

    u: float
    uu: float
    x: np.ndarray
    ux: np.ndarray
    uh: np.ndarray
    xx: float
    xh: float
    hh: float
    steps: float

    def plus(self, p: float, o: Moments) -> Moments:
        return Moments(*(a + p * b for a, b in zip(vars(self).values(), vars(o).values(), strict=True)))


class Family:
    """One process of the table. All episodes have the same length, and states of one time have it in common."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.trans, self.pi, self.block, self.s0 = entry["trans"], entry["pi"], entry["block"], entry["s0"]
        width = max(len(p) for p in self.pi)
        self.size = (max(self.block) + 1) * width
        self.scores = []
        for s, p in enumerate(self.pi):
            rows = np.zeros((len(p), self.size))
            at = self.block[s] * width
            rows[:, at : at + len(p)] = np.eye(len(p)) - np.array(p)
            self.scores.append(rows)
        self.horizon = self._depth(self.s0)

    def _depth(self, s: int) -> int:
        return 0 if s < 0 else 1 + max(self._depth(out[0][2]) for out in self.trans[s])

    def moments(self, forks: dict[int, tuple[int, float]]) -> Moments:
        """Of a root. ``forks``: time -> (K, gamma)."""
        self.memo: dict[int, Moments] = {}
        return self._node(self.s0, 0, forks)

    def _node(self, s: int, t: int, forks: dict[int, tuple[int, float]]) -> Moments:
        zero = np.zeros(self.size)
        if s < 0:
            return Moments(0.0, 0.0, zero, zero, zero, 0.0, 0.0, 0.0, 0.0)
        if s in self.memo:
            return self.memo[s]
        one = Moments(0.0, 0.0, zero, zero, zero, 0.0, 0.0, 0.0, 0.0)
        for a, outcomes in enumerate(self.trans[s]):
            for p, r, after in outcomes:
                one = one.plus(self.pi[s][a] * p, edge(self._node(after, t + 1, forks), self.scores[s][a], r))
        self.memo[s] = join(one, *forks[t]) if t in forks else one
        return self.memo[s]

    def trace(
        self, forks: dict[int, tuple[int, float]], roots: float | None = None, steps: float | None = None
    ) -> tuple[float, float]:
        """tr Cov with B roots, or with as many (whole or not) as ``steps`` pay for; and the steps."""
        m = self.moments(forks)
        b = roots if roots is not None else (steps or 0.0) / m.steps
        inner = m.xx - 2 * m.u * m.xh + m.u**2 * m.hh - m.x @ m.x
        outer = (m.uu - m.u**2) * m.hh + m.uh @ m.uh
        return float(inner / b + outer / (b * (b - 1))), float(b * m.steps)

    def increments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By time: v = E|Z d + G' - G|^2 of the ideal baseline, E d^2 of the return, and E|S|^2."""
        value = {-1: 0.0}
        gradient: dict[int, Any] = {-1: np.zeros(self.size)}
        for s in reversed(range(len(self.trans))):
            outs = [(self.pi[s][a] * p, a, r, n) for a, o in enumerate(self.trans[s]) for p, r, n in o]
            value[s] = sum(p * (r + value[n]) for p, _, r, n in outs)
            gradient[s] = sum(p * ((r + value[n]) * self.scores[s][a] + gradient[n]) for p, a, r, n in outs)
        v, d, score = np.zeros(self.horizon), np.zeros(self.horizon), np.zeros(self.horizon)
        # Over paths, Z enters linearly and squared: keep P, E Z and E |Z|^2 of each state.
        at = {self.s0: (1.0, np.zeros(self.size), 0.0)}
        for t in range(self.horizon):
            then: dict[int, tuple[float, np.ndarray, float]] = {}
            for s, (mass, z, zz) in at.items():
                for a, outcomes in enumerate(self.trans[s]):
                    for p, r, n in outcomes:
                        q, sc = self.pi[s][a] * p, self.scores[s][a]
                        delta, jump = r + value[n] - value[s], gradient[n] - gradient[s]
                        z2, zz2 = z + mass * sc, zz + 2 * z @ sc + mass * sc @ sc
                        v[t] += q * (delta**2 * zz2 + 2 * delta * z2 @ jump + mass * jump @ jump)
                        d[t] += q * mass * delta**2
                        score[t] += q * mass * sc @ sc
                        m0, m1, m2 = then.get(n, (0.0, np.zeros(self.size), 0.0))
                        then[n] = (m0 + q * mass, m1 + q * z2, m2 + q * zz2)
            at = then
        return v, d, score


def edge(m: Moments, s: np.ndarray, r: float) -> Moments:
    """The moments with one step in front: score ``s``, reward ``r``."""
    ss, su, uu = float(s @ s), float(m.ux @ s), m.uu + 2 * r * m.u + r * r
    xs, us = float(m.x @ s), float(m.uh @ s)
    xx = uu * ss + m.xx + r * r * m.hh + 2 * (r * xs + su) + 2 * r * us + 2 * r * m.xh
    xh = (m.u + r) * ss + us + xs + m.xh + r * m.hh
    return Moments(
        u=m.u + r,
        uu=uu,
        x=(m.u + r) * s + m.x,
        ux=uu * s + m.ux + r * m.x + r * m.uh,
        uh=(m.u + r) * s + m.uh,
        xx=xx,
        xh=xh,
        hh=ss + m.hh,
        steps=1 + m.steps,
    )


def join(m: Moments, k: int, gamma: float) -> Moments:
    """The moments of a node with ``k`` independent children."""
    var = m.uu - m.u**2
    own = m.xx - 2 * gamma * m.u * m.xh + gamma**2 * m.hh * (m.u**2 + var / (k - 1))
    cross = float(m.x @ m.x + gamma**2 * (m.uh @ m.uh) / (k - 1) ** 2)
    return Moments(
        u=m.u,
        uu=m.u**2 + var / k,
        x=m.x,
        ux=(m.ux - gamma * m.u * m.uh + (k - 1) * m.u * m.x) / k,
        uh=(1 - gamma) / k * m.uh,
        xx=(own + (k - 1) * cross) / k,
        xh=(1 - gamma) / k * (m.xh - gamma * m.u * m.hh),
        hh=(1 - gamma) ** 2 / k * m.hh,
        steps=k * m.steps,
    )


def forks(times: Sequence[int], widths: Sequence[int], gammas: Sequence[float]) -> dict[int, tuple[int, float]]:
    return {t: (k, g) for t, k, g in zip(times, widths, gammas, strict=True)}


def drawn(p: np.ndarray, rng: np.random.Generator) -> int:
    return min(int(np.searchsorted(np.cumsum(p), rng.random())), len(p) - 1)


def grown(family: Family, roots: int, widths: dict[int, int], rng: np.random.Generator) -> RolloutTree:
    """A tree of the process, one token an action, forked before the given turns."""
    branches: list[Branch] = []
    pending: list[tuple[int, int, int]] = [(-1, 0, family.s0)] * roots  # parent branch, turn, state
    while pending:
        parent, turn, s = pending.pop(0)
        me, turns, first = len(branches), [], turn
        fork = Fork(max(parent, 0), turn, 0, 1.0) if me else None
        while s >= 0:
            if turn in widths and turn > first:
                pending += [(me, turn, s)] * (widths[turn] - 1)
            p = np.array(family.pi[s])
            a = drawn(p, rng)
            outcomes = family.trans[s][a]
            _, reward, after = outcomes[drawn(np.array([o[0] for o in outcomes]), rng)]
            log, entropy = np.log(p[a : a + 1]), np.array([-np.sum(p * np.log(p))])
            seen = np.zeros(0 if turns == [] and fork else 1, np.int32)
            turns.append(Turn(seen, np.array([a], np.int32), log, log, entropy, reward))
            s, turn = after, turn + 1
        branches.append(Branch(me, fork, tuple(turns), "done"))
    return RolloutTree(Task("family", "test"), tuple(branches))
