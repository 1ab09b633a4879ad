"""Verified tasks on release sdists: 32 tasks of SWE-bench Verified on the release before the fix; no Docker, no git.

The tree is the source distribution of the release *before* the one that has the fix, not ``base_commit``, and the test
lists are those observed on it. Scores on these tasks are no SWE-bench Verified scores.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from branchpoint.env.swe import place, rows
from branchpoint.env.swe.sources import Source
from branchpoint.env.swe.task import Instance, Recipe, Repository
from branchpoint.sandbox.machine import Image

FILE = Path(__file__).parents[1] / "data" / "swe" / "verified_release_32.jsonl.xz"
NOTE = "Verified task on a release sdist ({}), not an official score"

USER = "/opt/user"
"""Python's user folder in a machine: commands that tests of Django start without PYTHONPATH find the packages there."""

_DJANGO = Recipe(
    kind="django",
    targets=(),
    arguments=("--verbosity=0", "--settings=test_sqlite", "--parallel=1"),
    requirements=("asgiref==3.8.1", "sqlparse==0.5.3", "pytz==2024.2", "tzdata==2024.2", "Jinja2==3.1.6"),
    tests=("tests/*", "django/test/*"),  # the package's own test classes decide outcomes too
    folder="tests",
    environment={"PYTHONWARNINGS": "ignore", "PYTHONUSERBASE": USER},
    seconds=600.0,  # one of them takes half a minute on an idle core
)
_SYMPY = Recipe(
    targets=(),
    arguments=("-W", "ignore"),
    requirements=("pytest==7.4.4", "mpmath==1.3.0"),
    tests=("*/tests/*", "sympy/testing/*", "*/test_*.py"),
)
_FLASK = Recipe(
    paths=("src",),
    targets=(),
    requirements=(
        "pytest==7.4.4", "Werkzeug==2.2.3", "Jinja2==3.1.6", "itsdangerous==2.2.0", "click==8.1.8", "MarkupSafe==3.0.2",
    ),
    tests=("tests/*", "src/flask/testing.py"),
)  # fmt: skip
RECIPES: Mapping[str, Recipe] = {"django": _DJANGO, "sympy": _SYMPY, "flask": _FLASK}
"""By project; the targets are an instance's own."""


@dataclass(frozen=True, slots=True)
class Release:
    """A task with the release that stands for its ``base_commit``. ``instance`` has the observed lists, and patches
    that apply to the release exactly; ``official`` is the published row."""

    instance: Instance
    official: rows.Row
    repository: Repository

    def image(self) -> Image:
        """What an agent works in; fetches the sdist and the packages when the cache has none."""
        image = place.image(self.repository.recipe, place.tree(self.repository))
        if USER not in image.environment.values():
            return image
        site = f"{USER}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        return replace(image, binds={**image.binds, site: image.binds[place.TOOLS]})


@cache
def releases() -> Mapping[str, Release]:
    """The 32 tasks by id: the official id, ``@`` and the release."""
    found: dict[str, Release] = {}
    for number, line in enumerate(lzma.decompress(FILE.read_bytes()).decode().splitlines(), 1):
        data = json.loads(line)
        official, release = rows.row(data, f"{FILE.name}, row {number}"), data["release"]
        name = f"{release['project']}-{release['version']}"
        recipe = replace(RECIPES[release["project"]], targets=tuple(release["targets"]))
        repository = Repository(
            release["project"], release["version"], release["sdist"], release["sha256"], "BSD-3-Clause", "", recipe
        )
        instance = replace(
            official.instance(),
            instance_id=f"{official.instance_id}@{name}",
            FAIL_TO_PASS=tuple(release["FAIL_TO_PASS"]),
            PASS_TO_PASS=tuple(release["PASS_TO_PASS"]),
            patch=release.get("patch", official.patch),
            test_patch=release.get("test_patch", official.test_patch),
            note=NOTE.format(name),
        )
        found[instance.instance_id] = Release(instance, official, repository)
    return found


SOURCE = Source(
    lambda: {name: each.instance for name, each in releases().items()},
    lambda instance: releases()[instance.instance_id].repository.recipe,
    lambda instance: releases()[instance.instance_id].image(),
)
