"""The trainer's side of one worker process: a socket that is awaited, a process that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from branchpoint.sandbox import _wire
from branchpoint.world import SandboxFailure

_EXITING = 0x4  # PF_EXITING of the kernel's flags of a process
Explain = Callable[[int], Awaitable[str]]


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process beyond doubt."""
    return int(_stat(pid)[19])


def dying(pid: int) -> bool:
    """Whether a process is on its way out, or dead and not yet waited for."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the state on. Raises OSError when there is no such process."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).rpartition(b")")[2].split()
    finally:
        os.close(fd)


async def _until(source: socket.socket | int, deadline: float, writable: bool = False) -> None:
    """Waits until a socket or descriptor can be read (or written). Raises TimeoutError after ``deadline`` (of the
    loop's clock).

    The event loop is used directly: this is the innermost wait, and a cancel scope around it costs more than the rest.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    fd = source if isinstance(source, int) else source.fileno()
    if fd < 0:
        raise ConnectionAbortedError
    add(fd, _wake, done, None)
    timer = loop.call_at(deadline, _wake, done, TimeoutError())
    try:
        await done
    finally:
        timer.cancel()
        if isinstance(source, int) or source.fileno() == fd:
            remove(fd)


def _wake(future: asyncio.Future[None], error: Exception | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


async def send(sock: socket.socket, data: bytes, fd: int | None, deadline: float) -> None:
    """Sends a request and, with its first byte, a descriptor. Nothing is raised when the other side is gone: the
    missing answer tells."""
    view = memoryview(data)
    while view:
        try:
            done = sock.send(view) if fd is None else socket.send_fds(sock, [view], [fd])
        except BlockingIOError:
            await _until(sock, deadline, writable=True)
            continue
        except OSError:
            return
        view, fd = view[done:], None


class Worker:
    """One worker process. Requests are answered in order; a worker that misses a time limit is ended.

    ``pid`` and ``started`` name the process; ``depth`` counts the forks since the zygote. ``explain(pid)`` says why a
    process died. ``dead`` is the reason why it is of no more use, or None.
    """

    def __init__(self, sock: socket.socket, depth: int, explain: Explain) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.depth = depth
        self.pid = 0
        self.started = 0
        self.dead: str | None = None
        self._explain = explain
        self._inbox = _wire.Inbox()
        self._turn = asyncio.Lock()

    async def ready(self, parent: Worker, what: str, limit: float) -> None:
        """Waits for a child that ``parent`` was asked to fork: its pid, then that it can be used.

        Raises the failure that either of them reports; the parent is to blame as long as there is no pid.
        """
        async with self._turn:
            try:
                fields, _ = await self._answer(what, limit, blame=parent)
                self.pid = fields["pid"]
                with contextlib.suppress(OSError):
                    self.started = started(self.pid)
                if "ready" not in fields:
                    await self._answer(what, limit)
            finally:
                self._release()

    async def post(self, limit: float, fd: int, request: bytes) -> None:
        """A request whose answer comes on the socket that is sent along."""
        async with self._turn:
            try:
                if self.dead:
                    raise SandboxFailure(self.dead)
                await send(self.sock, request, fd, asyncio.get_running_loop().time() + limit)
            finally:
                self._release()

    async def call(self, name: str, limit: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer within ``limit`` seconds. Raises the typed failure of whatever goes wrong."""
        return (await self.exchange(name, limit, **arguments))[0]

    async def exchange(self, name: str, limit: float, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """As :meth:`call`; the answer also as it was sent."""
        request = _wire.request(name, arguments)
        async with self._turn:
            try:
                if self.dead:
                    raise SandboxFailure(self.dead)
                return await self._answer(name, limit, request)
            finally:
                self._release()

    def _release(self) -> None:
        """Whoever used the socket last closes it once the worker is dead."""
        if self.dead is not None:
            self.sock.close()

    async def _answer(
        self, name: str, limit: float, request: bytes = b"", blame: Worker | None = None
    ) -> tuple[dict[str, Any], bytes]:
        culprit = blame or self
        deadline = asyncio.get_running_loop().time() + limit
        try:
            await send(self.sock, request, None, deadline)
            answer = await self._receive(deadline)
            if answer is None:
                told = await self._explain(culprit.pid)
                if blame is not None and blame.running:
                    culprit, told = self, "it ended before it could answer"
                why = culprit.dead or f"the worker process died in {name}: {told}"
                culprit.kill(why)
                raise SandboxFailure(why)
            fields = _wire.loads(answer)
        except TimeoutError:
            culprit.kill(f"{name} took longer than its limit of {limit:g} s; its process was ended")
            raise SandboxFailure(culprit.dead) from None
        except BaseException:
            self.kill(f"{name} was cancelled or failed; its process was ended")
            raise
        if "fail" in fields:
            raise _wire.to_failure(fields)
        return fields, answer

    async def _receive(self, deadline: float) -> bytes | None:
        """The next answer; None when the other side is gone. Raises TimeoutError after ``deadline``."""
        while (answer := self._inbox.take()) is None:
            await _until(self.sock, deadline)  # an answer is never there yet
            try:
                data = self.sock.recv(min(max(self._inbox.missing, 1 << 16), _wire.LARGEST_READ))
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not data:
                return None
            self._inbox.data += data
        return answer

    @property
    def running(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            state = _stat(self.pid)
        except OSError:
            return False
        return state[0] not in (b"Z", b"X") and int(state[19]) == self.started

    def kill(self, why: str) -> None:
        """Ends the process and everything in its group, at once. Safe to repeat; the first reason is kept."""
        if self.dead is not None:
            return
        self.dead = why
        if self.pid:
            with contextlib.suppress(OSError):
                if started(self.pid) == self.started:
                    os.kill(self.pid, signal.SIGKILL)
                    os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        if not self._turn.locked():
            self.sock.close()

    async def gone(self, limit: float = 5.0) -> None:
        """Waits until the process has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # gone, or never started
            return
        try:
            with contextlib.suppress(OSError):
                if started(self.pid) == self.started:
                    await _until(fd, asyncio.get_running_loop().time() + limit)
        finally:
            os.close(fd)


def cause(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        hint = " (out of memory, or killed from outside)" if -code == signal.SIGKILL else ""
        return f"killed by signal {-code}, {signal.Signals(-code).name}{hint}"
    return f"it exited with code {code} (os._exit in the environment?)"
