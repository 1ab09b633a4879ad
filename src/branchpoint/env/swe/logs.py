"""Status by test from the logs of official test commands, for the containers of SWE-bench."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from branchpoint.world import UserError

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PYTEST = {
    "PASSED": PASSED, "XFAIL": PASSED, "FAILED": FAILED, "ERROR": FAILED, "SKIPPED": SKIPPED, "XPASS": PASSED,
}  # fmt: skip
_DJANGO = {
    "ok": PASSED, "OK": PASSED, "expected failure": PASSED,
    "FAIL": FAILED, "ERROR": FAILED, "unexpected success": FAILED,
}  # fmt: skip
_SYMPY = {"ok": PASSED, "F": FAILED, "E": FAILED, "f": PASSED, "s": SKIPPED, "X": FAILED}
_METHOD = re.compile(r"^(\w+) \(([\w.]+)\)$")


class LogError(UserError):
    """A log that says nothing about tests."""


def output(log: str) -> str:
    """What stands between the marks of the official scripts. Raises LogError when a mark is missing."""
    _, start, rest = log.partition(START)
    inner, end, _ = rest.partition(END)
    if not start or not end:
        raise LogError(f"the log has no {(END if start else START)!r}; the test command was not run to its end")
    return inner


def pytest(log: str) -> dict[str, str]:
    """From a run of ``pytest -rA``: lines such as ``FAILED path::test - reason``."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word in _PYTEST and "::" in rest:
            found[_cut(rest)] = _PYTEST[word]
        elif (tail := line.rsplit(" ", 2))[-1] in _PYTEST and "::" in tail[0]:  # -v: path::test STATUS
            found.setdefault(line[: -len(tail[-1])].strip(), _PYTEST[tail[-1]])
    return found


def _cut(text: str) -> str:
    """Without the reason; a parameter may hold `` - `` too."""
    depth = 0
    for at, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth <= 0 and text.startswith(" - ", at):
            return text[:at]
    return text.split(" - ")[0] if depth else text.rstrip()


def django(log: str) -> dict[str, str]:
    """From Django's runner with ``--verbosity 2``: ``name ... ok``, the name being the docstring's if there is one."""
    found: dict[str, str] = {}
    before = ""
    for raw in log.splitlines():
        line = raw.strip()
        name, dots, said = line.rpartition(" ... ")
        if dots:
            outcome = SKIPPED if said.startswith("skipped") else _DJANGO.get(said)
            before = plain(name)
            if outcome:
                found[before] = outcome
        elif before and before not in found and line in _DJANGO:  # the test printed something in between
            found[before] = _DJANGO[line]
        elif line.startswith(("FAIL: ", "ERROR: ")):
            found[plain(line.partition(": ")[2])] = FAILED
    return found


def plain(name: str) -> str:
    """A unittest name without the method that Python 3.11 and later repeat: ``test_a (mod.Class.test_a)``."""
    parts = _METHOD.match(name)
    if parts and parts[2].endswith(f".{parts[1]}"):
        return f"{parts[1]} ({parts[2].removesuffix(f'.{parts[1]}')})"
    return name


def sympy(log: str) -> dict[str, str]:
    """From ``bin/test --verbose``: ``test_name ok``."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[0].startswith("test_") and parts[1] in _SYMPY:
            found[parts[0]] = _SYMPY[parts[1]]
    return found


PARSERS: Mapping[str, Callable[[str], dict[str, str]]] = {"django/django": django, "sympy/sympy": sympy}
"""By repository; all others use pytest."""


def parse(repo: str, log: str) -> dict[str, str]:
    """``passed``, ``skipped`` or ``failed`` by test name."""
    return PARSERS.get(repo, pytest)(log)


def resolved(fail: Iterable[str], keep: Iterable[str], outcomes: Mapping[str, str]) -> bool:
    """SWE-bench's rule: all of ``fail`` passed, and all of ``keep`` passed or were skipped.

    A name that was cut off in the middle of its parameters stands for all tests that begin with it.
    """
    wanted = list(fail)
    return bool(wanted) and all(_all(n, outcomes, {PASSED}) for n in wanted) and all(
        _all(n, outcomes, {PASSED, SKIPPED}) for n in keep
    )  # fmt: skip


def _all(name: str, outcomes: Mapping[str, str], good: set[str]) -> bool:
    if name in outcomes:
        return outcomes[name] in good
    cut = "[" in name and not name.endswith("]")
    matches = [said for other, said in outcomes.items() if cut and other.startswith(name)]
    return bool(matches) and all(said in good for said in matches)
