"""Growing a rollout tree: the only place where a policy acts on a world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from branchpoint.ledger import Ledger
from branchpoint.noise import Arm, Noise
from branchpoint.scheduler import Point, Scheduler, Start, Watch
from branchpoint.session import Action, Begun, Policy, Session
from branchpoint.tree import Branch, Fork, Ints, RolloutTree, Stop, Turn
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
    UserError,
    settle,
)

T = TypeVar("T")


class Limits(BaseModel):
    """Bounds of one rollout. ``live``: branches that act at once, over all trees of an update."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=30, ge=1)
    action_tokens: int = Field(default=64, ge=1)
    context_tokens: int = Field(default=2048, ge=8)
    act_seconds: float = Field(default=600.0, gt=0)
    step_seconds: float = Field(default=60.0, gt=0)
    start_seconds: float = Field(default=180.0, gt=0)
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
    heirs: int = 0  # siblings that share tokens sampled by this branch (the root group does not)
    rooted: bool = False  # the root group has been started
    frozen: set[int] = field(default_factory=set)  # turns of which a snapshot has been taken

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
    candidate, then every sibling. ``failure``: why the world could not be frozen."""

    step: Step
    start: int
    sampled: int
    snapshot: Snapshot | None = None
    action: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # so far; shared prefix included
    users: int = 1
    failure: BranchFailure | None = None


Begin = Callable[[_Growing], Awaitable[tuple[Env, Step]]]


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

        Failures of the world end up in the tree, as failed branches. A fork at which no snapshot can be taken is not
        made, and counted in the ledger. Raises UserError, in a group, when the world has no snapshots at all and the
        scheduler wants forks.
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
        name = "start_seconds" if what in ("open", "reset") else "step_seconds"
        limit: float = getattr(self.limits, name)
        try:
            with self.ledger.clock(column):
                async with asyncio.timeout(limit):
                    return await settle(call(*args))
        except BranchFailure:
            raise
        except TimeoutError as e:
            raise SandboxFailure(f"{what} took over {limit:g} s (limits.{name})") from e
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

    async def _branch(self, b: _Growing, context: Session, start: Begin) -> None:
        """Run a branch to its end. After an infrastructure failure it runs again with the same keys (so that a retry
        selects nothing), unless siblings live on its tokens. Owns ``context``, its tokens so far."""
        sampled = b.sampled
        try:
            for left in reversed(range(1 + self.limits.retries)):
                async with self.grower.live:
                    try:
                        await self._attempt(b, context, start)
                        return
                    except BranchFailure as failure:
                        b.stop, b.failure = "failed", Failure(failure.kind, str(failure))
                        if not left or b.heirs or not _transient(failure):
                            self.ledger.discarded_branches += 1
                            return
                self.ledger.retried_branches += 1
                b.turns, b.failure, b.sampled = [], None, sampled
        finally:
            context.close()

    async def _attempt(self, b: _Growing, context: Session, start: Begin) -> None:
        env, step = await start(b)
        session: Session | None = None
        try:
            session = context.fork(context.length)
            await self._episode(b, env, session, step)
            self.ledger.returns += 1
        finally:
            if session is not None:
                session.close()
            await self._close(env)

    async def _episode(self, b: _Growing, env: Env, session: Session, step: Step) -> None:
        """Act until the episode ends. Predictable forks leave as soon as they are decided, the others at the end."""
        watch = self._watch(b)
        candidates: dict[int, _Held] = {}
        # A forked branch starts with the observation in its context already.
        observation = np.zeros(0, np.int32) if b.point is not None else self.policy.observe(self.task, step, True)
        try:
            while True:
                turn = b.turn
                action, candidates[turn] = await self._choose(b, env, session, watch, observation, step)
                name = f"{'.'.join(map(str, b.key)) or 'root'}@{turn}" if turn in b.frozen else None
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
                observation = self.policy.observe(self.task, step, False)
                stop = self._stop(b, session.length + len(observation), step)
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
        noise, scheduler = self.noise.child("scheduler", *b.key), self.grower.scheduler
        if b.point is None:
            return scheduler.watch(noise)
        # Where the scheduler itself forks the single root at its first token, the siblings are forks, not roots.
        depth = b.depth + (scheduler.roots == 1 and b.depth == 0)
        return scheduler.watch(noise, Start(b.point.turn, b.point.token, b.sampled, depth))

    async def _choose(
        self, b: _Growing, env: Env, session: Session, watch: Watch, observation: Ints, step: Step
    ) -> tuple[Action, _Held]:
        """Sample an action, and fork the turn where the scheduler says so; siblings of the whole action leave while the
        branch itself still samples it."""
        turn, shared = b.turn, b.shared if not b.turns else np.zeros(0, np.int32)
        held = _Held(step, session.length + len(observation) - len(shared), b.sampled - len(shared))
        leaving: list[asyncio.Task[None]] = []

        def begun(entropy: float) -> None:
            recorded = float(np.float32(entropy))  # as the tree keeps it
            points = [*self._root_group(b), *watch.meet(turn, recorded)]
            if points:
                leaving.append(self.tasks.create_task(self._leave(b, env, session, held, points)))

        try:
            try:
                action = await self._act(b, session, observation, step, shared, None if len(shared) else begun)
            finally:
                for task in leaving:
                    await task
            points = watch.see(turn, action.entropies)
            if (points or turn in watch.keeps()) and not leaving:
                await self._freeze(b, env, held)
            if held.failure is not None:
                raise held.failure
        except BaseException:
            await self._release(held)
            raise
        held.action = np.concatenate([shared, action.tokens]).astype(np.int32)
        self._fork(b, held, session, points)
        return action, held

    def _root_group(self, b: _Growing) -> Iterator[Point]:
        """The root group is a fork like any other, made once."""
        if b.parent is None and not b.rooted and self.grower.scheduler.roots > 1:
            yield Point(0, 0, self.grower.scheduler.roots, 1.0)

    async def _leave(self, b: _Growing, env: Env, session: Session, held: _Held, points: list[Point]) -> None:
        await self._freeze(b, env, held)
        if held.failure is None:
            self._fork(b, held, session, points)

    async def _act(
        self, b: _Growing, session: Session, observation: Ints, step: Step, shared: Ints, begun: Begun | None
    ) -> Action:
        """Show the observation and sample an action."""
        room = self.limits.context_tokens - session.length - len(observation)
        room = min(room, self.limits.action_tokens - len(shared))
        if room < 1:
            raise PolicyFailure(
                f"the first {session.length + len(observation)} tokens leave no room for an action "
                f"(limits.context_tokens = {self.limits.context_tokens})"
            )
        noise = b.noise.child("turn", b.turn)
        prefix = shared if len(shared) else None
        try:
            with self.ledger.clock("generation_seconds"):
                async with asyncio.timeout(self.limits.act_seconds):
                    action = await session.act(observation, step, noise, len(shared) + room, prefix, begun)
        except TimeoutError as e:
            raise PolicyFailure(f"an action took over {self.limits.act_seconds:g} s (limits.act_seconds)") from e
        self.ledger.prompt_tokens += len(observation)
        self.ledger.generated_tokens += len(action.tokens)
        return action

    async def _freeze(self, b: _Growing, env: Env, held: _Held) -> None:
        """Take the snapshot. Where none can be taken the root group is reset afresh, and other forks are not made.

        Whether one can be taken depends on the history alone, so leaving a fork out selects nothing.
        """
        if not env.supports_snapshot:
            if self.grower.scheduler.kind != "flat":
                raise UserError("this environment cannot be snapshotted: use sandbox 'process', or scheduler 'flat'")
            return
        try:
            held.snapshot = await self._ask("snapshot_seconds", "snapshot", env.snapshot)
        except SnapshotUnsupported:
            return
        except BranchFailure as failure:
            held.failure = failure
            return
        b.frozen.add(b.turn)
        self.ledger.snapshots += 1

    def _fork(self, b: _Growing, held: _Held, session: Session, points: Iterable[Point]) -> None:
        """Start the fresh siblings of each point; they own a share of ``held`` and a context of their own."""
        for p in points:
            if held.snapshot is None and (p.turn, p.token) != (0, 0):
                self.ledger.forks_refused += 1
                continue
            b.rooted |= (p.turn, p.token) == (0, 0)
            for i in range(p.width - 1):
                key = (*b.key, p.turn, p.token, i)
                noise = self.noise.branch(self.grower.arm, *key)
                child = _Growing(key, noise, b, p, held.action[: p.token], held.sampled + p.token)
                self.branches.append(child)
                b.heirs += (p.turn, p.token) != (0, 0)
                held.users += 1
                self.tasks.create_task(self._sibling(child, session.fork(held.start + p.token), held))

    async def _sibling(self, b: _Growing, context: Session, held: _Held) -> None:
        async def start(b: _Growing) -> tuple[Env, Step]:
            if held.snapshot is None:
                env, step = await self._reset(b)
                if step != held.step:
                    await self._close(env)
                    raise EnvironmentFailure(
                        "a second reset gave another first observation, and this world has no snapshots: make reset "
                        "depend on the task alone, or choose a sandbox that can snapshot it"
                    )
                return env, step
            self.ledger.restores += 1
            return await self._ask("restore_seconds", "restore", held.snapshot.restore, b.noise), held.step

        try:
            await self._branch(b, context, start)
        finally:
            await self._release(held)

    def _stop(self, b: _Growing, length: int, step: Step) -> Stop | None:
        """Whether the episode ends with this step; ``length`` is that of the context once it is shown."""
        if step.done:
            return "done"
        if step.truncated:
            return "truncated"
        if b.turn >= self.limits.turns:
            return "turns"
        return "length" if length >= self.limits.context_tokens else None


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
