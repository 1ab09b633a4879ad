"""What a tree is made of while it grows: its branches, and the turns that can still be forked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from branchpoint.noise import Noise
from branchpoint.session import Action
from branchpoint.tree import Branch, Fork, Ints, Seeds, Stop, Turn
from branchpoint.watch import Point, Role
from branchpoint.world import BranchFailure, Failure, Snapshot, Step


def nothing() -> Ints:
    """[0] no tokens."""
    return np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Growing:
    """A branch while it grows. ``key`` is its place in the tree, never its arrival, so seeds and ids do not depend on
    timing. ``shared``: the tokens of its first action that it has in common with its parent.

    ``first``: what an opened world has to show first, because siblings have seen it. ``left``: the newest turn that
    siblings left before its action was there, and its number: what they hang on should no action ever come of it.
    """

    key: tuple[int, ...]
    noise: Noise
    parent: Growing | None = None
    point: Point | None = None
    shared: Ints = field(default_factory=nothing)
    sampled: int = 0  # tokens sampled on the path so far, the parent's included
    first: Step | None = None
    turns: list[Turn] = field(default_factory=list)
    left: tuple[int, Turn] | None = None
    stop: Stop = "failed"
    failure: Failure | None = None
    heirs: int = 0  # siblings that share tokens sampled by this branch (the root group does not)
    rooted: bool = False  # the root group has been started
    frozen: set[int] = field(default_factory=set)  # turns of which a snapshot has been taken
    judging: asyncio.Task[None] | None = None  # of the newest turn with pilots

    @property
    def turn(self) -> int:
        """The absolute index of the turn to come."""
        return len(self.turns) + (0 if self.point is None else self.point.turn)

    @property
    def order(self) -> int:
        """A parent comes before its children."""
        return 0 if self.parent is None else self.parent.order + 1

    @property
    def depth(self) -> int:
        """The number of forks on the path. All roots have depth 0, though all but one are recorded as its forks."""
        if self.parent is None or self.point is None:
            return 0
        return self.parent.depth + (not at_root(self.point))

    @property
    def role(self) -> Role:
        """What the branch is for. Nothing is forked from those that are not trained."""
        return "trained" if self.point is None else self.point.role

    def name(self) -> str | None:
        """The name of the snapshot before the turn to come, if one has been taken."""
        return f"{'.'.join(map(str, self.key)) or 'root'}@{self.turn}" if self.turn in self.frozen else None

    def record(self, ids: dict[int, int]) -> Branch:
        """The branch as the tree keeps it; ``ids`` are those of all branches, by ``id()``."""
        fork = None
        if self.parent is not None and self.point is not None:
            fork = Fork(ids[id(self.parent)], self.point.turn, self.point.token, self.point.propensity)
        trained, pilot = self.role == "trained", self.role == "pilot"
        seeds = Seeds(self.noise.seed, self.noise.own, self.noise.clean)
        last = (self.left[1],) if self.left is not None and self.left[0] == self.turn else ()
        return Branch(ids[id(self)], fork, (*self.turns, *last), self.stop, self.failure, trained, pilot, seeds)


@dataclass(slots=True, eq=False)
class Held:
    """What a turn needs to be forked: its world before the action, what was shown, and where its action starts (in the
    context, and in sampled tokens of the path). Freed by its last user: the branch itself while the turn is a
    candidate, then every sibling. ``failure``: why the world could not be frozen."""

    step: Step
    start: int
    sampled: int
    snapshot: Snapshot | None = None
    action: Ints = field(default_factory=nothing)  # so far; shared prefix included
    users: int = 1
    failure: BranchFailure | None = None


def at_root(point: Point) -> bool:
    """Whether siblings that leave there are roots of their own."""
    return (point.turn, point.token) == (0, 0)


def played(action: Action, observation: Ints, shown: Step, answer: Step, snapshot: str | None) -> Turn:
    """The record of a turn: what was shown, the action, and what the world answered."""
    return Turn(
        observation=observation,
        action=action.tokens,
        logprobs=action.logprobs,
        raw_logprobs=action.raw_logprobs,
        entropies=action.entropies,
        reward=answer.reward,
        snapshot=snapshot,
        allowed=action.allowed,
        text=action.text,
        shown=shown.observation,
        stopped=action.stopped,
        info=dict(answer.info) | ({"final": answer.observation} if answer.done or answer.truncated else {}),
    )


def unplayed(observation: Ints, shown: Step, snapshot: str | None) -> Turn:
    """The record of a turn of which no action came."""
    none = nothing()
    return Turn(observation, none, none, none, none, snapshot=snapshot, shown=shown.observation)  # type: ignore[arg-type]
