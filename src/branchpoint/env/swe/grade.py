"""Grading: the hidden tests run in a fresh machine that holds the repository and the agent's changes to its source.

The changes are read by the host from the agent's machine. What could steer the tests instead of repairing the code is
left behind: see :func:`carried`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.place import TOOLS, grading
from branchpoint.env.swe.results import Results, run
from branchpoint.env.swe.task import ROOT, Instance, Recipe
from branchpoint.sandbox.machine import Change, Image, Machine
from branchpoint.world import GraderFailure

Start = Callable[[Image], Machine]
MOST_FILES, MOST_BYTES = 1000, 16 << 20

PROTECTED = frozenset({
    "conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "setup.py", "pytest.py", "pytest_plugins.py", "pyvenv.cfg", ".coveragerc", "noxfile.py",
})  # fmt: skip
_SUFFIXES = (".pyc", ".pyo", ".pth", ".so", ".pyd", ".egg-link", ".dylib")
_FOLDERS = ("__pycache__", ".git", ".hg", ".tox", ".venv", "_pytest", "pluggy", "site-packages")
_METADATA = (".dist-info", ".egg-info")


@dataclass(frozen=True, slots=True)
class Report:
    """How a repair did. ``failed`` names the expected tests that did not pass (the first 20 of each list). ``dropped``:
    changes that were left behind, with the reason. ``trouble``: why the run as a whole does not count, or ""."""

    resolved: bool
    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    failed: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""

    def info(self) -> dict[str, Any]:
        """For ``Step.info``."""
        return {
            "resolved": self.resolved,
            "fail_to_pass": list(self.fail_to_pass),
            "pass_to_pass": list(self.pass_to_pass),
            "failed": list(self.failed),
            "dropped": dict(list(self.dropped.items())[:20]),
            "trouble": self.trouble,
        }


def carried(
    changes: Mapping[str, Change], recipe: Recipe, image: Image
) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """The changes that count, by path relative to the root (None: removed), and the others with the reason.

    Left behind: whatever is outside the repository; tests and what configures them or Python's start; compiled code and
    caches; links and special files; new top-level modules that would shadow the standard library or a test package.
    """
    kept: dict[str, bytes | None] = {}
    dropped: dict[str, str] = {}
    base, taken = image.trees[ROOT], _taken(image)
    for absolute, change in changes.items():
        if PurePosixPath(ROOT) not in PurePosixPath(absolute).parents or ".." in PurePosixPath(absolute).parts:
            dropped[absolute] = "outside the repository"
            continue
        path = str(PurePosixPath(absolute).relative_to(ROOT))
        if change.kind == "directory":
            continue
        for each in _files(base, path) if change.kind == "deleted" else (path,):
            if reason := _steers(each, change.kind, recipe, base, taken):
                dropped[each] = reason
            else:
                kept[each] = change.data if change.kind == "file" else None
    return kept, dropped


def _files(base: Path, path: str) -> Iterator[str]:
    """The files of the original at or below a path that was removed."""
    place = base / path
    if place.is_dir() and not place.is_symlink():
        for folder, _, names in os.walk(place):
            yield from (str((Path(folder) / name).relative_to(base)) for name in names)
    elif os.path.lexists(place):
        yield path


def _steers(path: str, kind: str, recipe: Recipe, base: Path, taken: frozenset[str]) -> str:
    parts = PurePosixPath(path).parts
    if kind not in ("file", "deleted"):
        return f"a {kind}"
    if recipe.is_test(path):
        return "belongs to the tests"
    if parts[-1] in PROTECTED or parts[-1].endswith(_SUFFIXES):
        return "configures or replaces what runs"
    if any(part in _FOLDERS or part.endswith(_METADATA) for part in parts):
        return "no source of the repository"
    for root in recipe.paths:
        if root and PurePosixPath(root) not in PurePosixPath(path).parents:
            continue
        first, *deeper = str(PurePosixPath(path).relative_to(root)).split("/")
        name = first.split(".")[0]
        there = any(os.path.lexists(base / root / file) for file in (name, f"{name}.py"))
        if name in taken and not there and (deeper or first.endswith(".py")):
            return f"shadows the module {name}"
    return ""


def _taken(image: Image) -> frozenset[str]:
    """Names of modules that tests rely on: of the standard library and of the installed packages."""
    tools = image.binds.get(TOOLS)
    found = {entry.name.split(".")[0] for entry in tools.iterdir()} if tools else set()
    return frozenset(sys.stdlib_module_names) | found | {"pytest", "_pytest", "pluggy", "py"}


def hidden(instance: Instance, base: Path) -> dict[str, str | None]:
    """The test files as the hidden tests want them, by path; None: removed. Raises GraderFailure when their patch does
    not apply to the repository."""

    def held(path: str) -> str | None:
        place = base / path
        return place.read_bytes().decode() if place.is_file() else None

    try:
        return diffs.apply(instance.test_patch, held)
    except diffs.PatchError as error:
        raise GraderFailure(f"{instance.instance_id}: test_patch: {error}") from error


def prepare(machine: Machine, files: Mapping[str, bytes | None]) -> None:
    """Writes and removes files of the repository in a machine. Raises OSError where that is not possible."""
    gone = [f"{ROOT}/{path}" for path, data in files.items() if data is None]
    if gone:
        machine.run("xargs -0 rm -f --", stdin=b"\0".join(path.encode() for path in gone))
    for path, data in files.items():
        if data is not None:
            machine.write(f"{ROOT}/{path}", data)


def grade(instance: Instance, recipe: Recipe, image: Image, changes: Mapping[str, Change], start: Start) -> Report:
    """The verdict on an agent's changes (``machine.changes(ROOT)``).

    ``image`` is the agent's. ``start`` starts a machine; the one for grading is closed here. ``resolved``: every test
    of FAIL_TO_PASS and PASS_TO_PASS passed; a skipped one did not, else code could skip what it breaks. Raises
    GraderFailure when the tests could not be run; what the agent's code does to itself is a failed repair instead.
    """
    kept, dropped = carried(changes, recipe, image)
    if len(kept) > MOST_FILES or sum(len(data or b"") for data in kept.values()) > MOST_BYTES:
        return _report(instance, Results({}, "the changes are too many"), dropped)
    tests = hidden(instance, image.trees[ROOT])
    machine = start(grading(image))
    try:
        try:
            prepare(machine, kept)
        except OSError as error:
            return _report(instance, Results({}, f"the changes do not fit into the repository: {error}"), dropped)
        try:
            prepare(machine, {path: None if text is None else text.encode() for path, text in tests.items()})
        except OSError as error:
            return _report(instance, Results({}, f"the changes leave no place for the tests: {error}"), dropped)
        return _report(instance, run(machine, recipe), dropped)
    finally:
        machine.close()


def _report(instance: Instance, results: Results, dropped: Mapping[str, str]) -> Report:
    passed = results.passed()
    lost = [test for test in instance.FAIL_TO_PASS if test not in passed]
    broken = [test for test in instance.PASS_TO_PASS if test not in passed]
    first, second = len(instance.FAIL_TO_PASS), len(instance.PASS_TO_PASS)
    return Report(
        resolved=first > 0 and not results.trouble and not lost and not broken,
        fail_to_pass=(first - len(lost), first),
        pass_to_pass=(second - len(broken), second),
        failed=(*lost[:20], *broken[:20]),
        dropped=dropped,
        trouble=results.trouble,
    )
