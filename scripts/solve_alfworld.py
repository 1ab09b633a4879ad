"""Play all ALFWorld validation games in the process sandbox with an expert, and count the wins.

    python scripts/solve_alfworld.py [--expert planner] [--games 274]
    python scripts/solve_alfworld.py --expert explorer --order frequency

Each game is opened in a worker process, snapshotted at its start, and played in a branch restored from the snapshot,
50 steps at most as in the ALFWorld paper. Exit status 1 if the planner loses a game; the explorer may, since it knows
only what it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from branchpoint.env import alfworld
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import Task


async def play(server: ForkServer, task: Task, expert: alfworld.Expert) -> tuple[bool, int]:
    """One episode in a branch; whether it was won, and in how many steps."""
    env = await server.open(alfworld.make, task, Noise(0))
    step = await env.reset()
    snapshot = await env.snapshot()
    branch = await snapshot.restore(Noise(1))
    while not (step.done or step.truncated):
        step = await branch.step(expert.act(step))
    for thing in (branch, env):
        await thing.close()
    await snapshot.discard()
    return bool(step.info["success"]), step.info["steps"]


async def solve(tasks: Sequence[Task], kind: alfworld.Kind, order: alfworld.Order) -> list[tuple[Task, bool, int]]:
    """All games one after the other: the task, whether it was won, the steps."""
    results = []
    async with ForkServer(preload=("branchpoint.env.alfworld_warm",)) as server:
        for task in tasks:
            won, steps = await play(server, task, alfworld.expert(task, kind, order=order))
            results.append((task, won, steps))
            if kind == "planner" and not won:
                print(f"not won after {steps} steps: {task.id}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expert", choices=("planner", "explorer"), default="planner")
    parser.add_argument(
        "--order", choices=("frequency", "random"), default="frequency", help="of the explorer's search"
    )
    parser.add_argument("--games", type=int, help="of each split, the first ones (all)")
    parser.add_argument("--seed", type=int, default=0, help="the explorer's luck")
    options = parser.parse_args()
    start, failed = time.monotonic(), 0
    for split in ("valid_unseen", "valid_seen"):
        tasks = alfworld.tasks(split, options.games, options.seed)
        results = asyncio.run(solve(tasks, options.expert, options.order))
        won = [steps for _, success, steps in results if success]
        failed += len(results) - len(won)
        print(f"{split}: {len(won)} of {len(results)} games won, {statistics.mean(won):.1f} steps on average")
        games, wins = Counter(t.metadata["task_type"] for t in tasks), Counter()
        wins.update(task.metadata["task_type"] for task, success, _ in results if success)
        print("  " + ", ".join(f"{kind} {wins[kind]}/{games[kind]}" for kind in alfworld.TASK_TYPES), flush=True)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")
    return int(options.expert == "planner" and failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
