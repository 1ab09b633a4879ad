"""A back-end of machines in memory, which runs nothing on this computer: for tests, and an example of the contract."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from branchpoint.sandbox.machine import Change, Image, Ran
from branchpoint.testing._fake_files import Files, Node
from branchpoint.testing._fake_job import Exit, Job, Killed, Over, Sink
from branchpoint.testing._fake_shell import State, Syntax, Value, parse
from branchpoint.world import SandboxFailure, UserError


class FakeMachines:
    """Machines whose files lie in memory and whose commands are interpreted, see ``FakeMachine``.

    Args:
        seconds: of a command that names no limit.
        output_bytes: of a command's output that are kept.
    """

    preserves = frozenset({"files", "shell", "links"})
    unenforced: tuple[str, ...] = ("memory_bytes, processes, cpus, disk_bytes: a fake machine has no processes",)

    def __init__(self, *, seconds: float = 60.0, output_bytes: int = 1 << 16) -> None:
        self.seconds, self.output_bytes = seconds, output_bytes
        self.live: list[FakeMachine] = []
        self.ids = itertools.count(1)
        self.closed = False

    def start(self, image: Image) -> FakeMachine:
        """A machine with the image's trees and binds. Raises UserError for what is not there."""
        for kind, places in (("trees", image.trees), ("binds", image.binds)):
            for outside in places.values():
                if not Path(outside).exists():
                    raise UserError(f"image.{kind}: there is no {outside}")
        files = Files()
        files.folders(image.workdir)
        for kind, places in (("trees", image.trees), ("binds", image.binds)):
            for inside, outside in sorted(places.items()):
                files.copy_in(inside, Path(outside), locked=kind == "binds")
        variables: dict[str, Value] = {"PATH": "/bin", **image.environment}
        state = State(image.workdir, variables, exported=set(variables))
        return self.machine(files, state, copy.deepcopy(files))

    def machine(self, files: Files, state: State, image: Files) -> FakeMachine:
        """A live machine with these files and this state, of an image that held ``image``."""
        if self.closed:
            raise SandboxFailure("the back-end is closed")
        made = FakeMachine(self, files, state, image)
        self.live.append(made)
        return made

    def close(self) -> None:
        """Closes all machines."""
        self.closed = True
        for machine in self.live:
            machine.close()


class FakeFrozen:
    """A copy of a machine's files and shell."""

    def __init__(self, machines: FakeMachines, files: Files, state: State, image: Files) -> None:
        self.machines, self.files, self.state, self.image = machines, files, state, image
        self.id, self.digest = f"fake-{next(machines.ids)}", ""
        self.gone = False

    def thaw(self) -> FakeMachine:
        """A machine with a copy of its own. Raises SandboxFailure after ``discard``."""
        if self.gone:
            raise SandboxFailure(f"frozen machine {self.id} was discarded")
        return self.machines.machine(copy.deepcopy(self.files), self.state.copy(), self.image)

    def discard(self) -> None:
        self.gone = True


class FakeMachine:
    """A live machine in memory. Its commands are ``cat``, ``cd``, ``chmod``, ``chown``, ``echo``, ``env``, ``exit``,
    ``export``, ``false``, ``find PATH -printf FORMAT``, ``head -c N``, ``kill -9 $$``, ``ln``, ``mkdir``, ``mkfifo``,
    ``mv``, ``printf``, ``pwd``, ``rm``, ``set``, ``setsid``, ``sleep``, ``touch``, ``trap``, ``true``, ``umask``,
    ``unset``, ``yes`` and ``[[ -o OPTION ]]``."""

    def __init__(self, machines: FakeMachines, files: Files, state: State, image: Files) -> None:
        self.machines, self.files, self.state, self.image = machines, files, state, image
        self.ended = threading.Event()
        self.lock = threading.RLock()

    def run(self, command: str, *, seconds: float | None = None, stdin: bytes = b"") -> Ran:
        """Interprets a command line, see the class."""
        with self.lock:
            self._open()
            limit = self.machines.seconds if seconds is None else seconds
            job = Job(self, self.state.copy(), Sink(self.machines.output_bytes), stdin, time.monotonic() + limit)
            notes: tuple[str, ...] = ()
            code, late = 137, False
            try:
                code = job.play(parse(command.encode(errors="replace").decode()))
            except Syntax as error:
                job.out.add(f"bash: {error}\n".encode())
                code = 2
            except Exit as end:
                code = end.code
            except Killed:
                notes = ("the shell is as before the command",)
            except Over:
                late, notes = True, ("the shell is as before the command",)
            if not notes:
                self.state = job.state
            output, omitted = job.out.result()
            return Ran(output.decode(errors="replace"), code, late, omitted, job.left, notes)

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """See :class:`~branchpoint.sandbox.machine.Machine`."""
        with self.lock:
            self._open()
            node = self.files.node(_path(path))
            if node.kind == "directory":
                raise IsADirectoryError(21, "Is a directory", path)
            if node.kind != "file":
                raise ValueError(f"{path} is no regular file")
            if len(node.data) > limit:
                raise ValueError(f"{path} has {len(node.data)} bytes; the limit is {limit}")
            return node.data

    def write(self, path: str, data: bytes) -> None:
        """See :class:`~branchpoint.sandbox.machine.Machine`."""
        with self.lock:
            self._open()
            self.files.folders(os.path.dirname(_path(path)))
            self.files.write(path, data)

    def changes(self, under: str) -> Mapping[str, Change]:
        """See :class:`~branchpoint.sandbox.machine.Machine`."""
        with self.lock:
            self._open()
            now, then = _below(self.files, under), _below(self.image, under)
            found = {path: Change("deleted") for path in then if path not in now}
            for path, node in now.items():
                old = then.get(path)
                if old is None or (old.kind, old.mode, old.data) != (node.kind, node.mode, node.data):
                    found[path] = Change(node.kind, node.data if node.kind == "file" else None, node.mode)
            return dict(sorted(found.items()))

    def freeze(self) -> FakeFrozen:
        """A copy of files and shell."""
        with self.lock:
            self._open()
            return FakeFrozen(self.machines, copy.deepcopy(self.files), self.state.copy(), self.image)

    def close(self) -> None:
        """Ends a command that another thread runs, too."""
        self.ended.set()

    def _open(self) -> None:
        if self.ended.is_set():
            raise SandboxFailure("the machine is closed")


def _path(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"not an absolute path: {path!r}")
    return path


def _below(files: Files, under: str) -> dict[str, Node]:
    try:
        return {f"{under.rstrip('/')}/{at}": node for at, node in files.walk(under) if at}
    except FileNotFoundError:
        return {}
