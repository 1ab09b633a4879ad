"""The part of the trusted runner for Django's own tests; the host sends it right behind ``runner.py``.

``tests/runtests.py`` of the repository (a test file, which an agent cannot change) prepares settings and databases; the
tests themselves are run and reported here. A test goes by both names that SWE-bench may have for it:
``method (module.Class)``, and the first line of its docstring.
"""

import runpy
import unittest
from typing import TYPE_CHECKING, Any
from unittest.util import strclass

if TYPE_CHECKING:  # in the machine they stand above, in the same text
    import os
    import sys
    from collections.abc import Callable

    from branchpoint.env.swe.runner import Write, _code, guarded


class Tally(unittest.TestResult):
    """The worst outcome by name. An expected failure counts as passed, an unexpected success as failed."""

    def __init__(self, write: "Write", check: Any) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}
        self._write_line, self._check = write, check

    def note(self, test: Any, outcome: str) -> None:
        if changed := self._check():
            self._write_line("tampered", changed)
        for name in names_of(test):
            kinds = (outcome, self.outcomes.get(name, outcome))
            self.outcomes[name] = next(kind for kind in ("failed", "skipped", "passed") if kind in kinds)

    def addSuccess(self, test: Any) -> None:
        self.note(test, "passed")

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.note(test, "failed")

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.note(test, "failed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.note(test, "skipped")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self.note(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.note(test, "failed")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.note(test, "failed")


def names_of(test: Any) -> list[str]:
    """A test's names in the lists of SWE-bench, which has one or the other."""
    text = test.shortDescription() if isinstance(test, unittest.TestCase) else ""
    method = getattr(test, "_testMethodName", "")
    name = f"{method} ({strclass(type(test))})" if method else str(test)
    return [name, str(text)] if text else [name]


def strange(tests: Any, folders: tuple[str, ...]) -> str:
    """A function by which a test class runs its tests that comes from elsewhere than tests and test packages, or ""."""
    classes = {kind for test in _each(tests) for kind in type(test).__mro__}
    for kind in classes:
        for name in ("run", "__call__", "_setup_and_call", "_callTestMethod"):
            code = _code(vars(kind).get(name))
            if code is not None and not os.path.abspath(code.co_filename).startswith(folders):
                return f"{kind.__name__}.{name}"
    return ""


def _each(tests: Any) -> Any:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


def run_django(order: dict[str, Any], write: "Write", ready: "Callable[[], None]") -> int:
    """The tests of Django by their labels."""
    sys.path.insert(0, order["tools"])
    tallies: list[Tally] = []
    others, own = guarded(), [(key, value, _code(value)) for key, value in vars(Tally).items() if _code(value)]

    def check() -> str:
        """The name of what was replaced in the test runner or in the tally, or ""."""
        changed = [key for key, value, code in own if vars(Tally).get(key) is not value or _code(value) is not code]
        return others() or (f"Tally.{changed[0]}" if changed else "")

    root = order["root"]
    folders = (f"{os.path.dirname(unittest.__file__)}/", f"{root}/tests/", f"{root}/django/test/")

    class Runner(unittest.TextTestRunner):
        def run(self, test: Any) -> Any:
            if found := strange(test, folders):
                write("tampered", found)
            tally = Tally(write, check)
            tallies.append(tally)
            test(tally)
            return tally

    unittest.TextTestRunner = unittest.runner.TextTestRunner = Runner  # what Django's test runner takes
    ready()
    sys.path[:0] = [".", *order["paths"]]
    sys.argv = ["runtests.py", *order["arguments"], *order["targets"]]
    status = 0
    try:
        runpy.run_path("runtests.py", run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    outcomes: dict[str, str] = {}
    for tally in tallies:
        outcomes |= tally.outcomes
        if type(tally) is not Tally:
            write("tampered", "the tally")
    if changed := check():
        write("tampered", changed)
    for name, outcome in outcomes.items():
        write(outcome, name)
    return 1 if status or "failed" in outcomes.values() else 0
