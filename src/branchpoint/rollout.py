"""Growing a rollout tree: the only place where a policy acts on a world.

The policy seam is here because this is where it is used. A policy hands out *sessions*: growing token contexts that
can be forked at any earlier token (a key/value cache is shared, not recomputed). Tokens go in, tokens come out; text is
made from tokens once, to be played, and is never encoded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from branchpoint.ledger import Ledger
from branchpoint.noise import Arm, Noise
from branchpoint.scheduler import Point, Scheduler, Watch
from branchpoint.tree import Allowed, Branch, Floats, Fork, Ints, RolloutTree, Stop, Turn
from branchpoint.world import (
    BranchFailure,
    Env,
    EnvironmentFailure,
    Failure,
    Make,
    PolicyFailure,
    Sandbox,
    SandboxFailure,
    Snapshot,
    SnapshotUnsupported,
    Step,
    Task,
    settle,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """What a policy sampled: only the new tokens (after a prefix given by a fork), one entry each in every array.

    ``text`` is the whole action, prefix included. ``stopped`` is False when the token limit cut it.
    """

    tokens: Ints
    logprobs: Floats
    raw_logprobs: Floats
    entropies: Floats
    text: str
    stopped: bool = True
    allowed: Allowed | None = None


class Session(Protocol):
    """One growing context: observation, action, observation, ... One owner; ``length`` counts its tokens."""

    @property
    def length(self) -> int: ...

    async def act(
        self, observation: Ints, step: Step, noise: Noise, max_tokens: int, prefix: Ints | None = None
    ) -> Action:
        """Append ``observation``, then sample an action and append it.

        ``step`` is what ``observation`` shows: a restricted policy samples only its ``actions``, or what its
        ``grammar`` matches.
        ``noise.private()`` drives the sampling, so equal keys give equal tokens whatever else is in the batch.
        ``prefix``: the action tokens already in the context, when the session was forked in the middle of an action;
        they count for the restriction, the text and ``max_tokens``.
        Raises PolicyFailure when the engine fails or the context is full before the first token.
        """
        ...

    def fork(self, length: int) -> Session:
        """A session that shares the first ``length`` tokens; both go on independently."""
        ...

    def close(self) -> None: ...


class Policy(Protocol):
    """Sessions, and the words around the tokens."""

    def open(self) -> Session: ...

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The tokens that show a step to the model. ``first``: with the task's prompt; else as the answer to an action,
        starting with whatever the chat format puts after the sampled tokens of the previous action."""
        ...


class Limits(BaseModel):
    """Bounds of one rollout. ``live``: branches that act at once, over all trees of an update."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=30, ge=1)
    action_tokens: int = Field(default=64, ge=1)
    context_tokens: int = Field(default=2048, ge=8)
    step_seconds: float = Field(default=60.0, gt=0)
    retries: int = Field(default=2, ge=0)
    live: int = Field(default=256, ge=1)


@dataclass(slots=True, eq=False)
class _Growing:
    """A branch while it grows. ``key`` is its place in the tree, never its arrival, so seeds and ids do not depend on
    timing. ``shared``: the tokens of its first action that it has in common with its parent."""

    key: tuple[int, ...]
    noise: Noise
    parent: _Growing | None = None
    point: Point | None = None
    shared: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    sampled: int = 0  # tokens sampled on the path so far, the parent's included
    turns: list[Turn] = field(default_factory=list)
    stop: Stop = "failed"
    failure: Failure | None = None
    children: int = 0

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
        return self.parent.depth + ((self.point.turn, self.point.token) != (0, 0))

    def record(self, ids: dict[int, int]) -> Branch:
        fork = None
        if self.parent is not None and self.point is not None:
            fork = Fork(ids[id(self.parent)], self.point.turn, self.point.token, self.point.propensity)
        return Branch(ids[id(self)], fork, tuple(self.turns), self.stop, self.failure)


@dataclass(slots=True, eq=False)
class _Held:
    """What a turn needs to be forked: its world before the action, what was shown, and where its action starts (in the
    context, and in sampled tokens of the path). Freed by its last user: the branch itself while the turn is a
    candidate, then every sibling."""

    snapshot: Snapshot | None
    step: Step
    start: int
    sampled: int
    action: Ints  # whole, shared prefix included
    users: int = 1


Start = Callable[[_Growing], Awaitable[tuple[Env, Step]]]


class Grower:
    """Grows trees with one policy and one sandbox. Reusable; concurrent calls of :meth:`grow` share ``limits.live``."""

    def __init__(
        self, policy: Policy, sandbox: Sandbox, scheduler: Scheduler, limits: Limits, arm: Arm, ledger: Ledger
    ) -> None:
        self.policy, self.sandbox, self.scheduler = policy, sandbox, scheduler
        self.limits, self.ledger = limits, ledger
        self.arm: Arm = arm
        self.live = asyncio.Semaphore(limits.live)

    async def grow(self, make: Make, task: Task, noise: Noise, key: str = "") -> RolloutTree:
        """One tree for one task. ``noise`` keys everything random in it: equal noise gives an equal tree.

        Failures of the world end up in the tree, as failed branches. Raises ValueError when the scheduler wants forks
        that this sandbox cannot make; anything else that raises is a defect.
        """
        return await _Tree(self, make, task, noise).run(key)


class _Tree:
    """One call of :meth:`Grower.grow`."""

    def __init__(self, grower: Grower, make: Make, task: Task, noise: Noise) -> None:
        self.grower, self.make, self.task, self.noise = grower, make, task, noise
        self.limits, self.ledger, self.policy = grower.limits, grower.ledger, grower.policy
        self.branches: list[_Growing] = []

    async def run(self, key: str) -> RolloutTree:
        root = _Growing((), self.noise.branch(self.grower.arm))
        self.branches.append(root)
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(self._branch(root, self.policy.open(), self._reset))
        ordered = sorted(self.branches, key=lambda b: (b.order, b.key))
        ids = {id(b): i for i, b in enumerate(ordered)}
        return RolloutTree(self.task, tuple(b.record(ids) for b in ordered), key)

    async def _ask(self, column: str, what: str, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """Ask the world. Every way in which it can let us down becomes a typed failure of this branch."""
        try:
            with self.ledger.clock(column):
                async with asyncio.timeout(self.limits.step_seconds):
                    return await settle(call(*args))
        except BranchFailure:
            raise
        except TimeoutError as e:
            raise SandboxFailure(f"{what} took over {self.limits.step_seconds:g} s (limits.step_seconds)") from e
        except Exception as e:
            raise EnvironmentFailure(f"{what} raised {type(e).__name__}: {e}") from e

    async def _reset(self, b: _Growing) -> tuple[Env, Step]:
        """A fresh environment and its first observation."""
        env = await self._ask("environment_seconds", "open", self.grower.sandbox.open, self.make, self.task, b.noise)
        try:
            return env, await self._ask("environment_seconds", "reset", env.reset)
        except BaseException:
            await self._close(env)
            raise

    async def _close(self, env: Env) -> None:
        # The episode is over: what cannot be closed now ends with the sandbox, and the score stands.
        with suppress(BranchFailure):
            await self._ask("environment_seconds", "close", env.close)

    async def _release(self, held: _Held) -> None:
        held.users -= 1
        if held.users == 0 and held.snapshot is not None:
            with suppress(BranchFailure):
                await self._ask("snapshot_seconds", "discard", held.snapshot.discard)

    async def _branch(self, b: _Growing, context: Session, start: Start) -> None:
        """Run a branch to its end. After an infrastructure failure it runs again with the same keys (so that a retry
        selects nothing), unless siblings already live on its tokens. Owns ``context``, its tokens so far."""
        sampled = b.sampled
        try:
            for left in reversed(range(1 + self.limits.retries)):
                async with self.grower.live:
                    try:
                        await self._attempt(b, context, start)
                        return
                    except BranchFailure as failure:
                        b.stop, b.failure = "failed", Failure(failure.kind, str(failure))
                        if not left or b.children or not _transient(failure):
                            self.ledger.discarded_branches += 1
                            return
                self.ledger.retried_branches += 1
                b.turns, b.failure, b.sampled = [], None, sampled
        finally:
            context.close()

    async def _attempt(self, b: _Growing, context: Session, start: Start) -> None:
        env, step = await start(b)
        session = context.fork(context.length)
        try:
            await self._episode(b, env, session, step)
            self.ledger.returns += 1
        finally:
            session.close()
            await self._close(env)

    async def _episode(self, b: _Growing, env: Env, session: Session, step: Step) -> None:
        """Act until the episode ends. Predictable forks leave as soon as they are decided, the others at the end."""
        watch = self._watch(b)
        candidates: dict[int, _Held] = {}
        try:
            while True:
                turn, shared = b.turn, b.shared if not b.turns else np.zeros(0, np.int32)
                action, observation = await self._act(b, session, step, shared)
                name = None
                points = self._points(b, turn, watch.see(turn, action.entropies))
                if points or turn in watch.keeps():
                    whole = np.concatenate([shared, action.tokens]).astype(np.int32)
                    frozen = await self._freeze(env, points)
                    held = _Held(frozen, step, session.length - len(whole), b.sampled - len(shared), whole)
                    candidates[turn] = held
                    name = f"{'.'.join(map(str, b.key)) or 'root'}@{turn}"
                    self._fork(b, held, session, points)
                b.sampled += len(action.tokens)
                shown = step
                try:
                    step = await self._ask("environment_seconds", "step", env.step, action.text)
                except BranchFailure:
                    b.turns.append(_turn(action, observation, shown, Step(""), name))
                    raise
                self.ledger.env_steps += 1
                b.turns.append(_turn(action, observation, shown, step, name))
                for t in set(candidates) - set(watch.keeps()):
                    await self._release(candidates.pop(t))
                stop = self._stop(b, session, step)
                if stop is not None:
                    b.stop = stop
                    for p in watch.finish():
                        self._fork(b, candidates[p.turn], session, [p])
                    return
        finally:
            for held in candidates.values():
                await self._release(held)

    def _watch(self, b: _Growing) -> Watch:
        """The scheduler's eyes on this branch."""
        noise = self.noise.child("scheduler", *b.key)
        if b.point is None:
            return self.grower.scheduler.watch(noise)
        at, depth = (b.point.turn, b.point.token), b.depth
        return self.grower.scheduler.watch(noise, depth, b.sampled, at[0], start_token=at[1])

    def _points(self, b: _Growing, turn: int, chosen: Iterable[Point]) -> list[Point]:
        """The forks to make at this turn; the root group is a fork like any other."""
        points = list(chosen)
        if turn == 0 and b.parent is None and self.grower.scheduler.roots > 1:
            points.insert(0, Point(0, 0, self.grower.scheduler.roots, 1.0))
        return points

    async def _act(self, b: _Growing, session: Session, step: Step, shared: Ints) -> tuple[Action, Ints]:
        """Show the step (unless the context already holds it) and sample an action."""
        forked = b.point is not None and not b.turns
        observation = np.zeros(0, np.int32) if forked else self.policy.observe(self.task, step, b.turn == 0)
        room = self.limits.context_tokens - session.length - len(observation)
        room = min(room, self.limits.action_tokens - len(shared))
        if room < 1:
            raise PolicyFailure(
                f"the first {session.length + len(observation)} tokens leave no room for an action "
                f"(limits.context_tokens = {self.limits.context_tokens})"
            )
        noise = b.noise.child("turn", b.turn)
        with self.ledger.clock("generation_seconds"):
            action = await session.act(observation, step, noise, len(shared) + room, shared if forked else None)
        self.ledger.prompt_tokens += len(observation)
        self.ledger.generated_tokens += len(action.tokens)
        return action, observation

    async def _freeze(self, env: Env, points: list[Point]) -> Snapshot | None:
        """A snapshot; None where none can be taken and only the root group wants it (its members are reset afresh)."""
        roots_only = bool(points) and all((p.turn, p.token) == (0, 0) for p in points)
        if env.supports_snapshot:
            try:
                snapshot = await self._ask("snapshot_seconds", "snapshot", env.snapshot)
                self.ledger.snapshots += 1
                return snapshot
            except SnapshotUnsupported:
                if not roots_only:
                    raise
        elif not roots_only:
            raise ValueError(
                f"scheduler {self.grower.scheduler.kind!r} forks inside the episode, but this environment cannot be "
                "snapshotted: choose sandbox 'process' or 'replay', or scheduler 'flat'"
            )
        return None

    def _fork(self, b: _Growing, held: _Held, session: Session, points: Iterable[Point]) -> None:
        """Start the fresh siblings of each point; they own a share of ``held`` and a context of their own."""
        for p in points:
            for i in range(p.width - 1):
                key = (*b.key, p.turn, p.token, i)
                noise = self.noise.branch(self.grower.arm, *key)
                child = _Growing(key, noise, b, p, held.action[: p.token], held.sampled + p.token)
                self.branches.append(child)
                b.children += 1
                held.users += 1
                self.tasks.create_task(self._sibling(child, session.fork(held.start + p.token), held))

    async def _sibling(self, b: _Growing, context: Session, held: _Held) -> None:
        async def start(b: _Growing) -> tuple[Env, Step]:
            if held.snapshot is None:
                return await self._reset(b)
            self.ledger.restores += 1
            return await self._ask("restore_seconds", "restore", held.snapshot.restore, b.noise), held.step

        try:
            await self._branch(b, context, start)
        finally:
            await self._release(held)

    def _stop(self, b: _Growing, session: Session, step: Step) -> Stop | None:
        if step.done:
            return "done"
        if step.truncated:
            return "truncated"
        if b.turn >= self.limits.turns:
            return "turns"
        # The next observation has to fit with at least one token of an action.
        following = session.length + len(self.policy.observe(self.task, step, False))
        return "length" if following >= self.limits.context_tokens else None


def _transient(failure: BranchFailure) -> bool:
    """Whether the same branch may well succeed in a fresh world: infrastructure failed, not what was asked of it."""
    return isinstance(failure, SandboxFailure) and not isinstance(failure, SnapshotUnsupported)


def _turn(action: Action, observation: Ints, shown: Step, answer: Step, snapshot: str | None) -> Turn:
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
