"""What a process fork cannot copy: found before the fork and refused, or made private in the child.

Threads and child processes are not copied, sockets and pipes would be shared, and so would writable files, shared
memory and the offsets of open files. Offsets and unnamed temporary files are made private; the rest is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Collection

from branchpoint.world import SnapshotUnsupported

_QUERY_SIZE = 104  # struct procmap_query of linux/fs.h
_PROCMAP_QUERY = 3 << 30 | _QUERY_SIZE << 16 | ord("f") << 8 | 17
_SHARED_WRITABLE_AT_OR_AFTER = 0x02 | 0x08 | 0x10
_QUERY = struct.pack("<QQQ", _QUERY_SIZE, _SHARED_WRITABLE_AT_OR_AFTER, 0).ljust(_QUERY_SIZE, b"\0")
_SHARED = re.compile(rb"^\S+ .w.s .*$", re.MULTILINE)
_HARMLESS_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}  # null, zero, full, random, urandom


def check(own_fds: Collection[int], own_children: Collection[int]) -> list[int]:
    """Raises SnapshotUnsupported, naming what stands in the way and the cure, when this process cannot be forked.

    Returns the descriptors that the child must :func:`detach`.
    """
    _check_threads()
    _check_children(own_children)
    held = _check_fds(own_fds)
    _check_maps()
    return held


def _check_threads() -> None:
    running = threads()
    if running > 1:
        import threading

        names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        known = f" ({', '.join(names)})" if names else " (started by a native library)"
        raise SnapshotUnsupported(
            f"the environment runs {running - 1} extra thread(s){known}; a fork copies only the main thread. "
            "Join the threads before the step returns"
        )


def threads() -> int:
    """The number of threads of this process. (The kernel counts them as links of the directory: one call.)"""
    count = os.stat("/proc/self/task").st_nlink - 2
    return count if count > 0 else len(os.listdir("/proc/self/task"))


def children() -> list[int]:
    """The processes that this one is the parent of."""
    fd = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while block := os.read(fd, 1 << 16):
            text += block
    finally:
        os.close(fd)
    return [int(pid) for pid in text.split()]


def _check_children(own: Collection[int]) -> None:
    foreign = [pid for pid in children() if pid not in own]
    if foreign:
        raise SnapshotUnsupported(
            f"the environment has running child processes {foreign}; a fork cannot copy them. "
            "Wait for them before the step returns, or use a sandbox that keeps processes"
        )


def _check_fds(own: Collection[int]) -> list[int]:
    """Looks at what the environment holds (0, 1, 2 and the worker's own left out); the files among it."""
    held = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in own:
            try:
                status = os.fstat(fd)
            except OSError:
                continue  # the descriptor that listed the directory
            if _is_file(fd, status):
                held.append(fd)
    return held


def _is_file(fd: int, status: os.stat_result) -> bool:
    """True for what has an offset, False for what has none; raises for what a fork would share."""
    kind = status.st_mode
    if stat.S_ISCHR(kind) and (os.major(status.st_rdev), os.minor(status.st_rdev)) in _HARMLESS_DEVICES:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if stat.S_ISDIR(kind) or (stat.S_ISREG(kind) and (flags & os.O_ACCMODE == os.O_RDONLY or status.st_nlink == 0)):
        return True
    name = os.readlink(f"/proc/self/fd/{fd}")
    if stat.S_ISREG(kind):
        what, cure = "is open for writing; siblings would write into the same file", "Close it before the step returns"
    else:
        what, cure = "cannot be copied by a fork; siblings would share it", "Close it, or re-open it in each step"
    raise SnapshotUnsupported(f"descriptor {fd} ({name}) {what}. {cure}, or use the replay sandbox")


def _check_maps() -> None:
    fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _shares_memory(fd):
            return
        text = b""
        while block := os.read(fd, 1 << 20):
            text += block
    finally:
        os.close(fd)
    shared = _SHARED.search(text)
    if shared is not None:
        raise SnapshotUnsupported(
            f"a writable shared memory map ({shared.group().decode(errors='replace').split(maxsplit=5)[-1]}) "
            "would leak writes between siblings. Use private memory, or the replay sandbox"
        )


def _shares_memory(maps: int) -> bool:
    """Whether the kernel finds a writable shared map. True where it cannot be asked (before Linux 6.11): then the text
    of the map is read, which takes most of a millisecond."""
    try:
        fcntl.ioctl(maps, _PROCMAP_QUERY, bytearray(_QUERY))
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def detach(held: Collection[int]) -> None:
    """In the child: gives each of these files its own offset, and every unnamed writable file its own content."""
    for fd in held:
        status = os.fstat(fd)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        if stat.S_ISREG(status.st_mode) and flags & os.O_ACCMODE != os.O_RDONLY:
            new = _copy(fd, status.st_size)
            fcntl.fcntl(new, fcntl.F_SETFL, flags & (os.O_APPEND | os.O_NONBLOCK))
        else:
            # Other flags (O_NOFOLLOW) would make the re-opening of the /proc link fail.
            new = os.open(f"/proc/self/fd/{fd}", flags & (os.O_ACCMODE | os.O_NONBLOCK) | os.O_CLOEXEC)
        os.lseek(new, offset, os.SEEK_SET)
        os.dup2(new, fd, inheritable=os.get_inheritable(fd))
        os.close(new)


def _copy(fd: int, size: int) -> int:
    """A descriptor of a new unnamed file with the same content."""
    import tempfile  # as threading above: rarely needed, and each module that is loaded makes all forks slower

    source = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    with tempfile.TemporaryFile(buffering=0) as file:
        at = 0
        while at < size and (block := os.pread(source, 1 << 20, at)):
            at += os.pwrite(file.fileno(), block, at)
        new = os.dup(file.fileno())
    os.close(source)
    return new
