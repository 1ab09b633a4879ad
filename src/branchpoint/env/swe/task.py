"""Repository tasks as data: how a repository's tests are run, and one bug to repair, in the names of SWE-bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from typing import Any

ROOT = "/testbed"
"""Where the repository lies in a machine."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the tests of a repository are run.

    Args:
        kind: which runner of :mod:`branchpoint.env.swe.runner` runs them.
        paths: folders of the repository that Python imports from; "" is its root.
        targets: what the runner is asked to run: test files and folders, relative to the root.
        arguments: further arguments of the test runner.
        plugins: pytest plugins to load by module name; no others are.
        requirements: what ``pip install`` has to provide, exact versions.
        tests: globs of the files that belong to the tests. The agent's changes to them do not count.
        folder: where in the repository the tests are started; "" is its root.
        environment: variables of the test process.
        python: the interpreter in the machine; "" is the one that runs Branchpoint.
        seconds: the time limit of one run of the tests.
    """

    kind: str = "pytest"
    paths: tuple[str, ...] = ("",)
    targets: tuple[str, ...] = ("tests",)
    arguments: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ("pytest==8.4.2",)
    tests: tuple[str, ...] = ("tests/*", "test/*", "test_*.py", "*_test.py", "*/test_*.py", "*/tests/*")
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    seconds: float = 120.0

    def is_test(self, path: str) -> bool:
        """Whether a file of the repository, by its path relative to the root, belongs to the tests."""
        return any(fnmatch(path, glob) for glob in self.tests)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Recipe:
        """From JSON. Raises TypeError for an unknown field."""
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Repository:
    """A release of a package, as its source distribution has it.

    ``sdist`` is the file's name, ``sha256`` its checksum, ``source`` the folder of the package in it (what is mutated).
    """

    name: str
    version: str
    sdist: str
    sha256: str
    licence: str
    source: str
    recipe: Recipe = Recipe()


@dataclass(frozen=True, slots=True)
class Instance:
    """One task. Patches are unified diffs relative to the repository's root.

    ``bug`` makes the state that the agent finds from the repository's own (empty: that is it already). ``patch`` is the
    reference repair, and ``test_patch`` what the hidden tests change in the repository's test files. The tests named in
    ``FAIL_TO_PASS`` fail before the repair, and all of both lists pass after it.
    """

    instance_id: str
    repo: str
    version: str
    patch: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    problem_statement: str
    test_patch: str = ""
    bug: str = ""
    base_commit: str = ""
    split: str = "test"
    note: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Instance:
        """From JSON; the test lists may be JSON texts, as in SWE-bench. Unknown fields are left out."""
        names = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in names}
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            listed = kept[key]
            kept[key] = tuple(json.loads(listed) if isinstance(listed, str) else listed)
        return cls(**kept)

    def to_json(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)
