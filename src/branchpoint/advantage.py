"""Who gets credit: every estimator is its own configuration and one pure function, ``credit(segments) -> Credit``.

Notation (one tree, one task): segment e starts at node v and holds a run of sampled tokens with score S_e (the sum over
its tokens of the gradient of log pi); R_l is the return of leaf l from the root; U_e is the reward of e plus the mean
over its children of theirs (its return-to-go); P_e are the rewards collected before e, so P_e + U_e is a *full* return.

Groups are the children of one node of the tree, never rollouts of equal text. Failed branches are already absent from
``Segments``; what remains is the group. Value-only branches (``trained`` False) count in values and baselines, receive
nothing, and take no weight from their trained siblings.

Weights. The mass of a segment is the product, over the nodes on its path with more than one trained child, of one over
their number. The root group is such a node, so each of B independent roots carries 1/B. This is a constant of the
design: nothing is ever divided by this batch's number of tokens, turns or edges (``Bpo`` excepted, as published).
The credit of a tree therefore sums to the gradient of one task; a batch averages over its trees.

Where all members of a group score alike the advantage is exactly 0 (differences of less than 1e-12 of the largest
return are rounding of sums and are set to 0), and ``Credit.informative`` is False when nothing else is left.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from branchpoint.baselines import Gigpo, Ppo, TreeGrpo, VinePpo
from branchpoint.credit import (
    Credit,
    Fraction,
    Strategy,
    full_returns,
    leaf_returns,
    leafwise,
    leave_one_out_difference,
    mean,
    refuse_look_ahead,
    rounded,
    trained_mass,
)
from branchpoint.tree import Array, Segments

__all__ = [
    "Bpo", "Credit", "DrGrpo", "Estimator", "Gigpo", "Grpo", "Ppo", "Reinforce", "Rloo", "Tree", "TreeGrpo", "VinePpo",
    "full_returns", "steered", "trained_mass",
]  # fmt: skip


class Reinforce(Strategy):
    """Plain policy gradient: g = sum_e w_e U_e S_e, w_e the mass. No baseline.

    Williams 1992; for trees, the case b = 0 of :class:`Tree`. Shapes: U, w [S]. Unbiased for predictable forks.
    Biased when: forks were chosen by looking at what came later (refused).
    """

    kind: Literal["reinforce"] = "reinforce"

    def credit(self, segments: Segments) -> Credit:
        """[N] credit. Raises ValueError when a fork looked ahead."""
        refuse_look_ahead(segments, self.kind)
        return Credit.of(segments, segments.mean_up(segments.reward), trained_mass(segments))


class Rloo(Strategy):
    """Leave-one-out over the leaves: A_l = R_l - mean of R over the other leaves; each leaf weighs 1/L.

    Kool et al. 2019, Ahmadian et al. 2024. All tokens on the path of leaf l receive A_l; a token shared by several
    leaves receives the sums of the positive and of the negative parts. Shapes: R, A [L] of L leaves.
    A single leaf has nothing to be compared with: A = 0, no update.
    Biased when: there is any fork below the root, since the baseline then contains rollouts that took the same action.
    """

    kind: Literal["rloo"] = "rloo"

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        returns = leaf_returns(segments)
        return leafwise(segments, rounded(leave_one_out_difference(returns), returns))


class DrGrpo(Strategy):
    """Group mean, own return included, no standard deviation: A_l = R_l - mean R; each leaf weighs 1/L.

    Liu et al. 2025 ("Dr. GRPO"). On a flat group exactly (1 - 1/L) times :class:`Rloo`; a single leaf gives 0.
    Biased when: there is any fork below the root: the factor differs between levels, so the direction changes.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        returns = leaf_returns(segments)
        return leafwise(segments, rounded(returns - mean(returns), returns))


class Grpo(Strategy):
    """A_l = (R_l - mean R) / (std R + eps), std with L - 1; each leaf weighs 1/L. A single leaf gives 0.

    Shao et al. 2024; std and eps as in TRL (1e-4, added to the std).
    Biased when: always in length and direction across tasks (tasks with a small std weigh more); within one flat group
    the std depends on the action too; with forks below the root also as :class:`DrGrpo`.
    """

    kind: Literal["grpo"] = "grpo"
    eps: float = Field(default=1e-4, gt=0.0)

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        returns = leaf_returns(segments)
        centred = rounded(returns - mean(returns), returns)
        spread = float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0
        return leafwise(segments, centred / (spread + self.eps))


class Bpo(Strategy):
    """Branching Policy Optimization as published (arXiv 2607.14171), for comparison.

    Eq. 3: at a fork with K siblings (the parent's own continuation is sibling 0), A^(i) = R^(i) - mean of the other R;
    R^(i) is the return of that rollout itself, not a mean over what was forked from it.
    Eq. 4: a parent's segment before the fork receives lam^(turns between) A^(0), summed over the later forks.
    Eq. 5 at ratio 1: g = (1/Z) sum over segments of A S. Shapes: A [S].

    A segment that starts at a fork receives Eq. 3 alone. Two points of the text are open and are options. ``post``:
    what the segments after a fork's first one receive: nothing (``none``) or their rollout's local advantage
    (``inherit``). ``normaliser``: Z = 1 (``sum``), the number of leaves (``leaves``) or of sampled tokens (``pairs``).
    A fork at the first token is the root group. Every branch is the backbone of what was forked from it.

    Biased when: always, on whatever precedes the first fork. Eq. 4 carries no signal: given the history up to the fork
    A^(0) has mean zero whatever came before, so the propagated term has mean zero for every lam and every MDP, and the
    mean gradient of the steps before the first fork is 0. It only adds variance; lam = 0 removes that and not the bias.
    Steps after n forks are over-weighted against each other. Under look-ahead selection the local terms are biased too.
    """

    kind: Literal["bpo"] = "bpo"
    lam: Fraction = 0.95
    post: Literal["none", "inherit"] = "none"
    normaliser: Literal["sum", "leaves", "pairs"] = "leaves"

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        advantage = rounded(self._advantage(segments), segments.sum_down(segments.reward))
        size = {
            "sum": 1.0,
            "leaves": max(1.0, float(np.sum(segments.leaf & segments.trained))),
            "pairs": max(1.0, float(np.sum(segments.to_tokens(segments.trained.astype(float))))),
        }[self.normaliser]
        return Credit.of(segments, advantage, np.full(len(advantage), 1.0 / size))

    def _advantage(self, segments: Segments) -> Array:
        """[S] Eq. 3, Eq. 4 and ``post`` along each branch."""
        local = _local_advantage(segments)
        advantage = np.zeros(len(local))
        for b in np.unique(segments.branch):
            own = np.flatnonzero(segments.branch == b)
            forks = [s for s in own if np.isfinite(local[s])]
            for s in own:
                later = [f for f in forks if f > s]
                if s in forks:
                    advantage[s] = local[s]
                elif later:
                    advantage[s] = sum(self.lam ** float(segments.turn[f] - segments.turn[s]) * local[f] for f in later)
                elif self.post == "inherit" and forks:
                    advantage[s] = local[forks[-1]]
        return advantage


class Tree(Strategy):
    """The unbiased tree estimator, and the default.

    g = sum_e w_e (P_e + U_e - beta b_e) S_e, w_e the mass, and b_e a mixture of leave-one-out means of full returns:
    at a child of the root group, the mean of P + U over the other roots; at a child of a deeper fork, gamma times the
    mean of P + U over its siblings plus (1 - gamma) times the b of the segment above; elsewhere the b of the segment
    above. gamma = 1 is the nearest fork's baseline alone, gamma = 0 the roots' alone. Shapes: all [S].

    ``gamma``: one number, or one for each level of forks below the roots (the last one holds for deeper levels).
    ``baseline_scale``: beta, 1 unless lagged data say otherwise (confident policies want less). Both must come from
    earlier or other tasks' data; fitted to the same trees they break unbiasedness.

    Source: a mass-weighted leave-one-out policy gradient; with the root group alone it is :class:`Rloo`. Unbiased for
    every scheduler that is predictable, whatever the shape: each b_e is, given the history at its fork, independent of
    the action that it is compared with. A fork left with one child has no baseline of its own. A single root has no
    root baseline (b = 0 there): still unbiased, with the variance of REINFORCE before the first fork; use B >= 2.
    Biased when: forks looked ahead (refused), gamma or beta depend on these returns, or branches *fail* for reasons
    that depend on what they did.
    """

    kind: Literal["tree"] = "tree"
    gamma: Fraction | Annotated[tuple[Fraction, ...], Field(min_length=1)] = 0.5
    baseline_scale: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)

    def credit(self, segments: Segments) -> Credit:
        """[N] credit. Raises ValueError when a fork looked ahead."""
        refuse_look_ahead(segments, self.kind)
        full = full_returns(segments)
        advantage = rounded(full - self.baseline_scale * self.baseline(segments, full), full)
        return Credit.of(segments, advantage, trained_mass(segments))

    def baseline(self, segments: Segments, full: Array) -> Array:
        """[S] b_e from the full returns [S] (see the class)."""
        value = full.tolist()
        base, level = [0.0] * len(value), [0] * len(value)
        for parent, group in enumerate(segments.children()):
            if len(group) < 2:
                for c in group:
                    base[c], level[c] = base[parent], level[parent]
                continue
            gamma = self._gamma(level[parent]) if parent else 1.0
            total = sum(value[c] for c in group)
            for c in group:
                others = (total - value[c]) / (len(group) - 1)
                base[c] = gamma * others + (1.0 - gamma) * base[parent]
                level[c] = level[parent] + (parent > 0)
        return np.array(base)

    def _gamma(self, level: int) -> float:
        if isinstance(self.gamma, tuple):
            return self.gamma[min(level, len(self.gamma) - 1)]
        return self.gamma


Estimator = Annotated[
    Reinforce | Rloo | Grpo | DrGrpo | Bpo | Tree | Ppo | VinePpo | Gigpo | TreeGrpo, Field(discriminator="kind")
]


def steered(estimator: Estimator, gammas: tuple[float, ...]) -> Estimator:
    """The estimator with the gammas that a scheduler planned with its forks, where it has a use for them. They must
    come from earlier data. Empty: unchanged."""
    return estimator.model_copy(update={"gamma": gammas}) if gammas and isinstance(estimator, Tree) else estimator


def _local_advantage(segments: Segments) -> Array:
    """[S] Eq. 3 of BPO for the segments that start at a fork, NaN elsewhere.

    A member whose own rollout failed (its segments are kept for what was forked further on) has no return: it is left
    out. A fork with fewer than two returns has no advantage.
    """
    total = segments.sum_down(segments.reward)
    own = {int(segments.branch[s]): total[s] for s in np.flatnonzero(segments.leaf)}
    local = np.full(len(total), np.nan)
    for children in segments.children():
        group = [c for c in children if int(segments.branch[c]) in own]
        if len(group) > 1:
            local[group] = leave_one_out_difference(np.array([own[int(segments.branch[c])] for c in group]))
    return local
