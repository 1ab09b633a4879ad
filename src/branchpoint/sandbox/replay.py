"""Snapshots by repetition: a snapshot is the list of what was done, a restore does it again.

Works for every deterministic world on every system, costs no memory, and takes the time of the steps it repeats. Every
answer is compared with the one seen first, so a world that does not repeat itself is found, and said where.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive
from branchpoint.sandbox.inprocess import Luck, Resident
from branchpoint.world import Make, SandboxFailure, SnapshotUnsupported, Step, Task


@dataclass(frozen=True, slots=True)
class _Entry:
    """One event of an episode: a call and what it answered, or (``step`` None) a change of luck by a restore."""

    action: str | None
    step: Step | None
    noise: Noise | None = None


class Replay:
    """A sandbox that repeats actions (``Sandbox`` of :mod:`branchpoint.world`). The world runs in this process."""

    preserves: ClassVar[frozenset[str]] = frozenset({"generators", "closures"})

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def open(self, make: Make | str, task: Task, noise: Noise) -> ReplayEnv:
        """A live environment built by ``make(task)``. Raises EnvironmentFailure when building raises."""
        return ReplayEnv(self, _drive.resolve(make), task, noise)

    def close(self) -> None:
        """Nothing outlives its owner here."""


class ReplayEnv(Resident):
    """A live environment that remembers what it did."""

    def __init__(self, sandbox: Replay, make: Make, task: Task, noise: Noise) -> None:
        self._sandbox, self._make, self._task, self._noise = sandbox, make, task, noise
        self._log: tuple[_Entry, ...] = ()
        luck = Luck()
        with luck.mine():
            world = _drive.build(make, task, noise)
        super().__init__(world, luck)

    def _play(self, action: str | None) -> Step:
        step = super()._play(action)
        self._log = (*self._log, _Entry(action, step))
        return step

    def snapshot(self) -> ReplaySnapshot:
        """The list of what was done so far. Raises SnapshotUnsupported for a world with ``deterministic = False``."""
        self._stage.enter("snapshot")
        if not getattr(self.world, "deterministic", True):
            raise SnapshotUnsupported(
                f"{type(self.world).__name__} declares deterministic = False, so it cannot be repeated; "
                "use the forkserver sandbox"
            )
        return ReplaySnapshot(self)


class ReplaySnapshot:
    """A history that can be repeated any number of times."""

    digest = ""

    def __init__(self, env: ReplayEnv) -> None:
        self.id = f"replay-{next(env._sandbox._ids)}"
        self._origin = (env._sandbox, env._make, env._task, env._noise)
        self._log: tuple[_Entry, ...] | None = env._log

    def restore(self, noise: Noise) -> ReplayEnv:
        """An independent live environment in the same state, with its own luck from here on.

        Raises SnapshotUnsupported, naming the step, when the world answers differently this time.
        """
        if self._log is None:
            raise SandboxFailure(f"snapshot {self.id} was discarded")
        env = ReplayEnv(*self._origin)
        try:
            for n, entry in enumerate(self._log):
                _repeat(env, entry, sum(e.step is not None for e in self._log[:n]))
            _change_luck(env, noise)
        except BaseException:
            env.close()
            raise
        return env

    def discard(self) -> None:
        """Forgets the history. Safe to repeat."""
        self._log = None


def _change_luck(env: ReplayEnv, noise: Noise) -> None:
    with env._luck.mine():
        _drive.reseed(env.world, noise)
    env._log = (*env._log, _Entry(None, None, noise))


def _repeat(env: ReplayEnv, entry: _Entry, at: int) -> None:
    if entry.step is None:
        assert entry.noise is not None
        _change_luck(env, entry.noise)
        return
    got = env._play(entry.action)
    for name in ("observation", "reward", "done", "truncated", "actions"):
        first, now = getattr(entry.step, name), getattr(got, name)
        if first != now:
            where = "reset" if at == 0 else f"step {at} ({entry.action!r})"
            raise SnapshotUnsupported(
                f"the world does not repeat itself: at {where} {name} was {first!r:.200} and is now {now!r:.200}; "
                "use the forkserver sandbox, or make it deterministic under its noise"
            )
