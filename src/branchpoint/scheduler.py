"""Where to fork. A scheduler is its own configuration; it hands out one :class:`Watch` for each growing branch.

The grower shows a watch the entropy of a turn's first token before it is sampled, so that siblings of the whole action
can leave at once, and every action right after it was sampled and *before it is played*, so that a snapshot can still
be taken. A **predictable** scheduler answers at once, from the entropies up to and including the token in question (an
entropy is known before its token is sampled) and from keyed coins that nothing else uses; its forks carry the
probability with which they were chosen. A **look-ahead** scheduler ranks all positions of the finished branch; it
answers in ``finish``, its forks carry no propensity, and the unbiased estimator refuses them. Meanwhile it names the
turns whose snapshots may still be wanted: at most ``max_forks``.

Positions are those of the path from the root: turn, token within the action, and sampled tokens before it. A watch
never forks where its branch started (that node has its children already), with one exception: ``start`` makes the very
first token of a single root a candidate, which turns the root group itself into a fork.

``boundary`` = "turn": forks at token 0 of a turn, and ``entropy`` says what a turn's entropy is: that before the first
token (``first_token``, the only one known before the action), the mean over the action (``action_mean``) or the largest
(``max_token``). ``boundary`` = "token": every token is a candidate with its own entropy.

``width`` K counts the branch that goes on, so K - 1 siblings are forked. ``max_forks`` counts per branch; an episode
with fewer positions has fewer forks. ``nested``: whether the siblings fork too. ``spacing``: the least number of
sampled tokens between two forks of one path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from branchpoint.noise import Noise
from branchpoint.planned import Planned
from branchpoint.tree import Branch, RolloutTree
from branchpoint.watch import (
    ROOT,
    Candidate,
    EntropyOf,
    Later,
    Never,
    Now,
    Point,
    Positions,
    Schedule,
    Side,
    Start,
    Unit,
    Watch,
    fork_at,
    turn_entropy,
)


class Flat(Schedule):
    """``roots`` independent rollouts and no fork: the group of RLOO and GRPO."""

    kind: Literal["flat"] = "flat"

    def watch(self, noise: Noise, start: Start = ROOT) -> Watch:
        """A watch that never forks."""
        return Never()


class _Forking(Schedule):
    """What all schedulers that fork share. Subclasses say what they watch for in ``_open``."""

    nested: bool = False
    boundary: Unit = "turn"
    start: bool = False

    @model_validator(mode="after")
    def _single_root(self) -> Self:
        if self.start and self.roots != 1:
            raise ValueError("start: a fork at the very first token *is* the root group; it needs roots = 1")
        return self

    def watch(self, noise: Noise, start: Start = ROOT) -> Watch:
        """A watch on a branch that starts there. ``noise.private`` drives the coins of this branch and nothing else."""
        if start.depth and not self.nested:
            return Never()
        return self._open(start, noise.child("fork"))

    def _open(self, start: Start, noise: Noise) -> Watch:
        raise NotImplementedError

    def _positions(self, start: Start, entropy: EntropyOf) -> Positions:
        return Positions(start, self.boundary, entropy, self.start and start.depth == 0)


Width = Annotated[int, Field(ge=1)]


def _no_single(width: int) -> None:
    if width < 2:
        raise ValueError("width: 1 makes no sibling (the branch itself counts); use kind: flat, or width >= 2")


class Fixed(_Forking):
    """Forks at fixed fractions of the expected length: the designs of docs/math.md, section 5.

    ``at``: increasing fractions in (0, 1]; ``expected``: the expected length of an episode in ``unit`` (turns, or
    sampled tokens); the l-th fork of a path has ``width[l]`` children (or ``width``). A position counted in tokens is
    taken at the first boundary at or after it; positions that fall together make one fork. Predictable.
    ``adapt``: :meth:`update` replaces ``expected`` by the mean length of the last batch's root rollouts.
    """

    kind: Literal["fixed"] = "fixed"
    at: Annotated[tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...], Field(min_length=1)] = (0.5,)
    width: Width | tuple[Width, ...] = 2
    unit: Unit = "turn"
    expected: float = Field(default=10.0, gt=0.0, allow_inf_nan=False)
    adapt: bool = True
    nested: bool = True

    @model_validator(mode="after")
    def _valid(self) -> Self:
        for w in self.width if isinstance(self.width, tuple) else (self.width,):
            _no_single(w)
        if isinstance(self.width, tuple) and len(self.width) != len(self.at):
            raise ValueError(f"width: {len(self.width)} widths for {len(self.at)} positions in at")
        if any(a >= b for a, b in pairwise(self.at)):
            raise ValueError("at: the fractions must increase")
        if self.at[0] == 0.0 and not self.start:
            raise ValueError("at: a fork at 0 is the root group; raise roots instead (or roots = 1 with start)")
        return self

    def _open(self, start: Start, noise: Noise) -> Watch:
        targets = [round(a * self.expected) for a in self.at]
        widths = self.width if isinstance(self.width, tuple) else (self.width,) * len(targets)
        positions = self._positions(start, "first_token")
        return fork_at(positions, self.unit, targets, widths, self.start and start.depth == 0)

    def update(self, trees: Sequence[RolloutTree]) -> Self:
        """With the mean length of these trees' root rollouts as ``expected`` (unchanged when there is none)."""
        lengths = [
            _length(b, self.unit) for tree in trees for b in tree.scored if b.fork is None or b.fork.node[1:] == (0, 0)
        ]
        return self.model_copy(update={"expected": float(np.mean(lengths))}) if self.adapt and lengths else self


class _Counted(_Forking):
    """Schedulers with one width and a largest number of forks."""

    width: int = Field(default=2, ge=1)
    max_forks: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _wide(self) -> Self:
        _no_single(self.width)
        return self


class Threshold(_Counted):
    """Forks at the first positions whose entropy exceeds a number fixed beforehand. Predictable.

    ``threshold`` (nats): None forks nowhere, until :meth:`update` has seen a batch. ``quantile``: the next threshold is
    this quantile of the entropies of the batch just seen, so it always lags by one batch (a quantile of the batch that
    it is applied to would look ahead). None keeps ``threshold`` as it is.
    """

    kind: Literal["threshold"] = "threshold"
    threshold: float | None = Field(default=None, allow_inf_nan=False)
    quantile: float | None = Field(default=0.8, ge=0.0, le=1.0)
    spacing: int = Field(default=0, ge=0)
    entropy: Literal["first_token"] = "first_token"

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.threshold is None and self.quantile is None:
            raise ValueError("threshold: give a number of nats, or a quantile to learn it from")
        return self

    def _open(self, start: Start, noise: Noise) -> Watch:
        least = self.threshold
        if least is None:
            return Never()

        def rule(c: Candidate) -> Point | None:
            return Point(c.turn, c.token, self.width, 1.0) if c.entropy > least else None

        return Now(self._positions(start, self.entropy), rule, self.max_forks, self.spacing)

    def update(self, trees: Sequence[RolloutTree]) -> Self:
        """With the quantile of these trees' entropies as the threshold (unchanged when there are none)."""
        if self.quantile is None:
            return self
        seen = [h for tree in trees for b in tree.scored for h in self._entropies(b)]
        return self.model_copy(update={"threshold": float(np.quantile(seen, self.quantile))}) if seen else self

    def _entropies(self, b: Branch) -> Iterator[float]:
        """The entropies of the positions that the branch itself added, its fork left out (its parent has it)."""
        for i, turn in enumerate(b.turns):
            repeated = 1 if i == 0 and b.fork is not None else 0
            if self.boundary == "token":
                yield from map(float, turn.entropies[repeated:])
            elif len(turn.entropies) and not repeated:
                yield turn_entropy(turn.entropies, self.entropy)


class Random(_Counted):
    """Tosses a coin of fixed probability at every position. Predictable; the forks carry the probability."""

    kind: Literal["random"] = "random"
    probability: float = Field(gt=0.0, le=1.0)
    spacing: int = Field(default=0, ge=0)

    def _open(self, start: Start, noise: Noise) -> Watch:
        def rule(c: Candidate) -> Point | None:
            heads = noise.private(c.turn, c.token).random() < self.probability
            return Point(c.turn, c.token, self.width, self.probability) if heads else None

        return Now(self._positions(start, "first_token"), rule, self.max_forks, self.spacing)


class EquallySpaced(_Counted):
    """Forks after every ``every`` turns or sampled tokens of the path (``unit``). Predictable.

    Counted in tokens, a fork is made at the first boundary at or after the mark.
    """

    kind: Literal["equally_spaced"] = "equally_spaced"
    every: int = Field(ge=1)
    unit: Unit = "turn"

    def _open(self, start: Start, noise: Noise) -> Watch:
        passed = (start.turn if self.unit == "turn" else start.tokens) // self.every

        def rule(c: Candidate) -> Point | None:
            nonlocal passed
            before, passed = passed, (c.turn if self.unit == "turn" else c.tokens) // self.every
            return Point(c.turn, c.token, self.width, 1.0) if passed > before else None

        return Now(self._positions(start, "first_token"), rule, self.max_forks, 0)


class Vine(Schedule):
    """Value-only rollouts restored at every turn of ``roots`` independent rollouts, for estimator ``vineppo``.

    ``rollouts`` of them a turn. Those of the first turn serve all roots. They are neither trained nor forked, and count
    in the ledger like all others. Predictable.
    """

    kind: Literal["vine"] = "vine"
    rollouts: int = Field(default=4, ge=1)

    def group(self) -> tuple[Point, ...]:
        """The other roots, and the rollouts of the first turn."""
        return (*super().group(), Point(0, 0, 1 + self.rollouts, 1.0, "value"))

    def watch(self, noise: Noise, start: Start = ROOT) -> Watch:
        """A watch that restores rollouts at each later turn."""
        return Side(start, self.rollouts, "value")


class OracleValue(Schedule):
    """Forks where pilots disagree: auxiliary rollouts are restored at every turn, and the first turns at which their
    returns-to-go have a standard deviation above ``threshold`` are forked.

    That spread bounds from above how much the values of the actions differ; the luck that follows is in it too.
    ``rollouts`` pilots a turn. They come on top of the design and cost as much as any rollout (the ledger counts them):
    a bound on what a cheaper rule could know, not a way to save. Predictable: pilots are independent of what the branch
    does from there on, and they decide *only* that; no value, baseline or gradient sees them again.
    """

    kind: Literal["oracle_value"] = "oracle_value"
    nested: bool = False
    width: int = Field(default=2, ge=2)
    max_forks: int = Field(default=1, ge=1)
    rollouts: int = Field(default=4, ge=2)
    threshold: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    def watch(self, noise: Noise, start: Start = ROOT) -> Watch:
        """A watch that sends pilots at each later turn."""
        if start.depth and not self.nested:
            return Never()
        return Side(start, self.rollouts, "pilot", self.threshold, self.width, self.max_forks)


class _LookAhead(_Counted):
    """Ranks the positions of a finished branch. Biased (docs/math.md, section 4); for comparison."""

    predictable: ClassVar[bool] = False
    spacing: int = Field(default=64, ge=0)
    entropy: EntropyOf = "first_token"

    @model_validator(mode="after")
    def _one_entropy(self) -> Self:
        if self.boundary == "token" and self.entropy != "first_token":
            raise ValueError("entropy: with boundary = token every token has its own; leave it at first_token")
        return self

    def _open(self, start: Start, noise: Noise) -> Watch:
        def score(c: Candidate) -> float:
            return self._score(c, noise)

        return Later(self._positions(start, self.entropy), score, self.max_forks, self.spacing, self.width)

    def _score(self, c: Candidate, noise: Noise) -> float:
        raise NotImplementedError


class TopEntropy(_LookAhead):
    """The ``max_forks`` positions of highest entropy, ``spacing`` tokens apart: the rule of the BPO paper."""

    kind: Literal["top_entropy"] = "top_entropy"

    def _score(self, c: Candidate, noise: Noise) -> float:
        return c.entropy


class LowestEntropy(_LookAhead):
    """The ``max_forks`` positions of lowest entropy: the control of :class:`TopEntropy`."""

    kind: Literal["lowest_entropy"] = "lowest_entropy"

    def _score(self, c: Candidate, noise: Noise) -> float:
        return -c.entropy


class Uniform(_LookAhead):
    """``max_forks`` positions of the finished branch, drawn uniformly (without spacing: without replacement).

    Not predictable: the chance of a position depends on how long the episode became. See :class:`Random`.
    """

    kind: Literal["uniform"] = "uniform"

    def _score(self, c: Candidate, noise: Noise) -> float:
        return float(noise.private(c.turn, c.token).random())


Scheduler = Annotated[
    Flat
    | Fixed
    | Threshold
    | Random
    | EquallySpaced
    | Vine
    | OracleValue
    | Planned
    | TopEntropy
    | LowestEntropy
    | Uniform,
    Field(discriminator="kind"),
]


def _length(b: Branch, unit: Unit) -> int:
    """The length of a root rollout."""
    return len(b.turns) if unit == "turn" else sum(len(t.action) for t in b.turns)
