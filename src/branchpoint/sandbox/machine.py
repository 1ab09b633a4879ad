"""Machines: small computers for untrusted commands, and the sandbox that gives one to every branch of a world.

A world of this kind is trusted Python (prompt, action parser, grader) beside an untrusted machine (files, commands). It
names the machine it wants in ``image`` and receives it through ``attach``; a snapshot freezes both. Back-ends:
:mod:`branchpoint.sandbox.shell` (namespaces and overlay layers) and :mod:`branchpoint.sandbox.container` (a
Docker-compatible engine). :func:`branchpoint.testing.check_machine` checks one.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.world import EnvironmentFailure, Make, SandboxFailure, Step, Task, World

R = TypeVar("R")
_THREADS = 64  # they wait for commands; more branches than that queue


@dataclass(frozen=True, slots=True)
class Image:
    """What a machine starts from. The agent writes to none of it: its changes lie in a layer above.

    ``base`` is what the back-end starts from: ``host`` (read-only directories of this computer, shell only), a folder
    that holds a root file system (shell), or the name or tar file of an image (container). ``trees`` are copied in:
    absolute path inside -> folder outside. ``binds`` are mounted read-only: path inside -> folder outside.
    """

    base: str = "host"
    trees: Mapping[str, Path] = field(default_factory=dict)
    binds: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did.

    ``output``: standard output and error as they were written, undecodable bytes replaced, cut in the middle beyond the
    limit (``omitted`` bytes are missing there). ``code``: the exit status, 128 + n for signal n. ``timed_out``: the
    time was over and the whole tree of processes was killed. ``left``: how many processes the command left running;
    they were killed. ``notes``: what else there is to know (a limit that was hit, a shell state that was lost).
    """

    output: str
    code: int
    timed_out: bool = False
    omitted: int = 0
    left: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A path that differs from the image. ``data`` is None unless it is a regular file now."""

    kind: str  # "file", "deleted", "directory", "symlink", "other"
    data: bytes | None = None
    mode: int = 0


def absolute(path: str, workdir: str) -> str:
    """A path of a machine, from its root, ``..`` resolved by name. Raises ValueError for one that no file can have."""
    if "\0" in path or not path:
        raise ValueError(f"not a path: {path!r}")
    return posixpath.normpath(posixpath.join("/", workdir, path))


class Machine(Protocol):
    """A live machine with one owner. Its methods block, and raise SandboxFailure when the machine itself fails."""

    def run(self, command: str, *, seconds: float | None = None, stdin: bytes = b"") -> Ran:
        """Runs a bash command line in the state that earlier ones left. Ends after ``seconds`` at the latest."""
        ...

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """The content of a regular file, links followed inside only. Raises FileNotFoundError, IsADirectoryError, or
        ValueError when it holds more than ``limit`` bytes or is no regular file."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, with its folders; links are followed inside only. Raises OSError where that cannot be."""
        ...

    def changes(self, under: str) -> Mapping[str, Change]:
        """What differs from the image below a folder, by absolute path; read by the host, whatever runs inside."""
        ...

    def freeze(self) -> Frozen:
        """The state as of now, which the machine leaves unchanged when it goes on."""
        ...

    def close(self) -> None:
        """Ends everything that runs in it. Safe to repeat, and from another thread while a command runs."""
        ...


class Frozen(Protocol):
    """A frozen machine, which can be thawed any number of times. ``digest`` is "" where content is not hashed."""

    id: str
    digest: str

    def thaw(self) -> Machine: ...
    def discard(self) -> None: ...


class Machines(Protocol):
    """A back-end. ``preserves`` says what a frozen machine keeps: ``files``, ``shell`` (working directory, variables,
    functions, options), ``processes``, ``links`` (names of one file stay that when one is written to after a thaw).
    ``unenforced`` names limits that this host cannot keep, each with the reason."""

    preserves: frozenset[str]
    unenforced: tuple[str, ...]

    def start(self, image: Image) -> Machine: ...
    def close(self) -> None: ...


class MachineWorld(World, Protocol):
    """A world that acts through a machine. ``get_state`` and ``set_state`` cover the Python side alone.

    Optional: ``spare(start)``, called before ``attach`` with what starts a further machine of an image, e.g. to grade
    in; the world closes each before its step returns.
    """

    image: Image

    def attach(self, machine: Machine) -> None: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Housed:
    """A machine world in a machine of its own, as a plain world: for one episode, without snapshots."""

    def __init__(self, world: Any, machines: Machines) -> None:
        self._world, self._machine = world, machines.start(world.image)
        _move_in(world, self._machine, machines)

    def reseed(self, noise: Noise) -> None:
        _drive.reseed_world(self._world, noise)

    def reset(self) -> Step:
        return self._world.reset()

    def step(self, action: str) -> Step:
        return self._world.step(action)

    def close(self) -> None:
        self._machine.close()
        self._world.close()


def _move_in(world: Any, machine: Machine, machines: Machines) -> None:
    spare = getattr(world, "spare", None)
    if spare is not None:
        spare(machines.start)
    world.attach(machine)


class MachineSandbox(InProcess):
    """A sandbox whose worlds get a machine each (``Sandbox`` of :mod:`branchpoint.world`).

    A world without ``attach`` is handled as in :class:`~branchpoint.sandbox.inprocess.InProcess`. One with it runs in a
    thread of its own while it waits for its machine, so it draws luck from its ``Noise`` alone.

    Args:
        machines: the back-end; closed with the sandbox.
    """

    preserves: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, machines: Machines) -> None:
        super().__init__("auto")
        self.machines = machines
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="machine")

    def open(self, make: Make | str, task: Task, noise: Noise) -> Any:
        """A live environment with a fresh machine. Raises EnvironmentFailure when building the world raises."""
        builder = _drive.resolve(make)
        with _drive.typed("building the environment"):
            world: Any = builder(task)
        if not hasattr(world, "attach"):
            world.close()
            return super().open(builder, task, noise)
        return self._begin(builder, task, world, noise)

    async def _begin(self, builder: Make, task: Task, world: MachineWorld, noise: Noise) -> MachineEnv:
        _own_state(world)

        def start() -> MachineEnv:
            machine = self.machines.start(world.image)
            return MachineEnv(self, lambda: builder(task), world, machine, noise)

        return await self.aside(start)

    async def aside(self, work: Callable[[], R]) -> R:
        """Runs blocking work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Ends all machines, and the threads that waited for them also where that raises."""
        try:
            self.machines.close()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)


def _own_state(world: Any) -> None:
    missing = [name for name in ("image", "get_state", "set_state") if not hasattr(world, name)]
    if missing:
        raise EnvironmentFailure(
            f"{type(world).__name__} has attach but no {', '.join(missing)}; a machine world needs all"
        )


class MachineEnv:
    """A live world with its machine. Failures are typed; calls out of order raise RuntimeError."""

    supports_snapshot = True

    def __init__(
        self, sandbox: MachineSandbox, fresh: Callable[[], World], world: MachineWorld, machine: Machine, noise: Noise
    ) -> None:
        self.world, self.machine = world, machine
        self._sandbox, self._fresh = sandbox, fresh
        self._stage = _drive.Stage()
        with _drive.typed("attaching the machine"):
            _move_in(world, machine, sandbox.machines)
            _drive.reseed_world(world, noise)

    async def reset(self) -> Step:
        """The first observation."""
        self._stage.enter("reset")
        return await self._play(None)

    async def step(self, action: str) -> Step:
        """Plays an action."""
        if not isinstance(action, str):
            raise TypeError(f"action is {type(action).__name__}; expected str")
        self._stage.enter("step")
        return await self._play(action)

    async def _play(self, action: str | None) -> Step:
        try:
            step = await self._sandbox.aside(lambda: _drive.play(self.world, action))
        except BaseException:
            self._stage.state = "failed"
            raise
        self._stage.after(step)
        return step

    async def snapshot(self) -> MachineSnapshot:
        """World and machine frozen together; both go on unchanged."""
        self._stage.enter("snapshot")

        def freeze() -> MachineSnapshot:
            with _drive.typed("saving the world's state"):
                state = self.world.get_state()
            return MachineSnapshot(self, state, self.machine.freeze())

        return await self._sandbox.aside(freeze)

    async def close(self) -> None:
        """Ends the machine and lets the world close. Safe to repeat."""
        if self._stage.state == "closed":
            return
        self._stage.state = "closed"
        self.machine.close()
        with _drive.typed("closing the environment"):
            self.world.close()


class MachineSnapshot:
    """A frozen world with its frozen machine, restorable any number of times."""

    def __init__(self, env: MachineEnv, state: Any, frozen: Frozen) -> None:
        self.id, self.digest = frozen.id, frozen.digest
        self._sandbox, self._fresh, self._stage = env._sandbox, env._fresh, env._stage.state
        self._state = state
        self._frozen: Frozen | None = frozen

    async def restore(self, noise: Noise) -> MachineEnv:
        """An independent live environment with its own luck. Raises SandboxFailure after ``discard``."""
        frozen = self._frozen
        if frozen is None:
            raise SandboxFailure(f"snapshot {self.id} was discarded")

        def thaw() -> MachineEnv:
            with _drive.typed("restoring the environment"):
                world: Any = self._fresh()
                world.set_state(self._state)
            env = MachineEnv(self._sandbox, self._fresh, world, frozen.thaw(), noise)
            env._stage.state = self._stage
            return env

        return await self._sandbox.aside(thaw)

    async def discard(self) -> None:
        """Frees the frozen machine. Safe to repeat."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            await self._sandbox.aside(frozen.discard)
