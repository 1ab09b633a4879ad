"""The system calls behind the shell sandbox's files: overlays, bind mounts and limited memory file systems.

Only the keeper (:mod:`._shell_keeper`) calls them, in a mount namespace of its own, so none outlives it. The mount API
of Linux 5.2 takes each layer by itself: ``mount(2)`` cuts a list of layers off at one page, silently.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

NEWNS, NEWUSER, NEWNET = 0x00020000, 0x10000000, 0x40000000
LOWERS = 500  # more layers than these the kernel refuses

_C = ctypes.CDLL(None, use_errno=True)
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK, _SETATTR = 428, 429, 430, 431, 432, 433, 442
_FLAG, _STRING, _CREATE, _RECONFIGURE = 0, 1, 6, 7
_HERE = -100
_EMPTY_PATH, _RECURSIVE = 0x1000, 0x8000
_CLONE, _CLOEXEC = 1, os.O_CLOEXEC
_FROM_FD, _TO_FD = 0x4, 0x40
_RDONLY, _NOSUID, _NODEV = 0x1, 0x2, 0x4
_REC, _PRIVATE, _DETACH = 0x4000, 0x40000, 2
_SUBREAPER = 36
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # of a network device
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}  # fmt: skip


class _Attr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _did(result: int, what: str, fs: int | None = None) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {_told(fs) or os.strerror(number)}")


def _told(fs: int | None) -> str:
    """The kernel's own words about a file system that it refused."""
    if fs is None:
        return ""
    try:
        return os.read(fs, 4096).decode(errors="replace").strip()
    except OSError:
        return ""


def unshare(flags: int) -> None:
    _did(_C.unshare(flags), "unshare")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    _did(_C.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")


def make_private() -> None:
    """What is mounted here from now on is seen nowhere else."""
    _did(_C.mount(None, b"/", None, _REC | _PRIVATE, None), "making mounts private")


def _mounted(kind: str, settings: Sequence[tuple[str, str | None]], flags: int) -> int:
    """A new file system as a descriptor, attached nowhere yet."""
    fs = _did(_C.syscall(_FSOPEN, kind.encode(), 1), f"opening {kind}")
    try:
        for key, value in settings:
            how = _FLAG if value is None else _STRING
            text = None if value is None else os.fsencode(value)
            _did(_C.syscall(_FSCONFIG, fs, how, key.encode(), text, 0), f"{kind} {key}={value}", fs)
        _did(_C.syscall(_FSCONFIG, fs, _CREATE, None, None, 0), kind, fs)
        return _did(_C.syscall(_FSMOUNT, fs, 1, flags), kind, fs)
    finally:
        os.close(fs)


def overlay(lowers: Sequence[str], upper: str = "", work: str = "") -> int:
    """An overlay of directories, uppermost first, as a descriptor; for reading alone without ``upper``.

    ``volatile``: it is never synced to disk, of which nothing that lasts is made. ``userxattr``: the flavour that an
    ordinary user may mount; layers of the two flavours cannot be mixed.
    """
    settings: list[tuple[str, str | None]] = [("source", "branchpoint")]
    settings += (("lowerdir+", lower) for lower in lowers)
    settings += [("userxattr", None), ("index", "off"), ("xino", "off")]
    if upper:
        settings += [("upperdir", upper), ("workdir", work), ("volatile", None)]
    return _mounted("overlay", settings, _NOSUID | _NODEV)


def memory(size: int, inodes: int, mode: int = 0o711) -> int:
    """A file system in memory that holds ``size`` bytes and ``inodes`` files, as a descriptor."""
    settings = [("source", "branchpoint"), ("size", str(size)), ("nr_inodes", str(inodes)), ("mode", f"{mode:o}")]
    return _mounted("tmpfs", settings, _NOSUID | _NODEV)


def read_only(path: str, devices: bool = False) -> int:
    """A file or folder with what is mounted below it, for reading alone, as a descriptor; links are followed."""
    tree = _did(_C.syscall(_OPEN_TREE, _HERE, os.fsencode(path), _CLONE | _CLOEXEC | _RECURSIVE), path)
    attr = _Attr(_RDONLY | _NOSUID | (0 if devices else _NODEV), 0, 0, 0)
    _did(
        _C.syscall(_SETATTR, tree, b"", _EMPTY_PATH | _RECURSIVE, ctypes.byref(attr), ctypes.sizeof(attr)),
        f"making {path} read-only",
    )
    return tree


def make_devices(place: str) -> None:
    """Fills a folder with the harmless devices of this computer, once for all machines."""
    attach(memory(1 << 16, 64, 0o755), place)
    for name in _DEVICES:
        path = f"{place}/{name}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        attach(read_only(f"/dev/{name}", devices=True), path)
    for name, target in _LINKS.items():
        os.symlink(target, f"{place}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{place}/{name}")


def attach_devices(place: str, tree: int, shared: int) -> None:
    """Puts the devices at a folder, with terminals and shared memory of its own.

    Args:
        tree: what :func:`make_devices` made, by :func:`read_only`.
        shared: bytes of shared memory.
    """
    attach(tree, place)
    terminals = [("source", "branchpoint"), ("ptmxmode", "0666"), ("mode", "620")]
    attach(_mounted("devpts", terminals, _NOSUID), f"{place}/pts")
    attach(memory(shared, 1 << 16, 0o1777), f"{place}/shm")


def network() -> int:
    """A new network namespace, in which a loopback device is all there is, as a descriptor."""
    mine = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    unshare(NEWNET)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sh14x", b"lo", 0)
            flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
        return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        enter(mine)
        os.close(mine)


def enter(namespace: int) -> None:
    _did(_C.setns(namespace, 0), "setns")


def attach(mount: int, place: str | int) -> None:
    """Puts a mount at a path or on what a descriptor refers to, and closes the mount's descriptor."""
    at, path, flags = (_HERE, os.fsencode(place), 0) if isinstance(place, str) else (place, b"", _TO_FD)
    _did(_C.syscall(_MOVE_MOUNT, mount, b"", at, path, _FROM_FD | flags), f"mounting at {place}")
    os.close(mount)


def resize(path: str, inodes: int) -> None:
    """Lets a file system in memory hold so many files. Raises OSError where it holds more."""
    fs = _did(_C.syscall(_FSPICK, _HERE, os.fsencode(path), 1), f"changing {path}")
    try:
        _did(_C.syscall(_FSCONFIG, fs, _STRING, b"nr_inodes", str(inodes).encode(), 0), f"{path} nr_inodes", fs)
        _did(_C.syscall(_FSCONFIG, fs, _RECONFIGURE, None, None, 0), f"changing {path}", fs)
    finally:
        os.close(fs)


def detach(path: str) -> None:
    """Takes a mount away; what still uses it keeps it."""
    _did(_C.umount2(os.fsencode(path), _DETACH), f"unmounting {path}")


def keeps_attributes(place: str) -> bool:
    """Whether a file system keeps the extended attributes that an overlay needs; memory does since Linux 6.6."""
    try:
        os.setxattr(place, "user.overlay.probe", b"y")
    except OSError:
        return False
    return True
