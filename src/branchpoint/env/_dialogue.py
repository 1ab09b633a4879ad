"""A coroutine that asks for one text at a time, run in the caller's own time: between two answers nothing runs.

So an environment that is written as a coroutine (it awaits the agent's replies) becomes one that is stepped, and its
process can be forked between two steps.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import contextlib
import threading
from asyncio import events
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

R = TypeVar("R")
Ask = Callable[[str], Awaitable[str]]
PATIENCE = 600.0
"""Seconds after which a coroutine that waits for nothing that can come is given up."""


class Stuck(RuntimeError):
    """The coroutine awaits something that this loop cannot bring: input or output, say."""


class _Bell:
    """Stands in for a selector: it only sleeps, and wakes when a thread has called back."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._rung.wait(PATIENCE if timeout is None else max(timeout, 0)) and timeout is None:
            raise Stuck(f"nothing has happened for {PATIENCE:.0f} s")
        self._rung.clear()
        return []


def _refuse(*_: Any, **__: Any) -> Any:
    raise Stuck("it does input or output, which a loop without sockets cannot; set io=True")


class _PlainLoop(asyncio.base_events.BaseEventLoop):
    """An event loop of timers and callbacks only. It opens no socket and no pipe, so its process can be forked."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Bell()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: the bell reports no input."""

    def _write_to_self(self) -> None:
        self._selector.ring()

    sock_connect = sock_accept = sock_sendall = sock_recv = _refuse
    _make_socket_transport = _make_subprocess_transport = _make_read_pipe_transport = _refuse


class Dialogue(Generic[R]):
    """Runs ``run(ask)`` from question to question.

    ``io``: use an ordinary event loop, for a coroutine that needs the network or subprocesses; its sockets forbid
    forking the process.
    """

    def __init__(self, run: Callable[[Ask], Awaitable[R]], io: bool = False) -> None:
        self._run, self._loop = run, asyncio.new_event_loop() if io else _PlainLoop()
        self._task: asyncio.Task[R] | None = None
        self._question: asyncio.Future[str] | None = None
        self._answer: asyncio.Future[str] | None = None

    def next(self, answer: str | None = None) -> str | None:
        """Start, or go on with an answer: the next question, or None when the coroutine has ended.

        Raises what the coroutine raises.
        """
        self._question = self._loop.create_future()
        if self._task is None:
            self._task = self._loop.create_task(self._main())
        elif self._answer is not None and answer is not None:
            self._answer.set_result(answer)
        else:
            raise RuntimeError("a dialogue that waits for an answer needs one")
        with _outermost():
            self._loop.run_until_complete(self._until_asked(self._task, self._question))
        if self._question.done():
            return self._question.result()
        self._task.result()
        return None

    @property
    def result(self) -> R:
        """What the coroutine returned."""
        assert self._task is not None
        return self._task.result()

    def close(self) -> None:
        """Cancel the coroutine and close its loop. Safe to repeat."""
        if self._loop.is_closed():
            return
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with _outermost(), contextlib.suppress(BaseException):
                self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _main(self) -> R:
        return await self._run(self._ask)

    async def _ask(self, question: str) -> str:
        assert self._question is not None
        self._answer = self._loop.create_future()
        self._question.set_result(question)
        return await self._answer

    @staticmethod
    async def _until_asked(task: asyncio.Task[R], question: asyncio.Future[str]) -> None:
        await asyncio.wait({task, question}, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def _outermost() -> Iterator[None]:
    """Lets a loop run within a callback of another (the trainer's, where a world runs in its process)."""
    outer = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(outer)
