"""Runs tests inside a grading machine and reports each outcome signed. It is sent there as text and imports only the
standard library, and what runs the tests, before the code under test can be imported.

The order comes on standard input after this text: JSON with ``secret`` (hex), ``results`` (a file that does not exist
yet), ``tools``, ``paths`` (to import from), ``root``, ``folder``, ``kind``, ``targets``, ``arguments``, ``plugins``.
Each line of the results is a keyed hash, its number, a word and a text in hex;
:func:`branchpoint.env.swe.results.read` checks it.
What the code under test can still do in this same process is told in docs/howto/swe.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Write = Callable[[str, str], None]

GUARDED = (
    "_pytest.runner", "_pytest.reports", "_pytest.main", "_pytest.python", "_pytest.nodes", "_pytest.outcomes",
    "_pytest.unittest", "_pytest.raises", "_pytest.python_api", "_pytest.fixtures", "_pytest.skipping",
    "_pytest.config", "_pytest.mark.structures", "_pytest._code.code", "pluggy._callers", "pluggy._hooks",
    "pluggy._manager", "pluggy._result", "unittest.case", "unittest.suite", "unittest.result",
)  # fmt: skip
"""Modules whose functions have to be at the end what they were at the start."""
OWN = ("_getini_unknown_type",)
"""What pytest itself replaces when it starts."""
HOOKS = (
    "pytest_runtest_protocol", "pytest_runtest_makereport", "pytest_runtest_logreport", "pytest_runtest_call",
    "pytest_pyfunc_call", "pytest_runtest_setup", "pytest_runtest_teardown", "pytest_exception_interact",
)  # fmt: skip
"""Hooks that only pytest, named plugins and conftest files may implement."""


def signer(secret: bytes, path: str) -> Write:
    """Writes signed lines. Works with built-in types alone, so that nothing patched later takes part in it."""
    keyed = hashlib.blake2b(key=secret, digest_size=16)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    put, owner, whoami, count = os.write, os.getpid(), os.getpid, 0

    def write(word: str, text: str) -> None:
        nonlocal count
        if whoami() != owner:  # a fork of the code under test
            return
        line = f"{count} {word} {text.encode('utf-8', 'surrogatepass').hex()}".encode()
        mac = keyed.copy()
        mac.update(line)
        put(file, mac.hexdigest().encode() + b" " + line + b"\n")
        count += 1

    return write


def guarded() -> Callable[[], str]:
    """A check for functions of the test runner that were replaced: the name of one, or ""."""
    held: list[tuple[Any, str, Any, Any]] = []
    for name in GUARDED:
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module else ():
            if getattr(value, "__module__", None) != name:
                continue
            if isinstance(value, type):
                held += [(value, k, v, _code(v)) for k, v in vars(value).items() if _code(v) and k not in OWN]
            elif _code(value) is not None:
                held.append((module, key, value, _code(value)))

    def check() -> str:
        for owner, key, value, code in held:
            if owner.__dict__.get(key) is not value or _code(value) is not code:
                return f"{getattr(owner, '__name__', '?')}.{key}"
        return ""

    return check


def _code(value: Any) -> Any:
    function = value.fget if type(value) is property else getattr(value, "__func__", value)
    return getattr(function, "__code__", None)


class Recorder:
    """A pytest plugin: one signed line a test. ``failed`` beats ``skipped`` beats ``passed`` over its phases; an
    expected failure counts as passed, as in SWE-bench."""

    def __init__(self, write: Write, check: Callable[[], str], root: str, plugins: list[str]) -> None:
        self._write, self._check, self._root, self._plugins = write, check, root, plugins
        self._outcomes: dict[str, str] = {}
        self._bodies: list[tuple[Any, Any]] = []
        self._config: Any = None

    def pytest_configure(self, config: Any) -> None:
        self._config = config

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            body = getattr(item, "obj", None)
            self._bodies.append((body, _code(body)))
        self._guard()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._guard()
        expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
        outcome = "passed" if expected else report.outcome
        before = self._outcomes.get(report.nodeid, "passed")
        worst = next(kind for kind in ("failed", "skipped", "passed") if kind in (before, outcome))
        self._outcomes[report.nodeid] = worst
        if report.when == "teardown":
            self._write(worst, report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write("broken", report.nodeid)

    def _own(self, plugin: Any) -> bool:
        """Whether a plugin is pytest's own, one that the recipe names, or a conftest.py."""
        if plugin is self:
            return True
        if type(plugin) is type(sys):
            file = getattr(plugin, "__file__", None) or ""
            known = plugin.__name__.startswith("_pytest.") or plugin.__name__ in self._plugins
            inside = file.startswith(self._root + "/") and file.endswith("/conftest.py")
            return inside or (known and sys.modules.get(plugin.__name__) is plugin)
        kind = type(plugin)
        home = sys.modules.get(kind.__module__)
        return kind.__module__.startswith("_pytest.") and getattr(home, kind.__qualname__, None) is kind

    def _guard(self) -> None:
        if changed := self._check():
            self._write("tampered", changed)

    def finish(self) -> None:
        """The last checks: the runner, its hooks and the bodies of the tests are what they were."""
        self._guard()
        for name in HOOKS:
            for found in getattr(self._config.hook, name).get_hookimpls():
                if not self._own(found.plugin):
                    self._write("tampered", f"a hook for {name}")
        for body, code in self._bodies:
            if _code(body) is not code:
                self._write("tampered", "the body of a test")


def run_pytest(order: dict[str, Any], write: Write, ready: Callable[[], None]) -> int:
    """The tests by pytest. Its plugins are loaded by name only, and its options of the project are left out."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.path.insert(0, order["tools"])
    import pytest

    for name in GUARDED:
        with contextlib.suppress(ImportError):  # not in every release of pytest
            __import__(name)
    recorder = Recorder(write, guarded(), order["root"], order["plugins"])
    ready()
    sys.path[:0] = order["paths"]
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", order["root"]]
    for name in order["plugins"]:
        arguments += ["-p", name]
    status = pytest.main([*arguments, *order["arguments"], *order["targets"]], plugins=[recorder])
    recorder.finish()
    return int(status)


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    leave, kind = os._exit, order["kind"]  # taken now: no exit handler of the code under test runs
    secret = bytes.fromhex(order.pop("secret"))
    write = signer(secret, order.pop("results"))
    put, token = os.write, hashlib.blake2b(b"started", key=secret, digest_size=16).hexdigest()

    def ready() -> None:
        """To be called when all that is trusted is imported, and before anything else can be."""
        put(1, f"started {token}\n".encode())

    del secret
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.chdir(os.path.join(order["root"], order["folder"]))
    sys.dont_write_bytecode = True
    sys.argv = ["pytest"]
    run: Callable[[dict[str, Any], Write, Callable[[], None]], int] = globals()[f"run_{kind}"]
    status = 3
    try:
        status = run(order, write, ready)
    except BaseException:
        traceback.print_exc()
    finally:
        write("end", str(status))
        leave(status)
