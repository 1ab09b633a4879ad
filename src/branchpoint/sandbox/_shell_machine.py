"""Live and frozen machines of the shell sandbox."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from branchpoint.sandbox import _shell_keeper as keeper
from branchpoint.sandbox import _shell_link as link
from branchpoint.sandbox import _shell_state
from branchpoint.sandbox._shell_files import HEAD
from branchpoint.sandbox._shell_image import Prepared
from branchpoint.sandbox.machine import Change, Ran, absolute
from branchpoint.world import SandboxFailure, SnapshotUnsupported

if TYPE_CHECKING:
    from branchpoint.sandbox.shell import Limits, ShellMachines

_MARK = 230  # the descriptor of shells that leads to the host, out of the way of a script's own
_NEVER = _MARK + 1  # and two of a pipe that nobody writes to, to wait on
_INPUT = _NEVER + 2  # what the command reads
_GRACE = 5  # hundredths of a second that processes which are about to end get before they count as left
_KILLED = 137
_SMALL = 16 << 20  # bytes of a layer that is merged with its neighbours
_ROOM = 16  # the part of the limits that a machine has after a snapshot at least: a deletion takes a file there
_MOST = 400  # layers; the kernel refuses 500
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/user", "USER": "user", "LOGNAME": "user",
    "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb",
}  # fmt: skip
# Counted with builtins alone, since a fork may be impossible: all but the first process, and zombies.
_COUNT = (
    "__n=0; for __p in /proc/[0-9]*; do [[ $__p == /proc/1 ]] || "
    '{ builtin read -r __s <"$__p/stat" && __s=${__s##*) } && [[ $__s != [ZX]* ]] && __n=$((__n + 1)); }; done'
)


@dataclass(eq=False, slots=True)
class Layer:
    """A frozen layer. ``store``: the machine's that it lies in; None for one that was merged, which lies on disk."""

    path: str
    store: Store | None
    bytes: int
    users: int = 0


@dataclass(eq=False, slots=True)
class Store:
    """Where a machine's layers lie. Gone when the machine is closed and none of its layers is in use."""

    machine: str
    users: int = 1


@dataclass(frozen=True, slots=True)
class State:
    """What a machine goes on from. ``bytes`` and ``files``: what the layers hold of the limits."""

    layers: tuple[Layer, ...] = ()  # uppermost first
    shell: bytes = b""
    bytes: int = 0
    files: int = 0


class ShellMachine:
    """A live machine (``Machine`` of :mod:`branchpoint.sandbox.machine`)."""

    def __init__(self, machines: ShellMachines, prepared: Prepared, state: State, name: str) -> None:
        self.image = prepared.image
        self._machines, self._prepared, self._state, self._name = machines, prepared, state, name
        self._store: Store | None = None
        self._holds = 0  # bytes in the store when it was last frozen
        self._inherited = state.bytes, state.files
        self._running: link.Running | None = None
        self._lock = threading.RLock()  # one call at a time; close ends the one that runs
        self._touched = False
        self._left = 0
        self._closed = False

    def run(self, command: str, *, seconds: float | None = None, stdin: bytes = b"") -> Ran:
        """Runs a bash command line, see :class:`~branchpoint.sandbox.machine.Machine`."""
        limits = self._machines.limits
        if "\0" in command:
            return Ran("bash: a command cannot hold a NUL character\n", 2)
        with self._lock:
            mark = secrets.token_hex(16)
            script = _script(command, self._state.shell, mark, self.image.workdir, self._prepared.shell, limits)
            running = link.Running(
                self._machines.link, self._order() | self._launch(), script, stdin,
                (limits.output_bytes, 4 * _shell_state.LIMIT),
            )  # fmt: skip
            self._running = running
            if self._closed:
                running.stop()
            try:
                told, late = running.wait(limits.seconds if seconds is None else seconds)
            finally:
                self._running = None
            self._opened()
            if not told["started"]:
                raise SandboxFailure(f"a command could not start: {running.output.result().decode(errors='replace')}")
            return self._told(running, told, late, mark)

    def _told(self, running: link.Running, told: Mapping[str, Any], late: bool, mark: str) -> Ran:
        dump = running.state.result()
        state, notes = _shell_state.parse(dump, mark)
        if state is not None and not late:
            self._state = replace(self._state, shell=state)
        found = re.search(rb"<%s left (\d+)>\Z" % mark.encode(), dump)
        left = int(found[1]) if found and not late else 0
        self._left += left
        limits = self._machines.limits
        if told["oom"]:
            notes += (f"the memory limit ({limits.memory_bytes} bytes) killed {told['oom']} processes",)
        if told["full"]:
            notes += (f"the limit of {limits.processes} processes was hit",)
        if told["disk"]:
            notes += (f"no room is left: the limits are {limits.disk_bytes} bytes and {limits.inodes} files",)
        output = running.output.result().decode(errors="replace")
        code = _KILLED if late else told["code"] if told["code"] >= 0 else 128 - told["code"]
        return Ran(output, code, late, running.output.omitted, left, notes)

    def _order(self) -> dict[str, Any]:
        """What every request for this machine holds. Opens its store."""
        self._opened()
        self._touched = True
        if self._store is None:
            self._store = Store(self._name)
        limits = self._machines.limits
        return {
            "machine": self._name,
            "lowers": [*(layer.path for layer in self._state.layers), *self._prepared.lowers],
            "written": len(self._state.layers),
            "binds": self._prepared.binds,
            "bytes": max(limits.disk_bytes // _ROOM, limits.disk_bytes - self._inherited[0]),
            "inodes": max(limits.inodes // _ROOM, limits.inodes - self._inherited[1]),
        }

    def _launch(self) -> dict[str, Any]:
        limits = self._machines.limits
        rlimits = {
            "RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CPU": limits.cpu_seconds,
        }  # fmt: skip
        if not self._machines.link.told["memory_group"]:
            rlimits["RLIMIT_AS"] = limits.memory_bytes
        return {
            "environment": {**_ENVIRONMENT, **self.image.environment},
            "command": [self._prepared.shell, "--noprofile", "--norc", "-c", _shell_state.BOOT, "bash"],
            "rlimits": rlimits,
            "told": _MARK,
            "shm": limits.memory_bytes // 4,
        }

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """The content of a regular file, see :class:`~branchpoint.sandbox.machine.Machine`."""
        with self._lock:
            order = {"op": "read", "path": absolute(path, self.image.workdir), "limit": limit}
            return self._machines.link.work(self._order() | order)[1]

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, see :class:`~branchpoint.sandbox.machine.Machine`."""
        with self._lock:
            self._machines.link.work(
                self._order() | {"op": "write", "path": absolute(path, self.image.workdir)}, data or b""
            )

    def changes(self, under: str) -> Mapping[str, Change]:
        """What differs from the image below a folder, see :class:`~branchpoint.sandbox.machine.Machine`."""
        with self._lock:
            order = {"op": "changes", "path": absolute(under, self.image.workdir), "binds": []}
            told = self._machines.link.work(self._order() | order)[1]
        at = HEAD.unpack_from(told)[0]
        found: dict[str, Change] = {}
        start = HEAD.size
        for path, kind, mode, size in json.loads(told[at:]):
            if (path, kind) != (order["path"], "directory"):
                found[path] = Change(kind, told[start : start + size] if kind == "file" else None, mode)
            start += size
        return dict(sorted(found.items()))

    def freeze(self) -> ShellFrozen:
        """The files and the shell as of now. No layer is made where no file has changed.

        Raises SnapshotUnsupported where a command has left processes behind and ``left`` is ``refuse``.
        """
        with self._lock:
            self._opened()
            if self._left and self._machines.left == "refuse":
                raise SnapshotUnsupported(
                    f"commands have left {self._left} processes running, which a snapshot of the shell sandbox cannot "
                    "keep; end them in the command that starts them"
                )
            if self._touched:
                self._freeze_files()
                if len(self._state.layers) > self._machines.layers:
                    self._merge()
            return ShellFrozen(self._machines, self._prepared, self._state, f"shell-{self._machines.number()}")

    def _freeze_files(self) -> None:
        assert self._store is not None
        path = f"{keeper.STORES}/{self._name}/l{self._machines.number()}"
        room = self._machines.limits.inodes // _ROOM
        told = self._machines.link.ask({"do": "freeze", "machine": self._name, "layer": path, "room": room})
        self._touched = False
        if told["changed"]:
            layer = Layer(path, self._store, max(0, told["bytes"] - self._holds))
            self._store.users += 1
            self._holds = told["bytes"]
            self._replace(0, 0, layer)
            inherited, files = self._inherited
            self._state = replace(self._state, bytes=inherited + told["bytes"], files=files + told["files"])

    def _replace(self, start: int, stop: int, layer: Layer) -> None:
        """Puts a layer in place of some."""
        old = self._state.layers
        self._machines.hold(None, [layer])
        self._state = replace(self._state, layers=(*old[:start], layer, *old[stop:]))
        self._machines.release(None, old[start:stop])

    def _merge(self) -> None:
        """Puts one layer in place of the longest run of small ones, or of all before the kernel's limit.

        Its cost is bounded by the size of small layers, and many freezes share it.
        """
        layers = self._state.layers
        start, stop = (0, len(layers)) if len(layers) >= _MOST else _longest(layers)
        if stop - start < 2:
            return
        path = f"g{self._machines.number()}"
        order = self._order() | {"op": "merge", "lowers": [layer.path for layer in layers[start:stop]], "to": path}
        told, _ = self._machines.link.work(order)
        self._touched = False
        self._replace(start, stop, Layer(path, None, told["bytes"]))

    def close(self) -> None:
        """Ends what runs and lets go of the files. Safe to repeat, and from another thread while a command runs."""
        if self._closed:
            return
        self._closed = True
        running = self._running
        if running is not None:
            running.stop()
        with self._lock:
            if self._store is not None:
                self._machines.leave(self._store)
            self._machines.release(self._prepared, self._state.layers)

    def _opened(self) -> None:
        if self._closed:
            raise SandboxFailure("the machine is closed")


def _longest(layers: Sequence[Layer]) -> tuple[int, int]:
    """The longest run of layers that are small."""
    best = (0, 0)
    start = 0
    for at, layer in enumerate(layers):
        if layer.bytes > _SMALL:
            start = at + 1
        elif at + 1 - start > best[1] - best[0]:
            best = (start, at + 1)
    return best


class ShellFrozen:
    """A frozen machine: a list of layers and the state of a shell."""

    def __init__(self, machines: ShellMachines, prepared: Prepared, state: State, name: str) -> None:
        self.id, self.digest = name, ""
        self._machines, self._prepared, self._state = machines, prepared, state
        self._gone = False
        machines.hold(prepared, state.layers)

    def thaw(self) -> ShellMachine:
        """A machine that goes on from here. Raises SandboxFailure after ``discard``."""
        if self._gone:
            raise SandboxFailure(f"frozen machine {self.id} was discarded")
        return self._machines.machine(self._prepared, self._state)

    def discard(self) -> None:
        """Removes the layers that nothing else is built on. Safe to repeat."""
        if not self._gone:
            self._gone = True
            self._machines.release(self._prepared, self._state.layers)


def _script(command: str, state: bytes, mark: str, workdir: str, shell: str, limits: Limits) -> bytes:
    """What the first process is given, a bash: limits, then one more bash to run the command, then a count of what is
    left. Nothing inside can kill the first process, and all others end with it."""
    outer = "; ".join(
        [
            "exec 2>/dev/null",
            f"builtin cd -- {shlex.quote(workdir)}",
            "builtin unset OLDPWD SHLVL",
            f"builtin ulimit -SHu {limits.processes + 1}",
            f"{shell} --noprofile --norc -c {shlex.quote(_shell_state.BOOT)} bash 2>&1",
            f"__c=$? __t=0; {_COUNT}",
            f"while ((__n && __t++ < {_GRACE})); do builtin read -rt 0.01 -u {_NEVER}; {_COUNT}; done",
            f"builtin printf '<{mark} left %s>' \"$__n\" >&{_MARK}",
            'builtin exit "$__c"\n',
        ]
    ).encode(errors="surrogateescape")
    before = f"exec <&{_INPUT} {_INPUT}<&- {_NEVER}<&- {_NEVER + 1}>&-"
    return b"%d\n%s" % (len(outer), outer) + _shell_state.script(command, state, mark=mark, fd=_MARK, before=before)
