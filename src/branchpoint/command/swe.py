"""``branchpoint swe``: make repository tasks by bug injection, and check the tasks of SWE-bench Verified."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from branchpoint.env.swe import inject as work
from branchpoint.env.swe import verified
from branchpoint.env.swe import verify as checks
from branchpoint.env.swe.repositories import REPOSITORIES
from branchpoint.sandbox.machine import Machines


def machines() -> Machines:
    """The machines of the shell sandbox."""
    from branchpoint.sandbox.shell import ShellMachines

    return ShellMachines()


def inject(count: int, out: Path, names: list[str] | None, seed: int, jobs: int, console: Console) -> int:
    """Make tasks and say how it goes. Raises InjectError, or what else names the cure."""
    if strange := sorted(set(names or ()) - set(REPOSITORIES)):
        raise work.InjectError(f"--repos: no repository {strange[0]!r}; known: {', '.join(REPOSITORIES)}")
    for name, value in (("--tasks", count), ("--jobs", jobs)):
        if value < 1:
            raise work.InjectError(f"{name} is {value}; use a positive number")
    chosen = [r for r in REPOSITORIES.values() if not names or r.name in names]

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    box = machines()
    try:
        made = work.inject(chosen, box, count, out, seed, jobs, say)
    finally:
        box.close()
    say(f"{made} tasks in {out}")
    return 0


def verify(names: list[str] | None, jobs: int, out: Path | None, console: Console) -> int:
    """Check the Verified tasks on release sdists and print a line each; 0 when all hold. Raises InjectError for a bad
    argument."""
    known = verified.releases()
    short = {name.partition("@")[0]: name for name in known}
    chosen = [short.get(name, name) for name in names or known]
    if strange := next((name for name in chosen if name not in known), ""):
        raise work.InjectError(f"--ids: no task {strange!r}; known: {', '.join(short)}")
    if jobs < 1:
        raise work.InjectError(f"--jobs is {jobs}; use a positive number")
    width = max(map(len, chosen))

    def say(v: checks.Verdict) -> None:
        verdict = "ok" if v.holds else "FAILED"
        graded = f"empty {_no(v.empty)}, broken {_no(v.broken)}"
        found = v.trouble or f"before {v.before}, repaired {v.after}/{v.total}, {graded}"
        console.print(f"{v.instance_id:<{width}}  {verdict:<6}  {found}", highlight=False, markup=False)

    box = machines()
    try:
        verdicts = checks.verify("verified", chosen, box, jobs, out, say)
    finally:
        box.close()
    holding = sum(v.holds for v in verdicts)
    console.print(f"{holding} of {len(verdicts)} Verified tasks on release sdists hold", highlight=False)
    return 0 if holding == len(verdicts) else 1


def _no(turned_down: bool) -> str:
    return "not resolved" if turned_down else "RESOLVED"
