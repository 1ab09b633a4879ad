"""The world an agent acts on: tasks, environments, snapshots, and what can go wrong.

An environment is *live*: it has one owner and is used for one episode. A snapshot is *frozen*: it can be restored any
number of times, and every restored environment is independent of the others. A sandbox turns a plain environment (a
Python object with ``reset`` and ``step``) into one that can be snapshotted.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from branchpoint.noise import Noise

T = TypeVar("T")
FailureKind = Literal["policy", "environment", "sandbox", "grader"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem for the agent. Groups are formed by task *and fork*, never by equal text.

    ``root`` names what builds the environment (a registered name or ``module:attribute``); ``metadata`` is everything
    that builder needs and must survive JSON; ``seed`` keys the luck of a world that nobody reseeds, and that of
    evaluation rollouts (training takes its luck from the run's seed).
    """

    id: str
    root: str
    prompt: tuple[Message, ...] = ()
    seed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What the world answers: to ``reset`` (the first observation, reward 0) and to every action.

    ``reward`` is what the learner sees. ``actions`` lists the admissible actions of the state just reached, or is empty
    when any text may be tried; ``grammar`` is a regular expression that every well-formed action matches in full, for
    environments whose actions cannot be listed.
    ``done``: the episode ended by its own rules. ``truncated``: it was cut (budget, time).
    ``info`` holds JSON values for people and metrics, e.g. ``success`` (the true outcome, before grader noise).
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    actions: tuple[str, ...] = ()
    grammar: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise GraderFailure(f"reward is {self.reward}; an environment must return a finite number")


class UserError(ValueError):
    """Something the user asked for cannot be had; one line that names it and the cure. It ends the run."""


class BranchFailure(Exception):
    """A failure of one branch. It never becomes reward 0: the branch is retried or left out."""

    kind: ClassVar[FailureKind] = "environment"


class PolicyFailure(BranchFailure):
    """The policy could not act (its engine failed, not: it acted badly)."""

    kind = "policy"


class EnvironmentFailure(BranchFailure):
    """The environment raised, or broke its contract."""

    kind = "environment"


class SandboxFailure(BranchFailure):
    """Infrastructure: a dead worker, a time-out, a failed fork, a memory limit."""

    kind = "sandbox"


class GraderFailure(BranchFailure):
    """No usable score: the reward is missing, NaN or infinite, or the grader raised."""

    kind = "grader"


class SnapshotUnsupported(SandboxFailure):
    """This environment or its present state cannot be snapshotted; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of a failure, as kept in a tree."""

    kind: FailureKind
    message: str


class World(Protocol):
    """What a user writes: a plain environment. It is built by ``make(task)`` and used for one episode.

    Optional: ``get_state() -> state`` and ``set_state(state)`` for a native snapshot, and ``reseed(noise)``, called at
    the start and after every restore with the luck to use from then on. An environment that holds a ``Noise`` keeps
    the repeat counters of its events in its own state, so that they travel with a snapshot.
    """

    def reset(self) -> Step: ...
    def step(self, action: str) -> Step: ...
    def close(self) -> None: ...


Make = Callable[[Task], World]
"""Builds a fresh ``World`` for a task. Importable by name where a worker process has to find it."""

Transcript = tuple[Task, Sequence[tuple[Step, str]]]
"""A task, and in order what the world showed and the action that an expert answered with."""


class Env(Protocol):
    """A live environment with one owner. Methods may be plain or ``async``; :func:`settle` accepts both."""

    supports_snapshot: bool

    def reset(self) -> Step | Awaitable[Step]: ...
    def step(self, action: str) -> Step | Awaitable[Step]: ...
    def snapshot(self) -> Snapshot | Awaitable[Snapshot]: ...
    def close(self) -> Awaitable[None] | None: ...


class Snapshot(Protocol):
    """A frozen state. ``restore`` gives an independent live environment whose luck is ``noise``.

    ``id`` is unique within its sandbox. ``digest`` identifies the content where the back-end can compute it, else "".
    """

    id: str
    digest: str

    def restore(self, noise: Noise) -> Env | Awaitable[Env]: ...
    def discard(self) -> Awaitable[None] | None: ...


class Sandbox(Protocol):
    """Opens environments that can be snapshotted. Closing it ends everything that it opened."""

    def open(self, make: Make, task: Task, noise: Noise) -> Env | Awaitable[Env]: ...
    def close(self) -> Awaitable[None] | None: ...


async def settle(value: T | Awaitable[T]) -> T:
    """The value itself, or what it resolves to: the one place where sync and async implementations meet."""
    if isinstance(value, Awaitable):
        return await value
    return value
