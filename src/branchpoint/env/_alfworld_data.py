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
    """One line of the index; ``place``: first byte and bytes of the xz stream that holds the game in its pack."""

    id: str
    split: str
    task_type: str
    place: tuple[int, int]


def folder() -> Path:
    """Where the package data lie."""
    return Path(str(files("branchpoint.env") / "data" / "alfworld"))


def _lines(path: Path, start: int = 0, length: int = -1) -> list[str]:
    """The lines of an ``.xz`` text file, or of some bytes of it. Raises EnvironmentFailure naming the file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return lzma.decompress(file.read(length)).decode().splitlines()
    except FileNotFoundError:
        raise EnvironmentFailure(f"ALFWorld pack {path.name} is missing from {path.parent}") from None
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise EnvironmentFailure(f"ALFWorld pack {path.name} is damaged ({error}): install the package again") from None


def _row(line: str, fields: tuple[str, ...], path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise EnvironmentFailure(f"ALFWorld pack {path.name}, line {number}: not JSON ({error})") from None
    missing = [field for field in fields if not isinstance(row, dict) or field not in row]
    if missing:
        raise EnvironmentFailure(f"ALFWorld pack {path.name}, line {number}: no field {', '.join(missing)}")
    return row


def read_pack(path: Path, fields: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The rows of a ``.jsonl.xz`` file. Raises EnvironmentFailure naming file, line and what is wrong with it."""
    return tuple(_row(line, fields, path, number) for number, line in enumerate(_lines(path), 1))


def write_pack(path: Path, rows: Iterable[Mapping[str, Any]], block: int | None = None) -> list[tuple[int, int]]:
    """Write rows as ``.jsonl.xz``, in their order, as one xz stream for every ``block`` rows (one in all when None).

    Returns, for every row, the place of its stream in the file (first byte, bytes), so that it can be read alone.
    """
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
    size = block or max(1, len(lines))
    streams, places, start = [], [], 0
    for first in range(0, len(lines), size):
        part = lines[first : first + size]
        text = "".join(part).encode()
        window = max(1 << 16, min(64 << 20, len(text)))
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
        streams.append(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters))
        places += [(start, len(streams[-1]))] * len(part)
        start += len(streams[-1])
    path.write_bytes(b"".join(streams))
    return places


@functools.cache
def index() -> Mapping[str, Entry]:
    """All 3,827 games by id, ordered by split and id."""
    rows = read_pack(folder() / "games.jsonl.xz", Entry._fields)
    return {row["id"]: Entry(row["id"], row["split"], row["task_type"], tuple(row["place"])) for row in rows}


_block = functools.lru_cache(maxsize=4)(_lines)


def game(game_id: str) -> dict[str, Any]:
    """One game with the fields GAME_FIELDS. Raises EnvironmentFailure for an unknown id."""
    entry = index().get(game_id)
    if entry is None:
        raise EnvironmentFailure(f"unknown ALFWorld game {game_id!r}: take ids from branchpoint.env.alfworld.tasks()")
    path = folder() / f"{entry.split}-{entry.task_type}.jsonl.xz"
    head = f'{{"id":{json.dumps(game_id)},'
    for number, line in enumerate(_block(path, *entry.place), 1):
        if line.startswith(head):
            return _row(line, GAME_FIELDS, path, number)
    raise EnvironmentFailure(f"ALFWorld pack {path.name} lacks game {game_id}: install the package again")


@functools.cache
def plans() -> Mapping[str, tuple[str, ...]]:
    """Shipped plans (full style) by game id; every one was played and won."""
    return {row["id"]: tuple(row["plan"]) for row in read_pack(folder() / "plans.jsonl.xz", ("id", "plan"))}


@functools.cache
def containers() -> Mapping[str, Mapping[str, int]]:
    """In how many places of training games an object type lay in a receptacle type at the start."""
    return read_counts(folder() / "containers.json")


def read_counts(path: Path) -> Mapping[str, Mapping[str, int]]:
    """{object type: {receptacle type: count}}. Raises EnvironmentFailure naming the file and what is wrong with it."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EnvironmentFailure(f"ALFWorld file {path.name} is missing from {path.parent}") from None
    except ValueError as error:
        raise EnvironmentFailure(f"ALFWorld file {path.name} is damaged ({error}): install the package again") from None
    rows = counts.values() if isinstance(counts, dict) else [counts]
    if not all(isinstance(row, dict) and all(isinstance(n, int) for n in row.values()) for row in rows):
        raise EnvironmentFailure(f"ALFWorld file {path.name} does not hold counts: install the package again")
    return counts
