"""Shell sandboxes: an unprivileged Linux world for untrusted commands, with snapshots that cost the same at any size.

A machine is a stack of layers (overlayfs) and the state of a shell. Each command runs by itself: a new root is mounted
from the layers, bubblewrap (https://github.com/containers/bubblewrap, a system package) makes the namespaces, a new
bash goes on where the last one ended, and with it all processes end. To freeze a machine is to put its uppermost layer
among those that are only read, to thaw it is to put a new one on top: neither reads or copies files.

Nothing is mounted where others see it: one helper process, the keeper, holds everything in namespaces of its own, and
all is gone when it ends. What is promised and what is not: docs/howto/shell.md.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from branchpoint.sandbox import _shell_keeper as keeper
from branchpoint.sandbox import _shell_link as link
from branchpoint.sandbox._shell_image import HOST, Images, Prepared
from branchpoint.sandbox._shell_machine import Layer, ShellMachine, State, Store
from branchpoint.sandbox.machine import Image, MachineSandbox
from branchpoint.world import SandboxFailure, UserError

_USER = 65533  # of commands, on the host, where the trainer is root: no account has it
_PREFIX = "branchpoint-shell-"
_OLDEST = (0, 8)  # bubblewrap's version that can forbid further user namespaces


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine may use. What this computer cannot hold it to is named in ``ShellMachines.unenforced``.

    ``seconds``: of a command that names no limit. ``cpu_seconds``: of one process. ``output_bytes``: of a command's
    output that are kept. ``memory_bytes``: all processes together, without their files. ``disk_bytes`` and ``inodes``:
    what a machine has written, with what it inherited from those it was thawed from. ``file_bytes``: one file.
    ``open_files``: of a process.
    """

    seconds: float = 60.0
    cpu_seconds: int = 600
    output_bytes: int = 1 << 16
    memory_bytes: int = 2 << 30
    processes: int = 256
    cpus: float = 1.0
    disk_bytes: int = 1 << 30
    inodes: int = 200_000
    file_bytes: int = 1 << 30
    open_files: int = 1024


class ShellMachines:
    """Machines in namespaces of this computer (``Machines`` of :mod:`branchpoint.sandbox.machine`).

    ``base`` of an :class:`~branchpoint.sandbox.machine.Image` is ``host``, where a machine sees the folders ``host`` of
    this computer, or a folder that holds a root file system. Works as root, where commands run as a user id that no
    account has, and as an ordinary user where the kernel lets those make user namespaces. Inside, commands run as user
    1000 without any capability.

    Raises UserError when bubblewrap is missing or a setting is wrong, SandboxFailure when the kernel refuses.

    Args:
        folder: where trees are copied to, and layers with ``storage="disk"``; a new folder is made in it and removed.
        limits: of every machine.
        storage: ``memory`` keeps what machines write in memory, where the limits of bytes and inodes are hard;
            ``disk`` in ``folder``, where they are not enforced.
        left: what becomes of a snapshot after a command that left processes behind, which are killed in any case:
            ``kill`` takes it, ``refuse`` raises SnapshotUnsupported.
        host: folders of this computer that a machine sees, read-only, where ``base`` is ``host``.
        layers: a machine on more layers gets one in place of many small ones.
        bwrap: the program; None looks for it.
    """

    preserves = frozenset({"files", "shell"})

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        limits: Limits | None = None,
        storage: Literal["memory", "disk"] = "memory",
        left: Literal["kill", "refuse"] = "kill",
        host: Sequence[str] = HOST,
        layers: int = 24,
        bwrap: str | None = None,
    ) -> None:
        if storage not in ("memory", "disk"):
            raise UserError(f"storage is {storage!r}; expected 'memory' or 'disk'")
        if left not in ("kill", "refuse"):
            raise UserError(f"left is {left!r}; expected 'kill' or 'refuse'")
        self.limits, self.left, self.layers = limits or Limits(), left, layers
        program = _bubblewrap(bwrap)
        self.folder, self._held = _place(folder)
        try:
            for name in keeper.FOLDERS:
                (self.folder / name).mkdir()
            user = _USER if os.getuid() == 0 else None
            self.images = Images(self.folder, user, host)
            self.link = link.Keeper(
                self.folder,
                {
                    "bwrap": program, "memory": storage == "memory", "user": user,
                    "bounds": {
                        "memory": self.limits.memory_bytes + (self.limits.disk_bytes if storage == "memory" else 0),
                        "processes": self.limits.processes + 3, "cpus": self.limits.cpus,
                    },
                },
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._held)
            raise
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._live: weakref.WeakSet[ShellMachine] = weakref.WeakSet()
        self._closed = False
        self._at_exit = atexit.register(_close_at_exit, weakref.ref(self))
        self.unenforced = _unenforced(self.link.told, storage)
        try:
            self._try()
        except BaseException:
            self.close()
            raise

    def _try(self) -> None:
        """A first command, so that what the kernel refuses is told here."""
        machine = self.start(Image())
        ran = machine.run("true", seconds=20.0)
        machine.close()
        if ran.code:
            raise SandboxFailure(
                f"the shell sandbox cannot run here: {ran.output.strip() or f'exit status {ran.code}'}"
            )

    def start(self, image: Image) -> ShellMachine:
        """A machine of an image. Raises UserError for an image that cannot be had."""
        self._open()
        prepared = self.images.prepare(image)
        try:
            return self.machine(prepared, State())
        finally:
            self.images.release(prepared)

    def machine(self, prepared: Prepared, state: State) -> ShellMachine:
        """A machine that goes on from a state."""
        self._open()
        self.hold(prepared, state.layers)
        machine = ShellMachine(self, prepared, state, f"m{self.number()}")
        with self._lock:
            self._live.add(machine)
        return machine

    def number(self) -> int:
        return next(self._ids)

    def hold(self, prepared: Prepared | None, layers: Sequence[Layer]) -> None:
        """Keeps layers until :meth:`release`."""
        with self._lock:
            for layer in layers:
                layer.users += 1
        if prepared is not None:
            self.images.hold(prepared)

    def release(self, prepared: Prepared | None, layers: Sequence[Layer]) -> None:
        """Lets go of layers; those that nothing uses any more are removed."""
        with self._lock:
            for layer in layers:
                layer.users -= 1
                if not layer.users:
                    if layer.store is None or layer.store.users > 1:
                        self._tell({"do": "remove", "layer": layer.path})
                    if layer.store is not None:
                        self.leave(layer.store, of_machine=False)
        if prepared is not None:
            self.images.release(prepared)

    def leave(self, store: Store, *, of_machine: bool = True) -> None:
        """One user less, a machine or a layer, of a store, which goes with its last."""
        with self._lock:
            store.users -= 1
            if of_machine or not store.users:
                self._tell({"do": "drop", "machine": store.machine, "store": not store.users})

    def _tell(self, order: dict[str, Any]) -> None:
        if not self._closed:
            with suppress(SandboxFailure):  # the keeper has ended, and all that it held with it
                self.link.ask(order)

    def _open(self) -> None:
        if self._closed:
            raise SandboxFailure("the shell sandbox is closed")

    def close(self) -> None:
        """Ends all machines and removes all that they wrote. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        atexit.unregister(self._at_exit)
        for machine in live:
            machine.close()
        self.link.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._held)


class Shell(MachineSandbox):
    """The shell sandbox: every branch of a machine world gets a machine, see :class:`ShellMachines`.

    Args as there.
    """

    preserves: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, folder: str | Path | None = None, **settings: Any) -> None:
        super().__init__(ShellMachines(folder, **settings))


def available() -> str:
    """Why there is no shell sandbox here, or "" where it works."""
    try:
        ShellMachines().close()
    except (UserError, SandboxFailure) as error:
        return str(error)
    return ""


def _bubblewrap(given: str | None) -> str:
    """The program. Raises UserError where it is missing or too old."""
    cure = "install the system package bubblewrap (apt-get install bubblewrap)"
    program = shutil.which(given or "bwrap")
    if program is None:
        raise UserError(f"the shell sandbox needs {given or 'bwrap'}, which is not there; {cure}")
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except OSError as error:
        raise UserError(f"{program} cannot be run ({error}); {cure}") from error
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise UserError(
            f"{program} is {told.strip() or 'unknown'}; {_OLDEST[0]}.{_OLDEST[1]} or newer is needed; {cure}"
        )
    return program


def _place(folder: str | Path | None) -> tuple[Path, int]:
    """A new folder, locked as long as this process lives. Those of processes that have ended are removed."""
    base = Path(folder or tempfile.gettempdir())
    if not base.is_dir():
        raise UserError(f"folder is {str(base)!r}, which is no folder")
    for old in base.glob(f"{_PREFIX}*"):
        if old.is_dir() and not old.is_symlink() and old.stat().st_uid == os.getuid():
            with suppress(OSError):
                fd = os.open(old, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old, ignore_errors=True)
                finally:
                    os.close(fd)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)).absolute()
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return place, fd


def _unenforced(told: Mapping[str, Any], storage: str) -> tuple[str, ...]:
    """Limits that this computer cannot hold machines to. That of processes is held without control groups, too."""
    texts = {
        "memory_bytes": "memory_bytes of all processes together: no control group ({}); each process is held to it",
        "cpus": "cpus: no control group ({}); a process is held to cpu_seconds",
    }
    missing = [texts[limit].format(reason) for limit, reason in told["missing"].items() if limit in texts]
    if storage == "memory" and not told["memory"]:
        missing.append("disk_bytes and inodes: before Linux 6.6 no overlay can lie in memory; it is on disk")
    elif storage == "disk":
        missing.append("disk_bytes and inodes: storage is disk, which has no quota; one file is held to file_bytes")
    return tuple(missing)


def _close_at_exit(machines: weakref.ref[ShellMachines]) -> None:
    found = machines()
    if found is not None:
        with suppress(Exception):  # the interpreter is ending; the keeper ends with it in any case
            found.close()
