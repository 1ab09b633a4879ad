"""Snapshots by process fork: any Python world, picklable or not, restorable any number of times.

Each environment runs in a worker process. ``snapshot`` forks the worker; the copy waits, frozen, and costs the pages
that are written later. ``restore`` forks the copy again. What a fork copies: the heap, closures, generators, loaded
libraries, the offsets of files open for reading, unnamed temporary files. What it cannot copy is refused with
SnapshotUnsupported, or left to replay: threads, child processes, sockets and pipes, files open for writing, shared
memory. What it cannot see: named files that the environment writes and closes again (all branches share the file
system). Hooks of ``os.register_at_fork`` do not run: a copy is exact, and there are no threads whose locks they would
repair.

Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Literal

import anyio

from branchpoint.noise import Noise
from branchpoint.sandbox import _wire
from branchpoint.sandbox._drive import Stage, globals_seed
from branchpoint.sandbox._history import Counters, Event, Origin, compare
from branchpoint.sandbox._template import Template, recipe
from branchpoint.sandbox._worker import Worker
from branchpoint.world import BranchFailure, Make, SandboxFailure, SnapshotUnsupported, Step, Task


class ForkServer:
    """A sandbox for Python worlds (``Sandbox`` of :mod:`branchpoint.world`), used as ``async with ForkServer() as s``.

    Args:
        preload: modules that the zygote imports before anything else. The builder's own module is imported there too,
            once, so opening a further environment costs a fork and not an interpreter. Name what the world imports
            late (in ``reset`` or ``step``; also "numpy.random", if it draws from a ``Noise`` and has no ``reseed``):
            else each branch imports it anew. Name no more than it needs: every module makes every fork slower.
        step_timeout_s: limit of one step, snapshot or restore.
        start_timeout_s: limit of building (imports included) and of ``reset``.
        memory_bytes: address space that each environment may use beyond the zygote's; None is no limit.
        rebase_depth: a snapshot this many forks away from the zygote is rebuilt by repeating its history on a
            shallower process, since the kernel's bookkeeping makes deep forks slow (some 20 ms at 128). The answers are
            compared on the way; if any differs, or the world has ``deterministic = False``, the deep process is used.
        huge_pages: put the heap on transparent huge pages: large heaps fork several times faster, and a branch copies
            2 MB instead of 4 kB where it writes.
        quiet: drop what environments print; else it goes to the trainer's stderr.
        unforkable: what a snapshot of a state that a fork cannot copy does: ``refuse`` raises SnapshotUnsupported;
            ``replay`` keeps the history instead, which a restore repeats in a new process, comparing all answers.
        say: told once for each kind of environment that is left to replay, with the reason.

    Raises SnapshotUnsupported on systems other than Linux.
    """

    preserves: ClassVar[frozenset[str]] = frozenset({"generators", "closures", "globals", "isolation"})

    def __init__(
        self,
        preload: tuple[str, ...] = (),
        *,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 180.0,
        memory_bytes: int | None = None,
        rebase_depth: int = 64,
        huge_pages: bool = False,
        quiet: bool = True,
        unforkable: Literal["refuse", "replay"] = "refuse",
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        if sys.platform != "linux":
            raise SnapshotUnsupported("the fork server needs Linux; use the inprocess or replay sandbox")
        for name, value in (("step_timeout_s", step_timeout_s), ("start_timeout_s", start_timeout_s)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; expected a positive number of seconds")
        if memory_bytes is not None and memory_bytes <= 0:
            raise ValueError(f"memory_bytes is {memory_bytes}; expected a positive number, or None for no limit")
        if rebase_depth < 4:
            raise ValueError(f"rebase_depth is {rebase_depth}; expected at least 4")
        self.step_timeout_s = step_timeout_s
        self.start_timeout_s = start_timeout_s
        self.memory_bytes = memory_bytes
        self.rebase_depth = rebase_depth
        self.unforkable, self._say, self._said = unforkable, say, set[str]()
        self.counters = Counters()
        self._template = Template(preload, huge_pages, quiet)
        self._workers: set[Worker] = set()
        self._envs: set[ForkEnv] = set()
        self._snapshots: set[ForkSnapshot] = set()
        self._closed = False
        _SERVERS.add(self)

    @property
    def live(self) -> int:
        """The number of worker processes that are alive, snapshots included."""
        return sum(w.dead is None for w in self._workers)

    async def __aenter__(self) -> ForkServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> Worker:
        """Starts the zygote if it does not run, and imports ``preload`` there. ``open`` does it by itself."""
        if self._closed:
            raise RuntimeError("the fork server is closed")
        return await self._template.start(self.start_timeout_s)

    async def open(self, make: Make | str, task: Task, noise: Noise) -> ForkEnv:
        """A live environment in a process of its own, built by ``make(task)`` and given its luck.

        ``make`` is what a worker can import: a function or class of a module, or ``"module:attribute"``.
        Raises EnvironmentFailure when building raises, SandboxFailure when no process can be had.
        """
        origin: Origin = (recipe(make), task)
        with self._timed("open"):
            worker = await self._spawn(origin, noise)
            self.counters.opens += 1
        return ForkEnv(self, worker, Event(None, "open", (origin, noise)))

    async def _spawn(self, origin: Origin, noise: Noise) -> Worker:
        build, task = origin
        zygote = await self.start()
        arguments = {"build": build, "task": task, "noise": noise, "memory_bytes": self.memory_bytes}
        return await self._forked(zygote, "open", self.start_timeout_s, _wire.request("open", arguments))

    async def _copied(self, parent: Worker, noise: Noise | None) -> Worker:
        """A copy of a worker: exact, or with its own luck."""
        request = _wire.fork_request(noise, 0 if noise is None else globals_seed(noise))
        return await self._forked(parent, "fork", self.step_timeout_s, request)

    async def _forked(self, parent: Worker, call: str, limit: float, request: bytes) -> Worker:
        """A child of a worker, ready to be used."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxFailure(f"{error}: raise the limit of open files (ulimit -n), or discard snapshots") from error
        child = Worker(ours, parent.depth + 1, self._template.explain)
        try:
            with theirs:
                await parent.post(limit, theirs.fileno(), request)
            await child.ready(parent, call, limit)
            self.counters.forks += 1
        except BaseException as error:
            child.kill(str(error) or "cancelled")
            raise
        self._workers.add(child)
        return child

    def _left_to_replay(self, name: str, error: SnapshotUnsupported) -> None:
        if name not in self._said:
            self._said.add(name)
            self._say(f"{name}: snapshots by replay, since a fork cannot copy its state: {error}")

    async def _retire(self, worker: Worker, why: str) -> None:
        worker.kill(why)
        self._workers.discard(worker)
        with anyio.CancelScope(shield=True):
            await worker.gone()
        self._template.bury(worker.pid)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except BranchFailure:
            self.counters.failures += 1
            raise
        finally:
            name = f"{what}_seconds"
            setattr(self.counters, name, getattr(self.counters, name) + time.perf_counter() - start)

    async def close(self) -> None:
        """Ends all environments, snapshots and the zygote, and waits until they are gone."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for env in tuple(self._envs):
                    group.start_soon(env.close)
            for snapshot in tuple(self._snapshots):
                if snapshot.worker is not None:
                    snapshot.worker.kill("the fork server was closed")
            await self._template.stop()
            self._workers.clear()
            self._snapshots.clear()

    def _forget(self) -> None:
        """In a child that the trainer forked: lets go of the connections, which would keep workers alive for ever."""
        for worker in self._workers:
            worker.dead = worker.dead or "the fork server belongs to the parent process"
            worker.sock.close()
        self._template.forget()
        self._closed = True


_SERVERS: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in tuple(_SERVERS):
        server._forget()


os.register_at_fork(after_in_child=_forget_all)


class ForkEnv:
    """A live environment in a worker process. One owner; calls are awaited in turn.

    A failure of the environment or its process ends this branch only. Calls out of order (a second reset, a step after
    the end or a failure) raise RuntimeError.
    """

    supports_snapshot = True

    def __init__(self, server: ForkServer, worker: Worker, event: Event) -> None:
        self.server = server
        self.worker = worker
        self._event = event
        self._stage = Stage()
        server._envs.add(self)

    async def reset(self) -> Step:
        """The first observation. Raises the typed failure of whatever goes wrong, within ``start_timeout_s``."""
        self._stage.enter("reset")
        return await self._play("reset", self.server.start_timeout_s)

    async def step(self, action: str) -> Step:
        """Plays an action. Raises the typed failure of whatever goes wrong, within ``step_timeout_s``."""
        if not isinstance(action, str):
            raise TypeError(f"action is {type(action).__name__}; expected str")
        self._stage.enter("step")
        return await self._play("step", self.server.step_timeout_s, action=action)

    async def _play(self, call: str, limit: float, **arguments: Any) -> Step:
        try:
            fields, answer = await self.worker.exchange(call, limit, **arguments)
            step = _wire.to_step(fields)
        except BranchFailure as error:
            self.server.counters.failures += 1
            self._stage.state = "failed"
            await self.server._retire(self.worker, f"this branch has failed: {error}")
            raise
        self._event = Event(self._event, call, arguments.get("action"), _wire.fingerprint(answer))
        self._stage.after(step)
        return step

    async def snapshot(self) -> ForkSnapshot:
        """Freezes a copy. This environment goes on unchanged.

        Raises SnapshotUnsupported, naming what stands in the way, for a state that a fork cannot copy.
        """
        self._stage.enter("snapshot")
        server = self.server
        with server._timed("snapshot"):
            worker = await self._frozen()
            server.counters.snapshots += 1
        return ForkSnapshot(server, worker, self._event, self._stage.state)

    async def _frozen(self) -> Worker | None:
        """A copy, or None where the history has to do."""
        try:
            return await self.server._copied(self.worker, None)
        except SnapshotUnsupported as error:
            if self.server.unforkable == "refuse":
                raise
            (_, task), _ = self._event.opened
            self.server._left_to_replay(task.root, error)
        await self.worker.call("repeatable", self.server.step_timeout_s)
        return None

    async def close(self) -> None:
        """Lets the world close, then ends its process. Safe to repeat."""
        if self._stage.state == "closed":
            return
        self._stage.state = "closed"
        self.server._envs.discard(self)
        with anyio.CancelScope(shield=True):
            if self.worker.dead is None:
                with contextlib.suppress(BranchFailure):
                    await self.worker.call("close", min(5.0, self.server.step_timeout_s))
            await self.server._retire(self.worker, "the environment was closed")

    async def __aenter__(self) -> ForkEnv:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await self.close()


class ForkSnapshot:
    """A frozen process. It can be restored any number of times, also when branches that it gave have died.

    Without a process (``worker`` None) it is the history of a state that a fork cannot copy, and is repeated.
    """

    digest = ""

    def __init__(self, server: ForkServer, worker: Worker | None, event: Event, stage: str) -> None:
        self.id = f"fork-{server.counters.snapshots}"
        self.server = server
        self.worker = worker
        self._event = event
        self._stage = stage
        self._rebasing = anyio.Lock()
        self._rebase = True
        self._discarded = False
        event.frozen.append(weakref.ref(self))
        server._snapshots.add(self)

    @property
    def alive(self) -> bool:
        """Whether there is a process to fork."""
        return self.worker is not None and self.worker.dead is None

    @property
    def depth(self) -> int:
        """The number of forks between the zygote and this process."""
        return 0 if self.worker is None else self.worker.depth

    async def restore(self, noise: Noise) -> ForkEnv:
        """An independent live environment that goes on from here with its own luck.

        Raises SandboxFailure when the frozen process is gone or no new one can be had, and SnapshotUnsupported when a
        history is answered differently this time.
        """
        server = self.server
        event = Event(self._event, "noise", noise)
        with server._timed("restore"):
            if self._discarded:
                raise SandboxFailure(f"snapshot {self.id} was discarded")
            if self.depth >= server.rebase_depth:
                await self._move_up()
            if self.worker is None:
                worker = await self._repeat(event, live=True)
                server.counters.repeats += 1
            else:
                worker = await server._copied(self.worker, noise)
            server.counters.restores += 1
        env = ForkEnv(server, worker, event)
        env._stage.state = self._stage
        return env

    async def discard(self) -> None:
        """Ends the frozen process. What was restored from it lives on. Safe to repeat."""
        self._discarded = True
        self.server._snapshots.discard(self)
        if self.worker is not None:
            await self.server._retire(self.worker, f"snapshot {self.id} was discarded")

    async def _move_up(self) -> None:
        """Rebuilds this state on a shallower process by repeating its history; on any difference nothing changes."""
        async with self._rebasing:
            if not self._rebase or self.worker is None or self.worker.dead or self.depth < self.server.rebase_depth:
                return
            try:
                shallow = await self._repeat(self._event, live=False)
            except BranchFailure:
                self._rebase = False
                return
            self.server.counters.rebases += 1
            deep, self.worker = self.worker, shallow
            await self.server._retire(deep, "moved to a shallower process")

    async def _repeat(self, event: Event, live: bool) -> Worker:
        """A process in the state after an event, forked from the nearest shallow snapshot or opened anew.

        ``live``: to be played on, else a snapshot. Raises SnapshotUnsupported when it answers differently.
        """
        server = self.server
        base, events = event.since(server.rebase_depth // 4)
        worker = await (server._spawn(*event.opened) if base is None else server._copied(base, None))
        try:
            log = [(e.call, e.argument) for e in events]
            answers = await worker.call("replay", server.start_timeout_s, log=log, freeze=not live)
            compare(events, answers["fingerprints"])
        except BaseException as error:
            await server._retire(worker, f"the history could not be repeated: {error}")
            raise
        return worker
