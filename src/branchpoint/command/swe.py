"""``branchpoint swe inject``: make repository tasks by bug injection, validated in the shell sandbox."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from branchpoint.env.swe import inject as work
from branchpoint.env.swe.repositories import REPOSITORIES
from branchpoint.sandbox.machine import Machines


def machines() -> Machines:
    """The machines of the shell sandbox."""
    from branchpoint.sandbox.shell import Shell

    return Shell()


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
