"""The trainer's end of the keeper: starts it, asks it, and collects what commands write."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import branchpoint
from branchpoint.sandbox import _shell_keeper as keeper
from branchpoint.world import SandboxFailure

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from branchpoint.sandbox._shell_keeper import main; main(int(sys.argv[1]))"
)
_START, _ANSWER, _WORK, _END = 20.0, 30.0, 300.0, 30.0  # seconds to wait at most
_PIPE = 1 << 16


class Keeper:
    """A running keeper. Raises SandboxFailure where it cannot be started."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(branchpoint.__file__).parents[1])
        # -I and -S: no packages of the user, which would cost time at each start and memory at each fork.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(its.fileno()), source]
        with its:
            self.process = subprocess.Popen(
                command, cwd=folder, env={}, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._control = mine
        self._lock = threading.Lock()
        mine.send(json.dumps(settings).encode())
        mine.settimeout(_START)
        try:
            told = mine.recv(keeper.LARGEST)
        except TimeoutError:
            self.process.kill()
            raise SandboxFailure(f"the keeper of the shell sandbox did not start within {_START:g} s") from None
        mine.settimeout(None)
        self.told: dict[str, Any] = json.loads(told) if told else {"error": "it ended"}
        if "error" in self.told:
            self.close()
            raise SandboxFailure(f"the keeper of the shell sandbox could not start: {self.told['error']}")

    def send(self, order: Mapping[str, Any], fds: Sequence[int]) -> socket.socket:
        """Sends a request; the answer comes on the socket."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = json.dumps(order).encode()
        if len(data) > keeper.LARGEST:
            mine.close()
            its.close()
            raise SandboxFailure(f"a request of {len(data)} bytes is too long (a large environment?)")
        with its, self._lock:
            try:
                socket.send_fds(self._control, [data], [its.fileno(), *fds])
            except OSError as error:
                mine.close()
                raise SandboxFailure(f"the keeper of the shell sandbox has ended ({error})") from error
        return mine

    def ask(self, order: Mapping[str, Any], fds: Sequence[int] = (), *, seconds: float = _ANSWER) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises SandboxFailure when it does not come or tells of one."""
        with self.send(order, fds) as reply:
            reply.settimeout(seconds)
            try:
                return answer(reply)
            except TimeoutError:
                raise SandboxFailure(f"the keeper did not answer {order['do']} within {seconds:g} s") from None

    def work(self, order: Mapping[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Has files worked on. Returns the answer and what came out. Raises OSError, ValueError and SandboxFailure."""
        fd = os.memfd_create("branchpoint")
        try:
            _fill(fd, data)
            told = self.ask({"do": "files", **order}, [fd], seconds=_WORK)
            if "value" in told:
                raise ValueError(told["value"])
            if "errno" in told:
                raise OSError(told["errno"], told["error"], told["path"])
            return told, b"" if data else _content(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Ends the keeper and all that runs. Safe to repeat."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def answer(reply: socket.socket) -> dict[str, Any]:
    data = reply.recv(keeper.LARGEST)
    if not data:
        raise SandboxFailure("the keeper of the shell sandbox has ended, or lost a request")
    try:
        told: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise SandboxFailure("the keeper of the shell sandbox gave no answer that can be read") from error
    if "error" in told and "errno" not in told:
        raise SandboxFailure(f"the shell sandbox: {told['error']}")
    return told


def source(data: bytes) -> int:
    """A descriptor that data can be read from and nobody can change it through."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _fill(fd, data)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _fill(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts = bytearray()
    while len(parts) < size and (part := os.pread(fd, size - len(parts), len(parts))):
        parts += part
    return bytes(parts)


class Kept:
    """The first and the last bytes of a stream, however long it is."""

    def __init__(self, limit: int) -> None:
        self._first, self._last = limit - limit // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.omitted = 0

    def add(self, data: bytes) -> None:
        room = self._first - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._last + 4 * _PIPE:
            self._cut()

    def _cut(self) -> None:
        excess = max(0, len(self._tail) - self._last)
        del self._tail[:excess]
        self.omitted += excess

    def result(self) -> bytes:
        self._cut()
        return bytes(self._head + self._tail)


class Running:
    """A command that runs: its two streams, and the socket that its end is told on and that ends it when closed."""

    def __init__(
        self, link: Keeper, order: Mapping[str, Any], script: bytes, stdin: bytes, limits: tuple[int, int]
    ) -> None:
        self.output, self.state = Kept(limits[0]), Kept(limits[1])
        given = [source(script), source(stdin)]
        out, out_w = os.pipe()
        told, told_w = os.pipe()
        self._streams = {out: self.output, told: self.state}
        try:
            self._reply = link.send({"do": "run", **order}, [given[0], out_w, told_w, given[1]])
        except BaseException:
            os.close(out)
            os.close(told)
            raise
        finally:
            for fd in (*given, out_w, told_w):
                os.close(fd)

    def stop(self) -> None:
        """Has it killed. From any thread."""
        with suppress(OSError):
            self._reply.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> tuple[dict[str, Any], bool]:
        """The keeper's answer, and whether the time was over. Raises SandboxFailure when there is none."""
        deadline, late = time.monotonic() + seconds, False
        try:
            poll = select.poll()
            for fd in (*self._streams, self._reply.fileno()):
                poll.register(fd, select.POLLIN)
            while True:
                ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                if not ready:
                    if late:
                        raise SandboxFailure(f"a command could not be killed within {_END:g} s")
                    late, deadline = True, time.monotonic() + _END
                    self.stop()
                    continue
                for fd, _ in ready:
                    if fd in self._streams:
                        if not self._take(fd):
                            poll.unregister(fd)
                    else:
                        told = answer(self._reply)
                        self._drain()
                        return told, late
        finally:
            self._close()

    def _take(self, fd: int) -> bool:
        part = os.read(fd, _PIPE)
        self._streams[fd].add(part)
        return bool(part)

    def _drain(self) -> None:
        """What is still in the pipes; all that could write to them has ended."""
        for fd in self._streams:
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while self._take(fd):
                    pass

    def _close(self) -> None:
        self._reply.close()
        for fd in self._streams:
            os.close(fd)
