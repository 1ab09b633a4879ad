"""What the checks of machines share: an image with known files, and a look at what a machine holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from branchpoint.sandbox.machine import Frozen, Image, Machine, Machines, Ran
from branchpoint.testing.report import expect

Seen = dict[str, tuple[str, ...]]
_FORMAT = "%y|%m|%U|%G|%n|%s|%T@|%l|%P\\0"

FILES = {"a.txt": "one\n", "run.sh": "echo ran\n", "d/old": "old\n", "d/sub/foo": "foo\n", "gone/x/y": "y\n",
         "keep/k": "k\n"}  # fmt: skip
"""The files of the tree ``/check``. It holds a link ``link`` to ``d/old``, and ``hard``, a further name of a.txt."""


def fill(tree: Path, bind: Path, secret: Path) -> None:
    """Makes the folders that machines are given, and one that they must not see."""
    for name, text in FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    (tree / "a.txt").chmod(0o640)
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("d/old")
    (tree / "hard").hardlink_to(tree / "a.txt")
    for path in (tree, *tree.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    os.utime(tree / "d/old", (1_000_000_000, 1_000_000_000))
    for folder, name in ((bind, "bound"), (secret, "secret")):
        folder.mkdir()
        folder.chmod(0o777)
        (folder / name).write_text(f"{name} of the host\n")
        (folder / name).chmod(0o666)


@dataclass(frozen=True)
class Bench:
    """A back-end under test, its image, and the folders outside that the image was made from."""

    machines: Machines
    image: Image
    tree: Path
    bind: Path
    secret: Path
    depth: int
    seconds: float

    @contextmanager
    def machine(self, *begin: str) -> Iterator[Machine]:
        """A machine that has run some commands."""
        machine = self.machines.start(self.image)
        try:
            for command in begin:
                self.do(machine, command)
            yield machine
        finally:
            machine.close()

    @contextmanager
    def frozen(self, machine: Machine) -> Iterator[Frozen]:
        """A frozen machine, discarded at the end."""
        made = machine.freeze()
        try:
            yield made
        finally:
            made.discard()

    @contextmanager
    def thawed(self, frozen: Frozen) -> Iterator[Machine]:
        machine = frozen.thaw()
        try:
            yield machine
        finally:
            machine.close()

    def do(self, machine: Machine, command: str, **more: bytes) -> str:
        """The output of a command, which must succeed."""
        ran = machine.run(command, seconds=self.seconds, **more)
        expect(ran.code == 0 and not ran.timed_out, f"{command[:200]!r} gave {brief(ran)}")
        return ran.output

    def look(self, machine: Machine, place: str = "/check") -> Seen:
        """All below a folder: kind, mode, owner, group, names, size, time in whole seconds, target; by path.

        A directory's size and number of names are the file system's own affair, and left out.
        """
        seen: Seen = {}
        for line in self.do(machine, f"find {place} -printf '{_FORMAT}'").split("\0")[:-1]:
            kind, mode, user, group, names, size, time, target, path = line.split("|", 8)
            if kind == "d":
                names = size = ""
            seen[path] = (kind, mode, user, group, names, size, time.partition(".")[0], target)
        return seen

    def content(self, machine: Machine, paths: Iterable[str]) -> str:
        """The content of files below ``/check``, one after the other."""
        return self.do(machine, f"cat -- {' '.join(quote(f'/check/{p}') for p in paths)}")


def brief(ran: Ran) -> str:
    """A result in a few words."""
    output = repr(ran.output) if len(ran.output) < 200 else f"{ran.output[:80]!r}...{ran.output[-80:]!r}"
    more = f", left {ran.left}, omitted {ran.omitted}, timed_out {ran.timed_out}, notes {ran.notes}"
    return f"code {ran.code}, output {output}{more}"


def quote(path: str) -> str:
    """A path as a bash word, whatever bytes it holds."""

    def plain(byte: int) -> bool:
        return chr(byte).isascii() and (chr(byte).isalnum() or byte in b"/._-")

    return "$'" + "".join(chr(b) if plain(b) else f"\\x{b:02x}" for b in os.fsencode(path)) + "'"


def differ(before: Seen, after: Seen) -> str:
    """What two looks do not agree on; "" when they do."""
    rows = [f"{p!r}: {before.get(p)} became {after.get(p)}" for p in sorted({*before, *after})
            if before.get(p) != after.get(p)]  # fmt: skip
    return "; ".join(rows[:4]) + (f"; and {len(rows) - 4} more" if len(rows) > 4 else "")


def same(before: Seen, after: Seen, what: str) -> None:
    """Raises AssertionError unless two looks agree."""
    found = differ(before, after)
    expect(not found, f"{what}: {found}")
