"""Containers as machines: any Docker-compatible engine, through the Docker SDK (extra ``container``).

A machine is a container without network or capabilities whose first process runs the commands. A frozen machine is an
image committed from it (or the one it came from, where no file has changed) beside the state of the shell; to thaw one
is to run a new container of that image. Files and shell are kept, processes are not.

All that is made here carries a label that names this process. :meth:`ContainerMachines.close` removes it; what a killed
process left is removed when the next one starts, or by :func:`reap`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from branchpoint.sandbox import _container_link as link
from branchpoint.sandbox import _container_owner as owner
from branchpoint.sandbox._container_engine import Engine, EngineError, Spec, address
from branchpoint.sandbox._container_layers import Images, Layer
from branchpoint.sandbox._container_machine import ContainerMachine
from branchpoint.sandbox.machine import Image, MachineSandbox
from branchpoint.world import SandboxFailure, UserError

_MOST_LAYERS = 100  # engines and kernels stop at 125 to 500; deeper chains are slower, too


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine may use. What the engine cannot hold it to is named in ``ContainerMachines.unenforced``.

    ``seconds``: of a command that names no limit. ``output_bytes``: of a command's output that are kept.
    ``disk_bytes``: written files together (few engines can), ``file_bytes``: one file. ``open_files``: of a process.
    """

    seconds: float = 60.0
    output_bytes: int = 1 << 16
    memory_bytes: int = 2 << 30
    processes: int = 256
    cpus: float = 1.0
    disk_bytes: int = 4 << 30
    file_bytes: int = 1 << 30
    open_files: int = 1024


class ContainerMachines:
    """Machines in containers (``Machines`` of :mod:`branchpoint.sandbox.machine`).

    ``base`` of an :class:`~branchpoint.sandbox.machine.Image` is the name of an image, which is pulled if it is not
    there, or the path of a ``.tar``: one that ``docker save`` wrote, or a root file system. It must hold bash.

    Raises UserError when no engine answers, and ModuleNotFoundError when the Docker SDK is not installed.

    Args:
        socket: of the engine (``unix:///...``, ``tcp://...``, or a path); None: DOCKER_HOST, or the usual places.
        limits: of every machine.
        user: numeric ``uid:gid`` that commands run as.
        capabilities: that commands keep, e.g. ``("CHOWN", "DAC_OVERRIDE")`` for package managers; none by default.
        engine_seconds: how long one answer of the engine may take.
        layers: a frozen machine that would lie on more layers of images is flattened to one.
    """

    preserves = frozenset({"files", "shell"})

    def __init__(
        self,
        socket: str | None = None,
        *,
        limits: Limits | None = None,
        user: str = "0:0",
        capabilities: tuple[str, ...] = (),
        engine_seconds: float = 120.0,
        layers: int = _MOST_LAYERS,
    ) -> None:
        uid, _, gid = user.partition(":")
        if not (uid.isdigit() and gid.isdigit()):
            raise UserError(f"user is {user!r}; expected numbers, e.g. '0:0' or '1000:1000'")
        self.limits, self.user, self.capabilities = limits or Limits(), user, capabilities
        self.owner_ids = int(uid), int(gid)
        self.engine = Engine(socket, engine_seconds)
        self.session = secrets.token_hex(8)
        self._me = owner.me()
        self._held, unenforced = _enforced(self.limits, self.engine.info)
        self.unenforced: tuple[str, ...] = unenforced
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        # More starts at once than processors take longer all together: 32 at a time three times as long as 2.
        self._starting = threading.Semaphore(max(2, os.cpu_count() or 1))
        self.images = Images(self.engine, self._create, self.labels, self._name, self.owner_ids, layers)
        self._live: weakref.WeakSet[ContainerMachine] = weakref.WeakSet()
        self._closed = False
        with suppress(EngineError):  # another one may be removing the same
            owner.sweep(self.engine, {owner.OWNER: ""}, only_dead=True)
        self._at_exit = atexit.register(_close_at_exit, weakref.ref(self))

    def start(self, image: Image) -> ContainerMachine:
        """A machine of an image. Raises UserError for an image that cannot be had, SandboxFailure otherwise."""
        return self.run(self.images.prepare(image), image, b"")

    def run(self, layer: Layer, image: Image, state: bytes) -> ContainerMachine:
        """A machine on a layer, with a state of the shell."""
        if self._closed:
            raise SandboxFailure("the container sandbox is closed")
        layer.hold()
        with self._starting:
            return self._begin(layer, image, state)

    def _begin(self, layer: Layer, image: Image, state: bytes) -> ContainerMachine:
        try:
            container = self._create(layer, image, "machine")
        except BaseException:
            layer.release()
            raise
        machine = ContainerMachine(self, layer, image, container, state)
        with self._lock:
            self._live.add(machine)
            late = self._closed
        try:
            if late:
                raise SandboxFailure("the container sandbox is closed")
            machine.begin()
        except BaseException:
            machine.close()
            raise
        return machine

    def labels(self, kind: str, **more: str) -> dict[str, str]:
        """What containers and images made here are known by."""
        return {owner.OWNER: self._me, owner.SESSION: self.session, owner.KIND: kind, **more}

    def number(self) -> int:
        return next(self._ids)

    def _name(self) -> str:
        return f"branchpoint-{self.session}:{self.number()}"

    def _create(self, layer: Layer, image: Image, kind: str) -> str:
        limits = self.limits
        spec = Spec(
            image=layer.id,
            command=link.COMMAND,
            labels=self.labels(kind),
            user=self.user,
            workdir=image.workdir,
            environment={**layer.environment, **image.environment},
            binds={k: Path(v).absolute() for k, v in image.binds.items()},
            capabilities=self.capabilities,
            limits=self._held,
            ulimits={"nofile": limits.open_files, "nproc": 1 << 12, "core": 0, "fsize": limits.file_bytes},
            healthcheck=layer.healthcheck,
        )
        try:
            return self.engine.create(spec)
        except EngineError as error:
            if "storage_opt" not in self._held:
                raise
            with self._lock:
                self._held = {k: v for k, v in self._held.items() if k != "storage_opt"}
                self.unenforced = (*self.unenforced, f"disk_bytes: the engine refused a quota ({error})")
            return self._create(layer, image, kind)

    def close(self) -> None:
        """Removes every container and image that was made here. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        atexit.unregister(self._at_exit)
        for machine in live:
            with suppress(EngineError):  # the sweep tries again, and tells
                machine.close()
        try:
            owner.sweep(self.engine, {owner.SESSION: self.session}, only_dead=False)
            left = self.engine.containers({owner.SESSION: self.session})
        finally:
            self.engine.close()
        if left:
            raise EngineError(f"{len(left)} containers could not be removed; branchpoint reap tries again")


def _close_at_exit(machines: weakref.ref[ContainerMachines]) -> None:
    found = machines()
    if found is not None:
        with suppress(Exception):  # the interpreter is ending; the next start removes what is left
            found.close()


class Container(MachineSandbox):
    """The container sandbox: every branch of a machine world gets a container, see :class:`ContainerMachines`.

    Args as there.
    """

    preserves: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, socket: str | None = None, **settings: Any) -> None:
        super().__init__(ContainerMachines(socket, **settings))


def reap(socket: str | None = None, *, everything: bool = False) -> tuple[int, int]:
    """Removes the containers and images that processes which have ended left behind; returns how many of each.

    ``everything``: also those whose process is alive, or cannot be seen from here (another machine, or another process
    namespace).
    """
    engine = Engine(socket, 120.0)
    try:
        return owner.sweep(engine, {owner.OWNER: ""}, only_dead=not everything)
    finally:
        engine.close()


def available(socket: str | None = None) -> str:
    """Why no container can be had here, or "" when an engine answers."""
    try:
        Engine(socket, 10.0).close()
    except (UserError, ModuleNotFoundError) as error:
        return f"{address(socket)}: {error}"
    return ""


def _enforced(limits: Limits, info: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The limits to ask the engine for, and why the others are not."""
    asked: dict[str, Any] = {}
    missing: list[str] = []
    period = info.get("CpuCfsQuota", info.get("CPUCfsQuota", True))
    for flag, name, wanted in (
        (info.get("MemoryLimit", True), "memory_bytes", {"mem_limit": limits.memory_bytes}),
        (info.get("SwapLimit", True), "memory_bytes of swap", {"memswap_limit": limits.memory_bytes}),
        (info.get("PidsLimit", True), "processes", {"pids_limit": limits.processes}),
        (period, "cpus", {"nano_cpus": int(limits.cpus * 1e9)}),
    ):
        if flag:
            asked |= wanted
        else:
            missing.append(f"{name}: the engine's host has no such control group")
    storage = {row[0]: row[1] for row in info.get("DriverStatus") or () if len(row) == 2}
    backing = storage.get("Backing Filesystem", "unknown")
    if info.get("Driver") in ("btrfs", "zfs") or (info.get("Driver") in ("overlay2", "overlay") and backing == "xfs"):
        asked["storage_opt"] = {"size": str(limits.disk_bytes)}
    else:
        missing.append(
            f"disk_bytes, and a limit of inodes: storage driver {info.get('Driver')} on {backing} has no quota; "
            f"one file is limited to {limits.file_bytes} bytes"
        )
    return asked, tuple(missing)
