"""Whose containers and images these are: labels, and the removal of what dead processes left."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from branchpoint.sandbox._container_engine import Engine, EngineError, NotThere

OWNER, SESSION, KIND, LOADED = "branchpoint.owner", "branchpoint.session", "branchpoint.kind", "branchpoint.loaded"


def me() -> str:
    """This process as a label: host, boot, process namespace, process id, start time."""
    host = re.sub(r"[^\w.-]", "_", platform.node()) or "unknown"
    return "/".join([host, _boot(), _namespace(), str(os.getpid()), _start(os.getpid())])


def dead(owner: str) -> bool:
    """Whether the process of a label is known to have ended. One of another machine, or of another process namespace
    of this machine, cannot be seen from here and counts as living; so does all where there is no ``/proc``."""
    try:
        host, boot, namespace, pid, start = owner.split("/")
        my_host, my_boot, my_namespace, *_ = me().split("/")
        if not my_boot:
            return False
        if boot != my_boot:
            return host == my_host  # this machine has started anew since
        return namespace == my_namespace and _start(int(pid)) != start
    except ValueError:
        return False  # not a label of ours


def sweep(engine: Engine, labels: Mapping[str, str], only_dead: bool) -> tuple[int, int]:
    """Removes containers, then images, that carry the labels; with ``only_dead`` those of ended processes alone.

    Returns how many of each were removed. Images that are in use by others stay.
    """
    containers = [c["Id"] for c in engine.containers(labels) if _ours(c, only_dead)]
    removed = sum(_try(engine.remove, c) for c in containers)
    images = [i for i in engine.images(labels) if _ours(i, only_dead)]
    loaded = {i["Labels"][LOADED] for i in images if LOADED in i["Labels"]}
    waiting = [i["Id"] for i in sorted(images, key=lambda i: -i["Created"])] + sorted(loaded)
    total = len(waiting)
    while waiting:  # children go before their parents, and two may be as old
        left = [i for i in waiting if not _try(engine.remove_image, i)]
        if len(left) == len(waiting):
            break
        waiting = left
    return removed, total - len(waiting)


def _ours(thing: Mapping[str, object], only_dead: bool) -> bool:
    labels = thing.get("Labels")
    owner = labels.get(OWNER) if isinstance(labels, Mapping) else None
    return isinstance(owner, str) and (not only_dead or dead(owner))


def _try(remove: object, name: str) -> bool:
    try:
        remove(name)  # type: ignore[operator]
    except NotThere:
        return True
    except EngineError:
        return False
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "0"


def _start(pid: int) -> str:
    """When a process started, in ticks since the boot; "" when there is none (a dead one not waited for counts)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
