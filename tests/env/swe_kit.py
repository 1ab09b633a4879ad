"""A tiny repository made on the fly, with the packages that run its tests taken from this interpreter."""

from __future__ import annotations

import compileall
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from branchpoint.env.swe import place
from branchpoint.env.swe.task import ROOT, Instance, Recipe
from branchpoint.sandbox.machine import Change, Image

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
CODE = """def total(items):
    result = 0
    for item in items:
        result += item
    return result


def largest(items):
    return max(items)
"""
BROKEN = CODE.replace("result += item", "result -= item")
TESTS = (
    "from calc import largest, total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\n"
    "def test_empty():\n    assert total([]) == 0\n\n\ndef test_largest():\n    assert largest([1, 3, 2]) == 3\n"
)
FILES = {"calc/__init__.py": CODE, "tests/test_calc.py": TESTS, "tests/conftest.py": "", "README": "calc\n"}
RECIPE = Recipe(requirements=(), seconds=60.0)
INSTANCE = Instance(
    "calc__1-0", "calc", "1", "", ("tests/test_calc.py::test_total",),
    ("tests/test_calc.py::test_empty", "tests/test_calc.py::test_largest"), "total() is wrong.",
)  # fmt: skip


def repository(folder: Path, files: dict[str, str] = FILES) -> Path:
    """Writes a repository."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def tools(folder: Path) -> Path:
    """pytest and what it needs, copied from this interpreter."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, folder / name)
        else:
            shutil.copy2(source, folder)
    compileall.compile_dir(folder, quiet=2)  # else every run of tests would compile pytest
    folder.chmod(0o755)
    return folder


def image(tree: Path, packages: Path) -> Image:
    """The image of a repository with these packages."""
    made = place.image(RECIPE, tree)
    variables = {**made.environment, "PYTHONPATH": f"{made.environment['PYTHONPATH']}:{place.TOOLS}"}
    return replace(made, binds={**made.binds, place.TOOLS: packages}, environment=variables)


def written(files: dict[str, str]) -> dict[str, Change]:
    """What a machine reports when the faulty repository got these files."""
    texts = {"calc/__init__.py": BROKEN, **files}
    return {f"{ROOT}/{path}": Change("file", text.encode(), 0o644) for path, text in texts.items()}


def machines() -> Any:
    """The machines of the shell sandbox, or a skip that says why there are none."""
    shell = pytest.importorskip("branchpoint.sandbox.shell", reason="the shell sandbox is not there")
    try:
        return shell.ShellMachines()
    except Exception as error:
        pytest.skip(f"no shell sandbox here: {error}")
