"""Control groups: limits on all processes of a machine together, of version 1 or 2, where this user may make them.

Each machine has a group below one that carries this process's id. Files in memory count as its memory, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "branchpoint-"
_PERIOD = 100_000  # microseconds


@dataclass(frozen=True, slots=True)
class Bounds:
    """``memory``: bytes; ``processes``: at once; ``cpus``: processors' time a second."""

    memory: int
    processes: int
    cpus: float


@dataclass(slots=True)
class Groups:
    """The control groups of this process, and why some limits cannot be held (``missing``: limit -> reason)."""

    bounds: Bounds
    roots: dict[str, Path] = field(default_factory=dict)  # controller -> folder of this process's groups
    missing: dict[str, str] = field(default_factory=dict)

    def enter(self, machine: str) -> None:
        """Moves the calling process, which must have one thread, into a machine's group, made before.

        Version 1 moves a single thread at once; a whole process waits tens of milliseconds for all processors.
        """
        for root in set(self.roots.values()):
            (root / machine / ("tasks" if _version_1(root) else "cgroup.procs")).write_text("0")

    def make(self, machine: str) -> None:
        """A group with the limits."""
        for root in set(self.roots.values()):
            with suppress(FileExistsError):
                (root / machine).mkdir()
        for name, controller, value in _settings(self.bounds, self.roots):
            (self.roots[controller] / machine / name).write_text(value)

    def remove(self, machine: str) -> None:
        """Drops a group, which no process may be in any more."""
        for root in set(self.roots.values()):
            with suppress(OSError):
                (root / machine).rmdir()

    def counts(self, machine: str) -> tuple[int, int]:
        """How often the limit of memory has killed, and that of processes has refused."""
        oom = full = 0
        for controller, names in (("memory", ("memory.oom_control", "memory.events")), ("pids", ("pids.events",))):
            for name in names:
                with suppress(OSError, KeyError):
                    told = dict(line.split()[:2] for line in (self.roots[controller] / machine / name).open())
                    oom += int(told.get("oom_kill", 0))
                    full += int(told.get("max", 0)) if controller == "pids" else 0
        return oom, full

    def close(self) -> None:
        for root in set(self.roots.values()):
            _remove(root)


def groups(bounds: Bounds) -> Groups:
    """What can be had here. Groups that a process which has ended left behind are removed."""
    found: dict[str, Path] = {}
    why: dict[str, str] = {}
    mounts = _mounts()
    for controller, limit in (("memory", "memory_bytes"), ("pids", "processes"), ("cpu", "cpus")):
        try:
            found[controller] = _root(mounts, controller)
        except OSError as error:
            why[limit] = error.strerror or str(error)
    return Groups(bounds, found, why)


def _settings(bounds: Bounds, roots: Mapping[str, Path]) -> Iterator[tuple[str, str, str]]:
    """File, controller and value of each limit."""
    first = {c: _version_1(root) for c, root in roots.items()}
    if "memory" in roots:
        if first["memory"]:
            yield "memory.limit_in_bytes", "memory", str(bounds.memory)
            if (roots["memory"] / "memory.memsw.limit_in_bytes").exists():
                yield "memory.memsw.limit_in_bytes", "memory", str(bounds.memory)
        else:
            yield "memory.max", "memory", str(bounds.memory)
            yield "memory.swap.max", "memory", "0"
    if "pids" in roots:
        yield "pids.max", "pids", str(bounds.processes)
    if "cpu" in roots:
        quota = max(1000, int(bounds.cpus * _PERIOD))
        if first["cpu"]:
            yield "cpu.cfs_quota_us", "cpu", str(quota)
        else:
            yield "cpu.max", "cpu", f"{quota} {_PERIOD}"


def _version_1(root: Path) -> bool:
    return not (root / "cgroup.controllers").exists()


def _mounts() -> dict[str, Path]:
    """Where each controller is mounted, and this process's own place in it; "" is version 2."""
    mine: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        mine |= dict.fromkeys(names.split(","), place)
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            if name in mine:
                found[name] = Path(point, os.path.relpath(mine[name], root))
    return found


def _root(mounts: Mapping[str, Path], controller: str) -> Path:
    """A folder for this process's groups. Raises OSError where that is not allowed."""
    if controller in mounts:
        return _make(mounts[controller])
    base = mounts.get("")
    if base is None or controller not in (base / "cgroup.controllers").read_text().split():
        raise OSError(0, "this system has no such controller")
    _delegate(base, controller)
    root = _make(base)
    _delegate(root, controller)
    return root


def _delegate(folder: Path, controller: str) -> None:
    switch = folder / "cgroup.subtree_control"
    if controller not in switch.read_text().split():
        switch.write_text(f"+{controller}")


def _make(base: Path) -> Path:
    for old in base.glob(f"{_PREFIX}*"):
        pid = re.fullmatch(rf"{_PREFIX}(\d+)", old.name)
        if pid and not Path("/proc", pid[1]).exists():
            _remove(old)
    root = base / f"{_PREFIX}{os.getpid()}"
    root.mkdir(exist_ok=True)
    return root


def _remove(root: Path) -> None:
    with suppress(OSError):
        for machine in root.iterdir():
            if machine.is_dir():
                with suppress(OSError):
                    machine.rmdir()
        root.rmdir()
