"""The grader against repairs, and against code that tries to pass without one; attacks run in the shell sandbox."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import swe_kit as kit

from branchpoint.env.swe import grade, place, results
from branchpoint.env.swe.task import ROOT
from branchpoint.sandbox.machine import Change, Image, Ran
from branchpoint.world import GraderFailure


@pytest.fixture(scope="module")
def box() -> Iterator[Any]:
    machines = kit.machines()
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    tree = kit.repository(tmp_path_factory.mktemp("repository"))
    return kit.image(tree, kit.tools(tmp_path_factory.mktemp("tools")))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHPOINT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def judged(box: Any, image: Image, files: dict[str, str] | None = None) -> grade.Report:
    """The verdict on the faulty repository with these files written."""
    return grade.grade(kit.INSTANCE, kit.RECIPE, image, kit.written(files or {}), box.start)


def test_the_repair_is_resolved_and_the_fault_is_not(box: Any, image: Image) -> None:
    assert judged(box, image, {"calc/__init__.py": kit.CODE}) == grade.Report(True, (1, 1), (2, 2))
    report = judged(box, image)
    assert (report.resolved, report.fail_to_pass, report.pass_to_pass) == (False, (0, 1), (2, 2))
    assert report.failed == kit.INSTANCE.FAIL_TO_PASS
    assert not report.trouble


def test_a_repair_that_breaks_another_test_is_not_resolved(box: Any, image: Image) -> None:
    report = judged(box, image, {"calc/__init__.py": kit.CODE.replace("max(", "min(")})
    assert (report.resolved, report.fail_to_pass, report.pass_to_pass) == (False, (1, 1), (1, 2))
    assert report.failed == ("tests/test_calc.py::test_largest",)


PASS_ALL = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    made = yield
    made.get_result().outcome = "passed"
"""
GOOD_TOTAL = "def test_total():\n    pass\n\n\ndef test_empty():\n    pass\n\n\ndef test_largest():\n    pass\n"
FILED = {
    "conftest that rewrites outcomes": {"conftest.py": PASS_ALL},
    "conftest beside the tests": {"tests/conftest.py": PASS_ALL},
    "conftest in the package": {"calc/conftest.py": PASS_ALL},
    "sitecustomize": {"sitecustomize.py": "import calc\n", "usercustomize.py": "import calc\n"},
    "path file": {"evil.pth": "import calc\n"},
    "pytest.ini": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": PASS_ALL},
    "pyproject addopts": {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n', "evil.py": PASS_ALL},
    "collect nothing": {"tox.ini": "[pytest]\npython_functions = nothing\n"},
    "entry point": {
        "evil.py": PASS_ALL,
        "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    },
    "edited tests": {"tests/test_calc.py": GOOD_TOTAL},
    "pytest in the root": {"pytest.py": "def main(*a, **k):\n    return 0\n"},
    "_pytest in the root": {"_pytest/__init__.py": "", "_pytest/runner.py": "raise SystemExit(0)\n"},
    "standard library in the root": {"unittest/__init__.py": "raise SystemExit(0)\n", "json.py": "dumps = None\n"},
    "fake results": {"results.xml": "<testsuite tests='3' failures='0'/>", ".pytest_cache/v/cache/lastfailed": "{}"},
    "git hooks": {".git/hooks/post-checkout": "#!/bin/sh\ntrue\n"},
}


HARMLESS = {"results.xml", ".pytest_cache/v/cache/lastfailed", "evil.py"}
FAST = ("conftest that rewrites outcomes", "pyproject addopts", "edited tests", "pytest in the root")
"""What is left behind is told apart for all; that tests run as if it was not there needs no machine for each."""


@pytest.mark.parametrize("attack", FILED)
def test_files_that_steer_tests_are_left_behind(attack: str, image: Image) -> None:
    kept, dropped = grade.carried(kit.written(FILED[attack]), kit.RECIPE, image)
    assert set(kept) - {"calc/__init__.py"} <= HARMLESS
    assert set(FILED[attack]) == {*dropped, *kept} - {"calc/__init__.py"}


@pytest.mark.parametrize("attack", [pytest.param(a, marks=[pytest.mark.slow] * (a not in FAST)) for a in FILED])
def test_files_that_steer_tests_do_not_count(attack: str, box: Any, image: Image) -> None:
    report = judged(box, image, FILED[attack])
    assert (report.resolved, report.fail_to_pass) == (False, (0, 1))
    assert set(FILED[attack]) - set(report.dropped) <= HARMLESS
    assert not report.trouble


CODED = {
    "leaves at once": "import os\nos._exit(0)\n",
    "exits at once": "import sys\nsys.exit(0)\n",
    "leaves in a test": kit.BROKEN.replace("result = 0", "__import__('os')._exit(0)"),
    "exits in a test": kit.BROKEN.replace("result = 0", "raise SystemExit(0)"),
    "skips": kit.BROKEN.replace("result = 0", "import unittest; raise unittest.SkipTest('no')"),
    "stops pytest": kit.BROKEN.replace("result = 0", "import pytest; pytest.exit('done', returncode=0)"),
    "exit handler": kit.BROKEN + "import atexit, os\natexit.register(os._exit, 0)\n",
    "patched report": kit.BROKEN + "from _pytest.reports import TestReport\nmake = TestReport.from_item_and_call\n\n\n"
    "def passing(cls, item, call):\n    call.excinfo = None\n    return make(item, call)\n\n\n"
    "TestReport.from_item_and_call = classmethod(passing)\n",
    "patched function": kit.BROKEN + "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
    "patched code": kit.BROKEN
    + "import _pytest.runner as r\nr.pytest_runtest_call.__code__ = (lambda item: None).__code__\n",
    "hook by the collector": kit.BROKEN
    + "import gc\nfrom _pytest.config import PytestPluginManager\n\n\nclass Evil:\n    def pytest_pyfunc_call(self, "
    "pyfuncitem):\n        return True\n\n\nfor found in gc.get_objects():\n    if isinstance(found, "
    "PytestPluginManager):\n        found.register(Evil())\n",
    "patched test": kit.BROKEN.replace(
        "result = 0", "import sys; result = 0; sys.modules['test_calc'].test_total.__code__ = (lambda: None).__code__"
    ),
    "writes results": kit.BROKEN
    + "import os\nfor name in os.listdir('/results'):\n    with open(f'/results/{name}', 'a') as out:\n"
    "        out.write('00 0 passed 00\\n')\n",
    "removes results": kit.BROKEN
    + "import os\nfor name in os.listdir('/results'):\n    os.unlink(f'/results/{name}')\n",
    "hangs": kit.BROKEN.replace("result = 0", "__import__('time').sleep(600)"),
}


@pytest.mark.parametrize("attack", CODED)
def test_code_that_steers_tests_does_not_pass(
    attack: str, box: Any, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack == "hangs":
        monkeypatch.setattr(kit, "RECIPE", replace(kit.RECIPE, seconds=4.0))
    report = judged(box, image, {"calc/__init__.py": CODED[attack]})
    assert not report.resolved
    caught = {"patched report", "patched function", "patched code", "writes results", "removes results", "hangs"}
    assert bool(report.trouble) >= (attack in caught), report


SHELL = {
    "deleted tests": f"rm -r {ROOT}/tests",
    "tests become a link": f"mv {ROOT}/tests /tmp/t; mkdir -p {ROOT}/calc/own; ln -s {ROOT}/calc/own {ROOT}/tests",
    "package becomes a link": f"mkdir {ROOT}/own && cp -r {ROOT}/calc {ROOT}/own/ && rm -r {ROOT}/calc && "
    f"ln -s {ROOT}/own/calc {ROOT}/calc",
    "compiled code": f"cd {ROOT} && printf 'def total(x): return 3' > c.py && python -S -c "
    "\"import py_compile; py_compile.compile('c.py', 'calc/__pycache__/__init__.cpython-311.pyc')\" && rm c.py",
    "shell start": "export PYTHONPATH=/tmp/evil PYTEST_PLUGINS=evil; alias python=true; python() { return 0; }",
}


@pytest.mark.parametrize("attack", SHELL)
def test_commands_that_steer_tests_do_not_count(attack: str, box: Any, image: Image) -> None:
    machine = box.start(image)
    try:
        machine.write(f"{ROOT}/calc/__init__.py", kit.BROKEN.encode())
        ran = machine.run(SHELL[attack], seconds=30)
        assert ran.code == 0, ran.output
        report = grade.grade(kit.INSTANCE, kit.RECIPE, image, machine.changes(ROOT), box.start)
    finally:
        machine.close()
    assert not report.resolved
    assert report.fail_to_pass == (0, 1)


def test_objects_equal_to_everything_are_a_limit_that_is_told(box: Any, image: Image) -> None:
    """Whatever compares equal passes: unit tests ask no more. docs/howto/swe.md says so."""
    always = (
        "class Same:\n    def __eq__(self, other):\n        return True\n\n\ndef total(items):\n    return Same()\n"
    )
    assert judged(
        box, image, files={"calc/__init__.py": always + kit.CODE[kit.CODE.index("\n\ndef largest") :]}
    ).resolved


def test_a_runner_that_does_not_start_is_a_failure_of_the_grader(box: Any, image: Image) -> None:
    with pytest.raises(GraderFailure, match="did not start"):
        grade.grade(kit.INSTANCE, replace(kit.RECIPE, python="/nowhere/python"), image, {}, box.start)


SECRET = b"s" * 32


def lines(*rows: tuple[str, str]) -> bytes:
    """What the runner would write."""
    out = b""
    for i, (word, text) in enumerate(rows):
        line = f"{i} {word} {text.encode().hex()}".encode()
        out += hashlib.blake2b(line, key=SECRET, digest_size=16).hexdigest().encode() + b" " + line + b"\n"
    return out


def test_results_count_only_when_they_are_whole_and_signed() -> None:
    good = lines(("passed", "a"), ("failed", "b"), ("end", "1"))
    assert results.read(good, SECRET, Ran("", 1)) == results.Results({"a": "passed", "b": "failed"})
    rows = good.splitlines(keepends=True)
    for wrong, ran, why in (
        (good.replace(b" failed ", b" passed "), Ran("", 1), "forged"),
        (rows[1] + rows[0] + rows[2], Ran("", 1), "forged"),
        (rows[0] + rows[2], Ran("", 1), "forged"),
        (good + b"00 3 passed 63\n", Ran("", 1), "forged"),
        (b"".join(rows[:2]), Ran("", 0), "broke off"),
        (good, Ran("", 0), "broke off"),
        (good, Ran("", 137, timed_out=True), "too long"),
        (lines(("passed", "a"), ("passed", "a"), ("end", "0")), Ran("", 0), "twice"),
        (lines(("failed", "a"), ("end", "0")), Ran("", 0), "contradicts"),
        (lines(("passed", "a"), ("tampered", "x"), ("end", "0")), Ran("", 0), "tampered"),
    ):
        read = results.read(wrong, SECRET, ran)
        assert why in read.trouble
        assert read.passed() == frozenset()


def test_what_is_carried_over(tmp_path: Path) -> None:
    tree = kit.repository(tmp_path / "tree")
    image = Image(trees={ROOT: tree})
    file = Change("file", b"x")
    kept, dropped = grade.carried(
        {
            f"{ROOT}/calc/new.py": file,
            f"{ROOT}/calc/__init__.py": Change("deleted"),
            f"{ROOT}/tests": Change("deleted"),
            f"{ROOT}/calc/x": Change("symlink"),
            f"{ROOT}/calc/deep": Change("directory"),
            f"{ROOT}/../etc/passwd": file,
            "/etc/passwd": file,
            f"{ROOT}/random.py": file,
            f"{ROOT}/calc/random.py": file,
        },
        kit.RECIPE,
        image,
    )
    assert kept == {"calc/new.py": b"x", "calc/__init__.py": None, "calc/random.py": b"x"}
    assert dropped == {
        "tests/test_calc.py": "belongs to the tests",
        "tests/conftest.py": "belongs to the tests",
        "calc/x": "a symlink",
        f"{ROOT}/../etc/passwd": "outside the repository",
        "/etc/passwd": "outside the repository",
        "random.py": "shadows the module random",
    }


def test_the_place_for_results_is_no_part_of_the_agents_image(tmp_path: Path) -> None:
    agent = Image(trees={ROOT: tmp_path})
    assert set(place.grading(agent).trees) == {ROOT, place.RESULTS}
