"""Runs the tests of a repository in a machine, and reads what the trusted runner signed."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from branchpoint.env.swe.place import RESULTS, TOOLS, python
from branchpoint.env.swe.task import ROOT, Recipe
from branchpoint.sandbox.machine import Machine, Ran
from branchpoint.world import GraderFailure

_LIMIT = 64 << 20
_BOOT = (
    "import sys; exec(compile(sys.stdin.buffer.read({size}), 'runner', 'exec'), n := {{'__name__': 'runner'}}); "
    "n['main']()"
)
_OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Results:
    """What a run of tests gave. ``outcomes``: ``passed``, ``failed`` or ``skipped`` by test id. ``trouble``: why the
    run as a whole does not count, or "": it timed out, crashed, or something interfered with the test runner."""

    outcomes: Mapping[str, str]
    trouble: str = ""
    output: str = ""

    def passed(self) -> frozenset[str]:
        """The ids of the tests that passed; of a run that does not count, none."""
        return frozenset() if self.trouble else frozenset(k for k, v in self.outcomes.items() if v == "passed")


def source(kind: str) -> str:
    """The text of the runner for a kind: ``runner.py``, then ``runner_KIND.py`` where there is one."""
    folder = files("branchpoint.env.swe")
    extra = folder / f"runner_{kind}.py"
    return (folder / "runner.py").read_text("utf-8") + (extra.read_text("utf-8") if extra.is_file() else "")


def run(machine: Machine, recipe: Recipe, targets: Sequence[str] | None = None) -> Results:
    """Runs tests in a machine that holds ``/results``: the recipe's targets, or others.

    Raises GraderFailure when the runner did not start: then the code under test had no part in it.
    """
    secret, place = secrets.token_bytes(32), f"{RESULTS}/{secrets.token_hex(8)}"
    order = {
        "secret": secret.hex(), "results": place, "kind": recipe.kind, "tools": TOOLS, "root": ROOT,
        "paths": [str(PurePosixPath(ROOT, path)) for path in recipe.paths], "folder": recipe.folder,
        "targets": list(recipe.targets if targets is None else targets),
        "arguments": list(recipe.arguments), "plugins": list(recipe.plugins),
    }  # fmt: skip
    text = source(recipe.kind).encode()
    boot = _BOOT.format(size=len(text))
    site = "" if recipe.python else "-S "  # an image's own interpreter needs its packages
    command = f"{shlex.quote(python(recipe))} -I {site}-B -c {shlex.quote(boot)}"
    ran = machine.run(command, seconds=recipe.seconds, stdin=text + json.dumps(order).encode())
    token = hashlib.blake2b(b"started", key=secret, digest_size=16).hexdigest()
    if f"started {token}" not in ran.output:
        said = ran.output.strip().splitlines()[-1:] or ["no output"]
        raise GraderFailure(f"the test runner did not start (status {ran.code}): {said[0][:300]}")
    try:
        written = machine.read(place, limit=_LIMIT)
    except (OSError, ValueError):
        return Results({}, "the results were removed", ran.output)
    return read(written, secret, ran)


def read(written: bytes, secret: bytes, ran: Ran) -> Results:
    """Checks every signature, the numbering, that no test is reported twice, and the end against the exit status."""
    outcomes: dict[str, str] = {}
    trouble, end = "", None
    for number, row in enumerate(written.splitlines()):
        mac, _, line = row.partition(b" ")
        right = hashlib.blake2b(line, key=secret, digest_size=16).hexdigest().encode()
        count, word, text = [*line.split(b" "), b"", b"", b""][:3]
        if not hmac.compare_digest(mac, right) or count != str(number).encode():
            trouble = trouble or "the results were forged"
            break
        said, name = word.decode(), bytes.fromhex(text.decode()).decode("utf-8", "surrogatepass")
        if end is not None or (said in _OUTCOMES and name in outcomes):
            trouble = trouble or "the results report twice"
        elif said in _OUTCOMES:
            outcomes[name] = said
        elif said == "tampered":
            trouble = trouble or f"the test runner was tampered with: {name}"
        elif said == "end":
            end = int(name)
    if ran.timed_out:
        trouble = trouble or "the tests took too long"
    elif end is None or end != ran.code or end not in (0, 1, 2):
        trouble = trouble or f"the tests broke off (status {ran.code})"
    elif end == 0 and "failed" in outcomes.values():
        trouble = trouble or "the exit status contradicts the outcomes"
    return Results(outcomes, trouble, ran.output)
