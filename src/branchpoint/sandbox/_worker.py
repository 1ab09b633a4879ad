"""The trainer's side of one worker process: a socket that is awaited, a process that can be ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from branchpoint.sandbox import _wire
from branchpoint.sandbox._node import started
from branchpoint.world import SandboxFailure

Explain = Callable[[int], Awaitable[str]]


async def receive(sock: socket.socket) -> bytes:
    """The next answer; empty when the other side is gone."""
    head = await _exactly(sock, _wire.HEADER.size)
    if not head:
        return b""
    (length,) = _wire.HEADER.unpack(head)
    if length > _wire.LARGEST:
        raise SandboxFailure(f"the worker announced an answer of {length} bytes; the limit is {_wire.LARGEST}")
    return await _exactly(sock, length)


async def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except BlockingIOError:
            with contextlib.suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(sock)
            continue
        except OSError:
            return b""
        if not part:
            return b""
        parts += part
    return bytes(parts)


async def send(sock: socket.socket, data: bytes, fd: int | None) -> None:
    """Sends a request and, with its first byte, a descriptor. Nothing is raised when the other side is gone: the
    missing answer tells."""
    view = memoryview(data)
    while view:
        try:
            done = sock.send(view) if fd is None else socket.send_fds(sock, [view], [fd])
        except BlockingIOError:
            with contextlib.suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(sock)
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
        self._turn = anyio.Lock()

    async def ready(self, what: str, limit: float) -> None:
        """Waits for the first answer of a fresh process. Raises the failure that it reports, and ends it then."""
        async with self._turn:
            await self._answer(what, limit)

    async def call(self, name: str, limit: float, *, fd: int | None = None, **arguments: Any) -> dict[str, Any]:
        """One request and its answer within ``limit`` seconds. Raises the typed failure of whatever goes wrong."""
        body = _wire.frame(pickle.dumps({"call": name, **arguments}))
        async with self._turn:
            if self.dead:
                raise SandboxFailure(self.dead)
            return await self._answer(name, limit, body, fd)

    async def _answer(self, name: str, limit: float, body: bytes = b"", fd: int | None = None) -> dict[str, Any]:
        try:
            with anyio.fail_after(limit):
                await send(self.sock, body, fd)
                answer = await receive(self.sock)
            if not answer:
                why = self.dead or f"the worker process died in {name}: {await self._explain(self.pid)}"
                self.kill(why)
                raise SandboxFailure(why)
            fields = _wire.loads(answer)
        except TimeoutError:
            self.kill(f"{name} took longer than its limit of {limit:g} s; its process was ended")
            raise SandboxFailure(self.dead) from None
        except BaseException:
            self.kill(f"{name} was cancelled or failed; its process was ended")
            raise
        if "fail" in fields:
            raise _wire.to_failure(fields)
        return fields

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
        anyio.notify_closing(self.sock)
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
