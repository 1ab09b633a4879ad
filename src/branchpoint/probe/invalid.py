"""Estimators that are wrong on purpose: choices that look harmless and bias the gradient of a tree.

They exist to show by how much, and to prove that the exact check would notice. Never train with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from branchpoint.advantage import full_returns, trained_mass
from branchpoint.tree import Array, Credit, Segments

Fault = Literal["mass", "leafw", "selfmean", "selfmean_fixed", "std", "down", "uniform"]
FAULTS: tuple[str, ...] = get_args(Fault)


@dataclass(frozen=True)
class Faulty:
    """The nearest fork's baseline with one thing changed.

    mass: nothing (the reference). leafw: values and weights by number of leaves. selfmean: the group mean contains the
    member itself; selfmean_fixed: that times K / (K - 1). std: the segments at the
    fork, leave-one-out, divided by the group's standard deviation.
    down: what precedes a fork uses the mean of the next fork. uniform: every segment weighs one over the leaves.
    """

    fault: Fault

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        full, weight = full_returns(segments), trained_mass(segments)
        leaves = segments.sum_up(segments.leaf.astype(float))
        if self.fault == "leafw":
            before = segments.sum_down(segments.reward) - segments.reward
            total = np.where(segments.leaf, before + segments.reward, 0.0)
            full, weight = segments.sum_up(total) / leaves, leaves / leaves[0]
        if self.fault == "uniform":
            weight = np.full(len(full), 1.0 / leaves[0])
        return Credit.of(segments, self._advantage(segments, full), weight)

    def _advantage(self, segments: Segments, full: Array) -> Array:
        children = segments.children()
        base, scale = np.zeros(len(full)), np.ones(len(full))
        for parent, kids in enumerate(children):
            group = list(kids)
            x = full[group]
            if len(group) < 2:
                base[group] = base[parent]
                scale[group] = 1.0 if self.fault == "std" else scale[parent]
            elif self.fault in ("selfmean", "selfmean_fixed"):
                base[group] = np.mean(x)
                scale[group] = len(x) / (len(x) - 1) if self.fault == "selfmean_fixed" else 1.0
            else:
                base[group] = (np.sum(x) - x) / (len(x) - 1)
                if self.fault == "std":
                    scale[group] = 1.0 / (np.std(x, ddof=1) + 1e-8)
        if self.fault == "down":
            base = self._from_below(segments, full, base)
        return (full - base) * scale

    @staticmethod
    def _from_below(segments: Segments, full: Array, base: Array) -> Array:
        """``base``, but before the first fork of a path the mean of that fork."""
        children = segments.children()
        free = np.ones(len(full), bool)
        below = np.zeros(len(full))
        for s in reversed(range(len(full))):
            kids = list(children[s])
            below[s] = np.mean(full[kids]) if len(kids) > 1 else below[kids[0]] if kids else 0.0
        for s in range(1, len(full)):
            free[s] = free[segments.parent[s]] and len(children[segments.parent[s]]) < 2
        return np.where(free, below, base)
