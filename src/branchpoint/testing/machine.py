"""The conformance suite of machines, see :mod:`branchpoint.testing`."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from branchpoint.sandbox.machine import Image, Machine, Machines, Ran
from branchpoint.testing import _machine_commands as commands
from branchpoint.testing import _machine_files as files
from branchpoint.testing import _machine_frozen as frozen
from branchpoint.testing._machine_bench import Bench, fill
from branchpoint.testing.report import Checks, Report, expect
from branchpoint.world import SandboxFailure, UserError

KNOWN = frozenset({"files", "shell", "processes", "links"})


def check_machine(
    factory: Callable[[], Machines],
    image: Image | None = None,
    *,
    depth: int = 40,
    seconds: float = 30.0,
    only: Sequence[str] = (),
) -> Report:
    """Whether a back-end keeps the contract of :class:`~branchpoint.sandbox.machine.Machines`.

    It is held to what its ``preserves`` declares; the rest is skipped. A snapshot may refuse what it cannot keep with
    SnapshotUnsupported where the report says so, and nothing may be lost silently. The back-end is made, used by up to
    eight threads, and closed. Commands use bash, coreutils and find.

    Args:
        factory: makes a back-end, e.g. the class itself.
        image: what machines start from; a tree at ``/check`` and a bind at ``/check-bind`` are added.
        depth: how long a chain of frozen machines to try.
        seconds: how long a command that ends by itself, or a call that ends one, may take.
        only: the checks whose names hold one of these texts, the first and the last two; empty: all.
    """
    before = frozenset(_children()), frozenset(_mounts())
    machines = factory()
    checks = Checks(f"machines {type(machines).__name__}")
    with tempfile.TemporaryDirectory(prefix="bp-check-") as place:
        tree, bind, secret = (Path(place, name) for name in ("tree", "bind", "secret"))
        fill(tree, bind, secret)
        base = image or Image()
        bench = Bench(
            machines,
            replace(
                base,
                trees={**base.trees, "/check": tree},
                binds={**base.binds, "/check-bind": bind},
                environment={**base.environment, "CHECK": "it's \"set\""},
                workdir="/check",
            ),
            tree=tree, bind=bind, secret=secret, depth=depth, seconds=seconds,
        )  # fmt: skip
        try:
            checks.run("starts a machine", lambda: _starts(bench))
            for name, check in _all(bench) if checks.results[0].status == "ok" else ():
                if not only or any(text in name for text in only):
                    checks.run(name, check)
        finally:
            marker = f"{secrets.randbelow(10**8) + 10**8}"
            last = _last(bench, marker)
            checks.run("the back-end closes, and all machines with it", lambda: _closed(bench, last))
            checks.run("nothing is left: no processes, no mounts", lambda: _left(before, marker))
    return checks.report()


def _all(bench: Bench) -> list[tuple[str, Callable[[], str | None]]]:
    return [
        ("declares what it keeps and what it cannot enforce", lambda: _declares(bench.machines)),
        ("starts as its image says", lambda: commands.image(bench)),
        ("refuses an image that is not there", lambda: _bad_image(bench)),
        ("tells output and status", lambda: commands.status(bench)),
        ("gives standard input, and its end", lambda: commands.stdin(bench)),
        ("takes any command line", lambda: commands.strange(bench)),
        ("bounds output and counts the rest", lambda: commands.output(bench)),
        ("ends all at a time-out, and goes on", lambda: commands.time_out(bench)),
        ("ends and counts what a command left", lambda: commands.left(bench)),
        ("reads and writes files", lambda: files.host(bench)),
        ("follows no link out of the machine", lambda: files.traps(bench)),
        ("tells what differs from the image", lambda: files.changes(bench)),
        ("keeps files, modes, times and links", lambda: frozen.keeps_files(bench)),
        ("keeps deletions, renames and new folders at old places", lambda: frozen.deletions(bench)),
        ("keeps odd names", lambda: frozen.odd_names(bench)),
        ("keeps names that stand for deletions, or refuses", lambda: frozen.whiteouts(bench)),
        ("keeps owners", lambda: frozen.owners(bench)),
        ("keeps hard links", lambda: frozen.hard_links(bench)),
        ("keeps hard links that are written to", lambda: frozen.written_links(bench)),
        ("keeps the shell", lambda: frozen.shell(bench)),
        ("a freeze changes nothing", lambda: frozen.unchanged(bench)),
        ("siblings are independent", lambda: frozen.siblings(bench)),
        ("an older one comes back as it was", lambda: frozen.older(bench)),
        ("thaws when its machine is closed", lambda: frozen.orphan(bench)),
        (f"a chain of {bench.depth}", lambda: frozen.chain(bench)),
        ("discard frees one and no other", lambda: frozen.discarded(bench)),
        ("gives each frozen machine its own id", lambda: frozen.ids(bench)),
        ("eight at once", lambda: commands.together(bench)),
        ("a closed machine refuses", lambda: commands.closed(bench)),
        ("closes while a command runs", lambda: commands.closed_meanwhile(bench)),
    ]


def _declares(machines: Machines) -> None:
    expect(isinstance(machines.preserves, frozenset), f"preserves is a {type(machines.preserves).__name__}")
    odd = machines.preserves - KNOWN
    expect(not odd, f"preserves holds {sorted(odd)}; known: {', '.join(sorted(KNOWN))}")
    expect("files" in machines.preserves, "preserves lacks files, without which a frozen machine is none")
    told = machines.unenforced
    expect(isinstance(told, tuple) and all(isinstance(t, str) and ":" in t for t in told),
           f"unenforced is {told!r}; expected a tuple of 'limit: reason'")  # fmt: skip


def _starts(bench: Bench) -> None:
    with bench.machine() as machine:
        got = bench.do(machine, "echo on")
        expect(got == "on\n", f"a new machine says {got!r}")


def _bad_image(bench: Bench) -> None:
    missing = bench.tree / "no such place"
    for kind in ("trees", "binds"):
        places = {"/x": missing}
        bad = replace(bench.image, trees=places) if kind == "trees" else replace(bench.image, binds=places)
        try:
            bench.machines.start(bad).close()
        except UserError as error:
            expect(str(missing) in str(error) and "\n" not in str(error), f"the message is {error}")
        else:
            raise AssertionError(f"image.{kind} with a folder that is not there is taken")


def _last(bench: Bench, marker: str) -> tuple[Machine, threading.Thread, list[object]] | Exception:
    """A machine in which a command still runs when the back-end closes."""
    try:
        machine = bench.machines.start(bench.image)
    except Exception as error:
        return error
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(machine.run(f"setsid sleep {marker} & sleep {marker}", seconds=600))
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.05)
    return machine, thread, ended


def _closed(bench: Bench, last: tuple[Machine, threading.Thread, list[object]] | Exception) -> None:
    machines = bench.machines
    machines.close()
    machines.close()
    if isinstance(last, Exception):
        raise AssertionError(f"the last machine did not start: {last}") from last
    machine, thread, ended = last
    thread.join(bench.seconds)
    expect(not thread.is_alive(), f"a command still runs {bench.seconds:g} s after the back-end was closed")
    expect(isinstance(ended[0], (SandboxFailure, Ran)), f"a running command ended with {ended[0]!r}")
    for call, name in ((partial(machines.start, bench.image), "start"), (partial(machine.run, "true"), "run")):
        try:
            call()
        except SandboxFailure:
            continue
        raise AssertionError(f"{name} works when the back-end is closed")


def _left(before: tuple[frozenset[str], frozenset[str]], marker: str) -> str | None:
    if not os.path.isdir("/proc/self/task"):
        return "this system has no /proc to look in"
    running = [pid for pid in os.listdir("/proc") if pid.isdigit() and marker.encode() in _said(pid)]
    expect(not running, f"processes {', '.join(running)} of a closed back-end still run")
    children = set(_children()) - before[0]
    expect(not children, f"child processes {', '.join(sorted(children))} are left")
    mounts = set(_mounts()) - before[1]
    expect(not mounts, f"mounts are left: {', '.join(sorted(mounts))}")
    return None


def _said(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def _children() -> list[str]:
    """Child processes of this one, also dead ones that nobody has waited for."""
    try:
        return [p for t in os.listdir("/proc/self/task") for p in _task(t).split()]
    except OSError:
        return []


def _task(thread: str) -> str:
    try:
        return Path("/proc/self/task", thread, "children").read_text()
    except OSError:
        return ""


def _mounts() -> list[str]:
    try:
        return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return []
