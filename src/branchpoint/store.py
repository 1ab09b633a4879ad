"""Trees and runs on disk.

A run folder holds: ``config.yaml`` (resolved), ``versions.json``, ``metrics.jsonl`` (repeatable numbers, one line an
update), ``timings.jsonl`` (clocks), ``trees/NNNNNN.jsonl.zst`` (one tree a line), ``register/NNNNNN.jsonl``
(seeds, outcomes and advantages of each group, see :mod:`branchpoint.register`), ``ledger.json``,
``checkpoints/NNNNNN/`` (Hugging Face layout and the state of the trainer), ``reference/`` (the model that the KL
penalty pulls towards, in full training), ``probe/`` (results of ``branchpoint probe``) and ``curve.png``.
Whatever is written is written beside its place and renamed, so a reader never sees half a file; only the ``.jsonl``
files grow line by line. A killed run loses at most what came after its last checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from branchpoint.tree import Branch, Fork, RolloutTree, Seeds, Turn
from branchpoint.world import Failure, Message, Task


class StoreError(Exception):
    """A run folder or file cannot be used; the message names it and the cure."""


# --- trees ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """JSON values for numpy scalars and arrays, and a readable text for anything else that an environment reports."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)


def dump_tree(tree: RolloutTree) -> str:
    """One line of JSON. Floats are written so that they are read back bit for bit; equal trees give equal lines."""
    task = asdict(tree.task)
    task["metadata"] = dict(tree.task.metadata)
    branches = [
        {
            "id": b.id,
            "fork": asdict(b.fork) if b.fork else None,
            "stop": b.stop,
            "failure": asdict(b.failure) if b.failure else None,
            "trained": b.trained,
            "pilot": b.pilot,
            "seeds": None if b.seeds is None else [f"{b.seeds.world:x}", f"{b.seeds.policy:x}", b.seeds.clean],
            "turns": [_dump_turn(t) for t in b.turns],
        }
        for b in tree.branches
    ]
    record = {"key": tree.key, "task": task, "branches": branches}
    return json.dumps(record, default=_plain, separators=(",", ":"), sort_keys=True)


def _dump_turn(t: Turn) -> dict[str, Any]:
    allowed = None if t.allowed is None else [None if ids is None else ids.tolist() for ids in t.allowed]
    arrays = {
        name: getattr(t, name).tolist() for name in ("observation", "action", "logprobs", "raw_logprobs", "entropies")
    }
    rest = {name: getattr(t, name) for name in ("reward", "snapshot", "text", "shown", "stopped")}
    return arrays | rest | {"allowed": allowed, "info": dict(t.info)}


def load_tree(line: str) -> RolloutTree:
    """The inverse of :func:`dump_tree`. Raises StoreError for anything else."""
    try:
        raw = json.loads(line)
        task = dict(raw["task"])
        task["prompt"] = tuple(Message(**m) for m in task["prompt"])
        branches = tuple(_load_branch(b) for b in raw["branches"])
        return RolloutTree(Task(**task), branches, raw["key"])
    except (KeyError, TypeError, ValueError) as e:
        raise StoreError(f"not a rollout tree of this version ({type(e).__name__}: {e})") from e


def _load_branch(raw: Mapping[str, Any]) -> Branch:
    turns = []
    for t in raw["turns"]:
        allowed = t["allowed"]
        if allowed is not None:
            allowed = tuple(None if ids is None else np.array(ids, np.int32) for ids in allowed)
        turns.append(Turn(**{**t, "allowed": allowed}))
    fork = Fork(**raw["fork"]) if raw["fork"] else None
    failure = Failure(**raw["failure"]) if raw["failure"] else None
    seeds = raw.get("seeds")
    if seeds is not None:
        seeds = Seeds(int(seeds[0], 16), int(seeds[1], 16), bool(seeds[2]))
    return Branch(raw["id"], fork, tuple(turns), raw["stop"], failure, raw["trained"], raw.get("pilot", False), seeds)


def write_trees(path: Path, trees: Iterable[RolloutTree]) -> None:
    """One tree a line, zstd-compressed; the bytes depend on the trees alone."""
    text = "".join(dump_tree(t) + "\n" for t in trees)
    data = zstandard.ZstdCompressor(level=6, threads=0).compress(text.encode())
    replace(path, lambda p: p.write_bytes(data))


def read_trees(path: Path) -> Iterator[RolloutTree]:
    """The trees of a file. Raises StoreError when it is missing, cut short or not a tree file."""
    try:
        text = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        raise StoreError(f"{path}: no such file") from None
    except (zstandard.ZstdError, UnicodeDecodeError) as e:
        raise StoreError(f"{path}: not a complete tree file ({e}); remove it, a resumed run writes it again") from e
    for line in text.splitlines():
        yield load_tree(line)


# --- files ---------------------------------------------------------------------------------------------------------


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make a file or folder beside ``path``, then put it in its place: in one step for a file; a folder
    that was there is removed first.

    Raises StoreError when the disk is full or the place cannot be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        write(temporary)
        _sync(temporary)
        if path.is_dir():
            _remove(path)
        os.replace(temporary, path)
    except OSError as e:
        _remove(temporary)
        raise StoreError(
            f"{path}: cannot be written ({e.strerror or e}); free space or choose another run folder"
        ) from e


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for p in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(p, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_text(path: Path, text: str) -> None:
    replace(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    write_text(path, "".join(json.dumps(r, default=_plain, sort_keys=True) + "\n" for r in rows))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, default=_plain, indent=1, sort_keys=True) + "\n")


# --- runs ----------------------------------------------------------------------------------------------------------


class RunFolder:
    """One run's folder. One process owns it at a time (an advisory lock that ends with the process)."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[RunFolder]:
        """Own the folder. Raises StoreError when another live run owns it, or it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held open for the whole run
        except OSError as e:
            raise StoreError(f"{self.path}: cannot be used as a run folder ({e.strerror or e})") from e
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(f"{self.path}: another run is writing here; give this one its own folder") from None
            yield self

    @property
    def started(self) -> bool:
        return (self.path / "config.yaml").exists()

    def clear(self) -> None:
        """Remove what a run has written here, and nothing else."""
        written = ("config.yaml", "versions.json", "metrics.jsonl", "timings.jsonl", "ledger.json", "curve.png")
        for name in (*written, "trees", "register", "checkpoints", "reference", "probe"):
            _remove(self.path / name)

    def trees_file(self, update: int) -> Path:
        return self.path / "trees" / f"{update:06d}.jsonl.zst"

    def register_file(self, update: int) -> Path:
        return self.path / "register" / f"{update:06d}.jsonl"

    def checkpoint(self, update: int) -> Path:
        return self.path / "checkpoints" / f"{update:06d}"

    def checkpoints(self) -> list[int]:
        """The updates of all complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        done = [p for p in folder.glob("[0-9]*") if (p / "trainer.json").exists()] if folder.is_dir() else []
        return sorted(int(p.name) for p in done)

    def save_checkpoint(self, update: int, write: Callable[[Path], Any], state: Mapping[str, Any], keep: int) -> None:
        """A complete checkpoint or none: model and optimiser by ``write(folder)``, then ``state``, then the rename."""

        def all_of_it(folder: Path) -> None:
            folder.mkdir(parents=True)
            write(folder)
            (folder / "trainer.json").write_text(json.dumps(state, default=_plain, sort_keys=True))

        replace(self.checkpoint(update), all_of_it)
        for old in self.checkpoints()[:-keep]:
            _remove(self.checkpoint(old))

    def load_state(self, update: int) -> dict[str, Any]:
        path = self.checkpoint(update) / "trainer.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise StoreError(f"{path}: cannot be read ({e}); remove the folder {path.parent} and resume again") from e

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """One line at the end of a ``.jsonl`` file. A line that a crash cut short is dropped by :meth:`rewind`."""
        try:
            with open(self.path / name, "a", encoding="utf-8") as f:
                f.write(json.dumps(row, default=_plain, sort_keys=True) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise StoreError(f"{self.path / name}: cannot be written ({e.strerror or e}); free space and resume") from e

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.exists():
            return []
        out = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                break  # the tail of a killed write
        return out

    def rewind(self, update: int) -> None:
        """Forget everything after an update, so that a resumed run writes it again."""
        for name in ("metrics.jsonl", "timings.jsonl"):
            kept = [r for r in self.rows(name) if r["update"] <= update]
            write_text(self.path / name, "".join(json.dumps(r, sort_keys=True) + "\n" for r in kept))
        for p in [*self.path.glob("trees/[0-9]*.jsonl.zst"), *self.path.glob("register/[0-9]*.jsonl")]:
            if int(p.name.split(".")[0]) > update:
                _remove(p)
        for p in [*self.path.glob(".*.partial*"), *self.path.glob("*/.*.partial*")]:
            _remove(p)
