"""The two domains: records, tools, policy, and the problems of each split (see ``env/data/tau``)."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from branchpoint.env.tau import airline, retail
from branchpoint.env.tau.calls import Tools, grammar
from branchpoint.env.tau.database import Database, Tables, ToolError
from branchpoint.world import EnvironmentFailure

SPLITS: Mapping[str, tuple[str, ...]] = {"retail": ("train", "dev", "test"), "airline": ("test",)}
_TOOLS: Mapping[str, Tools] = {"retail": retail.TOOLS, "airline": airline.TOOLS}
_TABLES = {
    "retail": {"orders": "order_id", "products": "product_id", "users": "orders"},
    "airline": {"flights": "flight_number", "reservations": "reservation_id", "users": "reservations"},
}
"""The tables of each domain, with a field that each of their records has."""


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """Shared by all worlds of a process and never changed; copies and pickles of it are itself."""

    name: str
    tables: Tables
    tools: Tools
    policy: str
    grammar: str

    def __reduce__(self) -> tuple[Callable[[str], Domain], tuple[str]]:
        return load, (self.name,)

    def run(self, changes: Tables, tool: str, args: Mapping[str, Any]) -> tuple[Tables, str]:
        """Call a tool on the tables with some changes. Returns the changes from then on, and the text for the agent."""
        db = Database(self.tables, changes)
        try:
            text = self.tools[tool].run(db, **{name: args[name] for name in self.tools[tool].args})
        except ToolError as error:
            return changes, f"Error: {error}"
        return db.changes, text


@dataclass(frozen=True, slots=True)
class Problem:
    """A task as published. ``actions``: the calls that a correct agent makes, ``outputs``: what it has to say."""

    user_id: str
    instruction: str
    actions: tuple[tuple[str, Mapping[str, Any]], ...]
    outputs: tuple[str, ...]


@cache
def load(name: str) -> Domain:
    """A domain. The first call in a process takes a few tenths of a second. Raises EnvironmentFailure."""
    if name not in SPLITS:
        raise EnvironmentFailure(f"no domain {name!r}; known: {', '.join(SPLITS)}")
    tables = {table: _records(folder() / name / f"{table}.json.xz", field) for table, field in _TABLES[name].items()}
    policy = (folder() / name / "policy.md").read_text(encoding="utf-8").strip()
    return Domain(name, tables, _TOOLS[name], policy, grammar(_TOOLS[name]))


@cache
def problems(name: str, split: str) -> tuple[Problem, ...]:
    """The problems of a split, in the published order. Raises EnvironmentFailure."""
    if split not in SPLITS.get(name, ()):
        known = "; ".join(f"{domain}: {', '.join(splits)}" for domain, splits in SPLITS.items())
        raise EnvironmentFailure(f"no split {split!r} of {name!r}; known: {known}")
    path = folder() / name / f"tasks_{split}.json.xz"
    return tuple(_problem(row, path) for row in _json(path, list))


def folder() -> Path:
    """Where the package data lie."""
    return Path(str(files("branchpoint.env") / "data" / "tau"))


def _records(path: Path, field: str) -> dict[str, Any]:
    records = _json(path, dict)
    for key, record in records.items():
        if not isinstance(record, dict) or field not in record:
            raise EnvironmentFailure(f"tau-bench file {path}: record {key!r} without {field!r}")
    return records


def _json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(lzma.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise EnvironmentFailure(f"tau-bench file {path.name} is missing from {path.parent}") from None
    except (lzma.LZMAError, ValueError) as error:
        raise EnvironmentFailure(f"tau-bench file {path} is damaged ({error}): install the package again") from None
    if not isinstance(value, kind):
        raise EnvironmentFailure(f"tau-bench file {path} holds a {type(value).__name__}; expected {kind.__name__}")
    return value


def _problem(row: Mapping[str, Any], path: Path) -> Problem:
    try:
        actions: Sequence[Mapping[str, Any]] = row["actions"]
        calls = tuple((action["name"], action["kwargs"]) for action in actions)
        return Problem(row["user_id"], row["instruction"], calls, tuple(row["outputs"]))
    except (KeyError, TypeError) as error:
        raise EnvironmentFailure(f"tau-bench file {path}: a task without {error}") from None
