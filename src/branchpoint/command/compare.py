"""``branchpoint compare``: freeze a study, run it, report it; or whatever of that is left."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

    with RunFolder(study.study.folder).locked():  # one process runs a study at a time
        run.run(
            study.study, (lambda todo: _here(todo, main)) if jobs == 1 else lambda todo: _apart(todo, jobs, say), say
        )


def _report(study: Frozen, console: Console) -> None:
    from branchpoint.experiment import page, results
    from branchpoint.store import write_json, write_text

    found = results.results(study)
    place = Path(study.study.results)
    write_json(place / "results.json", found)
    write_text(place / "index.html", page.page(found))
    console.print(page.table(found), highlight=False, markup=False)
    console.print(f"{place / 'results.json'}, {place / 'index.html'}", highlight=False)


def _here(todo: Sequence[list[str]], main: Callable[[list[str]], int]) -> None:
    """One after the other, in this process."""
    from branchpoint.experiment.spec import StudyError

    for arguments in todo:
        status = main(arguments)
        if status == 130:
            raise KeyboardInterrupt
        if status:
            raise StudyError(f"branchpoint {' '.join(arguments)}: failed, see the line above")


def _apart(todo: Sequence[list[str]], jobs: int, say: Callable[[str], None]) -> None:
    """At most ``jobs`` at a time, each in a process of its own that ends when this one does."""
    from branchpoint.experiment.run import command
    from branchpoint.experiment.spec import StudyError

    waiting, running = list(todo), dict[subprocess.Popen[bytes], list[str]]()
    start = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                arguments = waiting.pop(0)
                process = subprocess.Popen(
                    command(arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=_with_parent
                )
                running[process] = arguments
            time.sleep(0.05)
            for process in [p for p in running if p.poll() is not None]:
                arguments = running.pop(process)
                _, told = process.communicate()
                if process.returncode:
                    last = told.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
                    raise StudyError(f"branchpoint {' '.join(arguments)}: {last[0]}")
                left = len(waiting) + len(running)
                say(f"  {(time.monotonic() - start) / 60:6.1f} min  {left:4d} left  {arguments[0]} {arguments[1]}")
    finally:
        for process in running:
            process.terminate()  # like Ctrl-C: the run stops where its checkpoint stands
        for process in running:
            _ended(process)


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _with_parent() -> None:
    """In the child: be killed when the parent is, or a killed study would go on unseen."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the call
        os._exit(1)
