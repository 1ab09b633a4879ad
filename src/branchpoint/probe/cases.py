"""The quantities that the oracles state, computed by enumeration through the library's schedulers and estimators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from branchpoint.advantage import Bpo, Tree, full_returns
from branchpoint.probe.enumerate import Estimates, Forest, Moments, Place, Rule, exact, gradient, scheduled
from branchpoint.probe.invalid import FAULTS, Faulty
from branchpoint.probe.tabular import Mdp, Outcome
from branchpoint.scheduler import Fixed, Flat, Threshold, TopEntropy
from branchpoint.tree import Array, Segments

MOST_GROUPS = 3000
"""Groups of B trees are enumerated one by one up to this many."""
MOST_TREES = 10_000
"""Trees of one prefix, for :func:`local_variance`."""

__all__ = ["FAULTS", "Design", "Traces", "bpo", "faults", "fixed", "local_variance", "selection", "traces"]


class Design(NamedTuple):
    """Forks at fixed times. ``nested``: siblings fork too; else only the backbone does (a caterpillar)."""

    times: tuple[int, ...]
    widths: tuple[int, ...]
    nested: bool


def fixed(mdp: Mdp, design: Design) -> Rule:
    """The design as the library's own ``fixed`` scheduler."""
    if not design.times:
        return scheduled(Flat(roots=1), mdp)
    scale = float(max(mdp.horizon, *design.times))
    at = tuple(t / scale for t in design.times)
    start = design.times[0] == 0
    scheduler = Fixed(roots=1, at=at, width=design.widths, expected=scale, nested=design.nested, start=start)
    return scheduled(scheduler, mdp)


def poor_so_far(width: int, first: int, reward: float) -> Rule:
    """A predictable rule: from time ``first`` on, fork wherever less than ``reward`` was collected so far."""

    def rule(own: tuple[Outcome, ...], at: Place) -> dict[int, int]:
        out, so_far = {}, at.reward
        for i, step in enumerate(own):
            starts_here = i == 0 and at.depth > 0
            if at.step + i >= first and so_far < reward and not starts_here:
                out[i] = width
            so_far += step.reward
        return out

    return rule


def look_ahead(forks: int, width: int) -> TopEntropy:
    """The paper's selection: the highest entropies of the finished backbone, the first step included."""
    return TopEntropy(roots=1, max_forks=forks, width=width, spacing=0, start=True)


def threshold(least: float, forks: int, width: int) -> Threshold:
    """The first entropies above a fixed number, the first step included."""
    return Threshold(roots=1, threshold=least, quantile=None, max_forks=forks, width=width, start=True)


@dataclass(frozen=True, eq=False)
class Traces:
    """What the tree estimator does on one design with one gamma.

    ``inner`` = tr Cov(X - mu H) and ``outer`` = Var(U) E|H|^2 + |E[(U - mu) H]|^2, where a root's gradient is X - c H
    for a root baseline c, and U is its value: all that a group of B independent roots needs (:meth:`of`).
    """

    mean: Array
    single: float
    inner: float
    outer: float
    cost: float
    explicit: Mapping[int, float] = field(default_factory=dict)

    def of(self, roots: int) -> float:
        """tr Cov of the mean over B roots, each with the leave-one-out baseline of the others (none if B = 1)."""
        return self.single if roots == 1 else self.inner / roots + self.outer / (roots * (roots - 1))


def traces(mdp: Mdp, design: Design, gammas: Mapping[str, float]) -> Iterator[tuple[str, Traces]]:
    """For every named gamma, the moments of ``Tree(gamma=...)``, X and H taken from its own credit.

    H is how much the gradient changes when a value-only root with return 1 joins (its return is then the baseline).
    """
    forest = Forest(mdp, fixed(mdp, design))
    roots = forest.roots()
    p = np.array(list(roots.values()))
    cost = float(p @ [forest.cost(node) for node in roots])
    views = []
    for node in roots:
        one = Segments.of(forest.tree(node, value_only=1.0))
        zero = replace(one, reward=np.where(one.trained, one.reward, 0.0))
        views.append((zero, one))
    value = np.array([full_returns(zero)[zero.children()[0][0]] for zero, _ in views])
    for name, gamma in gammas.items():
        estimator = Tree(gamma=gamma)
        x, x_minus_h = (np.array([gradient(mdp, view[i], estimator.credit(view[i])) for view in views]) for i in (0, 1))
        yield name, _moments(p, x, x - x_minus_h, value, cost, _explicit(forest, estimator))


def _moments(p: Array, x: Array, h: Array, value: Array, cost: float, explicit: Mapping[int, float]) -> Traces:
    mu = float(p @ value)
    single = Moments.of(p, x)
    centred = p @ ((value - mu)[:, None] * h)
    outer = float(p @ (value - mu) ** 2 * (p @ np.sum(h**2, axis=1)) + centred @ centred)
    return Traces(single.mean, single.trace, Moments.of(p, x - mu * h).trace, outer, cost, explicit)


def _explicit(forest: Forest, estimator: Tree) -> dict[int, float]:
    """tr Cov over explicitly enumerated groups of 2 and 3 roots, where there are few enough."""
    n = len(forest.roots())
    sizes = [b for b in (2, 3) if math.comb(n + b - 1, b) <= MOST_GROUPS]
    return {b: exact(forest, forest.groups(b), estimator).trace for b in sizes}


class Cost(NamedTuple):
    """Moments, and the expected number of steps."""

    mean: Array
    trace: float
    cost: float


def bpo(mdp: Mdp, design: Design, lam: float, post: Any, normaliser: Any) -> Cost:
    """The moments of BPO's gradient."""
    forest = Forest(mdp, fixed(mdp, design), ordered=True)
    roots = forest.roots()
    found = exact(forest, roots, Bpo(lam=lam, post=post, normaliser=normaliser))
    return Cost(found.mean, found.trace, sum(p * forest.cost(node) for node, p in roots.items()))


def local_variance(mdp: Mdp, time: int, width: int) -> tuple[float, float]:
    """The variance of BPO's local advantage (Eq. 3) at a fork at ``time``, and K/(K-1) E Var(R | s).

    Both are given that the episode got there. Where the trees are too many to enumerate, the advantage's coefficients
    are read off the estimator (it is linear in the K returns, which are independent given the state).
    """
    there = mdp.visits()[time]
    variance = float(there @ np.array(mdp.variance) / np.sum(there))
    law = width / (width - 1) * variance
    n = max(sum(1 for _ in mdp.episodes(int(s))) for s in np.flatnonzero(there))
    if n * math.comb(n + width - 2, width - 1) > MOST_TREES:
        return float(np.sum(_coefficients(width) ** 2)) * variance, law
    forest = Forest(mdp, fixed(mdp, Design((time,), (width,), nested=False)), ordered=True)
    estimator = Bpo(lam=0.0, normaliser="sum")
    p, a = [], []
    for node, probability in forest.roots().items():
        segments = Segments.of(forest.tree(node))
        at = np.flatnonzero((segments.branch == 0) & (segments.turn == time) & (segments.parent >= 0))
        if len(at):
            p.append(probability)
            a.append(_given(segments, estimator)[at[0]])
    p, a = np.array(p) / np.sum(p), np.array(a)
    return float(p @ a**2 - (p @ a) ** 2), law


def _coefficients(width: int) -> Array:
    """[K] of every sibling's return, its coefficient in the local advantage of sibling 0."""
    one = Mdp(((((1.0, 1.0, -1),), ((1.0, 0.0, -1),)),), ((0.5, 0.5),), (0,))
    forest = Forest(one, fixed(one, Design((0,), (width,), nested=False)), ordered=True)
    edges = {forest.edge(e)[0].reward: e for node in forest.roots() for e in node}
    rows = [[edges[float(i == j)] for j in range(width)] for i in range(width)]
    segments = [Segments.of(forest.tree(tuple(row))) for row in rows]
    return np.array([_given(s, Bpo(lam=0.0, normaliser="sum"))[s.children()[0][0]] for s in segments])


def _given(segments: Segments, estimator: Bpo) -> Array:
    """[S] the credit of each segment's first token (segments here hold at most one sampled token)."""
    credit = estimator.credit(segments)
    at = np.minimum(segments.start[:-1], len(credit.up) - 1)
    return (credit.up + credit.down)[at]


def selection(mdp: Mdp, scheduler: TopEntropy | Threshold, whole: bool = True) -> dict[str, Any]:
    """What choosing forks by this scheduler does to the whole gradient and, if ``whole``, at the first step.

    The trees are given to the unbiased estimator as if the forks were predictable (propensity 1), which is what a
    library does that does not ask.
    """
    forest = Forest(mdp, scheduled(scheduler, mdp), ordered=whole)
    roots = forest.roots()
    p = np.array(list(roots.values()))
    trees = [Segments.of(forest.tree(node)) for node in roots]

    def mean(estimator: Estimates) -> Array:
        return p @ np.array([gradient(mdp, s, estimator.credit(s)) for s in trees])

    bias = float(np.linalg.norm(mean(Tree(gamma=1.0)) - mdp.gradient))
    shift = float(p @ [s.mean_up(s.reward)[0] for s in trees]) - mdp.mean_return
    if not whole:
        return {"EU_minus_J": shift, "grad_bias": bias}
    propagated = mean(Bpo(lam=1.0, normaliser="sum")) - mean(Bpo(lam=0.0, normaliser="sum"))
    return {
        **_first_step(mdp, zip(roots.values(), trees, strict=True)),
        "tree_EU_minus_J": shift,
        "tree_grad_bias_norm": bias,
        "true_grad_norm": float(np.linalg.norm(mdp.gradient)),
        "bpo_propagated_mean_norm": float(np.linalg.norm(propagated)),
    }


def _first_step(mdp: Mdp, trees: Iterable[tuple[float, Segments]]) -> dict[str, Any]:
    """The local advantages at the first step, given that it was selected."""
    s0 = mdp.start
    pi = np.array(mdp.pi[s0])
    scores = np.eye(len(pi)) - pi
    advantage = np.array([mdp.q(s0, a) for a in range(len(pi))]) - mdp.value[s0]
    selected = 0.0
    weight, given = np.zeros((2, len(pi))), np.zeros((2, len(pi)))
    for p, segments in trees:
        roots = segments.children()[0]
        if len(roots) < 2:
            continue
        selected += p
        local = _given(segments, Bpo(lam=0.0, normaliser="sum"))
        for i, r in enumerate(roots):
            who, share = (0, p) if i == 0 else (1, p / (len(roots) - 1))
            action = int(segments.tokens[segments.start[r]]) - mdp.token(s0, 0)
            weight[who, action] += share
            given[who, action] += share * local[r]
    shift = [{str(a): given[w, a] / weight[w, a] - advantage[a] for a in np.flatnonzero(weight[w])} for w in (0, 1)]
    scale = selected or 1.0
    return {
        "P_sel": selected,
        "ES_given_sel": weight[0] @ scores / scale,
        "Ahat_backbone_minus_A": shift[0],
        "Ahat_fresh_minus_A": shift[1],
        "backbone_grad_over_Psel": given[0] @ scores / scale,
        "fresh_grad_over_Psel": given[1] @ scores / scale,
        "target_grad_s0": (pi * advantage) @ scores,
    }


def faults(mdp: Mdp, rule: Rule, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """For each faulty estimator, the norm of its bias, the cosine with the true gradient, and E U - J."""
    forest = Forest(mdp, rule)
    roots = forest.roots()
    trees = [Segments.of(forest.tree(node)) for node in roots]
    p = np.array(list(roots.values()))
    out = {}
    for name in names:
        estimator = Tree(gamma=1.0) if name == "mass" else Faulty(name)  # type: ignore[arg-type]
        mean = p @ np.array([gradient(mdp, s, estimator.credit(s)) for s in trees])
        value = p @ [_root_value(s, name) for s in trees]
        norms = np.linalg.norm(mean) * np.linalg.norm(mdp.gradient)
        out[name] = {
            "bias": float(np.linalg.norm(mean - mdp.gradient)),
            "cos": float(mean @ mdp.gradient / norms),
            "EU": float(value - mdp.mean_return),
        }
    return out


def _root_value(segments: Segments, fault: str) -> float:
    if fault == "leafw":
        return float(np.mean(segments.sum_down(segments.reward)[segments.leaf]))
    return float(segments.mean_up(segments.reward)[0])
