"""Files of SWE-bench: instances in their official fields, both row shapes, and predictions (Jimenez et al., 2024)."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchpoint.env.swe.task import Instance
from branchpoint.world import UserError

_TEXTS = ("instance_id", "repo", "base_commit", "patch", "problem_statement")
_OPTIONAL = ("test_patch", "hints_text", "created_at", "version", "environment_setup_commit", "difficulty")
_NEWER = ("image", "eval_script", "log_parser", "eval_type")
_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


class RowError(UserError):
    """A file or a row of one that is not as SWE-bench has it."""


@dataclass(frozen=True, slots=True)
class Row:
    """An instance as published. The classic shape has all but the last four fields; ``image`` and those behind it are
    of the newer one, and "" in the classic."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    problem_statement: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    test_patch: str = ""
    hints_text: str = ""
    created_at: str = ""
    version: str = ""
    environment_setup_commit: str = ""
    difficulty: str = ""
    image: str = ""
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = ""

    def instance(self) -> Instance:
        """As a task of this package."""
        return Instance(
            instance_id=self.instance_id,
            repo=self.repo,
            version=self.version,
            patch=self.patch,
            FAIL_TO_PASS=self.FAIL_TO_PASS,
            PASS_TO_PASS=self.PASS_TO_PASS,
            problem_statement=self.problem_statement,
            test_patch=self.test_patch,
            base_commit=self.base_commit,
        )


def row(data: Mapping[str, Any], where: str = "row") -> Row:
    """Checks one row; unknown fields are left out. Raises RowError with the row and the field.

    The test lists may be lists or, as in the classic shape, JSON texts. A row of the newer shape has its four fields.
    """
    if not isinstance(data, Mapping):
        raise RowError(f"{where}: a {type(data).__name__}; expected an object with the fields of SWE-bench")
    name = data.get("instance_id")
    where = f"{where} ({name})" if isinstance(name, str) and name else where
    values: dict[str, Any] = {}
    newer = any(data.get(field) not in (None, "") for field in _NEWER)
    for field in (*_TEXTS, *_OPTIONAL, *_NEWER):
        value = data.get(field)
        needed = field in _TEXTS or (newer and field in _NEWER)
        if value is None or (value == "" and needed):
            if needed:
                raise RowError(f"{where}: field {field!r} is missing or empty")
            continue
        values[field] = str(value) if field == "created_at" else value
        if not isinstance(values[field], str):
            raise RowError(f"{where}: field {field!r} is a {type(value).__name__}; expected a text")
    if not newer and not values.get("test_patch"):
        raise RowError(f"{where}: field 'test_patch' is missing or empty")
    for field in _LISTS:
        values[field] = _names(data.get(field), field, where)
    return Row(**values)


def _names(value: Any, field: str, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{where}: field {field!r} holds no JSON list: {error}") from None
    if value is not None and hasattr(value, "tolist"):  # a numpy array, as pandas gives it
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not all(isinstance(test, str) for test in value):
        raise RowError(f"{where}: field {field!r} is no list of test names")
    if field == "FAIL_TO_PASS" and not value:
        raise RowError(f"{where}: field {field!r} is empty; nothing could be resolved")
    return tuple(value)


def read(path: Path) -> tuple[Row, ...]:
    """The instances of a ``.jsonl``, ``.jsonl.xz`` or ``.parquet`` file. Raises RowError, also for a repeated id."""
    found: dict[str, Row] = {}
    for number, data in enumerate(_raw(path), 1):
        where = f"{path.name}, row {number}"
        each = row(data, where)
        if each.instance_id in found:
            raise RowError(f"{where}: instance_id {each.instance_id!r} is there already")
        found[each.instance_id] = each
    return tuple(found.values())


def _raw(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise RowError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RowError(f"{path.name}, line {number}: no JSON: {error}") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RowError(f'{path.name}: parquet needs pyarrow: pip install "branchpoint[parquet]"') from None
    try:
        return parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        raise RowError(f"{path}: cannot be read: {error}") from error


def write_predictions(path: Path, model: str, patches: Mapping[str, str] | Iterable[tuple[str, str]]) -> int:
    """Writes predictions for the official harness: a JSON line per instance with ``instance_id``,
    ``model_name_or_path`` and ``model_patch``. The file is there as a whole or not at all. Returns their number."""
    pairs = list(patches.items() if isinstance(patches, Mapping) else patches)
    if len({name for name, _ in pairs}) != len(pairs):
        raise RowError("predictions: an instance_id is there twice")
    if not model:
        raise RowError("predictions: model_name_or_path is empty")
    lines = [json.dumps({"instance_id": i, "model_name_or_path": model, "model_patch": p}) + "\n" for i, p in pairs]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text("".join(lines), "utf-8")
    os.replace(beside, path)
    return len(lines)
