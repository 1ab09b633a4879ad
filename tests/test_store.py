"""Trees and run folders survive the disk: bit for bit, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from learner_helpers import random_tree

from branchpoint.ledger import Ledger
from branchpoint.store import RunFolder, StoreError, dump_tree, read_trees, replace, write_trees
from branchpoint.tree import Branch, RolloutTree
from branchpoint.world import Failure, Message, Task


def trees() -> list[RolloutTree]:
    made = [random_tree(np.random.default_rng(i), restricted=i % 2 == 1) for i in range(4)]
    task = Task("a/b", "backoffice", (Message("user", "näme\n"),), 2**62, {"p": 0.1, "kinds": ["x"]})
    broken = Branch(0, None, (), "failed", Failure("sandbox", "worker 3 was killed (signal 9)"))
    return [*made, RolloutTree(task, (broken,), "000001/0004")]


def test_trees_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_trees(tmp_path / "t.jsonl.zst", trees())
    back = list(read_trees(tmp_path / "t.jsonl.zst"))
    assert [dump_tree(t) for t in back] == [dump_tree(t) for t in trees()]
    for got, want in zip(back, trees(), strict=True):
        for b, c in zip(got.branches, want.branches, strict=True):
            for t, u in zip(b.turns, c.turns, strict=True):
                for f in ("observation", "action", "logprobs", "entropies"):
                    assert getattr(t, f).tobytes() == getattr(u, f).tobytes()
                    assert getattr(t, f).dtype == getattr(u, f).dtype
    assert back[-1].task == trees()[-1].task


def test_equal_trees_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trees(tmp_path / name, trees())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("damage", ["short", "noise", "other"])
def test_damaged_tree_files_say_so_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.jsonl.zst"
    write_trees(path, trees())
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "noise":
        path.write_bytes(b"not zstd")
    else:
        replace(path, lambda p: p.write_bytes(__import__("zstandard").compress(b'{"key": 1}\n')))
    with pytest.raises(StoreError) as error:
        list(read_trees(path))
    assert "\n" not in str(error.value)
    with pytest.raises(StoreError, match="no such file"):
        list(read_trees(tmp_path / "missing"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def full(p: Path) -> None:
        p.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match="No space left"):
        replace(path, full)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_appending_metrics_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left"):
        RunFolder(tmp_path).append("metrics.jsonl", {"update": 1})


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    code = """
import sys
from branchpoint.store import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("ready", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        with pytest.raises(StoreError, match="another run"), RunFolder(tmp_path).locked():
            pass
        owner.kill()  # the lock ends with its owner, however that ends
        owner.wait(30)
    with RunFolder(tmp_path).locked():
        pass


def test_checkpoints_are_whole_or_absent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def save(path: Path) -> None:
        (path / "w").write_text("weights")

    for update in range(4):
        folder.save_checkpoint(update, save, {"update": update}, keep=2)
    assert folder.checkpoints() == [2, 3]
    assert folder.load_state(3) == {"update": 3}

    def dies(path: Path) -> None:
        (path / "w").write_text("wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError):
        folder.save_checkpoint(4, dies, {}, keep=2)
    assert folder.checkpoints() == [2, 3]
    (folder.checkpoint(3) / "trainer.json").write_text('{"upd')
    with pytest.raises(StoreError, match="remove the folder"):
        folder.load_state(3)


def test_rewind_drops_what_a_killed_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for update in range(3):
        folder.append("metrics.jsonl", {"update": update})
        write_trees(folder.trees_file(update), [])
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"update": 3, "sco')
    (tmp_path / "trees" / ".000003.jsonl.zst.partial").write_bytes(b"x")
    folder.rewind(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"update": 0}\n{"update": 1}\n'
    assert sorted(p.name for p in (tmp_path / "trees").iterdir()) == ["000000.jsonl.zst", "000001.jsonl.zst"]


def test_the_ledger_counts_concurrent_time_once_and_refuses_unknown_columns() -> None:
    ledger = Ledger(env_steps=3)
    with ledger.clock("environment_seconds"), ledger.clock("environment_seconds"):
        pass
    assert 0 < ledger.environment_seconds < 1
    other = Ledger()
    other.restore(ledger.as_dict())
    assert other == ledger
    assert "environment_seconds" not in ledger.counts()
    with pytest.raises(ValueError, match="no column 'stpes'"):
        other.restore({"stpes": 1})
    assert dataclasses.asdict(other)["env_steps"] == 3
