"""Unified diffs in plain Python: made from two texts, and applied exactly."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from branchpoint.world import UserError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


class PatchError(UserError):
    """A diff that is malformed or does not apply."""


class Hunk(NamedTuple):
    """``before`` and ``after`` hold lines with their ends; ``start`` is the line of the old file, from 1, ``landing``
    that of the new; where a side is empty, it is the line before."""

    start: int
    landing: int
    before: tuple[str, ...]
    after: tuple[str, ...]


class FilePatch(NamedTuple):
    """What happens to one file. ``old`` is None for a file that is made, ``new`` for one that is removed."""

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...]


def lines(text: str) -> list[str]:
    r"""The lines with their ends; only ``\n`` ends a line, as in a diff."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def diff(path: str, before: str | None, after: str | None, context: int = 3) -> str:
    """The unified diff of a file; None: it is not there. Empty when both are equal."""
    if before == after:
        return ""
    old = "/dev/null" if before is None else f"a/{path}"
    new = "/dev/null" if after is None else f"b/{path}"
    rows = difflib.unified_diff(lines(before or ""), lines(after or ""), old, new, n=context)
    return "".join(row if row.endswith("\n") else f"{row}\n{_NO_NEWLINE}\n" for row in rows)


def parse(text: str) -> tuple[FilePatch, ...]:
    """The files of a unified diff (git's or plain). Raises PatchError naming the line that is wrong."""
    rows = lines(text)
    found: list[FilePatch] = []
    at = 0
    while at < len(rows):
        row = rows[at]
        if row.startswith("--- ") and at + 1 < len(rows) and rows[at + 1].startswith("+++ "):
            old, new = _name(row), _name(rows[at + 1])
            hunks, at = _hunks(rows, at + 2)
            found.append(FilePatch(old, new, tuple(hunks)))
            continue
        if row.startswith(("GIT binary patch", "Binary files", "rename from")):
            raise PatchError(f"diff line {at + 1}: {row.strip()!r}; binary changes and renames are not supported")
        at += 1
    if not found and text.strip():
        raise PatchError("the diff names no file; it needs '--- a/PATH' and '+++ b/PATH' lines")
    return tuple(found)


def _name(row: str) -> str | None:
    name = row[4:].rstrip("\n").split("\t")[0].strip()
    if name == "/dev/null":
        return None
    return name[2:] if name.startswith(("a/", "b/")) else name


def _hunks(rows: list[str], at: int) -> tuple[list[Hunk], int]:
    hunks: list[Hunk] = []
    while at < len(rows) and (head := _HUNK.match(rows[at])):
        start, landing, counts = int(head[1]), int(head[3]), [int(head[2] or 1), int(head[4] or 1)]
        at += 1
        before: list[str] = []
        after: list[str] = []
        while at < len(rows) and (len(before) < counts[0] or len(after) < counts[1] or rows[at].startswith("\\")):
            kind, content = rows[at][0], rows[at][1:]
            if kind == "\\":
                _trim(rows[at - 1][0], before, after)
            elif kind in " \n":
                before.append(content or "\n")
                after.append(content or "\n")
            elif kind in "-+":
                (before if kind == "-" else after).append(content)
            else:
                raise PatchError(f"diff line {at + 1}: {rows[at].strip()!r} in the middle of a hunk")
            at += 1
        if [len(before), len(after)] != counts:
            raise PatchError(f"diff line {at}: a hunk is shorter than its head says")
        hunks.append(Hunk(start, landing, tuple(before), tuple(after)))
    return hunks, at


def _trim(kind: str, before: list[str], after: list[str]) -> None:
    """The line before has no end."""
    for side, kinds in ((before, "- "), (after, "+ ")):
        if kind in kinds and side:
            side[-1] = side[-1].removesuffix("\n")


def apply(text: str, read: Callable[[str], str | None]) -> dict[str, str | None]:
    """What the files of a diff hold after it, by path; None: removed. ``read`` gives a file's content now or None.

    A hunk applies where its old lines stand, exactly, nearest to where it says. Raises PatchError where they do not.
    """
    done: dict[str, str | None] = {}
    for file in parse(text):
        path = file.new or file.old or ""
        held = done[path] if path in done else read(file.old or path)
        if file.old is not None and held is None:
            raise PatchError(f"{file.old}: the diff changes it, but there is no such file")
        if file.old is None and held is not None:
            raise PatchError(f"{path}: the diff makes it, but it is there already")
        done[path] = _patched(path, held or "", file.hunks)
        if file.new is None:
            if done[path]:
                raise PatchError(f"{path}: the diff removes it, but lines are left over")
            done[path] = None
    return done


def _patched(path: str, text: str, hunks: tuple[Hunk, ...]) -> str:
    rows, done, shift = lines(text), 0, 0
    out: list[str] = []
    for number, hunk in enumerate(hunks, 1):
        wanted, size = list(hunk.before), len(hunk.before)
        aim = max(hunk.start - 1 if size else hunk.start, 0) + shift
        places = [i for i in range(done, len(rows) - size + 1) if rows[i : i + size] == wanted]
        if not places:
            raise PatchError(f"{path}: hunk {number} does not apply; its old lines are not there")
        place = min(places, key=lambda i: abs(i - aim))
        shift += place - aim
        out += rows[done:place]
        out += hunk.after
        done = place + size
    return "".join(out + rows[done:])


def reverse(text: str) -> str:
    """The diff that undoes one. Raises PatchError for a malformed one."""
    return "".join(_written(FilePatch(f.new, f.old, tuple(map(_back, f.hunks)))) for f in parse(text))


def _back(hunk: Hunk) -> Hunk:
    return Hunk(hunk.landing, hunk.start, hunk.after, hunk.before)


def _written(file: FilePatch) -> str:
    head = f"--- {'/dev/null' if file.old is None else 'a/' + file.old}\n"
    head += f"+++ {'/dev/null' if file.new is None else 'b/' + file.new}\n"
    body = ""
    for hunk in file.hunks:
        body += f"@@ -{hunk.start},{len(hunk.before)} +{hunk.landing},{len(hunk.after)} @@\n"
        matcher = difflib.SequenceMatcher(None, hunk.before, hunk.after, autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind == "equal":
                body += "".join(map(_row, " " * (b - a), hunk.before[a:b]))
            else:
                body += "".join(map(_row, "-" * (b - a), hunk.before[a:b]))
                body += "".join(map(_row, "+" * (d - c), hunk.after[c:d]))
    return head + body


def _row(kind: str, line: str) -> str:
    return f"{kind}{line}" if line.endswith("\n") else f"{kind}{line}\n{_NO_NEWLINE}\n"


def changed(text: str) -> Mapping[str, str]:
    """The paths that a diff touches, with ``made``, ``removed`` or ``changed``."""
    return {
        (f.new or f.old or ""): "made" if f.old is None else "removed" if f.new is None else "changed"
        for f in parse(text)
    }
