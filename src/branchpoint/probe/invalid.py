"""Estimators that are wrong on purpose: choices that look harmless and bias the gradient of a tree.

They exist to show by how much, and to prove that the exact check would notice. Never train with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from branchpoint.advantage import Credit, full_returns, trained_mass
from branchpoint.tree import Array, Segments

Fault = Literal["mass", "leafw", "selfmean", "selfmean_fixed", "std", "down", "uniform"]
FAULTS: tuple[str, ...] = get_args(Fault)


@dataclass(frozen=True)
class Faulty:
    """The nearest fork's baseline with one thing changed.

    mass: nothing (the reference). leafw: values and weights by number of leaves. selfmean: the group mean contains the
    member itself; selfmean_fixed: that times K / (K - 1). std: the segments at the fork, leave-one-out, divided by the
    group's standard deviation. down: what precedes the first fork uses the mean of that fork, however many steps ahead.
    uniform: every segment weighs one over the leaves of its tree.

    A segment with no fork to compare with (none above; for ``down`` none below either) has the baseline 0 *for its
    return-to-go*: its advantage is U_e, without the rewards before it. Those would be mere noise to an estimator that
    treats a segment by what came before. ``down`` and ``uniform`` treat it by what follows: where forks depend on its
    outcome, the rewards before it would add a bias of their own.
    """

    fault: Fault

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        full, weight = full_returns(segments), trained_mass(segments)
        before = segments.sum_down(segments.reward) - segments.reward
        if self.fault == "leafw":
            leaves = segments.sum_up(segments.leaf.astype(float))
            full = segments.sum_up(np.where(segments.leaf, before + segments.reward, 0.0)) / leaves
            weight = leaves / leaves[0]
        if self.fault == "uniform":
            weight = np.full(len(full), 1.0 / np.count_nonzero(segments.leaf))
        return Credit.of(segments, self._advantage(segments, full, before), weight)

    def _advantage(self, segments: Segments, full: Array, before: Array) -> Array:
        """Lists, not arrays: groups hold two or three members, and the trees are many."""
        children, value, base = segments.children(), full.tolist(), before.tolist()
        scale = [1.0] * len(value)
        # Depth-first order: up to the first fork the tree is one path, and all that follows has a fork above.
        first = next((s for s, group in enumerate(children) if len(group) > 1), len(children))
        if self.fault == "down" and first < len(children):
            base[: first + 1] = [_mean([value[c] for c in children[first]])] * (first + 1)
        for parent, group in enumerate(children[first:], first):
            if len(group) > 1:
                compared = self._compare([value[c] for c in group])
            else:
                compared = [(base[parent], 1.0 if self.fault == "std" else scale[parent])] * len(group)
            for c, (b, k) in zip(group, compared, strict=True):
                base[c], scale[c] = b, k
        return (full - np.array(base)) * np.array(scale)

    def _compare(self, x: list[float]) -> list[tuple[float, float]]:
        """For each member of a group, the baseline and the factor of the difference from it."""
        n, total, mean = len(x), sum(x), _mean(x)
        if self.fault in ("selfmean", "selfmean_fixed"):
            return [(mean, n / (n - 1) if self.fault == "selfmean_fixed" else 1.0)] * n
        scale = 1.0
        if self.fault == "std":
            scale = 1.0 / (math.sqrt(sum((v - mean) ** 2 for v in x) / (n - 1)) + 1e-8)
        return [((total - v) / (n - 1), scale) for v in x]


def _mean(x: list[float]) -> float:
    return sum(x) / len(x)
