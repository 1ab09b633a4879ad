"""The worker side of the fork server: a zygote that opens environments, and nodes that hold one each.

A node serves one socket. ``fork`` brings the socket of the child, which answers on it from then on. A snapshot is a
node that nobody steps. A node ends when its socket does, so everything ends when the trainer does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import os
import pickle
import random
import resource
import runpy
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive, _guard, _wire
from branchpoint.world import BranchFailure, EnvironmentFailure, SandboxFailure, SnapshotUnsupported, World

_SET_CHILD_SUBREAPER = 36


class Reaper:
    """Waits for this process's own forks the moment they die, and for no other child: an environment's own
    subprocesses keep their exit status. The zygote, heir of every orphan, waits for all of them while it is idle.

    Each death is told to the trainer through a pipe ("pid status" lines), which explains a closed socket.
    """

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.children: set[int] = set()
        self.all = False
        signal.signal(signal.SIGCHLD, self._on_death)
        signal.siginterrupt(signal.SIGCHLD, False)

    def _on_death(self, *_: object) -> None:
        self.reap()

    def reap(self) -> None:
        if self.all:
            while self._wait(-1):
                pass
        else:
            for pid in tuple(self.children):
                self._wait(pid)

    def _wait(self, pid: int) -> bool:
        try:
            pid, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            self.children.discard(pid)
            return False
        if pid == 0:
            return False
        self.children.discard(pid)
        with contextlib.suppress(OSError):  # full, or the trainer is gone: only an explanation is lost
            os.write(self.pipe, b"%d %d\n" % (pid, status))
        return True


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process beyond doubt."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        return int(f.read().rpartition(b")")[2].split()[19])


class Server:
    """One process with one socket: reads requests, answers them, forks. ``handle`` does what is special to it."""

    def __init__(self, sock: socket.socket, reaper: Reaper) -> None:
        self.sock = sock
        self.reaper = reaper
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    @property
    def own_fds(self) -> set[int]:
        return {self.sock.fileno(), self.reaper.pipe}

    def wait(self) -> tuple[dict[str, Any], int | None]:
        """The next request. Ends the process when the trainer is gone. (poll lets the reaper run; recv would not.)"""
        self.poll.poll()
        message = _wire.receive(self.sock)
        if message is None:
            self.end()
        return message

    def answer(self, fields: dict[str, Any]) -> None:
        try:
            body = _wire.encode(fields) if fields else b"{}"
        except BranchFailure as error:
            body = _wire.encode(_wire.failure_fields(error))
        self.send(body)

    def send(self, body: bytes) -> None:
        try:
            self.sock.sendall(_wire.frame(body))
        except OSError:
            self.end()

    def end(self) -> NoReturn:
        os._exit(0)

    def refuse(self, fd: int, error: BranchFailure) -> None:
        """Tells a failure to whom the child's socket belongs."""
        with socket.socket(fileno=fd) as sock, contextlib.suppress(OSError):
            sock.sendall(_wire.frame(_wire.encode(_wire.failure_fields(error))))

    def fork(self, fd: int) -> bool:
        """Forks; True in the child, which serves the socket ``fd`` from now on and has told its pid there.

        Raises SandboxFailure when the kernel refuses.
        """
        try:
            pid = os.fork()
        except OSError as error:
            raise SandboxFailure(
                f"fork failed: {error}; keep fewer environments alive, or allow more memory"
            ) from error
        if pid:
            os.close(fd)
            self.reaper.children.add(pid)
            self.reaper.reap()
            return False
        self.reaper.children.clear()
        self.poll.unregister(self.sock)
        self.sock.close()
        self.sock = socket.socket(fileno=fd)
        self.sock.setblocking(True)
        self.poll.register(self.sock, select.POLLIN)
        os.setsid()  # a group of its own: it is ended with all that it starts
        self.send(b'{"pid": %d}' % os.getpid())
        return True


class Node(Server):
    """A worker that holds one world: live when the trainer steps it, a snapshot when it only forks it."""

    def __init__(self, sock: socket.socket, reaper: Reaper, world: World) -> None:
        super().__init__(sock, reaper)
        self.world = world
        self.settled = False
        self.frozen = False  # a snapshot: its state passed the guard and no longer changes

    def start(self) -> NoReturn:
        self.answer({})
        self.serve()

    def serve(self) -> NoReturn:
        calls: dict[str, Callable[..., dict[str, Any] | None]] = {
            "reset": lambda: _wire.step_fields(_drive.play(self.world, None)),
            "step": lambda action: _wire.step_fields(_drive.play(self.world, action)),
            "replay": self._replay,
            "fork": self._fork,
            "close": self._close,
        }
        while True:
            message, fd = self.wait()
            call, arguments = calls[message.pop("call")], message
            if fd is not None:
                arguments["fd"] = fd
            try:
                fields = call(**arguments)
            except BranchFailure as error:
                fields = _wire.failure_fields(error)
            except BaseException as error:  # KeyboardInterrupt raised by the world and the like: a failure as any
                fields = _wire.failure_fields(EnvironmentFailure(f"{type(error).__name__}: {error}"))
            if fields is not None:
                self.answer(fields)

    def _fork(self, noise: Noise | None, fd: int) -> dict[str, Any] | None:
        """Forks this node. With a noise the child is reseeded; without one it is an exact copy.

        All that there is to say, a refusal too, is said on the child's socket.
        """
        try:
            if not self.frozen:
                _guard.check(self.own_fds | {fd}, self.reaper.children)
                self._settle()
            generator = random.getstate()  # CPython reseeds ``random`` in every child
            if not self.fork(fd):
                return None
        except BranchFailure as error:
            self.refuse(fd, error)
            return None
        try:
            random.setstate(generator)
            _guard.detach(self.own_fds)
            self.frozen = noise is None
            if noise is not None:
                _drive.reseed(self.world, noise)
        except BranchFailure as error:
            return _wire.failure_fields(error)
        return {}

    def _settle(self) -> None:
        """What must be done before a fork: nothing left in the buffers, and no collector that touches old pages."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue  # the world closed or replaced it
        if not self.settled:
            self.settled = True
            gc.freeze()

    def _replay(self, log: list[tuple[str, Any]]) -> dict[str, Any]:
        """Repeats a log of (reset | step | noise, argument); the fingerprint of each answer."""
        if not getattr(self.world, "deterministic", True):
            raise SnapshotUnsupported("the world declares that it does not repeat itself")
        out: list[str] = []
        for call, argument in log:
            if call == "noise":
                _drive.reseed(self.world, argument)
                out.append("")
            else:
                fields = _wire.step_fields(_drive.play(self.world, None if call == "reset" else argument))
                out.append(fingerprint(_wire.encode(fields)))
        self.frozen = True
        return {"fingerprints": out}

    def _close(self) -> NoReturn:
        try:
            with _drive.typed("closing the environment"):
                self.world.close()
            self.answer({})
        except BranchFailure as error:
            self.answer(_wire.failure_fields(error))
        self.end()


def fingerprint(answer: bytes) -> str:
    return hashlib.blake2b(answer, digest_size=8).hexdigest()


class Zygote(Server):
    """The template of all workers: holds the imported modules, so that opening an environment is one fork."""

    def __init__(self, sock: socket.socket, reaper: Reaper) -> None:
        super().__init__(sock, reaper)
        self.settled = False
        self.threaded = ""  # the module whose import left a thread running
        self.main: tuple[str, str] | None = None

    def serve(self) -> NoReturn:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        while True:
            self.reaper.all = True
            self.reaper.reap()
            message, fd = self.wait()
            self.reaper.all = False  # an import may run subprocesses and needs their exit status
            call = message.pop("call")
            try:
                if call == "preload":
                    self._preload(**message)
                    self.answer({})
                elif call == "open":
                    assert fd is not None
                    self._open(**message, fd=fd)
                else:
                    self._bury()
                    self.answer({})
                    os._exit(0)
            except BranchFailure as error:
                self.answer(_wire.failure_fields(error))

    def _preload(self, modules: list[str], path: list[str]) -> None:
        _extend(path)
        for name in modules:
            with _drive.typed(f"preloading {name}"):
                importlib.import_module(name)
            self._look_for_threads(name)

    def _look_for_threads(self, name: str) -> None:
        if len(os.listdir("/proc/self/task")) == 1:
            self.threaded = ""
        elif not self.threaded:
            self.threaded = name

    def _open(self, build: dict[str, Any], task: Any, noise: Noise, memory_bytes: int | None, fd: int) -> None:
        try:
            builder = self._builder(**build)
            if self.threaded:
                raise SnapshotUnsupported(
                    f"importing {self.threaded} started a thread, and a process with threads cannot be forked; "
                    "start it in reset or step (and join it there) instead"
                )
            self._settle()
            if not self.fork(fd):
                return
        except BranchFailure as error:
            self.refuse(fd, error)
            return
        try:
            _limit(memory_bytes)
            world = _drive.build(builder, task, noise)
        except BranchFailure as error:
            self.answer(_wire.failure_fields(error))
            self.end()
        except BaseException as error:
            self.answer(_wire.failure_fields(EnvironmentFailure(f"{type(error).__name__} in make: {error}")))
            self.end()
        # A reaper of its own: the zygote's inherits all orphans, a node waits for its own forks only.
        Node(self.sock, Reaper(self.reaper.pipe), world).start()

    def _settle(self) -> None:
        """Before the first fork: everything that each child would otherwise do anew, or touch."""
        if not self.settled:
            self.settled = True
            generator = random.getstate()
            _drive.seed_globals(Noise())  # imports numpy.random
            random.setstate(generator)
            gc.collect()
            gc.freeze()

    def _builder(self, make: bytes, main: tuple[str, str] | None, path: list[str]) -> Any:
        """What builds the world. Its module is imported here, once, and inherited by every worker."""
        _extend(path)
        with _drive.typed("importing the builder of the environment"):
            if main is not None and main != self.main:
                _load_main(*main)
                self.main = main
            builder = _drive.resolve(pickle.loads(make))
        self._look_for_threads(f"{getattr(builder, '__module__', None) or builder!r}")
        return builder

    def end(self) -> NoReturn:
        self._bury()
        os._exit(0)

    def _bury(self) -> None:
        """Ends every process that this one is the ancestor of; children of the dead become ours and follow."""
        me = os.getpid()
        self.reaper.all = True
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.reaper.reap()
            with open(f"/proc/self/task/{me}/children") as f:
                children = f.read().split()
            if not children:
                return
            for pid in children:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.002)


def _extend(path: list[str]) -> None:
    sys.path.extend(p for p in path if p not in sys.path)


def _load_main(kind: str, name: str) -> None:
    """Makes what the trainer's script defines importable here, without running its ``if __name__ == "__main__"``."""
    run = runpy.run_path if kind == "path" else runpy.run_module
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(run(name, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _limit(memory_bytes: int | None) -> None:
    """Lets this process and its forks map ``memory_bytes`` more than now."""
    if memory_bytes is None:
        return
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, now + memory_bytes))


def main(sock_fd: int, pipe: int) -> NoReturn:
    sock = socket.socket(fileno=sock_fd)
    os.set_inheritable(sock_fd, False)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    Zygote(sock, Reaper(pipe)).serve()


if __name__ == "__main__":
    # Run by its own name, so that classes are those that pickles name.
    from branchpoint.sandbox import _node

    _node.main(int(sys.argv[1]), int(sys.argv[2]))
