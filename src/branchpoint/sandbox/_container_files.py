"""Files of containers as tars: what goes in, what is read back, what differs."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from branchpoint.sandbox._container_engine import Engine, EngineError, NotThere, Stat
from branchpoint.sandbox.machine import Change
from branchpoint.world import SandboxFailure, UserError

COMPARED = 1 << 30
"""Bytes below a folder that are compared with the image at most."""

WHITEOUT = ".wh."
"""What names start with that stand for deletions in the layers of images, so that no file of one can have them."""

_LINKS = 40


def follow(engine: Engine, container: str, path: str) -> tuple[str, Stat]:
    """Where a path leads inside the container, and what is there. Raises NotThere."""
    place, found = _reach(engine, container, path)
    if found is None:
        raise NotThere(f"{place} does not exist")
    return place, found


def _reach(engine: Engine, container: str, path: str) -> tuple[str, Stat | None]:
    """Where a path leads inside the container, and what is there, if anything. Raises NotThere for endless links."""
    for _ in range(_LINKS):
        try:
            found = look(engine, container, path)
        except NotThere:
            return path, None
        if found.kind != "symlink" or found.target in ("", path):
            return path, found
        path = found.target
    raise NotThere(f"{path}: too many symbolic links")


def read(engine: Engine, container: str, path: str, limit: int) -> bytes:
    """The content of a regular file, see :meth:`branchpoint.sandbox.machine.Machine.read`."""
    try:
        place, found = follow(engine, container, path)
    except NotThere as error:
        raise FileNotFoundError(f"no file {path}") from error
    if found.kind == "directory":
        raise IsADirectoryError(f"{path} is a directory")
    if found.kind != "file":
        raise ValueError(f"{path} is no regular file")
    if found.size > limit:
        raise ValueError(f"{path} has {found.size} bytes; the limit is {limit}")
    if pattern(place):
        with _below(engine, container, place) as (tar, members):
            return _content(tar, members[place])
    with spool(engine.get(container, place), limit + (1 << 16)) as stream, _opened(stream) as tar:
        for member in tar:
            if member.isreg():
                return _content(tar, member)
    raise ValueError(f"{path} is no regular file")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(member)
    return data.read() if data is not None else b""


# Names that Podman takes for patterns, and finds nothing or another file for


def pattern(path: str) -> bool:
    """Whether a path has to be looked for in the archive of a folder above it."""
    return any(c in path for c in "*?[\\")


def _plain(path: str) -> str:
    """The nearest folder above whose path is no pattern."""
    while pattern(path):
        path = posixpath.dirname(path)
    return path


@contextmanager
def _below(engine: Engine, container: str, path: str) -> Iterator[tuple[tarfile.TarFile, dict[str, tarfile.TarInfo]]]:
    """The archive of the nearest plain folder above a path, and its members by path. Raises NotThere."""
    folder, found = follow(engine, container, _plain(path))
    if found.kind != "directory":
        raise NotThere(f"{path} does not exist")
    with spool(engine.get(container, folder), COMPARED) as stream, _opened(stream) as tar:
        yield tar, dict(_members(tar, _plain(path)))


def look(engine: Engine, container: str, path: str) -> Stat:
    """What a path is, the last link not followed. Raises NotThere."""
    if not pattern(path):
        return engine.stat(container, path)
    with _below(engine, container, path) as (tar, members):
        for folder in _folders(path, _plain(path)):
            link = members.get(folder)
            if link is not None and link.issym():
                return look(engine, container, _target(folder, link) + path[len(folder) :])
        member = members.get(path)
        if member is None:
            raise NotThere(f"{path} does not exist")
        if member.islnk():
            member = tar.getmember(member.linkname)
        if member.issym():
            return Stat("symlink", 0o777, 0, _target(path, member))
        kind = "file" if member.isreg() else "directory" if member.isdir() else "other"
        return Stat(kind, member.mode & 0o7777, member.size, path)


def _folders(path: str, above: str) -> list[str]:
    """The folders between one and a path below it, uppermost first."""
    found: list[str] = []
    while (path := posixpath.dirname(path)) != above:
        found.insert(0, path)
    return found


def _target(path: str, link: tarfile.TarInfo) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link.linkname))


def write(engine: Engine, container: str, path: str, data: bytes, owner: tuple[int, int]) -> None:
    """Writes a file, see :meth:`branchpoint.sandbox.machine.Machine.write`. One that exists keeps its mode."""
    try:
        path, found = _reach(engine, container, path)
    except NotThere as error:
        raise OSError(str(error)) from error
    if found is not None and found.kind == "directory":
        raise IsADirectoryError(f"{path} is a directory")
    if found is not None and found.kind != "file":
        raise OSError(f"{path} is no regular file")
    mode = 0o644 if found is None else found.mode
    folder, missing = _deepest(engine, container, posixpath.dirname(path))
    place = _plain(folder)
    names = [*missing, posixpath.basename(path)]
    names[0] = posixpath.join(folder[len(place) :].strip("/"), names[0])
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for depth in range(1, len(names)):
            tar.addfile(_entry("/".join(names[:depth]), tarfile.DIRTYPE, 0o755, owner))
        entry = _entry("/".join(names), tarfile.REGTYPE, mode, owner)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    try:
        engine.put(container, place, out.getvalue())
    except EngineError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _deepest(engine: Engine, container: str, folder: str) -> tuple[str, list[str]]:
    """The last part of a path that exists, and the names that are missing behind it. Raises OSError."""
    missing: list[str] = []
    while True:
        try:
            place, found = follow(engine, container, folder)
        except NotThere:
            folder, name = posixpath.split(folder)
            missing.insert(0, name)
            continue
        if found.kind != "directory":
            raise NotADirectoryError(f"{folder} is no directory")
        return place, missing


def _entry(name: str, kind: bytes, mode: int, owner: tuple[int, int]) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, (entry.uid, entry.gid) = kind, mode, owner
    entry.mtime = int(time.time())
    return entry


# What goes in


def signature(trees: Mapping[str, Path]) -> str:
    """What changes when a file below one of the folders does: names, modes, sizes, times. Raises UserError."""
    digest = hashlib.sha256()
    for inside, folder in sorted(trees.items()):
        if not folder.is_dir():
            raise UserError(f"image.trees: {folder} is no folder")
        digest.update(f"{inside}\0{folder}\0".encode(errors="surrogateescape"))
        for name, path in _walk(folder):
            s = path.lstat()
            digest.update(f"{name}\0{s.st_mode} {s.st_size} {s.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def pack(trees: Mapping[str, Path], owner: tuple[int, int], extra: Iterable[tarfile.TarInfo]) -> tuple[IO[bytes], str]:
    """A tar, relative to the root, that holds the trees behind extra entries; and the hash of its content.

    Raises UserError for a name that no image can hold.
    """
    out = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    digest = hashlib.sha256()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in extra:
            tar.addfile(entry)
            digest.update(f"{entry.name}\0{entry.mode}\0".encode())
        for inside, folder in sorted(trees.items()):
            for name, path in _walk(folder):
                if path.name.startswith(WHITEOUT):
                    raise UserError(f"image.trees: {path}: an image cannot hold a name that starts with {WHITEOUT}")
                entry = tar.gettarinfo(path, posixpath.join(inside.strip("/"), name).rstrip("/"))
                if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                    continue
                entry.uid, entry.gid, entry.uname, entry.gname = *owner, "", ""
                digest.update(f"{entry.name}\0{entry.mode} {entry.type} {entry.linkname} {entry.size}\0".encode(
                    errors="surrogateescape"
                ))  # fmt: skip
                if entry.isreg():
                    with path.open("rb") as data:
                        content = _Hashed(data, digest)
                        tar.addfile(entry, content)  # type: ignore[arg-type]
                else:
                    tar.addfile(entry)
    out.seek(0)
    return out, digest.hexdigest()


class _Hashed:
    def __init__(self, data: IO[bytes], digest: hashlib._Hash) -> None:
        self._data, self._digest = data, digest

    def read(self, count: int = -1) -> bytes:
        got = self._data.read(count)
        self._digest.update(got)
        return got


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything below a folder, itself first, in a fixed order; links are not followed."""
    yield "", folder
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(at, name)
            yield path.relative_to(folder).as_posix(), path


def folders(engine: Engine, container: str, paths: Iterable[str], owner: tuple[int, int]) -> list[tarfile.TarInfo]:
    """Entries for those of the folders, and of the folders that they lie in, that a container lacks."""
    missing: dict[str, None] = {}
    for path in paths:
        parts = [p for p in path.split("/") if p]
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            if name not in missing and not exists(engine, container, f"/{name}"):
                missing[name] = None
    return [_entry(name, tarfile.DIRTYPE, 0o755, owner) for name in missing]


def exists(engine: Engine, container: str, path: str) -> bool:
    try:
        look(engine, container, path)
    except NotThere:
        return False
    return True


# What differs


@dataclass(frozen=True, slots=True)
class Seen:
    """A path of an archive: its kind, mode, and a digest of content or link."""

    kind: str
    mode: int
    digest: bytes


def index(stream: IO[bytes], under: str) -> dict[str, Seen]:
    """What an archive of the folder ``under`` holds, by absolute path."""
    with _opened(stream) as tar:
        return {path: _seen(tar, member) for path, member in _members(tar, under)}


def changes(stream: IO[bytes], under: str, before: Mapping[str, Seen]) -> dict[str, Change]:
    """How an archive of the folder ``under`` differs from an earlier one's :func:`index`."""
    found: dict[str, Change] = {}
    present = set()
    with _opened(stream) as tar:
        for path, member in _members(tar, under):
            present.add(path)
            seen = _seen(tar, member)
            if before.get(path) != seen:
                data = tar.extractfile(member) if seen.kind == "file" else None
                found[path] = Change(seen.kind, None if data is None else data.read(), seen.mode)
    found |= {path: Change("deleted") for path in before if path not in present}
    return dict(sorted(found.items()))


def _members(tar: tarfile.TarFile, under: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The members with their paths in the machine: the archive names them from the folder's own name on."""
    first: str | None = None
    for member in tar:
        name = member.name.strip("/")
        if first is None:  # the folder itself
            first = name
            continue
        rest = name[len(first) :].strip("/") if first and first != "." else name.removeprefix("./")
        if rest:
            yield posixpath.join(under, rest), member


def _seen(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Seen:
    mode = member.mode & 0o7777
    if member.isreg() or member.islnk():
        data = tar.extractfile(member)
        if data is None:
            return Seen("other", mode, b"")
        digest = hashlib.sha256()
        while part := data.read(1 << 20):
            digest.update(part)
        return Seen("file", mode, digest.digest())
    if member.issym():
        return Seen("symlink", 0o777, member.linkname.encode(errors="surrogateescape"))
    return Seen("directory" if member.isdir() else "other", mode, member.type)


def names(parts: Iterable[bytes]) -> Iterator[str]:
    """The paths in an archive, which is read as it comes."""
    with _opened(_Stream(parts), "r|") as tar:
        for member in tar:
            yield f"/{member.name.strip('/')}"


class _Stream:
    """Parts of a file as something to read from."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts, self._held = iter(parts), b""

    def read(self, count: int) -> bytes:
        while len(self._held) < count and (part := next(self._parts, b"")):
            self._held += part
        got, self._held = self._held[:count], self._held[count:]
        return got


def spool(parts: Iterable[bytes], limit: int) -> IO[bytes]:
    """An unnamed file with a stream's content. Raises SandboxFailure beyond the limit."""
    out = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        for part in parts:
            if out.tell() + len(part) > limit:
                raise SandboxFailure(f"an archive of a machine has more than {limit} bytes")
            out.write(part)
    except BaseException:
        out.close()
        raise
    out.seek(0)
    return out


def _opened(stream: IO[bytes] | _Stream, mode: str = "r:") -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=stream, mode=mode)  # type: ignore[call-overload]
    except tarfile.TarError as error:
        raise SandboxFailure(f"the engine's archive cannot be read: {error}") from error
