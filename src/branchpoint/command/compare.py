"""``branchpoint compare``: freeze a study, run it, report it; or whatever of that is left."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from branchpoint.experiment.freeze import Frozen

VERBS = ("freeze", "run", "report")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``branchpoint compare``."""
    parser.add_argument("what", metavar="[freeze|run|report] FILE", nargs="+", help="a study; alone: run, then report")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")


def compare(a: argparse.Namespace, console: Console, main: Callable[[list[str]], int]) -> int:
    """Run the sub-command; returns the exit status. ``main``: the command line, for runs in this process."""
    from branchpoint.experiment import freeze, spec

    *verbs, file = a.what
    if len(verbs) > 1 or (verbs and verbs[0] not in VERBS) or a.jobs < 1:
        raise spec.StudyError(f"compare: write it as compare [{'|'.join(VERBS)}] FILE, with --jobs of 1 or more")
    path = Path(file)
    if verbs == ["freeze"]:
        console.print(f"frozen: {freeze.freeze(path)}; now: branchpoint compare {path}", highlight=False)
        return 0
    study = freeze.frozen(path)
    if verbs != ["report"]:
        _run(study, a.jobs, console, main)
    if verbs != ["run"]:
        _report(study, console)
    return 0


def _run(study: Frozen, jobs: int, console: Console, main: Callable[[list[str]], int]) -> None:
    from branchpoint.experiment import run
    from branchpoint.store import RunFolder

    def say(text: str) -> None:
        console.print(text, highlight=False)

    def execute(todo: Sequence[list[str]], strict: bool) -> list[int]:
        return _here(todo, strict, main) if jobs == 1 else _apart(todo, strict, jobs, say)

    with RunFolder(study.study.folder).locked():  # one process runs a study at a time
        run.run(study.study, execute, say)


def _report(study: Frozen, console: Console) -> None:
    from branchpoint.experiment import page, results
    from branchpoint.store import write_json, write_text

    found = results.results(study)
    place = Path(study.study.results)
    write_json(place / "results.json", found)
    write_text(place / "index.html", page.page(found))
    console.print(page.table(found), highlight=False, markup=False)
    console.print(f"{place / 'results.json'}, {place / 'index.html'}", highlight=False)


def _here(todo: Sequence[list[str]], strict: bool, main: Callable[[list[str]], int]) -> list[int]:
    """One after the other, in this process."""
    statuses = []
    for arguments in todo:
        statuses.append(main(arguments))
        if statuses[-1] == 130:
            raise KeyboardInterrupt
        if strict and statuses[-1]:
            raise _failure(arguments, "see the line above")
    return statuses


def _failure(arguments: Sequence[str], told: str) -> Exception:
    from branchpoint.experiment.spec import StudyError

    return StudyError(f"branchpoint {' '.join(arguments)}: failed, {told}")


def _apart(todo: Sequence[list[str]], strict: bool, jobs: int, say: Callable[[str], None]) -> list[int]:
    """At most ``jobs`` at a time, each in a process of its own that ends when this one does."""
    from branchpoint.experiment.run import command

    waiting, running = list(range(len(todo))), dict[subprocess.Popen[bytes], tuple[int, IO[bytes]]]()
    start, statuses = time.monotonic(), [0] * len(todo)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number = waiting.pop(0)
                errors = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed when the process has ended
                process = subprocess.Popen(
                    command(todo[number]), stdout=subprocess.DEVNULL, stderr=errors,
                    preexec_fn=partial(_with_parent, os.getpid()),
                )  # fmt: skip
                running[process] = number, errors
            time.sleep(0.05)
            for process in [p for p in running if p.poll() is not None]:
                number, errors = running.pop(process)
                arguments, statuses[number], last = todo[number], process.returncode, _last_line(errors)
                if process.returncode:
                    if strict:
                        raise _failure(arguments, last or f"status {process.returncode}")
                    say(f"  {last}")
                left = len(waiting) + len(running)
                say(f"  {(time.monotonic() - start) / 60:6.1f} min  {left:4d} left  {' '.join(arguments[:3])}")
    finally:
        for process in running:
            process.terminate()  # like Ctrl-C: the run stops where its checkpoint stands
        for process in running:
            _ended(process)
    return statuses


def _last_line(errors: IO[bytes]) -> str:
    with errors:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _with_parent(parent: int) -> None:
    """In the child: be killed when the parent is, or a killed study would go on unseen."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
