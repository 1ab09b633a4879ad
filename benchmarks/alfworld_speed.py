"""ALFWorld: times of loading, resetting and stepping a game, beside the plain packages in the same run.

    OMP_NUM_THREADS=1 python benchmarks/alfworld_speed.py --out benchmarks/baselines/alfworld_speed.json

Seconds, medians over games of all task types and of all steps of random walks; each kind of time also by processor.

``ours``, in one process:

* ``pack``: ``make(task)`` of a game that was not asked for before: find it in the shipped pack and unpack it. The plain
  packages get the text in memory.
* ``load``: ``reset()`` of that game, which this process never loaded: from PDDL text to the first observation and its
  admissible commands. The plain packages need load and reset for that.
* ``reset``: ``reset()`` once more.
* ``step``: an observation and its admissible commands.
* ``state``: ``get_state()`` and ``set_state()`` on another world.

Nothing is kept on disk, so there is no other kind of load. ``first``: in a fresh process, importing the package until
it is ready for games (``preload``), and the load of its first game. ``plain``: ``load``, ``reset`` and ``step`` of the
packages as they are, the same games and commands; ``first`` is their first game's load, after importing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env import alfworld
from branchpoint.world import Task
from report import report

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.alfworld_plain import choose, timed  # noqa: E402

FIRST = """
import sys, time
clock = time.process_time if sys.argv[2] == "processor" else time.perf_counter
start = clock()
from branchpoint.env import alfworld
alfworld.preload()
ready = clock()
world = alfworld.make(alfworld.tasks("valid_seen")[int(sys.argv[1])])
made = clock()
world.reset()
print(ready - start, made - ready, clock() - made)
"""


class Times:
    """Wall and processor seconds by name."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, list[float]] = defaultdict(list)
        self.processor: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        result, (wall, processor) = timed(call)
        self.wall[name].append(wall)
        self.processor[name].append(processor)
        return result

    def medians(self) -> dict[str, float]:
        wall = {name: statistics.median(times) for name, times in self.wall.items()}
        return wall | {f"{name}_processor": statistics.median(times) for name, times in self.processor.items()}


def ours(tasks: Sequence[Task], steps: int) -> dict[str, float]:
    """Medians of one process."""
    alfworld.preload()
    times = Times()
    for number, task in enumerate(tasks):
        world = times.time("pack", lambda task=task: alfworld.make(task))
        times.time("load", world.reset)
        step, luck = times.time("reset", world.reset), random.Random(number)
        for _ in range(steps):
            command = choose(luck, step.actions)
            step = times.time("step", lambda world=world, command=command: world.step(command))
            if step.done:
                break
        other = alfworld.make(task)
        times.time("state", lambda world=world, other=other: other.set_state(world.get_state()))
    return times.medians()


def first(processes: int) -> dict[str, float]:
    """Medians of fresh processes."""
    found = {}
    for clock, suffix in (("wall", ""), ("processor", "_processor")):
        rows = []
        for number in range(processes):
            command = [sys.executable, "-c", FIRST, str(number), clock]
            rows.append([float(word) for word in subprocess.check_output(command, text=True, timeout=120).split()])
        names = [name + suffix for name in ("preload", "pack", "load")]
        found |= dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
    return found


def plain(tasks: Sequence[Task], steps: int) -> dict[str, float]:
    """Medians of the packages as they are."""
    orders = []
    for number, task in enumerate(tasks):
        row = data.game(task.metadata["game"])
        goal = engine.goal_text(row["id"], row["task_type"], row["pddl_params"])
        orders.append(json.dumps({"problem": row["pddl_problem"], "goal": goal, "seed": number, "steps": steps}))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "alfworld_plain.py")]
        environment = {**os.environ, "ALFWORLD_DATA": folder}
        said = subprocess.check_output(
            command, input="\n".join(orders), text=True, env=environment, timeout=3000
        ).splitlines()
    lines = [json.loads(line) for line in said]
    games = [line for line in lines if len(line) == 2]
    turns = [line[0] for line in lines if len(line) == 6 and line[0]]
    kinds = {"first": [games[0][0]], "load": [load for load, _ in games[1:]], "reset": [reset for _, reset in games]}
    return {
        name + suffix: statistics.median(seconds[clock] for seconds in times)
        for name, times in {**kinds, "step": turns}.items()
        for clock, suffix in enumerate(("", "_processor"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plain-games", type=int, default=12)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    each = max(1, options.games // len(alfworld.TASK_TYPES))
    kinds = [alfworld.tasks("valid_seen", each, 0, [kind], max_steps=10**9) for kind in alfworld.TASK_TYPES]
    tasks = [task for some in zip(*kinds, strict=True) for task in some]
    result: dict[str, Any] = {
        "ours": ours(tasks, options.steps),
        "first": first(options.processes),
        "plain": plain(tasks[: options.plain_games], options.steps),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
