"""The zygote as the trainer sees it: its process, the connection to it, and its news of deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from typing import Any

import anyio
import anyio.to_thread

from branchpoint.sandbox._worker import Worker, cause, dying, started
from branchpoint.world import BranchFailure, Make

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")}
_WAIT_FOR_NEWS_S = 0.25
_WAIT_FOR_BURIAL_S = 5.0
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Template:
    """Starts the zygote when it is needed, again when it has died, and ends it with everything below it."""

    def __init__(self, preload: tuple[str, ...], huge_pages: bool, quiet: bool) -> None:
        self.preload = preload
        self.huge_pages = huge_pages
        self.quiet = quiet
        self.process: subprocess.Popen[bytes] | None = None
        self.worker: Worker | None = None
        self._obituaries = -1  # a pipe of "pid status" lines, written by whoever waited for the dead
        self._deaths: dict[int, int] = {}
        self._starting = anyio.Lock()

    async def start(self, limit: float) -> Worker:
        """The zygote, with ``preload`` imported. Raises EnvironmentFailure when that raises."""
        async with self._starting:
            if self.worker is None or self.worker.dead:
                await self.stop()
                self.worker = self._launch()
                try:
                    await self.worker.call("preload", limit, modules=list(self.preload), path=sys.path)
                except BranchFailure as error:
                    self.worker.kill(str(error))
                    raise
            return self.worker

    def _launch(self) -> Worker:
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.setdefault("PYTHONHASHSEED", "0")  # the order of sets must not depend on the process
        if self.huge_pages:
            environment |= HUGE_PAGES
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        os.set_blocking(read, False)
        output = subprocess.DEVNULL if self.quiet else 2
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "branchpoint.sandbox._zygote", str(theirs.fileno()), str(write)],
                pass_fds=(theirs.fileno(), write),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(write)
        self._obituaries = read
        worker = Worker(ours, 0, self.explain)
        worker.pid, worker.started = self.process.pid, started(self.process.pid)
        return worker

    async def explain(self, pid: int) -> str:
        """Why a process died, as told by the one that waited for it. A zombie is still to be waited for, which a busy
        machine may delay for seconds; beyond that, the news takes a quarter of a second at most."""
        clock = asyncio.get_running_loop().time
        last, patience = clock() + _WAIT_FOR_NEWS_S, clock() + _WAIT_FOR_BURIAL_S
        while True:
            if self.process is not None and pid == self.process.pid and self.process.poll() is not None:
                return f"the zygote ended with code {self.process.returncode}"
            status = self.bury(pid)
            if status is not None:
                return cause(status)
            now = clock()
            if now < patience and dying(pid):
                last = now + _WAIT_FOR_NEWS_S
            elif now > last:
                return "cause unknown (it closed its connection)"
            await anyio.sleep(0.005)

    def bury(self, pid: int) -> int | None:
        """Reads the news of deaths, and returns and forgets the wait status of this one."""
        data = b""
        with contextlib.suppress(OSError):  # nothing more to read, or closed
            while block := os.read(self._obituaries, 1 << 16):
                data += block
        for line in data.splitlines():
            name, status = line.split()
            self._deaths[int(name)] = int(status)
        while len(self._deaths) > 4096:
            self._deaths.pop(next(iter(self._deaths)))
        return self._deaths.pop(pid, None)

    async def stop(self) -> None:
        """Ends the zygote and all its descendants, and waits until it is gone."""
        if self.worker is not None and self.process is not None:
            with contextlib.suppress(BranchFailure):
                await self.worker.call("close", 15.0)
            self.worker.kill("the fork server was closed")
            await anyio.to_thread.run_sync(self.process.wait, 15.0)
        self._close_pipe()

    def forget(self) -> None:
        """In a child that the trainer forked: lets go of the connection."""
        if self.worker is not None:
            self.worker.dead = self.worker.dead or "the fork server belongs to the parent process"
            self.worker.sock.close()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._obituaries >= 0:
            os.close(self._obituaries)
            self._obituaries = -1


def recipe(make: Make | str) -> dict[str, Any]:
    """What a zygote needs to find the builder. Raises ValueError for a builder that cannot be sent."""
    try:
        pickled = pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"make cannot be sent to a worker ({error}); pass a function or class of a module, or 'module:attribute'"
        ) from error
    return {"make": pickled, "main": _main(pickled), "path": list(sys.path)}


def _main(make: bytes) -> tuple[str, str] | None:
    """Where a worker finds what the trainer's script defines: a module name or a path; None if nothing is needed."""
    script = sys.modules["__main__"]
    if b"__main__" not in make:
        return None
    if script.__spec__ is not None:
        return "module", script.__spec__.name
    path = getattr(script, "__file__", None)
    return None if path is None else ("path", os.path.abspath(path))
