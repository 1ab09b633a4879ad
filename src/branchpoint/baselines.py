"""Published baselines: PPO with a critic, VinePPO, GiGPO and Tree-GRPO. Notation as in the docstring of ``advantage``.

An episode that a limit cut ends there, with no value beyond: the limit is part of the task.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from branchpoint.credit import (
    Credit,
    Fraction,
    Strategy,
    Targets,
    full_returns,
    leaf_returns,
    leafwise,
    mean,
    rounded,
    trained_mass,
)
from branchpoint.tree import Array, Segments

Discount = Annotated[float, Field(gt=0.0, le=1.0)]


class Ppo(Strategy):
    """PPO's advantages by GAE, from the values V of a critic that shares the policy's trunk.

    A_t = delta_t + discount lam A_{t+1}, delta_t = r_t + discount V_{t+1} - V_t, V and A beyond the end 0 (Schulman et
    al. 2016, Eq. 16; 2017, Eqs. 11-12); each weighs its mass, 1/B in a flat group of B. Where a tree forks, V_{t+1} and
    A_{t+1} are means over the children: the mean of GAE over the leaves below. The critic regresses on A_t + V_t with
    ``value_coef`` times half the squared error. A group is not compared within itself, and no batch is whitened.

    ``unit``: a step is a ``turn`` (all tokens of the action share its advantage, V is read before its first token; an
    action that forks inside is as many steps as it has parts) or a ``token`` (observations are no steps).
    ``value_lr``: the head's learning rate; None: the learner's.
    Biased when: lam < 1 and V is not the true value, or discount < 1; unbiased at lam = discount = 1 for any V.
    """

    kind: Literal["ppo"] = "ppo"
    critic: ClassVar[bool] = True
    lam: Fraction = 0.95
    discount: Discount = 1.0
    unit: Literal["turn", "token"] = "turn"
    value_coef: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    value_lr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)

    def credit(self, segments: Segments, values: Array | None = None) -> Credit:
        """[N] credit from ``values`` [N], V before each sampled token. Raises ValueError without values."""
        advantage = self._spread(segments, self._gae(segments, self._checked(segments, values), self.lam))
        w = segments.to_tokens(np.where(segments.trained, trained_mass(segments), 0.0))
        return Credit(up=w * np.maximum(advantage, 0.0), down=w * np.minimum(advantage, 0.0), share=w)

    def targets(self, segments: Segments, values: Array) -> Targets:
        """What the critic learns from these segments, given its values [N] before the update."""
        v = self._checked(segments, values)
        w = np.where(segments.trained, trained_mass(segments), 0.0)
        weight = np.zeros(len(v))
        for s, steps in enumerate(self._steps(segments)):
            weight[steps] = w[s]
        at = weight > 0
        lam_return, plain_return = (np.where(at, self._gae(segments, v, lam) + v, 0.0) for lam in (self.lam, 1.0))
        return Targets(value=lam_return, weight=weight, observed=plain_return, predicted=np.where(at, v, 0.0))

    def _checked(self, segments: Segments, values: Array | None) -> Array:
        if values is None:
            raise ValueError("estimator 'ppo' needs the values of a critic; only training has one")
        if len(values) != len(segments.tokens) or not np.all(np.isfinite(values)):
            raise ValueError(f"values must be {len(segments.tokens)} finite numbers, one a token")
        return np.asarray(values, np.float64)

    def _steps(self, segments: Segments) -> list[list[int]]:
        """[S] the tokens before which a value is read."""
        out = []
        for a, b in zip(segments.start[:-1].tolist(), segments.start[1:].tolist(), strict=True):
            own = (a + np.flatnonzero(segments.sampled[a:b])).tolist()
            out.append(own if self.unit == "token" else own[:1])
        return out

    def _gae(self, segments: Segments, v: Array, lam: float) -> Array:
        """[N] A at the steps' tokens, 0 elsewhere."""
        out, steps, children = np.zeros(len(v)), self._steps(segments), segments.children()
        entry = np.zeros((len(steps), 2))  # V and A of a segment's first step
        for s in range(len(steps) - 1, 0, -1):
            after = np.mean(entry[list(children[s])], axis=0) if children[s] else np.zeros(2)
            reward = float(segments.reward[s])
            if not steps[s]:  # no token of its own to score: it only hands on
                entry[s] = reward + self.discount * after[0], lam * self.discount * after[1]
            for t in reversed(steps[s]):
                delta = reward + self.discount * after[0] - v[t]
                out[t] = delta + self.discount * lam * after[1]
                after, reward = np.array([v[t], out[t]]), 0.0
                entry[s] = after
        return out

    def _spread(self, segments: Segments, at_steps: Array) -> Array:
        if self.unit == "token":
            return at_steps
        return segments.to_tokens(np.array([sum(at_steps[t] for t in steps) for steps in self._steps(segments)]))


class VinePpo(Strategy):
    """VinePPO: values from auxiliary rollouts restored at each state instead of a critic.

    A_t = r_t + V(s_{t+1}) - V(s_t), V(s) the mean return-to-go of the value-only rollouts restored at s, 0 beyond the
    end (Kazemnejad et al. 2024, at discount 1); each weighs its mass. Rollouts come from scheduler ``vine``.
    Where a state has none (they failed, or no snapshot could be taken) its neighbours' stand in: the step is joined to
    the next one, A = r_t + r_{t+1} + V(s_{t+2}) - V(s_t) for both.

    Unbiased: given the history, the rollouts that make V are independent of the action that it is compared with.
    Biased when: rollouts fail for reasons that depend on what they did.
    """

    kind: Literal["vineppo"] = "vineppo"

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        full = full_returns(segments)
        children, trained = segments.children(), trained_mass(segments) > 0
        after, before = full.copy(), np.zeros(len(full))  # full returns: rewards so far plus V
        aux = [[c for c in group if not trained[c]] for group in children]
        known = [float(np.mean(full[a])) if a else None for a in aux]
        for s in range(len(full) - 1, -1, -1):
            main = [c for c in children[s] if trained[c]]
            value = known[s]
            if value is not None:
                after[s] = value
            elif main:
                after[s] = float(np.mean(after[main]))
        for s in range(1, len(full)):
            p = int(segments.parent[s])
            value = known[p]
            before[s] = before[p] if value is None else value
        return Credit.of(segments, rounded(after - before, full), trained_mass(segments))


class Gigpo(Strategy):
    """Group-in-group: a trajectory's relative return plus, at states met more than once, the step's.

    A = A_E + omega A_S. A_E = (R_l - mean R) / F over the group's leaves; A_S = (G - mean G) / F over all visits of an
    equal state in the group, G the return from the visit on, discounted by turn (Feng et al. 2025). F is the
    standard deviation (n - 1; plus eps) or 1. A state met once has A_S = 0. Two states are equal when the last
    observations are, token by token (and the part of the action before a fork inside it). Each leaf weighs 1/L; with
    forks below the root every leaf counts as a trajectory, and a visit counts once for each leaf below it.

    Biased when: equal observations hide unequal states (V then differs within a group); by the standard deviation and
    the own return in the mean as :class:`Grpo`; with forks below the root as :class:`Rloo`.
    """

    kind: Literal["gigpo"] = "gigpo"
    omega: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    discount: Discount = 0.95
    norm: Literal["std", "none"] = "std"
    eps: float = Field(default=1e-6, gt=0.0)

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        trajectory = self._relative(leaf_returns(segments))
        states = _states(segments)
        visits: list[tuple[int, int, float]] = []  # leaf number, segment, return from there on
        groups: dict[object, list[int]] = {}
        leaves = np.flatnonzero(segments.leaf).tolist()
        for number, leaf in enumerate(leaves):
            s, turn, ahead = leaf, int(segments.turn[leaf]), 0.0
            while s > 0:
                ahead = float(segments.reward[s]) + self.discount ** (turn - int(segments.turn[s])) * ahead
                turn = int(segments.turn[s])
                groups.setdefault(states[s], []).append(len(visits))
                visits.append((number, s, ahead))
                s = int(segments.parent[s])
        step = np.zeros(len(visits))
        for members in groups.values():
            step[members] = self._relative(np.array([visits[i][2] for i in members]))
        weight = np.where(segments.trained[leaves], 1.0 / max(1, int(np.sum(segments.trained[leaves]))), 0.0)
        up, down, share = (np.zeros(len(segments.parent)) for _ in range(3))
        for (number, s, _), local in zip(visits, step, strict=True):
            if segments.trained[s]:
                advantage = trajectory[number] + self.omega * local
                up[s] += weight[number] * max(advantage, 0.0)
                down[s] += weight[number] * min(advantage, 0.0)
                share[s] += weight[number]
        return Credit(up=segments.to_tokens(up), down=segments.to_tokens(down), share=segments.to_tokens(share))

    def _relative(self, x: Array) -> Array:
        return _standardised(x, self.eps) if self.norm == "std" else rounded(x - mean(x), x)


class TreeGrpo(Strategy):
    """Tree-GRPO: a leaf compared with the leaves of its own tree, plus with those of all trees of the task.

    A_l = (R_l - mean) / (std + eps) over the leaves below the same root, plus the same over all leaves (Ji et al. 2025,
    the sum of intra-tree and inter-tree advantages); std with n - 1. Every token of the path receives A_l, summed over
    the leaves below it, each of weight 1/L. Here each independent root starts a tree. Without forks below the roots
    this is GRPO. The paper forks at nodes drawn from the finished tree: scheduler ``uniform``.

    Biased when: as :class:`Grpo`, and with any fork below the root: leaves that took the same action are compared.
    """

    kind: Literal["tree_grpo"] = "tree_grpo"
    eps: float = Field(default=1e-6, gt=0.0)

    def credit(self, segments: Segments) -> Credit:
        """[N] credit."""
        returns = leaf_returns(segments)
        first = np.zeros(len(segments.parent), np.int64)  # of each segment, the root's first segment above it
        for s in range(1, len(first)):
            p = int(segments.parent[s])
            first[s] = first[p] if p else s
        tree = first[segments.leaf]
        advantage = _standardised(returns, self.eps)
        for root in np.unique(tree):
            advantage[tree == root] += _standardised(returns[tree == root], self.eps)
        return leafwise(segments, advantage)


def _states(segments: Segments) -> list[object]:
    """[S] a key of the state in which each segment starts: the last observation, and the action so far."""
    starts: list[object] = []
    ends: list[object] = []
    for s, p in enumerate(segments.parent.tolist()):
        starts.append(ends[p] if p >= 0 else None)
        own = slice(segments.start[s], segments.start[s + 1])
        tokens, sampled = segments.tokens[own], segments.sampled[own]
        action, observation = tokens[sampled].tobytes(), tokens[~sampled].tobytes()
        ends.append(observation if observation else (starts[s], action))
    return starts


def _standardised(x: Array, eps: float) -> Array:
    """(x - mean) / (std + eps), std with n - 1; 0 for a single value."""
    spread = float(np.std(x, ddof=1)) if len(x) > 1 else 0.0
    return rounded(x - mean(x), x) / (spread + eps)
