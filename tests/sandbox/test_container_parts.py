"""Parts of the container sandbox that need no engine."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path

import pytest

from branchpoint.sandbox import _container_files as files
from branchpoint.sandbox._container_link import Bounded, Tail
from branchpoint.sandbox.container import Limits, _enforced
from branchpoint.sandbox.machine import absolute


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 64, 1000])
def test_output_is_its_beginning_and_end_however_it_arrives(limit: int) -> None:
    draw = random.Random(limit)
    for _ in range(200):
        text = bytes(draw.choice(b"ab<>") for _ in range(draw.choice([0, 1, limit, limit + 1, 3 * limit + 5, 3000])))
        before, after = b"of the last <x> command", b"not ours"
        stream = before + b"<mark" + text + b">mark" + (after if draw.random() < 0.2 else b"")
        seen = Bounded(limit, b"<mark", b">mark")
        while stream:
            size = draw.choice([1, 2, 5, 100, 5000])
            seen.add(stream[:size])
            stream = stream[size:]
        assert seen.ended
        right = text if len(text) <= limit else text[: limit - limit // 2] + text[len(text) - limit // 2 :]
        assert seen.result() == (right, len(text) - len(right))


def test_output_is_bounded_while_it_runs() -> None:
    seen = Bounded(1000, b"<mark", b">mark")
    seen.add(b"<mark")
    for _ in range(2000):
        seen.add(b"y" * 65536)
        assert len(seen._head) + len(seen._tail) < 200_000
    assert not seen.ended
    text, omitted = seen.result()  # the time was over
    assert (len(text), omitted) == (1000, 2000 * 65536 - 1000)


def test_a_tail_finds_what_lies_at_its_end() -> None:
    tail = Tail(100)
    for _ in range(50):
        tail.add(b"garbage <m 1 2> ")
        assert len(tail.held) <= 216
    assert tail.between(b"<m ", b">") == b"1 2"
    tail.add(b"<m 3")
    assert tail.between(b"<m ", b">") is None
    tail.add(b" 4>")
    assert tail.between(b"<m ", b">") == b"3 4"


def test_trees_are_packed_alike_and_told_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "d").mkdir(parents=True)
        (folder / "d/f").write_text("text")
        (folder / "d/g").hardlink_to(folder / "d/f")
        (folder / "odd\nname").symlink_to("/nowhere")
        os.mkfifo(folder / "pipe")
    packed = {}
    for folder in (one, two):
        tar, packed[folder] = files.pack({"/a/b": folder}, (7, 8), [])
        with tar, tarfile.open(fileobj=tar) as opened:
            assert sorted(opened.getnames()) == ["a/b", "a/b/d", "a/b/d/f", "a/b/d/g", "a/b/odd\nname"]
            assert {(m.uid, m.gid, m.uname) for m in opened} == {(7, 8, "")}
            assert opened.getmember("a/b/d/g").islnk()
    assert packed[one] == packed[two]
    before = files.signature({"/a": one})
    assert before == files.signature({"/a": one})
    (one / "d/f").chmod(0o600)
    assert files.signature({"/a": one}) != before
    (two / "d/f").write_text("next")
    tar, digest = files.pack({"/a/b": two}, (7, 8), [])
    tar.close()
    assert digest != packed[two]


def archive(entries: dict[str, bytes | str | None], root: str = "repo") -> io.BytesIO:
    """A tar as engines make it: content of files, targets of links, None for folders."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, what in {"": None, **entries}.items():
            entry = tarfile.TarInfo(f"{root}/{name}".strip("/") or ".")
            entry.type = (
                tarfile.DIRTYPE if what is None else tarfile.SYMTYPE if isinstance(what, str) else tarfile.REGTYPE
            )
            entry.linkname = what if isinstance(what, str) else ""
            entry.size = len(what) if isinstance(what, bytes) else 0
            tar.addfile(entry, io.BytesIO(what if isinstance(what, bytes) else b""))
    out.seek(0)
    return out


@pytest.mark.parametrize(("root", "under"), [("repo", "/repo"), ("c", "/a/b/c"), (".", "/"), ("", "/")])
def test_changes_agree_with_brute_force(root: str, under: str) -> None:
    draw = random.Random(3)
    names = ["a", "b/x", "b", "c d", "é\n", "b/y/z"]
    for _ in range(100):
        old, new = (
            {n: draw.choice([None, b"", b"1", b"2", "t", "u"]) for n in names if draw.random() < 0.7} for _ in range(2)
        )
        before = files.index(archive(old, root), under)
        prefix = under.rstrip("/") + "/"
        assert set(before) == {prefix + n for n in old}
        found = files.changes(archive(new, root), under, before)
        right = {
            prefix + n: new.get(n, "deleted") for n in {*old, *new} if n not in new or n not in old or old[n] != new[n]
        }
        assert set(found) == set(right)
        for path, change in found.items():
            what = right[path]
            if change.kind == "deleted":
                assert what == "deleted"
            else:
                kind = "directory" if what is None else "symlink" if isinstance(what, str) else "file"
                assert (change.kind, change.data) == (kind, what if isinstance(what, bytes) else None)


def test_paths_of_a_machine() -> None:
    assert absolute("a/../b", "/job") == "/job/b"
    assert absolute("/x/", "/job") == "/x"
    assert absolute("../../..", "/job") == "/"
    for bad in ("", "a\0b"):
        with pytest.raises(ValueError, match="not a path"):
            absolute(bad, "/")


def test_what_an_engine_cannot_enforce_is_named() -> None:
    whole = {
        "MemoryLimit": True, "SwapLimit": True, "PidsLimit": True, "CpuCfsQuota": True, "Driver": "overlay2",
        "DriverStatus": [["Backing Filesystem", "xfs"]],
    }  # fmt: skip
    asked, missing = _enforced(Limits(memory_bytes=5, processes=6, cpus=0.5, disk_bytes=7), whole)
    assert missing == ()
    assert asked == {
        "mem_limit": 5, "memswap_limit": 5, "pids_limit": 6, "nano_cpus": 500_000_000, "storage_opt": {"size": "7"}
    }  # fmt: skip
    for flag, name, field in (
        ("MemoryLimit", "memory_bytes:", "mem_limit"),
        ("SwapLimit", "memory_bytes of swap", "memswap_limit"),
        ("PidsLimit", "processes", "pids_limit"),
        ("CpuCfsQuota", "cpus", "nano_cpus"),
        ("DriverStatus", "disk_bytes", "storage_opt"),
    ):
        asked, missing = _enforced(Limits(), whole | {flag: False})
        assert field not in asked
        assert len(missing) == 1
        assert missing[0].startswith(name)
