"""A repair as a choice from a menu, for small models: a few one-token edits, one of which undoes the bug.

    fix inflection                         view 2
    fails test_camelize
    1 < <= if len(word) < 3
    2 None [] parts = None
    2 in camelize at 131                   apply 2
    ...
    applied 2                              run
    tests pass                             submit

An edit takes the place of the one before. The other edits are mutations of the same file, drawn by the instance's id.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from branchpoint.env.swe import mutate
from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.task import ROOT, Instance
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure

_PIECE, _LINE, _AROUND, _NAMES, _TESTS = 16, 40, 2, 2, 5


@dataclass(frozen=True, slots=True)
class Menu:
    """``source`` is the faulty file, ``edits`` what can be done to it, ``right`` the number of the one that repairs."""

    instance: Instance
    path: str
    source: bytes
    edits: tuple[mutate.Mutation, ...]
    right: int

    @classmethod
    def of(cls, instance: Instance, base: Path, choices: int) -> Menu:
        """The menu of an injected bug. Raises EnvironmentFailure for an instance that is none."""
        changed = list(diffs.changed(instance.bug)) if instance.bug else []
        if len(changed) != 1:
            raise EnvironmentFailure(f"{instance.instance_id}: style 'compact' needs a bug in one file")
        path = changed[0]
        original = (base / path).read_bytes()
        faulty = (diffs.apply(instance.bug, lambda _: original.decode())[path] or "").encode()
        repair = _difference(faulty, original)
        sites = mutate.sites(faulty)
        noise = Noise().at("swe", "menu", instance.instance_id)
        others = (sites[int(i)] for i in noise.permutation(len(sites)))
        fitting = (m for m, block in others if m.line != repair.line and mutate.valid(m, block, faulty))
        drawn = list(islice(fitting, choices - 1))
        place = int(noise.integers(len(drawn) + 1))
        return cls(instance, path, faulty, (*drawn[:place], repair, *drawn[place:]), place + 1)

    def opening(self) -> str:
        """The first observation: failing tests by name, and the edits."""
        names = [re.sub(r"\[.*", "", test.split("::")[-1]) for test in self.instance.FAIL_TO_PASS]
        failing = " ".join(list(dict.fromkeys(names))[:_NAMES])
        return "\n".join([f"fix {self.instance.repo}", f"fails {failing}", *map(self._shown, range(1, self.count + 1))])

    @property
    def count(self) -> int:
        """How many edits there are."""
        return len(self.edits)

    def _shown(self, number: int) -> str:
        edit = self.edits[number - 1]
        line = self.source.decode().splitlines()[edit.line - 1].strip()
        return f"{number} {_short(edit.old)} -> {_short(edit.new)} | {line[:_LINE]}"

    def actions(self) -> tuple[str, ...]:
        """All actions; they are the same throughout."""
        numbers = range(1, self.count + 1)
        return (*(f"view {n}" for n in numbers), *(f"apply {n}" for n in numbers), "run", "submit")

    def parse(self, action: str) -> tuple[str, int]:
        """Name and number of an action of the list; ("bad", 0) for any other text."""
        text = action.strip()
        name, _, number = text.partition(" ")
        return (name, int(number or 0)) if text in self.actions() else ("bad", 0)

    def view(self, number: int) -> str:
        """Where an edit stands, with the lines around."""
        edit = self.edits[number - 1]
        rows = self.source.decode().splitlines()
        first = max(edit.line - 1 - _AROUND, 0)
        around = "\n".join(row.strip()[:_LINE] for row in rows[first : edit.line + _AROUND])
        return f"{number} in {edit.where or 'the module'}\n{around}"

    def applied(self, number: int) -> tuple[str, bytes]:
        """The file with one edit."""
        return self.path, self.edits[number - 1].apply(self.source)

    def command(self, python: str) -> str:
        """Runs some of the failing tests, until one fails."""
        names = " ".join(map(shlex.quote, self.instance.FAIL_TO_PASS[:_TESTS]))
        return f"(cd {ROOT} && {shlex.quote(python)} -S -B -m pytest -q -x --tb=no -o addopts= {names})"


def _difference(before: bytes, after: bytes) -> mutate.Mutation:
    """The one replacement that turns one text into another, widened to whole words."""
    start, most = 0, min(len(before), len(after))
    while start < most and before[start] == after[start]:
        start += 1
    end = 0
    while end < most - start and before[-1 - end] == after[-1 - end]:
        end += 1
    while start and _wordy(before[start - 1 : start]):
        start -= 1
    while end and _wordy(before[len(before) - end : len(before) - end + 1]):
        end -= 1
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    where = next((m.where for m, _ in mutate.sites(before) if m.start >= start), "")
    return mutate.Mutation("repair", start, old, new, before.count(b"\n", 0, start) + 1, where)


def _wordy(byte: bytes) -> bool:
    return byte.isalnum() or byte == b"_"


def _short(text: bytes) -> str:
    shown = " ".join(text.decode().split())
    return (shown if len(shown) <= _PIECE else f"{shown[:_PIECE]}..") or "nothing"
