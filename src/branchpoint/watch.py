"""The eyes of a scheduler on one growing branch: positions, and the two ways to choose among them; and what all
schedulers have in common.

See :mod:`branchpoint.scheduler` for the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from branchpoint.tree import Floats, RolloutTree

EntropyOf = Literal["first_token", "action_mean", "max_token"]
Unit = Literal["turn", "token"]


Role = Literal["trained", "value", "pilot"]
"""What a sibling is for: to be learnt from; to make values and baselines only; to tell the scheduler where to fork."""


class Point(NamedTuple):
    """A fork to make: where, into how many children (the branch itself included), with what propensity, and what the
    fresh siblings are for."""

    turn: int
    token: int
    width: int
    propensity: float | None
    role: Role = "trained"


class Watch(Protocol):
    """The eyes of a scheduler on one branch. One owner; calls in the order of the episode, at each turn ``meet`` (if it
    is the branch's own from its first token on) and then ``see``."""

    def meet(self, turn: int, entropy: float) -> tuple[Point, ...]:
        """The forks to make before the first token of a turn, whose entropy (nats) is known before it is sampled."""
        ...

    def see(self, turn: int, entropies: Floats) -> tuple[Point, ...]:
        """Take in the branch's own sampled tokens of a turn (entropies [a], nats). The other forks of it, in order."""
        ...

    def keeps(self) -> frozenset[int]:
        """The turns whose snapshots may still be forked from; all others may be discarded. At most ``max_forks``."""
        ...

    def judge(self, turn: int, returns: Sequence[float]) -> tuple[Point, ...]:
        """The forks of a turn given the returns-to-go of its pilots; asked turn by turn, once they have ended."""
        ...

    def finish(self) -> tuple[Point, ...]:
        """The forks chosen by looking at the whole branch, in order. Empty for a predictable scheduler."""
        ...


class Candidate(NamedTuple):
    """A position where a branch could fork, its distance from the root in sampled tokens, and its entropy."""

    turn: int
    token: int
    tokens: int
    entropy: float


@dataclass(frozen=True, slots=True)
class Start:
    """Where a watched branch starts: turn, token within the action, sampled tokens of the path before it, and forks
    between the roots (depth 0) and the branch."""

    turn: int = 0
    token: int = 0
    tokens: int = 0
    depth: int = 0


ROOT = Start()


class Positions:
    """Turns entropies into candidates, in path coordinates. ``first``: the very first token is a candidate too."""

    def __init__(self, start: Start, boundary: Unit, entropy: EntropyOf, first: bool) -> None:
        self.start, self.first = start, first
        self.boundary: Unit = boundary
        self.entropy: EntropyOf = entropy
        self.seen = start.tokens

    def ahead(self, turn: int, entropy: float) -> list[Candidate]:
        """The first token of a turn as a candidate, before it is sampled."""
        return self._after_start([Candidate(turn, 0, self.seen, entropy)])

    def of(self, turn: int, entropies: Floats) -> list[Candidate]:
        """All candidates of a turn."""
        first = self.start.token if turn == self.start.turn else 0
        before, self.seen = self.seen, self.seen + len(entropies)
        if self.boundary == "token":
            found = [Candidate(turn, first + i, before + i, float(h)) for i, h in enumerate(entropies)]
        else:
            found = [Candidate(turn, 0, before, turn_entropy(entropies, self.entropy))] if len(entropies) else []
        return self._after_start(found)

    def _after_start(self, found: list[Candidate]) -> list[Candidate]:
        origin = (self.start.turn, self.start.token)
        return [c for c in found if (c.turn, c.token) > origin or (self.first and (c.turn, c.token) == origin)]


def turn_entropy(entropies: Floats, of: EntropyOf) -> float:
    if of == "first_token":
        return float(entropies[0])
    return float(np.mean(entropies)) if of == "action_mean" else float(np.max(entropies))


class Never:
    """Forks nowhere."""

    def meet(self, turn: int, entropy: float) -> tuple[Point, ...]:
        return ()

    def see(self, turn: int, entropies: Floats) -> tuple[Point, ...]:
        return ()

    def keeps(self) -> frozenset[int]:
        return frozenset()

    def judge(self, turn: int, returns: Sequence[float]) -> tuple[Point, ...]:
        return ()

    def finish(self) -> tuple[Point, ...]:
        return ()


class Now(Never):
    """Decides at each candidate, in order and by its own entropy: ``rule`` gives the point to fork at, or None."""

    def __init__(
        self, positions: Positions, rule: Callable[[Candidate], Point | None], most: int, spacing: int
    ) -> None:
        self.positions, self.rule, self.left, self.spacing = positions, rule, most, spacing
        self.last = positions.start.tokens if positions.start.depth else -spacing

    def meet(self, turn: int, entropy: float) -> tuple[Point, ...]:
        return self._choose(self.positions.ahead(turn, entropy))

    def see(self, turn: int, entropies: Floats) -> tuple[Point, ...]:
        return self._choose([c for c in self.positions.of(turn, entropies) if c.token])

    def _choose(self, candidates: list[Candidate]) -> tuple[Point, ...]:
        made: list[Point] = []
        for c in candidates:
            if self.left and c.tokens - self.last >= self.spacing and (point := self.rule(c)) is not None:
                made.append(point)
                self.left, self.last = self.left - 1, c.tokens
        return tuple(made)


class Side(Never):
    """Restores ``count`` rollouts on the side at each turn after the start, for ``role``.

    Where they are pilots, a turn at which the standard deviation of their returns exceeds ``least`` is forked into
    ``width`` children, ``most`` times at most; a turn with fewer than two of them left is not.
    """

    def __init__(self, start: Start, count: int, role: Role, least: float = 0.0, width: int = 1, most: int = 0) -> None:
        self.start, self.count, self.least, self.width, self.left = start, count, least, width, most
        self.role: Role = role

    def meet(self, turn: int, entropy: float) -> tuple[Point, ...]:
        return (Point(turn, 0, 1 + self.count, 1.0, self.role),) if turn > self.start.turn else ()

    def judge(self, turn: int, returns: Sequence[float]) -> tuple[Point, ...]:
        if not self.left or len(returns) < 2 or not np.std(returns, ddof=1) > self.least:
            return ()
        self.left -= 1
        return (Point(turn, 0, self.width, 1.0),)


class Later(Never):
    """Keeps the best candidates so far, at most ``most`` of them, by ``score``; ties go to the earlier one.

    A newcomer within the spacing of kept ones replaces them if it beats all of them, and is dropped otherwise; then the
    worst of too many goes. Without spacing these are exactly the best of the whole branch. With it, a position that
    was dropped for a neighbour stays dropped when that neighbour goes: its snapshot is no longer there.
    """

    def __init__(
        self,
        positions: Positions,
        score: Callable[[Candidate], float],
        most: int,
        spacing: int,
        width: int,
    ) -> None:
        self.positions, self.score, self.most, self.spacing, self.width = positions, score, most, spacing, width
        self.least = positions.start.tokens + spacing if positions.start.depth else 0
        self.kept: list[tuple[float, Candidate]] = []

    def see(self, turn: int, entropies: Floats) -> tuple[Point, ...]:
        for c in self.positions.of(turn, entropies):
            if c.tokens >= self.least:
                self._offer(self.score(c), c)
        return ()

    def _offer(self, score: float, c: Candidate) -> None:
        near = [k for k in self.kept if c.tokens - k[1].tokens < self.spacing]
        if any(s >= score for s, _ in near):
            return
        self.kept = [k for k in self.kept if k not in near] + [(score, c)]
        if len(self.kept) > self.most:
            self.kept.remove(min(self.kept, key=lambda k: (k[0], -k[1].tokens)))

    def keeps(self) -> frozenset[int]:
        return frozenset(c.turn for _, c in self.kept)

    def finish(self) -> tuple[Point, ...]:
        return tuple(Point(c.turn, c.token, self.width, None) for _, c in sorted(self.kept, key=lambda k: k[1][:2]))


class Schedule(BaseModel):
    """What all schedulers are: frozen, with ``roots`` independent rollouts that may fork."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    predictable: ClassVar[bool] = True
    roots: int = Field(default=4, ge=1)

    def group(self) -> tuple[Point, ...]:
        """What leaves the first node of a tree besides the first root."""
        return (Point(0, 0, self.roots, 1.0),) if self.roots > 1 else ()

    def update(self, trees: Sequence[RolloutTree]) -> Self:
        """The scheduler for the next batch, given this one. Pure: only *earlier* batches may steer a scheduler."""
        return self

    @property
    def gammas(self) -> tuple[float, ...]:
        """The weights of the siblings' baselines that go with the forks, one a level; empty: the estimator's own."""
        return ()

    def metrics(self) -> dict[str, Any]:
        """What a run's metrics should say about the batch that this scheduler grows."""
        return {}


def fork_at(positions: Positions, unit: Unit, targets: Sequence[int], widths: Sequence[int], again: bool) -> Now:
    """A watch that forks at given positions in ``unit``, or at the first candidates after them; those at or before the
    branch's own start are passed (``again``: before it only). Targets that fall together make one fork."""
    start = positions.start
    origin = (start.turn if unit == "turn" else start.tokens) - again
    pending = [(t, w) for t, w in zip(targets, widths, strict=True) if t > origin]

    def rule(c: Candidate) -> Point | None:
        place = c.turn if unit == "turn" else c.tokens
        passed = [w for t, w in pending if t <= place]
        del pending[: len(passed)]
        return Point(c.turn, c.token, passed[0], 1.0) if passed else None

    return Now(positions, rule, len(targets), 0)
