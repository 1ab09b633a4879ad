"""Every tree that a scheduler can grow in a tabular process, with its probability.

The trees are ordinary :class:`RolloutTree` objects and the forks are those of the scheduler's own watches, so what is
measured on them is the library's own code: ``Segments.of``, then an estimator, then the sum over sampled tokens of
credit times score.

One step of the process is one sampled token. ``turn_tokens`` of them make a turn (1: a step is a turn); with more, only
the last step of a turn may carry a reward or end the episode, as in a real action.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from branchpoint.advantage import Credit
from branchpoint.noise import Noise
from branchpoint.probe.tabular import Mdp, Outcome
from branchpoint.scheduler import Start
from branchpoint.tree import Array, Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Task

Weighted = dict[int, float]
"""Numbers of edges (a branch each, with all that grows on it) and their probabilities."""
Node = tuple[int, ...]
"""The numbers of the edges that leave a node."""


class Place(NamedTuple):
    """Where a branch starts: steps and rewards before it, and forks above it."""

    step: int
    reward: float
    depth: int


Rule = Callable[[tuple[Outcome, ...], Place], dict[int, int]]
"""From a finished branch and its start to {own step: children there}."""


class Estimates(Protocol):
    """What turns segments into credit."""

    def credit(self, segments: Segments) -> Credit: ...


def scheduled(scheduler: Any, mdp: Mdp, turn_tokens: int = 1, noise: Noise | None = None) -> Rule:
    """The rule of one of the library's schedulers: its own watch is shown the branch, turn by turn."""

    def rule(own: tuple[Outcome, ...], at: Place) -> dict[int, int]:
        turn, token = divmod(at.step, turn_tokens)
        watch = scheduler.watch(noise or Noise(), Start(turn, token, at.step, at.depth))
        steps = list(own)
        points = []
        while steps:
            size = turn_tokens - token
            entropies = np.array([mdp.entropy(o.state) for o in steps[:size]], np.float32)
            if token == 0:
                points += watch.meet(turn, float(entropies[0]))
            points += watch.see(turn, entropies)
            steps, turn, token = steps[size:], turn + 1, 0
        points += watch.finish()
        return {p.turn * turn_tokens + p.token - at.step: p.width for p in points}

    return rule


@dataclass(eq=False)
class Forest:
    """The trees of one process under one rule.

    ``ordered``: keep apart which child of a fork is the parent's own continuation (BPO cares). Otherwise siblings are
    exchangeable and trees that differ only in their order are one tree. ``propensity`` is written on every fork.
    """

    mdp: Mdp
    rule: Rule
    ordered: bool = False
    turn_tokens: int = 1
    propensity: float | None = 1.0
    _edges: list[tuple[Outcome, Node]] = field(default_factory=list)
    _numbers: dict[tuple[Outcome, Node], int] = field(default_factory=dict)
    _branches: dict[tuple[int, Place], dict[Node, float]] = field(default_factory=dict)
    _groups: dict[tuple[int, Place, int], dict[Node, float]] = field(default_factory=dict)
    _turns: dict[tuple[Any, ...], Turn] = field(default_factory=dict)

    def roots(self) -> dict[Node, float]:
        """What a single root can grow into."""
        return self._branch(self.mdp.start, Place(0, 0.0, 0))

    def groups(self, size: int) -> dict[Node, float]:
        """What ``size`` independent roots can grow into."""
        return _multisets({node[0]: p for node, p in self.roots().items()}, size)

    def tree(self, roots: Node, value_only: float | None = None) -> RolloutTree:
        """A node of roots as a rollout tree; ``value_only`` adds an untrained root of one turn with this return."""
        return _Builder(self, value_only).run(roots)

    def cost(self, node: Node) -> int:
        """The number of steps of all its branches, shared ones once."""
        return sum(1 + self.cost(self._edges[e][1]) for e in node)

    def edge(self, number: int) -> tuple[Outcome, Node]:
        """The first step of an edge and what follows it."""
        return self._edges[number]

    def turn(self, tokens: tuple[Outcome, ...], shown: int) -> Turn:
        """A turn; made once."""
        key = (tokens, shown)
        if key not in self._turns:
            action = [self.mdp.token(o.state, o.action) for o in tokens]
            zeros = np.zeros(len(action))
            entropies = [self.mdp.entropy(o.state) for o in tokens]
            if any(o.reward for o in tokens[:-1]):
                raise ValueError("only the last step of a turn may carry a reward")
            self._turns[key] = Turn([shown] if shown >= 0 else [], action, zeros, zeros, entropies, tokens[-1].reward)  # type: ignore[arg-type]
        return self._turns[key]

    def _branch(self, state: int, at: Place) -> dict[Node, float]:
        if (state, at) in self._branches:
            return self._branches[state, at]
        out: dict[Node, float] = {}
        for p, own in self.mdp.episodes(state):
            forks = self.rule(own, at)
            nodes: dict[Node, float] = {(): p}
            for i in reversed(range(len(own))):
                alone = {self._number(own[i], node): q for node, q in nodes.items()}
                here = Place(at.step + i, at.reward + sum(o.reward for o in own[:i]), at.depth + 1)
                nodes = self._node(alone, own[i].state, here, forks.get(i, 1))
            for node, q in nodes.items():
                out[node] = out.get(node, 0.0) + q
        self._branches[state, at] = out
        return out

    def _node(self, alone: Weighted, state: int, here: Place, width: int) -> dict[Node, float]:
        if width == 1:
            return {(e,): p for e, p in alone.items()}
        out: dict[Node, float] = {}
        for (e, p), (others, q) in itertools.product(alone.items(), self._siblings(state, here, width - 1).items()):
            node = (e, *others) if self.ordered else tuple(sorted((e, *others)))
            out[node] = out.get(node, 0.0) + p * q
        return out

    def _siblings(self, state: int, here: Place, count: int) -> dict[Node, float]:
        key = (state, here, count)
        if key not in self._groups:
            single = {node[0]: p for node, p in self._branch(state, here).items()}
            self._groups[key] = _multisets(single, count)
        return self._groups[key]

    def _number(self, first: Outcome, rest: Node) -> int:
        key = (first, rest)
        if key not in self._numbers:
            self._numbers[key] = len(self._edges)
            self._edges.append(key)
        return self._numbers[key]


def _multisets(single: Weighted, count: int) -> dict[Node, float]:
    """Unordered draws with replacement, with the probability of any order."""
    out: dict[Node, float] = {}
    for drawn in itertools.combinations_with_replacement(sorted(single), count):
        orders = math.factorial(count)
        for _, same in itertools.groupby(drawn):
            orders //= math.factorial(len(list(same)))
        out[drawn] = orders * math.prod(single[e] for e in drawn)
    return out


class _Builder:
    """Writes a node of edges as branches: the first edge of a node goes on, the others are forked from it."""

    def __init__(self, forest: Forest, value_only: float | None) -> None:
        self.forest, self.value_only = forest, value_only
        self.branches: list[Branch] = []

    def run(self, roots: Node) -> RolloutTree:
        pending: list[tuple[int, Fork | None]] = [(roots[0], None)]
        pending += [(e, Fork(0, 0, 0, self.forest.propensity)) for e in roots[1:]]
        while pending:
            edge, fork = pending.pop(0)
            pending += self._branch(edge, fork)
        if self.value_only is not None:
            turn = Turn([0], [0], [0.0], [0.0], [0.0], self.value_only)  # type: ignore[arg-type]
            self.branches.append(Branch(len(self.branches), Fork(0, 0, 0, 1.0), (turn,), "done", trained=False))
        return RolloutTree(Task("tabular", "tabular"), tuple(self.branches))

    def _branch(self, edge: int, fork: Fork | None) -> Iterator[tuple[int, Fork]]:
        forest, number = self.forest, len(self.branches)
        size = forest.turn_tokens
        step = 0 if fork is None else fork.turn * size + fork.token
        own: list[Outcome] = []
        turns: list[Turn] = []
        forks: list[tuple[int, Fork]] = []
        node: Node = (edge,)
        while node:
            forks += [(e, Fork(number, step // size, step % size, forest.propensity)) for e in node[1:]]
            first, node = forest.edge(node[0])
            own.append(first)
            step += 1
            if step % size == 0 or not node:
                shown = own[0].state if turns or fork is None else -1
                turns.append(forest.turn(tuple(own), shown))
                own = []
        self.branches.append(Branch(number, fork, tuple(turns), "done"))
        return iter(forks)


def gradient(mdp: Mdp, segments: Segments, credit: Credit) -> Array:
    """[parameters] the sum over sampled tokens of (up + down) times their score."""
    given = (credit.up + credit.down)[segments.sampled]
    weights = np.bincount(segments.tokens[segments.sampled], given, minlength=len(mdp.scores))
    return weights @ mdp.scores


@dataclass(frozen=True, eq=False)
class Moments:
    """The exact mean, and the trace of the covariance, of a random vector."""

    mean: Array
    trace: float

    @staticmethod
    def of(p: Array, values: Array) -> Moments:
        """From probabilities [n] and values [n, parameters]."""
        mean = p @ values
        return Moments(mean, float(p @ np.sum((values - mean) ** 2, axis=1)))


def exact(forest: Forest, nodes: dict[Node, float], estimator: Estimates) -> Moments:
    """The moments of an estimator's gradient over these trees."""
    values = []
    for node in nodes:
        segments = Segments.of(forest.tree(node))
        values.append(gradient(forest.mdp, segments, estimator.credit(segments)))
    return Moments.of(np.array(list(nodes.values())), np.array(values))
