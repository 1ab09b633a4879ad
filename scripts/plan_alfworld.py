"""Plan every shipped ALFWorld game, play the plan in the real engine, and keep what wins.

    python scripts/plan_alfworld.py plan plans.jsonl [--minutes 30]     add plans for games not in the file yet
    python scripts/plan_alfworld.py pack plans.jsonl                    write the package data plans.jsonl.xz

The packages' own planner (optimal, A*) takes from 10 ms to more than three minutes and a gigabyte for one game. A plan
of this domain is one choice of things and places, so it is searched directly (``shortest_plan``). Where it fails,
the packages' planner is asked, in a process of its own with a limit of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env._alfworld_plan import shortest_plan
from branchpoint.env._alfworld_text import Goal

PLANNER_SECONDS = 120


def wins(game: engine.Game, plan: tuple[str, ...]) -> bool:
    """Whether the plan, played from here, is admissible throughout and reaches the goal at its end and not before."""
    for command in plan:
        if game.won or command not in game.moves:
            return False
        game.play(command)
    return game.won


def solve(row: dict[str, Any]) -> dict[str, Any]:
    """The plan of a game, played and won, or an empty one."""
    start = time.perf_counter()
    goal = Goal.of(row["task_type"], row["pddl_params"])
    game = engine.Game(row["pddl_problem"], "")
    plan = shortest_plan(game, goal)
    won, source = wins(game, plan), "search"
    if not won:
        source = "planner"
        plan = game.packages_plan()
        won = wins(engine.Game(row["pddl_problem"], ""), plan)
    seconds = round(time.perf_counter() - start, 2)
    return {"id": row["id"], "plan": plan if won else (), "won": won, "source": source, "seconds": seconds}


def games() -> Iterator[dict[str, Any]]:
    """All games: evaluation splits first, then training games by task type."""

    def order(entry: data.Entry) -> tuple[bool, int, str, str]:
        return entry.split == "train", data.TASK_TYPES.index(entry.task_type), entry.split, entry.id

    return (data.game(entry.id) for entry in sorted(data.index().values(), key=order))


def work(row: dict[str, Any], path: Path) -> NoReturn:
    """In a process of its own: append the plan of one game to a file, or die of the limit."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (PLANNER_SECONDS, PLANNER_SECONDS))
        result = json.dumps(solve(row)) + "\n"
        with path.open("a") as file:
            file.write(result)
        status = 0
    finally:
        os._exit(status)


def plan(path: Path, minutes: float, jobs: int) -> None:
    """Append the plans of games that the file lacks. Each game runs in a forked process with a time limit, ``jobs`` of
    them at once."""
    path.touch()
    known = {json.loads(line)["id"] for line in path.read_text().splitlines()}
    end = time.monotonic() + 60 * minutes
    engine.preload()
    running: dict[int, str] = {}

    def wait(most: int) -> None:
        while len(running) > most:
            child, status = os.wait()
            game = running.pop(child)
            if status:
                print(f"no plan within {PLANNER_SECONDS} s of CPU time: {game}", flush=True)

    for row in games():
        if row["id"] in known:
            continue
        if time.monotonic() > end:
            break
        wait(jobs - 1)
        child = os.fork()
        if child == 0:
            work(row, path)
        running[child] = row["id"]
    wait(0)


def pack(path: Path, out: Path) -> None:
    """Write the won plans as package data, in the order of the index."""
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines()) if row["won"]}
    plans = [{"id": name, "plan": rows[name]["plan"]} for name in data.index() if name in rows]
    data.write_pack(out, plans)
    print(f"{len(plans)} of {len(data.index())} games have a plan; {out.stat().st_size} bytes in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "pack"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="games planned at once")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop starting new games after this time")
    options = parser.parse_args()
    if options.what == "plan":
        plan(options.file, options.minutes, options.jobs)
    else:
        pack(options.file, data.folder() / "plans.jsonl.xz")


if __name__ == "__main__":
    main()
