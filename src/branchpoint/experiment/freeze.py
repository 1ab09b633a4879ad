"""The record that a study was written before it was run: ``X.frozen.json`` beside ``X.yaml``.

The hash covers the parsed file without its ``deviations``, so comments may be mended and deviations added. The record
keeps the whole frozen text of the study: what has changed since can be named, and a lost file written again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from branchpoint.experiment.spec import Study, StudyError, parse, read, replaced
from branchpoint.store import write_json


@dataclass(frozen=True, slots=True)
class Frozen:
    """A study as frozen, with the changes of its deviations made. ``deviations``: each with ``recorded``, the time at
    which it was first seen in the file."""

    study: Study
    sha256: str
    date: str
    deviations: tuple[Mapping[str, Any], ...]


def record_of(path: Path) -> Path:
    """Where the record of a study's file lies."""
    return path.with_suffix(".frozen.json")


def fingerprint(raw: Mapping[str, Any]) -> str:
    """SHA-256 of the study without its deviations: of its JSON with sorted keys."""
    return hashlib.sha256(_canonical(_registered(raw)).encode()).hexdigest()


def freeze(path: Path, now: datetime | None = None) -> Path:
    """Write the hash and the date; returns the record's file.

    Raises StudyError when the study is wrong or frozen already, has deviations, or when there are runs of it.
    """
    raw = read(path)
    study, record = parse(raw, str(path)), record_of(path)
    if record.exists():
        raise StudyError(f"{path}: frozen already ({record}); what is done otherwise goes into deviations")
    if study.deviations:
        raise StudyError(f"{path}: deviations: nothing to deviate from yet; change the study itself, then freeze it")
    begun = sorted(Path(study.folder).glob("**/config.yaml"))
    if begun:
        raise StudyError(f"{path}: {begun[0].parent} holds a run; a study is frozen before its first run")
    date = (now or datetime.now(UTC)).isoformat(timespec="seconds")
    kept = json.loads(_canonical(_registered(raw)))
    write_json(record, {"sha256": fingerprint(raw), "date": date, "study": kept, "deviations": []})
    return record


def frozen(path: Path, now: datetime | None = None) -> Frozen:
    """The frozen study of a file, new deviations recorded on the way.

    Raises StudyError when the file is not frozen, has changed since, or a recorded deviation is gone from it.
    """
    raw, record = read(path), record_of(path)
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        known, sha256, date, deviations = (kept[k] for k in ("study", "sha256", "date", "deviations"))
    except FileNotFoundError:
        raise StudyError(f"{path}: not frozen; run: branchpoint compare freeze {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StudyError(f"{record}: not a complete record of a frozen study ({type(e).__name__}: {e})") from e
    if fingerprint(known) != sha256:
        raise StudyError(f"{record}: the study in it does not have the hash in it; restore the record")
    if fingerprint(raw) != sha256:
        raise StudyError(
            f"{path}: changed after freezing on {date}: {_difference(known, raw)}; undo that, and write what is done "
            "otherwise into deviations (date, what, changes)"
        )
    study = parse(raw, str(path))
    stated = [json.loads(d.model_dump_json()) for d in study.deviations]
    recorded = [{k: v for k, v in d.items() if k != "recorded"} for d in deviations]
    if stated[: len(recorded)] != recorded:
        raise StudyError(
            f"{path}: deviations: a recorded one was changed or removed; {record} has them, add new ones below"
        )
    seen = (now or datetime.now(UTC)).isoformat(timespec="seconds")
    everything = [*deviations, *({**d, "recorded": seen} for d in stated[len(recorded) :])]
    changed: Any = known
    for d in everything:
        for key, value in d["changes"].items():
            changed = replaced(changed, key, value)
    study = parse(changed, f"{path} with its deviations")  # before they are recorded: a wrong one can still be mended
    if len(everything) > len(deviations):
        write_json(record, kept | {"deviations": everything})
    return Frozen(study, sha256, date, tuple(everything))


def _registered(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != "deviations"}


def _canonical(raw: Mapping[str, Any]) -> str:
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _difference(before: Any, after: Any, name: str = "") -> str:
    """The first field that differs, with both values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after} - ({"deviations"} if not name else set()), key=str):
            inner = f"{name}.{key}" if name else str(key)
            if key not in after:
                return f"{inner} is gone"
            if key not in before:
                return f"{inner} is new"
            if _canonical({"": before[key]}) != _canonical({"": after[key]}):
                return _difference(before[key], after[key], inner)
    return f"{name} was {_short(before)}, is {_short(after)}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:39] + "…"
