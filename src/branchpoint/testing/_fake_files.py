"""The files of a fake machine: a tree in memory with links, modes, owners and times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_IMODE

_LINKS, _NAME = 40, 255


@dataclass(slots=True, eq=False)
class Node:
    """A file, directory, symbolic link, or something else. Two names of one node are hard links."""

    kind: str
    mode: int
    data: bytes = b""
    below: dict[str, Node] = field(default_factory=dict)
    owner: tuple[int, int] = (0, 0)
    time: int = field(default_factory=lambda: int(time.time()))
    locked: bool = False


class Files:
    """A tree. Paths are absolute; links are followed inside it, and a link to ``/`` leads to its own root."""

    def __init__(self) -> None:
        self.root = Node("directory", 0o755)
        for name in ("/dev", "/etc", "/root", "/tmp"):
            self.folders(name, 0o1777 if name == "/tmp" else 0o755)
        for name in ("null", "zero"):
            self.root.below["dev"].below[name] = Node("other", 0o666)
        self.write("/etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n")

    def find(self, path: str, follow: bool = True) -> tuple[Node, str, Node | None]:
        """Where a path leads: the folder, the name in it, and what is there. Raises OSError."""
        stack, names, links = [self.root], [n for n in path.split("/") if n][::-1], 0
        while names:
            name = names.pop()
            here = stack[-1]
            if here.kind != "directory":
                raise NotADirectoryError(20, "Not a directory", path)
            if name == "." or (name == ".." and len(stack) == 1):
                continue
            if name == "..":
                stack.pop()
                continue
            node = here.below.get(name)
            if node is None:
                if names:
                    raise FileNotFoundError(2, "No such file or directory", path)
                return here, name, None
            if node.kind == "symlink" and (names or follow):
                links += 1
                if links > _LINKS:
                    raise OSError(40, "Too many levels of symbolic links", path)
                target = os.fsdecode(node.data)
                if target.startswith("/"):
                    stack = [self.root]
                names += [n for n in target.split("/") if n][::-1]
                continue
            if not names:
                return here, name, node
            stack.append(node)
        return self.root, "", stack[-1]

    def node(self, path: str, follow: bool = True) -> Node:
        """What a path leads to. Raises FileNotFoundError."""
        found = self.find(path, follow)[2]
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return found

    def put(self, path: str, node: Node, follow: bool = False) -> Node:
        """Gives a node a new name. Raises FileExistsError."""
        folder, name, old = self.find(path, follow)
        if old is not None:
            raise FileExistsError(17, "File exists", path)
        if len(os.fsencode(name)) > _NAME:
            raise OSError(36, "File name too long", path)
        _changed(folder, path)
        folder.below[name] = node
        return node

    def write(self, path: str, data: bytes, mode: int = 0o644, more: bool = False) -> None:
        """Replaces the content of a file, or adds ``more``. A new file gets the mode."""
        node = self.find(path)[2] or self.put(path, Node("file", mode), follow=True)
        if node.kind == "directory":
            raise IsADirectoryError(21, "Is a directory", path)
        if node.kind != "file":
            raise OSError(22, "Is no regular file", path)
        _changed(node, path)
        node.data = node.data + data if more else data

    def folders(self, path: str, mode: int = 0o755) -> None:
        """Makes a folder and those that it lies in, where they are missing."""
        names = [n for n in path.split("/") if n]
        for depth in range(1, len(names) + 1):
            place = "/" + "/".join(names[:depth])
            found = self.find(place)[2]
            if found is None:
                self.put(place, Node("directory", mode), follow=True)
            elif found.kind != "directory":
                raise NotADirectoryError(20, "Not a directory", place)

    def remove(self, path: str) -> None:
        """Takes a name away, with all below it."""
        folder, name, node = self.find(path, follow=False)
        if node is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        if node.locked:
            raise OSError(30, "Read-only file system", path)
        _changed(folder, path)
        del folder.below[name]

    def move(self, old: str, new: str) -> None:
        """Renames; what ``new`` names is replaced, and a folder is moved into."""
        _, last, node = self.find(old, follow=False)
        if node is None:
            raise FileNotFoundError(2, "No such file or directory", old)
        place = self.find(new)[2]
        if place is not None and place.kind == "directory":
            new = f"{new}/{last}"
        if self.find(new, follow=False)[2] is not None:
            self.remove(new)
        self.remove(old)
        self.put(new, node)

    def walk(self, path: str) -> Iterator[tuple[str, Node]]:
        """Everything at a path and below, with paths relative to it; links are not followed."""
        waiting = [("", self.node(path, follow=False))]
        while waiting:
            at, node = waiting.pop()
            yield at, node
            waiting += [(f"{at}/{name}".lstrip("/"), node.below[name]) for name in sorted(node.below, reverse=True)]

    def names(self) -> dict[int, int]:
        """How many names each node has, by ``id``."""
        count: dict[int, int] = {}
        for _, node in self.walk("/"):
            count[id(node)] = count.get(id(node), 0) + 1
        return count

    def copy_in(self, inside: str, outside: Path, locked: bool) -> None:
        """Copies a file or folder of the host. ``locked``: it cannot be changed then."""
        self.folders(os.path.dirname(inside))
        seen: dict[int, Node] = {}

        def copied(path: Path) -> Node:
            s = path.lstat()
            if s.st_ino in seen:
                return seen[s.st_ino]
            if path.is_symlink():
                node = Node("symlink", 0o777, os.fsencode(os.readlink(path)))
            elif path.is_dir():
                node = Node("directory", S_IMODE(s.st_mode))
                node.below = {p.name: copied(p) for p in path.iterdir()}
            elif path.is_file():
                node = Node("file", S_IMODE(s.st_mode), path.read_bytes())
            else:
                node = Node("other", S_IMODE(s.st_mode))
            node.time, node.locked = int(s.st_mtime), locked
            seen[s.st_ino] = node
            return node

        folder, name, _ = self.find(inside)
        folder.below[name] = copied(outside)


def _changed(node: Node, path: str) -> None:
    if node.locked:
        raise OSError(30, "Read-only file system", path)
    node.time = int(time.time())
