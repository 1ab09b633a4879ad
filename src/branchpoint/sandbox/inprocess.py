"""Snapshots within the trainer's own process, for worlds that can copy themselves.

The cheapest sandbox for small pure-Python worlds, and the only one here without an operating system requirement. It
does not isolate: a world that crashes or hangs takes the trainer with it, and what lies outside the object (module
globals, closures, files) is shared by all branches. ``preserves`` says so to the conformance suite.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive
from branchpoint.world import Make, SandboxFailure, SnapshotUnsupported, Step, Task, World

Method = Literal["auto", "state", "deepcopy", "pickle"]
Rebuild = Callable[[], World]
_CURE = "Give it get_state and set_state, or use the forkserver or replay sandbox"


class Luck:
    """The global random state of one environment, in place only while that environment runs.

    So an environment that uses ``random`` or ``numpy.random`` directly shares no draw with its siblings, and leaves the
    trainer's own state as it was.
    """

    def __init__(self) -> None:
        self.state: Any = None

    @contextmanager
    def mine(self) -> Iterator[None]:
        outside = _global_state()
        if self.state is not None:
            _set_global_state(self.state)
        try:
            yield
        finally:
            self.state = _global_state()
            _set_global_state(outside)


def _global_state() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch is not None else None


def _set_global_state(state: tuple[Any, Any, Any]) -> None:
    python, numpy, torch = state
    random.setstate(python)
    np.random.set_state(numpy)
    if torch is not None:
        sys.modules["torch"].set_rng_state(torch)


class InProcess:
    """A sandbox that copies the world object (``Sandbox`` of :mod:`branchpoint.world`).

    Args:
        method: ``state`` uses the world's own ``get_state`` and ``set_state`` (set on a fresh ``make(task)``),
            ``deepcopy`` and ``pickle`` copy the object, ``auto`` takes the first of the three that works.
    """

    preserves: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, method: Method = "auto") -> None:
        if method not in ("auto", "state", "deepcopy", "pickle"):
            raise ValueError(f"method is {method!r}; expected 'auto', 'state', 'deepcopy' or 'pickle'")
        self.method: Method = method
        self._ids = itertools.count(1)

    def open(self, make: Make | str, task: Task, noise: Noise) -> LocalEnv:
        """A live environment built by ``make(task)``. Raises EnvironmentFailure when building raises."""
        luck = Luck()
        with luck.mine():
            builder = _drive.resolve(make)
            world = _drive.build(builder, task, noise)
        return LocalEnv(self, world, luck, lambda: builder(task))

    def close(self) -> None:
        """Nothing outlives its owner here."""

    def copier(self, world: World, fresh: Rebuild) -> Rebuild:
        """What builds copies of the world as it is now. Raises SnapshotUnsupported when no method works."""
        methods = ("state", "deepcopy", "pickle") if self.method == "auto" else (self.method,)
        reasons = []
        for method in methods:
            try:
                return _COPIERS[method](world, fresh)
            except Exception as error:  # whatever a foreign __deepcopy__ or __reduce__ raises
                reasons.append(f"{method}: {type(error).__name__}: {error}")
        raise SnapshotUnsupported(f"{type(world).__name__} cannot be copied ({'; '.join(reasons)}). {_CURE}")


def _by_state(world: Any, fresh: Rebuild) -> Rebuild:
    if not (hasattr(world, "get_state") and hasattr(world, "set_state")):
        raise AttributeError("the world has no get_state and set_state")
    state = copy.deepcopy(world.get_state())

    def rebuild() -> World:
        copied: Any = fresh()
        copied.set_state(copy.deepcopy(state))
        return copied

    return rebuild


def _by_deepcopy(world: World, _: Rebuild) -> Rebuild:
    frozen = copy.deepcopy(world)
    return lambda: copy.deepcopy(frozen)


def _by_pickle(world: World, _: Rebuild) -> Rebuild:
    frozen = pickle.dumps(world)
    copied: World = pickle.loads(frozen)  # a world that can be written but not read back is refused now, not later
    del copied
    return lambda: pickle.loads(frozen)


_COPIERS: dict[str, Callable[[Any, Rebuild], Rebuild]] = {
    "state": _by_state,
    "deepcopy": _by_deepcopy,
    "pickle": _by_pickle,
}


class Resident:
    """A live environment in this process. Failures of the world are typed; calls out of order raise RuntimeError."""

    supports_snapshot = True

    def __init__(self, world: World, luck: Luck) -> None:
        self.world = world
        self._luck = luck
        self._stage = _drive.Stage()

    def reset(self) -> Step:
        """The first observation."""
        self._stage.enter("reset")
        return self._play(None)

    def step(self, action: str) -> Step:
        """Plays an action."""
        if not isinstance(action, str):
            raise TypeError(f"action is {type(action).__name__}; expected str")
        self._stage.enter("step")
        return self._play(action)

    def _play(self, action: str | None) -> Step:
        with self._luck.mine():
            try:
                step = _drive.play(self.world, action)
            except Exception:
                self._stage.state = "failed"
                raise
        self._stage.after(step)
        return step

    def close(self) -> None:
        """Lets the world close. Safe to repeat."""
        if self._stage.state != "closed":
            self._stage.state = "closed"
            with self._luck.mine(), _drive.typed("closing the environment"):
                self.world.close()


class LocalEnv(Resident):
    """A live environment that can copy itself."""

    def __init__(self, sandbox: InProcess, world: World, luck: Luck, fresh: Rebuild) -> None:
        super().__init__(world, luck)
        self._sandbox, self._fresh = sandbox, fresh

    def snapshot(self) -> LocalSnapshot:
        """A frozen copy; this environment goes on unchanged. Raises SnapshotUnsupported when it cannot be copied."""
        self._stage.enter("snapshot")
        with self._luck.mine():
            rebuild = self._sandbox.copier(self.world, self._fresh)
        return LocalSnapshot(f"local-{next(self._sandbox._ids)}", self, rebuild)


class LocalSnapshot:
    """A frozen copy of a world, restorable any number of times."""

    digest = ""

    def __init__(self, id: str, env: LocalEnv, rebuild: Rebuild) -> None:
        self.id = id
        self._sandbox, self._fresh, self._stage = env._sandbox, env._fresh, env._stage.state
        self._rebuild: Rebuild | None = rebuild

    def restore(self, noise: Noise) -> LocalEnv:
        """An independent live environment with its own luck. Raises SandboxFailure after ``discard``."""
        if self._rebuild is None:
            raise SandboxFailure(f"snapshot {self.id} was discarded")
        luck = Luck()
        with luck.mine(), _drive.typed("restoring the environment"):
            world = self._rebuild()
            _drive.reseed(world, noise)
        env = LocalEnv(self._sandbox, world, luck, self._fresh)
        env._stage.state = self._stage
        return env

    def discard(self) -> None:
        """Frees the copy. Safe to repeat."""
        self._rebuild = None
