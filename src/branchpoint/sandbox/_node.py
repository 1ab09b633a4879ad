"""The worker side of the fork server: nodes, which are processes that hold one environment each.

A node serves one socket. ``fork`` brings the socket of the child, which answers on it from then on. A snapshot is a
node that nobody steps. A node ends when its socket does, so everything ends when the trainer does.

What a fork costs is mostly page faults: every page that parent or child writes to afterwards is copied, and CPython
writes to what it only reads. So the way from a request to a fork, and from there to an answer, is kept short.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive, _fork, _guard, _wire
from branchpoint.world import BranchFailure, EnvironmentFailure, SandboxFailure, SnapshotUnsupported, World

_BLOCK = 4096  # bytes to ask for when the size of a message is not known yet
_FDS = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FDS.size)
_DEAD = os.WEXITED | os.WNOHANG | os.WNOWAIT  # look for one that has died, and leave it a zombie


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
        try:
            # One call finds the dead one, except when a dead child of the environment stands before it.
            while dead := os.waitid(os.P_ALL, 0, _DEAD):
                if self.all or dead.si_pid in self.children:
                    self._bury(dead.si_pid)
                    continue
                for pid in tuple(self.children):
                    self._look(pid)
                return
        except ChildProcessError:
            self.children.clear()

    def _look(self, pid: int) -> None:
        try:
            if os.waitid(os.P_PID, pid, _DEAD):
                self._bury(pid)
        except ChildProcessError:
            self.children.discard(pid)

    def _bury(self, pid: int) -> None:
        """Ends what a dead child has started, while its number still names its process group, and waits for it."""
        try:  # noqa: SIM105 (suppress touches more pages)
            os.killpg(pid, signal.SIGKILL)
        except OSError:
            pass  # it led no group, or may not be signalled any more
        pid, status = os.waitpid(pid, 0)
        self.children.discard(pid)
        try:  # noqa: SIM105
            os.write(self.pipe, b"%d %d\n" % (pid, status))
        except OSError:
            pass  # full, or the trainer is gone: only an explanation is lost


class Server:
    """One process with one socket: reads requests, answers them, forks."""

    def __init__(self, sock: socket.socket, reaper: Reaper) -> None:
        self.sock = sock
        self.reaper = reaper
        self.inbox = _wire.Inbox()
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.own_fds = {sock.fileno(), reaper.pipe}

    def wait(self) -> bytes:
        """The next request. Ends the process when the trainer is gone. (poll lets the reaper run; recv would not.)"""
        while (body := self.inbox.take()) is None:
            self.poll.poll()
            size = min(max(self.inbox.missing, _BLOCK), _wire.LARGEST_READ)
            try:
                data, extra, _, _ = self.sock.recvmsg(size, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                self.end()
            if not data:
                self.end()
            self.inbox.data += data
            for _, _, fds in extra:
                self.inbox.fds += _FDS.unpack(fds)
        return body

    def answer(self, fields: dict[str, Any]) -> None:
        try:
            body = _wire.encode(fields)
        except BranchFailure as error:
            body = _wire.encode(_wire.failure_fields(error))
        self.send(_wire.frame(body))

    def send(self, message: bytes) -> None:
        try:
            self.sock.sendall(message)
        except OSError:
            self.end()

    def end(self) -> NoReturn:
        os._exit(0)

    def refuse(self, fd: int, error: BranchFailure) -> None:
        """Tells a failure to whom the child's socket belongs."""
        with socket.socket(fileno=fd) as sock, contextlib.suppress(OSError):
            sock.sendall(_wire.frame(_wire.encode(_wire.failure_fields(error))))

    def fork(self, fd: int, tell: bool) -> bool:
        """Forks; True in the child, which serves the socket ``fd`` from now on, in a process group of its own.

        With ``tell`` the parent says that the child is ready. Raises SandboxFailure when the kernel refuses.
        """
        try:
            pid = _fork.fork()
        except OSError as error:
            raise SandboxFailure(
                f"fork failed: {error}; keep fewer environments alive, or allow more memory"
            ) from error
        if pid:
            self.reaper.children.add(pid)
            if tell:
                try:
                    os.setpgid(pid, pid)  # so that it can be ended with all that it starts, and nothing else
                    os.write(fd, _wire.frame(_wire.ready(pid)))
                except OSError:
                    pass  # it has died already, or the trainer is gone
            os.close(fd)
            return False
        os.dup2(fd, self.sock.fileno(), inheritable=False)
        os.close(fd)
        if not tell:
            os.setpgid(0, 0)
        self.reaper.children.clear()
        self.inbox.clear()
        return True


class Node(Server):
    """A worker that holds one world: live when the trainer steps it, a snapshot when it only forks it."""

    def __init__(self, sock: socket.socket, reaper: Reaper, world: World) -> None:
        super().__init__(sock, reaper)
        self.world = world
        self.settled = False
        self.frozen = False  # a snapshot: its state passed the guard and no longer changes
        self.held: list[int] = []  # the open files of a frozen state

    def start(self) -> NoReturn:
        self.answer({})
        self.serve()

    def serve(self) -> NoReturn:
        calls: dict[str, Callable[..., dict[str, Any] | None]] = {
            "reset": lambda: _wire.step_fields(_drive.play(self.world, None)),
            "step": lambda action: _wire.step_fields(_drive.play(self.world, action)),
            "replay": self._replay,
            "repeatable": self._repeatable,
            "close": self._close,
        }
        while True:
            body = self.wait()
            try:
                if body.startswith(_wire.FORK):
                    fields = self._fork(body)
                else:
                    arguments = pickle.loads(body)
                    fields = calls[arguments.pop("call")](**arguments)
            except BranchFailure as error:
                fields = _wire.failure_fields(error)
            except BaseException as error:  # KeyboardInterrupt raised by the world and the like: a failure as any
                fields = _wire.failure_fields(EnvironmentFailure(f"{type(error).__name__}: {error}"))
            if fields is not None:
                self.answer(fields)

    def _fork(self, body: bytes) -> dict[str, Any] | None:
        """Forks this node. With a luck the child is reseeded; without one it is an exact copy.

        All that there is to say, a refusal too, is said on the child's socket: by this process when the child has
        nothing to do, else by the child, which first tells its pid when the world has a say in it (and may hang).
        """
        fd, luck = self.inbox.fds.pop(0), _wire.fork_luck(body)
        try:
            if not self.frozen:
                self.held = _guard.check({*self.own_fds, fd}, self.reaper.children)
                self._settle()
            exact = luck is None and not self.held
            if not self.fork(fd, exact):
                return None
        except BranchFailure as error:
            self.refuse(fd, error)
            return None
        self.frozen = luck is None
        if exact:
            return None
        slow = self.held or hasattr(self.world, "reseed")
        if slow:
            self.send(_wire.frame(_wire.born(os.getpid())))
            _guard.detach(self.held)
        if luck is not None:
            seed, *fields = luck
            _drive.seed_globals(seed)
            if slow:
                _drive.reseed_world(self.world, Noise(*fields[:2], clean=bool(fields[2])))
        self.send(_wire.frame(_wire.READY if slow else _wire.ready(os.getpid())))
        return None

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

    def _replay(self, log: list[tuple[str, Any]], freeze: bool) -> dict[str, Any]:
        """Repeats a log of (reset | step | noise, argument); the fingerprint of each answer.

        ``freeze``: the result is a snapshot, and only forked from here on.
        """
        self._repeatable()
        out: list[str] = []
        for call, argument in log:
            if call == "noise":
                _drive.reseed(self.world, argument)
                out.append("")
            else:
                fields = _wire.step_fields(_drive.play(self.world, None if call == "reset" else argument))
                out.append(_wire.fingerprint(_wire.encode(fields)))
        self.frozen = freeze
        return {"fingerprints": out}

    def _repeatable(self) -> dict[str, Any]:
        if not getattr(self.world, "deterministic", True):
            raise SnapshotUnsupported("the world declares that it does not repeat itself (deterministic = False)")
        return {}

    def _close(self) -> NoReturn:
        try:
            with _drive.typed("closing the environment"):
                self.world.close()
            self.answer({})
        except BranchFailure as error:
            self.answer(_wire.failure_fields(error))
        self.end()
