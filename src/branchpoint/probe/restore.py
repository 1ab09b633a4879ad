"""Restoring siblings for the fidelity probe: worlds that are frozen, restored and replayed, and what they answered.

Rollouts are grown by the :class:`~branchpoint.rollout.Grower` like any other; it is given a sandbox whose worlds start
where a snapshot was taken. The policy is shown the observation at the snapshot first: what it remembers of the way
there does not matter here, as long as all siblings are shown the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.probe.trace import ProbeError
from branchpoint.rollout import Grower, Limits
from branchpoint.scheduler import Flat
from branchpoint.session import Policy
from branchpoint.world import BranchFailure, Env, Make, Sandbox, SandboxFailure, Snapshot, Step, Task, settle

Say = Callable[[str], None]


@dataclass(slots=True, eq=False)
class Played:
    """A live environment that writes down what it is asked and what it answers. Its first observation is ``first``
    where that is given (a restored world has been reset already)."""

    env: Env
    noise: Noise
    first: Step | None = None
    actions: list[str] = field(default_factory=list)
    answers: list[Step] = field(default_factory=list)
    supports_snapshot: bool = False  # roots are opened one by one, each restored from the snapshot itself

    async def reset(self) -> Step:
        """The first observation."""
        if self.first is None:
            self.first = await settle(self.env.reset())
        return self.first

    async def step(self, action: str) -> Step:
        """Plays an action."""
        await asyncio.sleep(0)  # siblings take turns: a world that answers at once would finish before the next begins
        answer = await settle(self.env.step(action))
        self.actions.append(action)
        self.answers.append(answer)
        return answer

    async def snapshot(self) -> Snapshot:
        """A snapshot of the environment inside."""
        return await settle(self.env.snapshot())

    async def close(self) -> None:
        """Close the environment inside."""
        await settle(self.env.close())

    @property
    def total(self) -> float:
        """The return."""
        return float(sum(a.reward for a in self.answers))


class _Stage:
    """A sandbox whose worlds come from ``opener``, which is given the luck of the branch."""

    def __init__(self, opener: Callable[[Noise], Awaitable[Played]]) -> None:
        self.opener = opener
        self.played: list[Played] = []

    async def open(self, make: Make, task: Task, noise: Noise) -> Played:
        self.played.append(await self.opener(noise))
        return self.played[-1]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Session:
    """What one session of one snapshot gave. ``fresh``: the first sibling's actions under other luck."""

    siblings: tuple[Played, ...] = ()
    backbone: Played | None = None
    fresh: tuple[Played, ...] = ()
    replays: int = 0
    differences: tuple[str, ...] = ()
    failed: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """A snapshot to be taken: the actions that lead there, what they were answered, and with which luck."""

    make: Make
    task: Task
    pilot: Played
    turn: int

    @property
    def name(self) -> str:
        return f"task {self.task.id}, turn {self.turn}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: ``siblings`` restored from each snapshot in each of two sessions, at the root and half-way of an
    episode of every prompt. ``sandbox`` builds the sandbox of a session."""

    policy: Policy
    sandbox: Callable[[], Sandbox]
    prompts: Sequence[tuple[Make, Task]]
    limits: Limits = field(default_factory=Limits)
    siblings: int = 4

    def __post_init__(self) -> None:
        if self.siblings < 2:
            raise ProbeError("siblings: a session needs at least 2; nothing can leak between fewer")
        if not self.prompts:
            raise ProbeError("prompts: give at least one task")

    async def ask(self, noise: Noise, say: Say) -> list[tuple[Session, Session]]:
        """Two sessions of every snapshot, all first ones before all second ones, so that time passes between them."""
        rounds: list[list[Session]] = []
        places: list[_Place] = []
        for k in range(2):
            sandbox = self.sandbox()
            try:
                places = places or await self._places(sandbox, noise)
                models = [s.siblings for s in rounds[0]] if rounds else [()] * len(places)
                sessions = []
                for i, (place, model) in enumerate(zip(places, models, strict=True)):
                    key = noise.child("session", k, i)
                    sessions.append(await self._session(sandbox, place, key, model))
                rounds.append(sessions)
            finally:
                await settle(sandbox.close())
            say(f"session {k + 1} of 2: {len(places)} snapshots, {sum(len(s.siblings) for s in sessions)} siblings")
        return list(zip(*rounds, strict=True))

    async def _places(self, sandbox: Sandbox, noise: Noise) -> list[_Place]:
        """The root and the middle of an episode of each prompt."""
        out = []
        for i, (make, task) in enumerate(self.prompts):

            async def opened(luck: Noise, make: Make = make, task: Task = task) -> Played:
                return Played(await settle(sandbox.open(make, task, luck)), luck)

            played, _, failure = await self._grown(_Stage(opened), make, task, 1, noise.child("pilot", i))
            if not played:
                raise ProbeError(f"task {task.id}: an episode to fork from failed: {failure}")
            turns = {0, len(played[0].actions) // 2}
            out += [_Place(make, task, played[0], t) for t in sorted(turns)]
        return out

    async def _grown(
        self, stage: _Stage, make: Make, task: Task, roots: int, noise: Noise
    ) -> tuple[list[Played], int, str]:
        """Rollouts of the policy on a stage; none of them where one has failed, with the number that did and why."""
        grower = Grower(self.policy, stage, Flat(roots=roots), self.limits, "independent", Ledger())
        tree = await grower.grow(make, task, noise)
        failed = [b.failure for b in tree.branches if b.failure is not None]
        if failed:
            return [], len(failed), f"{failed[0].kind}: {failed[0].message}"
        if len(stage.played) != roots:  # which one went on is no longer known
            return [], len(stage.played) - roots, "a rollout had to be tried again"
        return stage.played, 0, ""

    async def _session(self, sandbox: Sandbox, place: _Place, noise: Noise, model: Sequence[Played]) -> Session:
        """Bring a world to the place, freeze it, restore siblings, replay. ``model``: siblings of the first session, to
        be repeated in this one."""
        luck = noise.child("root") if place.turn == 0 else place.pilot.noise
        try:
            live = Played(await self._ask(sandbox.open, place.make, place.task, luck), luck)
            at = await self._ask(live.reset)
            for t in range(place.turn):
                at = await self._ask(live.step, place.pilot.actions[t])
            told = mismatch(place.pilot, live, place.turn)
            if told:
                await self._ask(live.close)
                return Session(replays=1, differences=(f"{place.name}, the way there again: {told}",))
            if not live.env.supports_snapshot:
                raise ProbeError("this environment cannot be snapshotted: use sandbox 'process'")
            snapshot: Snapshot = await self._ask(live.env.snapshot)
        except BranchFailure as e:
            return Session(failed=1, failure=f"{place.name}: {e}")
        try:
            return await self._restored(snapshot, live, at, place, noise, model)
        finally:
            with suppress(BranchFailure):
                await self._ask(snapshot.discard)

    async def _restored(
        self, snapshot: Snapshot, live: Played, at: Step, place: _Place, noise: Noise, model: Sequence[Played]
    ) -> Session:
        going_on: list[Played] = [Played(live.env, live.noise, at)]

        async def opened(luck: Noise) -> Played:
            return going_on.pop() if going_on else Played(await settle(snapshot.restore(luck)), luck, at)

        stage = _Stage(opened)
        played, failed, failure = await self._grown(stage, place.make, place.task, self.siblings + 1, noise)
        if not played:
            return Session(failed=failed, failure=f"{place.name}: {failure}")
        backbone, siblings = played[0], played[1:]
        originals = [("restored again", siblings[0]), *(("in another session", p) for p in model[:2])]
        told = []
        for which, original in originals:
            again = await self._replay(snapshot, original, original.noise, at)
            if found := again if isinstance(again, str) else mismatch(original, again):
                told.append(f"{place.name}, {which}: {found}")
        fresh = [await self._replay(snapshot, siblings[0], noise.child("fresh", i), at) for i in range(2)]
        fresh = tuple(f for f in fresh if isinstance(f, Played))
        return Session(tuple(siblings), backbone, fresh, len(originals), tuple(told))

    async def _replay(self, snapshot: Snapshot, original: Played, luck: Noise, at: Step) -> Played | str:
        """The actions of a rollout once more from the snapshot, as far as the world goes along; or why it failed."""
        try:
            again = Played(await self._ask(snapshot.restore, luck), luck, at)
            try:
                for action in original.actions:
                    answer = await self._ask(again.step, action)
                    if answer.done or answer.truncated:
                        break
            finally:
                await self._ask(again.close)
        except BranchFailure as e:
            return f"it failed ({e.kind}: {e})"
        return again

    async def _ask(self, call: Callable[..., Any], *given: Any) -> Any:
        """Ask the world; a wait that is too long is a failure of the sandbox."""
        limit = max(self.limits.start_seconds, self.limits.step_seconds)
        try:
            async with asyncio.timeout(limit):
                return await settle(call(*given))
        except TimeoutError as e:
            raise SandboxFailure(f"{getattr(call, '__name__', 'an answer')} took over {limit:g} s") from e


def mismatch(one: Played, other: Played, turns: int | None = None) -> str:
    """Where two runs of the same actions were answered differently, in words; empty where they were not.

    ``turns``: only so many. What environments tell people (``info``) does not count.
    """
    pairs: list[tuple[Any, Any]] = [(one.first, other.first)]
    pairs += zip(one.answers[:turns], other.answers[:turns], strict=False)
    for t, (a, b) in enumerate(pairs):
        for name in ("observation", "reward", "done", "truncated", "actions", "grammar"):
            mine, theirs = getattr(a, name), getattr(b, name)
            if mine != theirs:
                where = "the first observation" if t == 0 else f"action {t} ({one.actions[t - 1]!r})"
                return f"{name} after {where} was {_short(mine)}, then {_short(theirs)}"
    if turns is None and len(one.answers) != len(other.answers):
        return f"the episode took {len(one.answers)} turns, then {len(other.answers)}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
