"""The zygote of the fork server: holds the imported modules, opens environments by forking, inherits every orphan."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import time
import types
from typing import Any, NoReturn

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive, _guard, _wire
from branchpoint.sandbox._node import Node, Reaper, Server
from branchpoint.world import BranchFailure, EnvironmentFailure, SnapshotUnsupported

_SET_CHILD_SUBREAPER = 36


class Zygote(Server):
    """The template of all workers: holds the imported modules, so that opening an environment is one fork."""

    def __init__(self, sock: socket.socket, reaper: Reaper) -> None:
        super().__init__(sock, reaper)
        self.threaded = ""  # the module whose import left a thread running
        self.main: tuple[str, str] | None = None

    def serve(self) -> NoReturn:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        while True:
            self.reaper.all = True
            self.reaper.reap()
            message = pickle.loads(self.wait())
            self.reaper.all = False  # an import may run subprocesses and needs their exit status
            call = message.pop("call")
            try:
                if call == "preload":
                    self._preload(**message)
                    self.answer({})
                elif call == "open":
                    self._open(**message, fd=self.inbox.fds.pop(0))
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
        gc.collect()

    def _look_for_threads(self, name: str) -> None:
        if _guard.threads() == 1:
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
            if not self.fork(fd, tell=False):
                return
            self.send(_wire.frame(_wire.born(os.getpid())))
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
        """Before a fork: what each child would otherwise do anew; and no collector that touches old pages."""
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # a part that numpy imports when it is first used
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
        self.reaper.all = True
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.reaper.reap()
            children = _guard.children()
            if not children:
                return
            for pid in children:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.002)


def _extend(path: list[str]) -> None:
    sys.path.extend(p for p in path if p not in sys.path)


def _load_main(kind: str, name: str) -> None:
    """Makes what the trainer's script defines importable here, without running its ``if __name__ == "__main__"``."""
    import runpy

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
    _drive.watch_imports()
    Zygote(sock, Reaper(pipe)).serve()


if __name__ == "__main__":
    # Run by its own name, so that classes are those that pickles name.
    from branchpoint.sandbox import _zygote

    _zygote.main(int(sys.argv[1]), int(sys.argv[2]))
