"""Compare ALFWorld games here with the plain packages, byte for byte, over random steps.

    python scripts/compare_alfworld.py --steps 20000 --games 60 [--seed 0] [--small] [--memoised]

The games are spread evenly over task types and splits. Every observation, list of admissible commands, score and done
flag has to be equal; the commands are random, half of them chosen among those that change something, a few of them
inadmissible. The packages take about 60 ms a step, so 20,000 steps take half an hour; with ``--memoised`` they remember
what they have parsed and take a few minutes. Exit status 1 at a difference, which is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env import alfworld
from branchpoint.world import Task

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alfworld_plain import choose  # noqa: E402


@contextmanager
def plain(options: Sequence[str] = ()) -> Iterator[tuple[IO[str], IO[str]]]:
    """The plain packages in a process of their own: where games go in, and where lines come out."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ALFWORLD_DATA": folder}
        command = [sys.executable, str(ROOT / "benchmarks" / "alfworld_plain.py"), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)
        assert process.stdin
        assert process.stdout
        try:
            yield process.stdin, process.stdout
        finally:
            process.stdin.close()
            process.kill()
            process.wait()


def order(task: Task, seed: int, steps: int) -> str:
    """What the plain side is told of a game."""
    row = data.game(task.metadata["game"])
    goal = engine.goal_text(row["id"], row["task_type"], row["pddl_params"])
    return json.dumps({"problem": row["pddl_problem"], "goal": goal, "seed": seed, "steps": steps}) + "\n"


def compare(task: Task, seed: int, steps: int, pipes: tuple[IO[str], IO[str]], kinds: Counter[str]) -> int:
    """Play a game on both sides; the number of steps compared. Raises SystemExit naming the first difference."""
    to_plain, from_plain = pipes
    to_plain.write(order(task, seed, steps))
    to_plain.flush()
    from_plain.readline()
    world, luck, command = alfworld.make(task), random.Random(seed), ""
    step, turn = world.reset(), 0
    for turn in range(steps + 1):
        line = from_plain.readline()
        if not line:
            raise SystemExit(f"{task.id}, step {turn}: the plain packages ended")
        theirs = json.loads(line)[1:]
        ours = [command, step.observation, list(step.actions), int(step.reward), step.done]
        if ours != theirs:
            raise SystemExit(f"{task.id}, step {turn} differs\nours:   {ours}\ntheirs: {theirs}")
        if step.done or turn == steps:
            break
        command = choose(luck, step.actions)
        kinds[command.split()[0] if command in step.actions else "(inadmissible)"] += 1
        step = world.step(command)
    world.close()
    return turn


def chosen(games: int, seed: int, small: bool) -> Sequence[Task]:
    """Games spread over splits and task types; ``small``: those in bathrooms, which load quickly."""
    found = []
    per_kind = {split: [] for split in alfworld.SPLITS}
    for split, lists in per_kind.items():
        for kind in alfworld.TASK_TYPES:
            tasks = alfworld.tasks(split, None, seed, [kind], max_steps=10**9)
            rooms = [task for task in tasks if int(task.metadata["game"].split("/")[0].rsplit("-", 1)[1]) > 400]
            lists.append(rooms if small else tasks)
    for place in range(games):
        for lists in per_kind.values():
            found += [tasks[place] for tasks in lists if place < len(tasks)]
    return found[:games]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="in all; an even share a game")
    parser.add_argument("--games", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="games in bathrooms only: few things, quick")
    parser.add_argument("--memoised", action="store_true", help="let the packages remember what they have parsed")
    options = parser.parse_args()
    start, total, kinds = time.monotonic(), 0, Counter()
    tasks = chosen(options.games, options.seed, options.small)
    with plain(("--memoised",) if options.memoised else ()) as pipes:
        for number, task in enumerate(tasks):
            share = (options.steps - total) // (len(tasks) - number)
            total += compare(task, options.seed + number, share, pipes, kinds)
            print(f"{total:6d} steps equal, {time.monotonic() - start:5.0f} s, {task.id}", flush=True)
    types = Counter(task.metadata["task_type"] for task in tasks)
    theirs = "packages' with memoised parsers" if options.memoised else "plain packages'"
    print(f"{total} steps of {len(tasks)} games are equal to the {theirs}, byte for byte; games: {dict(types)}")
    print(f"commands: {dict(kinds.most_common())}")


if __name__ == "__main__":
    main()
