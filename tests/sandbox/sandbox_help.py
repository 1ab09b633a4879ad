"""Helpers of the sandbox tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio


def run(test: Callable[[], Coroutine[Any, Any, None]], limit: float = 60.0) -> None:
    """Runs an async test with a time limit of its own."""

    async def limited() -> None:
        with anyio.fail_after(limit):
            await test()

    anyio.run(limited)


def descendants(pid: int) -> dict[int, str]:
    """The living and dead-but-unwaited processes below one, with their states."""
    out: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        try:
            children = Path(f"/proc/{(parent := waiting.pop())}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            try:
                out[child] = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            waiting.append(child)
    return out


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
