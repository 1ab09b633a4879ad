"""Growing a rollout tree: the only place where a policy acts on a world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from branchpoint.growing import Growing, Held, at_root, nothing, played, unplayed
from branchpoint.ledger import Ledger
from branchpoint.noise import Arm, Noise
from branchpoint.scheduler import Point, Scheduler, Start, Watch
from branchpoint.session import Action, Begun, Policy, Session
from branchpoint.tree import Ints, RolloutTree, Stop
from branchpoint.watch import Never
from branchpoint.world import (
    BranchFailure,
    Env,
    EnvironmentFailure,
    Failure,
    Make,
    PolicyFailure,
    Sandbox,
    SandboxFailure,
    SnapshotUnsupported,
    Step,
    Task,
    UserError,
    settle,
)

T = TypeVar("T")

_BOUNDS = {"open": ("start_seconds",), "reset": ("start_seconds",), "restore": ("start_seconds", "step_seconds")}
"""The limits of what is asked of the world, the larger one of two; ``step_seconds`` for all else. A restore may have to
start a process and repeat a history in it."""


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


Begin = Callable[[Growing], Awaitable[tuple[Env, Step]]]


class Grower:
    """Grows trees with one policy and one sandbox. Reusable; concurrent calls of :meth:`grow` share ``limits.live``."""

    def __init__(
        self, policy: Policy, sandbox: Sandbox, scheduler: Scheduler, limits: Limits, arm: Arm, ledger: Ledger
    ) -> None:
        self.policy, self.sandbox, self.scheduler = policy, sandbox, scheduler
        self.limits, self.ledger = limits, ledger
        self.arm: Arm = arm
        self.live = asyncio.Semaphore(limits.live)

    async def grow(self, make: Make, task: Task, noise: Noise, key: str = "", arm: Arm | None = None) -> RolloutTree:
        """One tree for one task. ``noise`` keys everything random in it: equal noise gives an equal tree. ``arm``: of
        this tree, if not the grower's; roots and siblings share the world's luck together, or none does.

        Failures of the world end up in the tree, as failed branches. A fork at which no snapshot can be taken is not
        made, and counted in the ledger. Raises UserError, in a group, when the world has no snapshots at all and the
        scheduler wants forks.
        """
        return await _Tree(self, make, task, noise, arm or self.arm).run(key)


class _Tree:
    """One call of :meth:`Grower.grow`."""

    def __init__(self, grower: Grower, make: Make, task: Task, noise: Noise, arm: Arm) -> None:
        self.arm: Arm = arm
        self.grower, self.make, self.task, self.noise = grower, make, task, noise
        self.limits, self.ledger, self.policy = grower.limits, grower.ledger, grower.policy
        self.branches: list[Growing] = []
        self.policy_seeds: set[int] = set()

    def _luck(self, *key: int) -> Noise:
        """The noise of a branch. Raises UserError where it would sample with another one's policy seed."""
        noise = self.noise.branch(self.arm, *key)
        if noise.own in self.policy_seeds:
            raise UserError(
                f"two branches of task {self.task.id} would sample with one policy seed, so that a baseline would "
                "depend on the action it is compared with: pair the world's luck (Noise.seed), never the policy's (own)"
            )
        self.policy_seeds.add(noise.own)
        return noise

    async def run(self, key: str) -> RolloutTree:
        root = Growing((), self._luck())
        self.branches.append(root)
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(self._branch(root, self.policy.open(), self._reset))
        ordered = sorted(self.branches, key=lambda b: (b.order, b.key))
        ids = {id(b): i for i, b in enumerate(ordered)}
        return RolloutTree(self.task, tuple(b.record(ids) for b in ordered), key)

    async def _ask(self, column: str, what: str, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """Ask the world. Every way in which it can let us down becomes a typed failure of this branch."""
        limit, name = max((getattr(self.limits, n), n) for n in _BOUNDS.get(what, ("step_seconds",)))
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

    async def _reset(self, b: Growing) -> tuple[Env, Step]:
        """A fresh environment and its first observation. Raises EnvironmentFailure where siblings saw another one."""
        env = await self._ask("environment_seconds", "open", self.grower.sandbox.open, self.make, self.task, b.noise)
        try:
            step = await self._ask("environment_seconds", "reset", env.reset)
            if b.first is not None and replace(step, info={}) != replace(b.first, info={}):
                raise EnvironmentFailure(
                    "a second reset gave another first observation than the one that siblings have seen: make reset "
                    "depend on the task alone"
                )
            return env, step
        except BaseException:
            await self._close(env)
            raise

    async def _close(self, env: Env) -> None:
        # The episode is over: what cannot be closed now ends with the sandbox, and the score stands.
        with suppress(BranchFailure):
            await self._ask("environment_seconds", "close", env.close)

    async def _release(self, held: Held) -> None:
        held.users -= 1
        if held.users == 0 and held.snapshot is not None:
            with suppress(BranchFailure):
                await self._ask("snapshot_seconds", "discard", held.snapshot.discard)

    async def _branch(self, b: Growing, context: Session, start: Begin) -> None:
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

    async def _attempt(self, b: Growing, context: Session, start: Begin) -> None:
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

    async def _episode(self, b: Growing, env: Env, session: Session, step: Step) -> None:
        """Act until the episode ends. Predictable forks leave as soon as they are decided, the others at the end."""
        watch = self._watch(b)
        candidates: dict[int, Held] = {}
        # A forked branch starts with the observation in its context already.
        observation = nothing() if b.point is not None else self._observe(step, True)
        try:
            while True:
                turn = b.turn
                action, candidates[turn] = await self._choose(b, env, session, watch, observation, step)
                name = b.name()
                b.sampled += len(action.tokens)
                shown = step
                try:
                    step = await self._ask("environment_seconds", "step", env.step, action.text)
                except BranchFailure:
                    b.turns.append(played(action, observation, shown, Step(""), name))
                    raise
                self.ledger.env_steps += 1
                b.turns.append(played(action, observation, shown, step, name))
                for t in set(candidates) - set(watch.keeps()):
                    await self._release(candidates.pop(t))
                observation = self._observe(step, False)
                stop = self._stop(b, session.length + len(observation), step)
                if stop is not None:
                    b.stop = stop
                    for p in watch.finish():
                        self._fork(b, candidates[p.turn], session, [p])
                    return
        finally:
            for held in candidates.values():
                await self._release(held)

    def _observe(self, step: Step, first: bool) -> Ints:
        """The tokens that show a step. A chat format is user code: what it cannot show fails the branch."""
        try:
            return self.policy.observe(self.task, step, first)
        except BranchFailure:
            raise
        except Exception as e:
            raise PolicyFailure(f"the observation cannot be shown: {type(e).__name__}: {e}") from e

    def _watch(self, b: Growing) -> Watch:
        """The scheduler's eyes on this branch."""
        noise, scheduler = self.noise.child("scheduler", *b.key), self.grower.scheduler
        if b.role != "trained":
            return Never()
        if b.point is None:
            return scheduler.watch(noise)
        # Where the scheduler itself forks the single root at its first token, the siblings are forks, not roots.
        depth = b.depth + (scheduler.roots == 1 and b.depth == 0)
        return scheduler.watch(noise, Start(b.point.turn, b.point.token, b.sampled, depth))

    async def _choose(
        self, b: Growing, env: Env, session: Session, watch: Watch, observation: Ints, step: Step
    ) -> tuple[Action, Held]:
        """Sample an action, and fork the turn where the scheduler says so; siblings of the whole action leave while the
        branch itself still samples it."""
        turn, shared = b.turn, b.shared if not b.turns else nothing()
        held = Held(step, session.length + len(observation) - len(shared), b.sampled - len(shared))
        leaving: list[asyncio.Task[None]] = []
        met = len(shared) > 0

        def begun(entropy: float) -> None:
            nonlocal met
            met, recorded = True, float(np.float32(entropy))  # as the tree keeps it
            points = _new(b, [*self._root_group(b), *watch.meet(turn, recorded)])
            if points:
                leaving.append(self.tasks.create_task(self._leave(b, env, session, held, observation, points, watch)))

        try:
            try:
                action = await self._act(b, session, observation, step, shared, None if met else begun)
                if not met and len(action.entropies):  # an engine that does not say when an action begins
                    begun(float(action.entropies[0]))
            finally:
                for task in leaving:
                    await task
            points = _new(b, watch.see(turn, action.entropies))
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

    def _root_group(self, b: Growing) -> Iterator[Point]:
        """The root group is a fork like any other."""
        if b.parent is None:
            yield from self.grower.scheduler.group()

    async def _leave(
        self, b: Growing, env: Env, session: Session, held: Held, observation: Ints, points: list[Point], watch: Watch
    ) -> None:
        await self._freeze(b, env, held)
        if held.failure is None:
            b.left = b.turn, unplayed(observation, held.step, b.name())
            made = self._fork(b, held, session, points)
            if pilots := {task: c for c, task in made if c.role == "pilot"}:
                held.users += 1
                judging = self._judge(b, watch, held, session.fork(held.start), pilots, b.judging)
                b.judging = self.tasks.create_task(judging)

    async def _judge(
        self,
        b: Growing,
        watch: Watch,
        held: Held,
        context: Session,
        pilots: dict[asyncio.Task[None], Growing],
        earlier: asyncio.Task[None] | None,
    ) -> None:
        """Fork a turn, or not, once its pilots and those of the turns before have ended. The branch does not wait."""
        try:
            await asyncio.wait([*pilots, *([] if earlier is None else [earlier])])
            ended = [p for p in pilots.values() if p.failure is None]
            turn = next(p.point.turn for p in pilots.values() if p.point is not None)
            self._fork(b, held, context, watch.judge(turn, [sum(t.reward for t in p.turns) for p in ended]))
        finally:
            context.close()
            await self._release(held)

    async def _act(
        self, b: Growing, session: Session, observation: Ints, step: Step, shared: Ints, begun: Begun | None
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
        before = session.length
        try:
            with self.ledger.clock("generation_seconds"):
                async with asyncio.timeout(self.limits.act_seconds):
                    return await session.act(observation, step, noise, len(shared) + room, prefix, begun)
        except TimeoutError as e:
            raise PolicyFailure(f"an action took over {self.limits.act_seconds:g} s (limits.act_seconds)") from e
        finally:  # what has been read and sampled is spent, whatever comes of it
            spent = session.length - before
            self.ledger.prompt_tokens += min(spent, len(observation))
            self.ledger.generated_tokens += max(0, spent - len(observation))

    async def _freeze(self, b: Growing, env: Env, held: Held) -> None:
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

    def _fork(
        self, b: Growing, held: Held, session: Session, points: Iterable[Point]
    ) -> list[tuple[Growing, asyncio.Task[None]]]:
        """Start the fresh siblings of each point; they own a share of ``held`` and a context of their own."""
        made = []
        for p in points:
            if held.snapshot is None and not at_root(p):
                self.ledger.forks_refused += 1
                continue
            first = held.step if at_root(p) else None
            b.rooted, b.first = b.rooted or at_root(p), b.first or first
            for i in range(p.width - 1):
                key = (*b.key, p.turn, p.token, i if p.role == "trained" else -1 - i)
                child = Growing(key, self._luck(*key), b, p, held.action[: p.token], held.sampled + p.token, first)
                self.branches.append(child)
                b.heirs += not at_root(p)
                held.users += 1
                context = session.fork(held.start + p.token)
                made.append((child, self.tasks.create_task(self._sibling(child, context, held))))
        return made

    async def _sibling(self, b: Growing, context: Session, held: Held) -> None:
        async def start(b: Growing) -> tuple[Env, Step]:
            if held.snapshot is None:
                return await self._reset(b)
            self.ledger.restores += 1
            return await self._ask("restore_seconds", "restore", held.snapshot.restore, b.noise), held.step

        try:
            await self._branch(b, context, start)
        finally:
            await self._release(held)

    def _stop(self, b: Growing, length: int, step: Step) -> Stop | None:
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


def _new(b: Growing, points: Iterable[Point]) -> list[Point]:
    """The points without the root group where that is made already: a retried root meets it again."""
    return [p for p in points if not (b.rooted and at_root(p))]
