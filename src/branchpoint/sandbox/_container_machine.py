"""Live and frozen machines of the container sandbox."""

from __future__ import annotations

import itertools
import posixpath
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branchpoint.sandbox import _container_files as files
from branchpoint.sandbox import _container_link as link
from branchpoint.sandbox import _shell_state
from branchpoint.sandbox._container_engine import PAUSE, TRIES, EngineError, NotThere
from branchpoint.sandbox._container_layers import Layer
from branchpoint.sandbox.machine import Change, Image, Ran, absolute
from branchpoint.world import SandboxFailure, SnapshotUnsupported, UserError

if TYPE_CHECKING:
    from branchpoint.sandbox.container import ContainerMachines

_SIGKILLED = 137
_DELETED = 2  # a kind of difference


@dataclass(slots=True, eq=False)
class ContainerFrozen:
    """A frozen machine. Thawed by a container of its layer, in its state of the shell."""

    machines: ContainerMachines
    layer: Layer
    image: Image
    state: bytes
    id: str
    digest: str = ""
    _gone: bool = field(default=False, init=False)

    def thaw(self) -> ContainerMachine:
        """A machine that goes on from here. Raises SandboxFailure after ``discard``."""
        if self._gone:
            raise SandboxFailure(f"frozen machine {self.id} was discarded")
        return self.machines.run(self.layer, self.image, self.state)

    def discard(self) -> None:
        """Removes the image, once no machine and no later image is built on it. Safe to repeat."""
        if not self._gone:
            self._gone = True
            self.layer.release()


class ContainerMachine:
    """A live container (``Machine`` of :mod:`branchpoint.sandbox.machine`)."""

    def __init__(self, machines: ContainerMachines, layer: Layer, image: Image, container: str, state: bytes) -> None:
        self.layer, self.image, self.container = layer, image, container
        self._machines, self._engine = machines, machines.engine
        self._state = state
        self._link: link.Link | None = None
        self._lock = threading.RLock()  # one call at a time; close does not wait for it
        self._ending = threading.Lock()
        self._closed = False
        self._pristine: frozenset[tuple[str, int]] | None = frozenset()
        self._touched = False

    def begin(self) -> None:
        """Starts the container."""
        self._start()
        self._pristine = self._differences()

    def _start(self) -> None:
        try:
            self._engine.start(self.container)
        except EngineError as error:
            if '"bash"' in str(error):
                raise UserError(f"image.base: {self.image.base} has no bash, which runs the commands") from error
            raise
        self._link = link.Link(self._engine.attach(self.container))

    def run(self, command: str, *, seconds: float | None = None, stdin: bytes = b"") -> Ran:
        """Runs a bash command line, see :class:`~branchpoint.sandbox.machine.Machine`.

        When the time is over the container is killed and started again on the same files; the shell is then as before
        the command, and what lay in ``/dev/shm`` is gone.
        """
        limits = self._machines.limits
        if "\0" in command:
            return Ran("bash: a command cannot hold a NUL character\n", 2)
        with self._lock:
            self._open()
            self._touched = True
            try:
                reply = self._joined().call(
                    command, self._state, stdin,
                    seconds=limits.seconds if seconds is None else seconds, limit=limits.output_bytes,
                )  # fmt: skip
            except link.Expired as late:
                self._restart()
                return Ran(
                    late.output.decode(errors="replace"), _SIGKILLED, timed_out=True, omitted=late.omitted,
                    notes=("the shell is as before the command",),
                )  # fmt: skip
            except link.Lost:
                self._open()  # a closed machine says so
                self._restart()
                return Ran("", _SIGKILLED, notes=("the machine broke down and was started again on the same files",))
            return self._told(reply)

    def _told(self, reply: link.Reply) -> Ran:
        state, notes = _shell_state.parse(reply.dump, reply.mark)
        if state is not None:
            self._state = state
        if reply.oom:
            notes += (f"the memory limit ({self._machines.limits.memory_bytes} bytes) killed {reply.oom} processes",)
        if reply.full:
            notes += (f"the limit of {self._machines.limits.processes} processes was hit",)
        if reply.stuck:
            self._restart()
        return Ran(reply.output.decode(errors="replace"), reply.code, False, reply.omitted, reply.left, notes)

    def _joined(self) -> link.Link:
        if self._link is None:
            self._restart()
        assert self._link is not None
        return self._link

    def _restart(self) -> None:
        """Kills all processes, and starts the container again on the files that it has."""
        with suppress(EngineError):  # it does not run any more
            self._engine.kill(self.container)
        if self._link is not None:
            self._link.close()
            self._link = None
        for turn in itertools.count():
            self._open()
            try:
                return self._start()
            except EngineError:
                if turn == TRIES:
                    raise
                time.sleep(PAUSE)  # the engine has not noticed the end yet

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """The content of a regular file, see :class:`~branchpoint.sandbox.machine.Machine`."""
        with self._lock:
            self._open()
            return files.read(self._engine, self.container, absolute(path, self.image.workdir), limit)

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, see :class:`~branchpoint.sandbox.machine.Machine`."""
        with self._lock:
            self._open()
            self._touched = True
            place = absolute(path, self.image.workdir)
            files.write(self._engine, self.container, place, data, self._machines.owner_ids)

    def changes(self, under: str) -> Mapping[str, Change]:
        """What differs from the image below a folder, see :class:`~branchpoint.sandbox.machine.Machine`."""
        under = absolute(under, self.image.workdir)
        if files.pattern(under):
            around = self.changes(posixpath.dirname(under))
            return {p: c for p, c in around.items() if p == under or p.startswith(f"{under}/")}
        with self._lock:
            self._open()
            before = self._machines.images.original(self.layer, self.image, under)
            try:
                found = self._engine.stat(self.container, under)
            except NotThere:
                gone = {under: Change("deleted")} if before else {}
                return gone | {path: Change("deleted") for path in before}
            if found.kind != "directory":
                data = self.read(under, limit=files.COMPARED) if found.kind == "file" else None
                return {under: Change(found.kind, data, found.mode)} | {path: Change("deleted") for path in before}
            with files.spool(self._engine.get(self.container, under), files.COMPARED) as stream:
                changed = files.changes(stream, under, before)
            self._check_whole([p for p, c in changed.items() if c.kind == "deleted"])
            return changed

    def _check_whole(self, deleted: list[str]) -> None:
        """An engine that fails while it reads ends the archive as if nothing followed, in the order of names."""
        if deleted and files.exists(self._engine, self.container, deleted[-1]):
            raise SandboxFailure(f"the engine did not read all files; {deleted[-1]} is missing in its archive")

    def freeze(self) -> ContainerFrozen:
        """The files and the shell as of now. No image is made where no file has changed since the machine started.

        Raises SnapshotUnsupported for a file whose name the layers of images use for deletions.
        """
        with self._lock:
            self._open()
            found = self._differences() if self._touched else self._pristine
            if found is None:
                names = files.names(self._engine.export(self.container))
            else:
                names = (p for p, kind in found if kind != _DELETED)
            odd = [p for p in names if posixpath.basename(p).startswith(files.WHITEOUT)]
            if odd:
                raise SnapshotUnsupported(
                    f"an image cannot hold {min(odd)}: names that start with {files.WHITEOUT} are "
                    "deletions there; rename it"
                )
            if self._touched and (found is None or self._pristine != frozenset() or found):
                layer = self._machines.images.freeze(self.layer, self.container)
            else:
                layer = self.layer
                layer.hold()
            number = self._machines.number()
            return ContainerFrozen(self._machines, layer, self.image, self._state, f"container-{number}")

    def _differences(self) -> frozenset[tuple[str, int]] | None:
        """What the engine says has changed; None where it cannot: Podman's fails where a folder became a file."""
        try:
            return self._engine.diff(self.container)
        except EngineError:
            return None

    def close(self) -> None:
        """Removes the container. Safe to repeat, and from another thread while a command runs."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            try:
                self._engine.remove(self.container)  # which ends a command that another thread waits for
            finally:
                if self._link is not None:
                    self._link.close()
                self.layer.release()

    def _open(self) -> None:
        if self._closed:
            raise SandboxFailure("the machine is closed")
