"""What machines of the shell sandbox start from: folders of this computer, and layers made once for each image.

An image is, uppermost first: the mount points and working folder, each tree as a layer, and the root. Root and folders
of the host are mounted read-only; trees are copied once, since a layer has its files at their place and their owner is
who runs the commands.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from branchpoint.sandbox.machine import Image
from branchpoint.world import UserError

HOST = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""What of this computer a machine sees where ``base`` is ``host``, read-only."""

# Of /etc, copied: what programs need to run. Nothing that names this computer, its users or its secrets.
_SETTINGS = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "inputrc", "java-11-openjdk",
    "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic",
    "mime.types", "os-release", "perl", "protocols", "python3", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo",
    "timezone",
)  # fmt: skip
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_FOLDERS = {
    "tmp": 0o1777, "var/tmp": 0o1777, "home/user": 0o755, "run": 0o755, "root": 0o755, "opt": 0o755, "proc": 0o555,
    "dev": 0o755,
}  # fmt: skip
_IDLE = 16  # layers of trees that are kept although no machine uses them
_COPY_SECONDS = 600


@dataclass(eq=False, slots=True)
class Tree:
    """A folder as a layer."""

    path: str
    users: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """An image that machines can start from. ``lowers``: its layers, uppermost first. ``binds``: inside, outside.
    ``shell``: its bash."""

    image: Image
    lowers: tuple[str, ...]
    binds: tuple[tuple[str, str], ...]
    trees: tuple[Tree, ...]
    shell: str


@dataclass(slots=True)
class Images:
    """The images of a sandbox.

    Args:
        folder: where the layers are made.
        owner: user and group id that own them, None for this process's own.
        host: what a machine sees where ``base`` is ``host``.
    """

    folder: Path
    owner: int | None
    host: Sequence[str] = HOST
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _trees: OrderedDict[tuple[str, str], Tree] = field(default_factory=OrderedDict)
    _roots: dict[str, str] = field(default_factory=dict)
    _points: dict[tuple[str, ...], str] = field(default_factory=dict)
    _made: int = 0

    def prepare(self, image: Image) -> Prepared:
        """The layers of an image, which stay until :meth:`release`. Raises UserError for what is not there."""
        for name, folder in image.trees.items():
            if not Path(folder).is_dir():
                raise UserError(f"image.trees: {folder} (for {name}) is no folder")
        for name, source in image.binds.items():
            if not Path(source).exists():
                raise UserError(f"image.binds: {source} (for {name}) is not there")
            need = 0o5 if Path(source).is_dir() else 0o4
            if self.owner is not None and Path(source).stat().st_mode & need != need:
                raise UserError(f"image.binds: {source} is closed to the user of commands; chmod o+rX {source}")
        for name in (*image.trees, *image.binds, image.workdir):
            if not name.startswith("/") or ".." in name.split("/") or "\0" in name:
                raise UserError(f"image: {name!r} is no absolute path of a machine")
        with self._lock:
            root, seen = self._root(image.base)
            trees = tuple(self._tree(inside, Path(folder)) for inside, folder in sorted(image.trees.items()))
            binds = [(_resolved(seen, inside), str(Path(source).absolute())) for inside, source in image.binds.items()]
            if image.base == "host":
                binds += [(path, path) for path in self.host if os.path.isdir(path) and not os.path.islink(path)]
            binds.sort()
            points = self._mount_points(binds, image)
            shell = "/usr/bin/bash" if image.base == "host" else "/bin/bash"  # a link there, which commands may remove
            made = Prepared(image, (points, *(tree.path for tree in trees), root), tuple(binds), trees, shell)
            self.hold(made)
        return made

    def hold(self, prepared: Prepared) -> None:
        """Keeps an image's layers once more."""
        with self._lock:
            for tree in prepared.trees:
                tree.users += 1

    def release(self, prepared: Prepared) -> None:
        """Trees that nothing uses are dropped, but for the latest."""
        with self._lock:
            for tree in prepared.trees:
                tree.users -= 1
            idle = [key for key, tree in self._trees.items() if not tree.users]
            for key in idle[: max(0, len(idle) - _IDLE)]:
                shutil.rmtree(self.folder / self._trees.pop(key).path, ignore_errors=True)

    def _new(self) -> str:
        self._made += 1
        name = f"i{self._made}"
        (self.folder / name).mkdir(mode=0o755)
        return name

    def _root(self, base: str) -> tuple[str, Path]:
        """The lowest layer, and where this process sees it."""
        if base != "host":
            if not Path(base).is_dir():
                raise UserError(
                    f"image.base is {base!r}; the shell sandbox takes 'host' or a folder with a root file system"
                )
            return str(Path(base).absolute()), Path(base)
        if base not in self._roots:
            name = self._new()
            _skeleton(self.folder / name, self.host)
            self._own(name)
            self._roots[base] = name
        return self._roots[base], self.folder / self._roots[base]

    def _tree(self, inside: str, folder: Path) -> Tree:
        key = (inside, str(folder.absolute()))
        if key not in self._trees:
            name = self._new()
            target = self.folder / name / inside.strip("/")
            target.mkdir(parents=True, exist_ok=True)
            copied = subprocess.run(
                ["cp", "-a", "--no-preserve=ownership", "--reflink=auto", "--", f"{folder}/.", str(target)],
                capture_output=True, text=True, timeout=_COPY_SECONDS, check=False,
            )  # fmt: skip
            if copied.returncode:
                shutil.rmtree(self.folder / name)
                raise UserError(f"image.trees: {folder} cannot be copied: {copied.stderr.strip().splitlines()[-1]}")
            self._own(name)
            self._trees[key] = Tree(name)
        self._trees.move_to_end(key)
        return self._trees[key]

    def _mount_points(self, binds: Iterable[tuple[str, str]], image: Image) -> str:
        key = (image.base, image.workdir, *(f"{inside}\0{os.path.isdir(source)}" for inside, source in binds))
        if key not in self._points:
            name = self._new()
            place = self.folder / name
            for folder, mode in _FOLDERS.items():
                (place / folder).mkdir(parents=True, exist_ok=True)
                (place / folder).chmod(mode)
            (place / image.workdir.strip("/")).mkdir(parents=True, exist_ok=True)
            for inside, source in binds:
                point = place / inside.strip("/")
                if os.path.isdir(source):
                    point.mkdir(parents=True, exist_ok=True)
                else:
                    point.parent.mkdir(parents=True, exist_ok=True)
                    point.touch()
            self._own(name)
            self._points[key] = name
        return self._points[key]

    def _own(self, name: str) -> None:
        if self.owner is None:
            return
        place = self.folder / name
        os.chown(place, self.owner, self.owner)
        for at, folders, files in os.walk(place):
            for entry in (*folders, *files):
                path = os.path.join(at, entry)
                mode = os.lstat(path).st_mode
                os.chown(path, self.owner, self.owner, follow_symlinks=False)
                if stat.S_IMODE(mode) & 0o6000 and not stat.S_ISLNK(mode):
                    os.chmod(path, stat.S_IMODE(mode))  # which a new owner takes away


def _skeleton(place: Path, host: Iterable[str]) -> None:
    """A root with what a program expects beside the mounted folders."""
    for path in host:
        inside = place / path.strip("/")
        if os.path.islink(path):
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.symlink_to(os.readlink(path))
    settings = place / "etc"
    settings.mkdir()
    for name in _SETTINGS:
        source, target = Path("/etc", name), settings / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for name, text in _WRITTEN.items():
        (settings / name).write_text(text)


def _resolved(root: Path, inside: str) -> str:
    """A path of a machine with the links of its root followed: ``/bin/x`` may be ``/usr/bin/x`` there."""
    done: list[str] = []
    waiting = [name for name in inside.split("/") if name][::-1]
    links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            done = done[:-1]
            continue
        path = root.joinpath(*done, name)
        if name != "." and path.is_symlink() and links < 40:
            links += 1
            target = os.readlink(path)
            done = [] if target.startswith("/") else done
            waiting += [part for part in target.split("/") if part][::-1]
        elif name != ".":
            done.append(name)
    return "/" + "/".join(done)
