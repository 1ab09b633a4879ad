"""Tables of records with changes on top: a world copies only what it touches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Record]]
"""``{table: {id: record}}``. Never changed once made."""


class ToolError(Exception):
    """A tool refuses. The text is what the agent reads after ``Error: ``; nothing was changed."""


class Database:
    """One tool call's view of the shared tables below and a world's changes above.

    Records handed out by all but :meth:`edit` must not be changed; it gives a copy that may be.
    The changes passed in stay as they are, so a call that fails half way leaves no trace.
    """

    def __init__(self, tables: Tables, changes: Tables = MappingProxyType({})) -> None:
        self._tables = tables
        self._before = changes
        self._drafts: dict[str, dict[str, Record]] = {}

    def find(self, table: str, key: str) -> Record | None:
        """The record as it is now, or None."""
        for layer in (self._drafts, self._before, self._tables):
            if (record := layer.get(table, {}).get(key)) is not None:
                return record
        return None

    def get(self, table: str, key: str, missing: str) -> Record:
        """The record as it is now. Raises ToolError with the text ``missing``."""
        if (record := self.find(table, key)) is None:
            raise ToolError(missing)
        return record

    def items(self, table: str) -> Iterator[tuple[str, Record]]:
        """The ids and records of the shared table in its order, as they are now."""
        return ((key, self.get(table, key, "not found")) for key in self._tables[table])

    def values(self, table: str) -> Iterator[Record]:
        """The records of :meth:`items`."""
        return (record for _, record in self.items(table))

    def edit(self, table: str, key: str) -> Record:
        """A copy of an existing record that stands in its place from now on, and may be changed."""
        drafts = self._drafts.setdefault(table, {})
        if key not in drafts:
            drafts[key] = copy.deepcopy(self.get(table, key, f"no {key} in {table}"))
        return drafts[key]

    def put(self, table: str, key: str, record: Record) -> None:
        """Add a record."""
        self._drafts.setdefault(table, {})[key] = record

    @property
    def changes(self) -> Tables:
        """All records that differ, or may differ, from the shared tables."""
        if not self._drafts:
            return self._before
        names = self._before.keys() | self._drafts.keys()
        return {name: {**self._before.get(name, {}), **self._drafts.get(name, {})} for name in sorted(names)}


def fingerprint(value: Any) -> str:
    """A text that two JSON values share exactly when tau-bench's database hash calls them equal.

    Keys are unordered and lists ordered; 5, 5.0 and True all differ, as they do there.
    """
    return repr(_canonical(value))


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _canonical(value[key])) for key in sorted(value))
    if isinstance(value, list):
        return tuple(map(_canonical, value))
    return value


def equal(tables: Tables, one: Tables, two: Tables) -> bool:
    """Whether the shared tables with one set of changes equal the same tables with another."""
    for table in one.keys() | two.keys():
        a, b = one.get(table, {}), two.get(table, {})
        for key in a.keys() | b.keys():
            shared = tables.get(table, {}).get(key)
            if fingerprint(a.get(key, shared)) != fingerprint(b.get(key, shared)):
                return False
    return True
