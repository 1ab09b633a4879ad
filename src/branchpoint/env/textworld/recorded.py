"""Recorded episodes: the task, and for every turn the observation, the admissible commands and the expert's command."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from branchpoint.world import EnvironmentFailure, Step


class Episode(NamedTuple):
    """``dials``: the metadata of its task."""

    dials: dict[str, Any]
    turns: tuple[tuple[Step, str], ...]


def shipped() -> Path:
    """The file that comes with the package."""
    return Path(str(files("branchpoint.env") / "data" / "textworld" / "transcripts.jsonl.xz"))


def save(path: Path, episodes: Iterable[Episode]) -> None:
    """Write episodes as ``.jsonl.xz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for dials, turns in episodes:
            row = {"dials": dials, "turns": [[s.observation, list(s.actions), action] for s, action in turns]}
            file.write(json.dumps(row, sort_keys=True) + "\n")


def load(path: Path) -> tuple[Episode, ...]:
    """Read what :func:`save` wrote. Raises EnvironmentFailure naming the file when it is missing or damaged."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return tuple(_episode(json.loads(line)) for line in file)
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentFailure(
            f"TextWorld episodes {path} cannot be read ({error}): install the package again"
        ) from None


def _episode(row: dict[str, Any]) -> Episode:
    turns = ((Step(seen, actions=tuple(actions)), action) for seen, actions, action in row["turns"])
    return Episode(row["dials"], tuple(turns))
