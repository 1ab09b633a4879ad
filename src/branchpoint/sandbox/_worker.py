"""The trainer's side of one worker process: a socket that is awaited, a process that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio

from branchpoint.sandbox import _wire
from branchpoint.sandbox._node import started
from branchpoint.world import SandboxFailure

Explain = Callable[[int], Awaitable[str]]


async def _until(sock: socket.socket, deadline: float, writable: bool = False) -> None:
    """Waits until a socket can be read (or written). Raises TimeoutError after ``deadline`` (of the loop's clock).

    The event loop is used directly: this is the innermost wait, and a cancel scope around it costs more than the rest.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    fd = sock.fileno()
    if fd < 0:
        raise ConnectionAbortedError
    add(fd, _wake, done, None)
    timer = loop.call_at(deadline, _wake, done, TimeoutError())
    try:
        await done
    finally:
        timer.cancel()
        if sock.fileno() == fd:
            remove(fd)


def _wake(future: asyncio.Future[None], error: Exception | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


async def receive(sock: socket.socket, deadline: float) -> bytes:
    """The next answer; empty when the other side is gone. Raises TimeoutError after ``deadline``."""
    head = await _exactly(sock, _wire.HEADER.size, deadline)
    if not head:
        return b""
    (length,) = _wire.HEADER.unpack(head)
    if length > _wire.LARGEST:
        raise SandboxFailure(f"the worker announced an answer of {length} bytes; the limit is {_wire.LARGEST}")
    return await _exactly(sock, length, deadline)


async def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except BlockingIOError:
            await _until(sock, deadline)
            continue
        except OSError:
            return b""
        if not part:
            return b""
        parts += part
    return bytes(parts)


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
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def _mine(self) -> AsyncIterator[None]:
        """The socket, for one request. Whoever used it last closes it once the worker is dead."""
        async with self._turn:
            try:
                yield
            finally:
                if self.dead is not None:
                    self.sock.close()

    async def ready(self, parent: Worker, what: str, limit: float) -> None:
        """Waits for a child that ``parent`` was asked to fork: its pid, then that it can be used.

        Raises the failure that either of them reports; the parent is to blame as long as there is no pid.
        """
        async with self._mine():
            self.pid = (await self._answer(what, limit, blame=parent))["pid"]
            with contextlib.suppress(OSError):
                self.started = started(self.pid)
            await self._answer(what, limit)

    async def post(self, name: str, limit: float, fd: int, **arguments: Any) -> None:
        """A request whose answer comes on the socket that is sent along."""
        body = _wire.frame(pickle.dumps({"call": name, **arguments}))
        async with self._mine():
            if self.dead:
                raise SandboxFailure(self.dead)
            await send(self.sock, body, fd, asyncio.get_running_loop().time() + limit)

    async def call(self, name: str, limit: float, **arguments: Any) -> dict[str, Any]:
        """One request and its answer within ``limit`` seconds. Raises the typed failure of whatever goes wrong."""
        body = _wire.frame(pickle.dumps({"call": name, **arguments}))
        async with self._mine():
            if self.dead:
                raise SandboxFailure(self.dead)
            return await self._answer(name, limit, body)

    async def _answer(self, name: str, limit: float, body: bytes = b"", blame: Worker | None = None) -> dict[str, Any]:
        culprit = blame or self
        deadline = asyncio.get_running_loop().time() + limit
        try:
            await send(self.sock, body, None, deadline)
            answer = await receive(self.sock, deadline)
            if not answer:
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
        return fields

    @property
    def running(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as f:
                state = f.read().rpartition(b")")[2].split()
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
            with contextlib.suppress(OSError), anyio.move_on_after(limit):
                if started(self.pid) == self.started and not select.select([fd], [], [], 0)[0]:
                    await anyio.wait_readable(fd)
        finally:
            os.close(fd)


def cause(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        hint = " (out of memory, or killed from outside)" if -code == signal.SIGKILL else ""
        return f"killed by signal {-code}, {signal.Signals(-code).name}{hint}"
    return f"it exited with code {code} (os._exit in the environment?)"
