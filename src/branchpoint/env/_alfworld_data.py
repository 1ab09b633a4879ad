"""The shipped ALFWorld games: an index, one pack a split and task type, plans, transcripts (see ``data/alfworld``)."""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from branchpoint.world import EnvironmentFailure

SPLITS = ("train", "valid_seen", "valid_unseen")
TASK_TYPES = (
    "look_at_obj_in_light",
    "pick_and_place_simple",
    "pick_clean_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_two_obj_and_place",
)
GAME_FIELDS = ("id", "task_type", "pddl_params", "scene", "turk_annotations", "pddl_problem")


class Entry(NamedTuple):
    """One line of the index."""

    id: str
    split: str
    task_type: str


def folder() -> Path:
    """Where the package data lie."""
    return Path(str(files("branchpoint.env") / "data" / "alfworld"))


def read_pack(path: Path, fields: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The rows of a ``.jsonl.xz`` file. Raises EnvironmentFailure naming file, line and what is wrong with it."""
    try:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    except FileNotFoundError:
        raise EnvironmentFailure(f"ALFWorld pack {path.name} is missing from {path.parent}") from None
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise EnvironmentFailure(f"ALFWorld pack {path.name} is damaged ({error}): install the package again") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EnvironmentFailure(f"ALFWorld pack {path.name}, line {number}: not JSON ({error})") from None
        missing = [field for field in fields if not isinstance(row, dict) or field not in row]
        if missing:
            raise EnvironmentFailure(f"ALFWorld pack {path.name}, line {number}: no field {', '.join(missing)}")
        rows.append(row)
    return tuple(rows)


def write_pack(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as ``.jsonl.xz``, in their order."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20}]
    path.write_bytes(lzma.compress(text.encode(), format=lzma.FORMAT_XZ, filters=filters))


@functools.cache
def index() -> Mapping[str, Entry]:
    """All 3,827 games by id, ordered by split and id."""
    rows = read_pack(folder() / "games.jsonl.xz", Entry._fields)
    return {row["id"]: Entry(row["id"], row["split"], row["task_type"]) for row in rows}


@functools.lru_cache(maxsize=4)
def _pack(split: str, task_type: str) -> Mapping[str, dict[str, Any]]:
    rows = read_pack(folder() / f"{split}-{task_type}.jsonl.xz", GAME_FIELDS)
    return {row["id"]: row for row in rows}


def game(game_id: str) -> dict[str, Any]:
    """One game with the fields GAME_FIELDS. Raises EnvironmentFailure for an unknown id."""
    entry = index().get(game_id)
    if entry is None:
        raise EnvironmentFailure(f"unknown ALFWorld game {game_id!r}: take ids from branchpoint.env.alfworld.tasks()")
    return _pack(entry.split, entry.task_type)[game_id]


@functools.cache
def plans() -> Mapping[str, tuple[str, ...]]:
    """Shipped plans (full style) by game id; every one was played and won."""
    return {row["id"]: tuple(row["plan"]) for row in read_pack(folder() / "plans.jsonl.xz", ("id", "plan"))}


@functools.cache
def containers() -> Mapping[str, Mapping[str, int]]:
    """In how many places of training games an object type lay in a receptacle type at the start."""
    return json.loads((folder() / "containers.json").read_text(encoding="utf-8"))
