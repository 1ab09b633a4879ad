"""Files of a machine, worked on by a child of the keeper: no command runs in the machine meanwhile.

What is to be read or written is reached from inside the machine's root, so that no link leads out of it. From then on
the child imports nothing: a module would be looked for among the machine's files.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from branchpoint.sandbox import _shell_mount as mount

COMPARED = 1 << 28
"""Bytes of changed files that are read at most."""

_BLOCK = 1 << 20
_OPAQUE = "user.overlay.opaque"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HEAD = struct.Struct("<Q")  # in front of files and their list: where the list begins
Entry = tuple[str, str, int, int | None]  # path, kind, mode, and for a file a descriptor


def work(
    order: Mapping[str, Any], data: int, enter: Callable[[Sequence[str]], object], user: int | None
) -> dict[str, Any]:
    """Does what an order asks for. ``data``: the file that content comes from or goes to; ``enter``: mounts a root.

    ``user``: who owns what is made, None for this process's own. Raises OSError and ValueError.
    """
    layers: list[str] = order["lowers"]
    if order["op"] == "merge":
        return {"bytes": merge(layers, order["to"])}
    if order["op"] == "changes":
        written = [os.open(layer, _FOLDER) for layer in [order["upper"], *layers[: order["written"]]]]
        image = mount.overlay(layers[order["written"] :])
        _inside(enter, layers, order["root"])
        _pour(changes(order["path"], image, written), data)
    else:
        _inside(enter, layers, order["root"])
        {"read": read, "write": write}[order["op"]](order, data, user)
    return {}


def _inside(enter: Callable[[Sequence[str]], object], layers: Sequence[str], root: str) -> None:
    enter(layers)
    os.chroot(root)
    os.chdir("/")
    sys.meta_path.clear()
    sys.path.clear()


def place(root: str, inside: str) -> int | None:
    """A descriptor of what lies at a path of a root, no link followed; None where nothing does."""
    at = os.open(root, os.O_PATH | os.O_CLOEXEC)
    for name in inside.strip("/").split("/"):
        try:
            further = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except OSError:
            return None
        finally:
            os.close(at)
        at = further
    if stat.S_ISLNK(os.fstat(at).st_mode):
        os.close(at)
        return None
    return at


def read(order: Mapping[str, Any], data: int, user: int | None) -> None:
    """Copies a regular file."""
    path, limit = order["path"], order["limit"]
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(source)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(21, "is a directory", path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_size > limit:
        raise ValueError(f"{path} has {found.st_size} bytes; the limit is {limit}")
    _copy(source, data, limit)


def write(order: Mapping[str, Any], data: int, user: int | None) -> None:
    """Writes a file, with its folders. One that exists keeps its mode."""
    path: str = order["path"]
    missing: list[str] = []
    folder = os.path.dirname(path)
    while folder != "/" and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        os.mkdir(folder, 0o755)
        _own(folder, user)
    new = not os.path.exists(path)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(target).st_mode):
        raise OSError(22, "is no regular file", path)
    os.ftruncate(target, 0)
    if new:
        _own(path, user)
    _copy(data, target, os.fstat(data).st_size)


def _own(path: str, user: int | None) -> None:
    if user is not None:
        os.chown(path, user, user, follow_symlinks=False)


def _copy(source: int, target: int, limit: int) -> int:
    """Copies from where both are; blocks of zeros become holes. Returns the number of bytes."""
    total = 0
    while part := os.read(source, _BLOCK):
        total += len(part)
        if total > limit:
            raise ValueError(f"a file has more than {limit} bytes")
        if part.count(0) == len(part):
            os.lseek(target, len(part), os.SEEK_CUR)
            os.ftruncate(target, os.lseek(target, 0, os.SEEK_CUR))
        else:
            while part:
                part = part[os.write(target, part) :]
    return total


# What differs from the image


def changes(under: str, image: int, written: Sequence[int]) -> Iterator[Entry]:
    """All that differs from the image at a path and below it.

    Args:
        image: a descriptor of its root.
        written: the layers above it: what none of them holds is as in the image.
    """
    folder, _, name = under.rpartition("/")
    at = [_descend(os.open(".", _FOLDER, dir_fd=fd), folder) for fd in (os.open("/", _FOLDER), image, *written)]
    step = _entry if name else _below
    yield from step(folder, name, at[0], at[1], [fd for fd in at[2:] if fd is not None])


def _entry(folder: str, name: str, now: int | None, then: int | None, layers: Sequence[int]) -> Iterator[Entry]:
    path = f"{folder}/{name}"
    new, old = _lstat(now, name), _lstat(then, name)
    if new is None:
        if old is not None:
            yield path, "deleted", 0, None
            yield from _below(path, "", None, _folder(then, name), ())
        return
    if old is not None and all(_lstat(layer, name) is None for layer in layers):
        return
    kind = _kind(new.st_mode)
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=now) if kind == "file" else None
    if old is None or (kind, _mode(new)) != (_kind(old.st_mode), _mode(old)) or not _equal(name, now, then, new, old):
        yield path, kind, _mode(new), file
    if file is not None:
        os.close(file)
    below = [sub for sub in (_folder(layer, name) for layer in layers) if sub is not None]
    yield from _below(path, "", _folder(now, name), _folder(then, name), below)


def _below(folder: str, _: str, now: int | None, then: int | None, layers: Sequence[int]) -> Iterator[Entry]:
    """The entries of a folder, whose descriptors it closes."""
    for name in sorted(_names(now) | _names(then)):
        yield from _entry(folder, name, now, then, layers)
    for fd in (now, then, *layers):
        if fd is not None:
            os.close(fd)


def _equal(name: str, now: int | None, then: int | None, new: os.stat_result, old: os.stat_result) -> bool:
    """Whether two entries of the same kind hold the same."""
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(name, dir_fd=now) == os.readlink(name, dir_fd=then)
    if not stat.S_ISREG(new.st_mode):
        return True
    if new.st_size != old.st_size:
        return False
    with (
        open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=now), "rb", 0) as one,
        open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=then), "rb", 0) as other,
    ):
        while True:
            left, right = one.read(_BLOCK), other.read(_BLOCK)
            if left != right:
                return False
            if not left:
                return True


def _descend(fd: int | None, path: str) -> int | None:
    for name in path.split("/"):
        if name:
            fd = _folder(fd, name)
    return fd


def _folder(fd: int | None, name: str) -> int | None:
    if fd is None:
        return None
    try:
        return os.open(name, _FOLDER, dir_fd=fd)
    except OSError:
        return None


def _lstat(fd: int | None, name: str) -> os.stat_result | None:
    try:
        return None if fd is None else os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None


def _names(fd: int | None) -> set[str]:
    return set() if fd is None else set(os.listdir(fd))


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    return "directory" if stat.S_ISDIR(mode) else "symlink" if stat.S_ISLNK(mode) else "other"


def _mode(found: os.stat_result) -> int:
    return stat.S_IMODE(found.st_mode)


def _pour(entries: Iterator[Entry], out: int) -> None:
    """Writes the files, then the list of all: path, kind, mode, size."""
    os.lseek(out, HEAD.size, os.SEEK_SET)
    room = COMPARED
    listed: list[tuple[str, str, int, int]] = []
    for path, kind, mode, file in entries:
        size = 0 if file is None else _copy(file, out, room)
        room -= size
        listed.append((path, kind, mode, size))
    at = os.lseek(out, 0, os.SEEK_CUR)
    text = json.dumps(listed).encode()
    while text:
        text = text[os.write(out, text) :]
    os.pwrite(out, HEAD.pack(at), 0)


# Layers


def merge(layers: Sequence[str], to: str) -> int:
    """Makes one layer that stands for several, uppermost first. Returns the bytes of its files."""
    links: dict[tuple[int, int], str] = {}
    os.mkdir(to)
    shutil.copystat(layers[0], to)
    _owner(os.lstat(layers[0]), to)
    return _merge(layers, to, links)


def _merge(layers: Sequence[str], to: str, links: dict[tuple[int, int], str]) -> int:
    total = 0
    for name in sorted({name for layer in layers for name in os.listdir(layer)}):
        stack: list[str] = []
        closed = False  # nothing below the stack shows through
        for layer in layers:
            path = f"{layer}/{name}"
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    closed = True
                    if not stack:
                        stack.append(path)
                    break
                stack.append(path)
                if _opaque(path):
                    closed = True
                    break
        top = os.lstat(stack[0])
        target = f"{to}/{name}"
        if stat.S_ISDIR(top.st_mode):
            os.mkdir(target)
            total += _merge(stack, target, links)
            if closed:
                os.setxattr(target, _OPAQUE, b"y")
        elif (top.st_dev, top.st_ino) in links:
            os.link(links[top.st_dev, top.st_ino], target)
            continue
        else:
            total += _duplicate(stack[0], top, target)
            if top.st_nlink > 1:
                links[top.st_dev, top.st_ino] = target
        _owner(top, target)
        _like(stack[0], top, target)
    return total


def _opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _duplicate(source: str, found: os.stat_result, target: str) -> int:
    """Copies what is no folder. Returns its bytes."""
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(found.st_mode):
        read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return _copy(read, made, found.st_size)
        finally:
            os.close(read)
            os.close(made)
    else:
        os.mknod(target, stat.S_IFMT(found.st_mode) | 0o600, found.st_rdev)  # a deletion is a device 0/0
    return 0


def _owner(found: os.stat_result, target: str) -> None:
    os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)


def _like(source: str, found: os.stat_result, target: str) -> None:
    """Gives a copy the mode, extended attributes and times of its original."""
    if not stat.S_ISLNK(found.st_mode):
        for name in os.listxattr(source, follow_symlinks=False):
            if name != _OPAQUE and not name.startswith("user.overlay.") and name.startswith("user."):
                os.setxattr(target, name, os.getxattr(source, name))
        os.chmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
