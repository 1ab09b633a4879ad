"""ALFWorld: steps a second of 64 live branches in the fork server. Times of one game: ``alfworld_speed.py``.

    OMP_NUM_THREADS=1 python benchmarks/alfworld_branches.py --out benchmarks/baselines/alfworld.json

Four games are opened, snapshotted at their start, and restored 16 times each; then all 64 branches take random
admissible commands at once, round after round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

from branchpoint.env import alfworld
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import Task
from report import report

GAMES, BRANCHES = 4, 64


async def branches(games: list[Task], rounds: int) -> dict[str, float]:
    """Of 64 live branches: steps a second, and seconds to open a game, to snapshot it, and to restore a branch."""
    async with ForkServer(preload=("branchpoint.env.alfworld_warm",)) as server:
        live = []
        for task in games:
            env = await server.open(alfworld.make, task, Noise(0))
            first = await env.reset()
            snapshot = await env.snapshot()
            for k in range(BRANCHES // GAMES):
                live.append((await snapshot.restore(Noise(k)), first))
        luck = random.Random(0)
        start, taken = time.perf_counter(), 0
        for _ in range(rounds):
            going = [(env, step) for env, step in live if not (step.done or step.truncated)]
            steps = await asyncio.gather(*(env.step(luck.choice(step.actions)) for env, step in going))
            live = [(env, step) for (env, _), step in zip(going, steps, strict=True)]
            taken += len(steps)
        seconds, counters = time.perf_counter() - start, server.counters
        return {
            "branches": float(BRANCHES),
            "steps": float(taken),
            "steps_per_second": taken / seconds,
            "open": counters.open_seconds / counters.opens,
            "snapshot": counters.snapshot_seconds / counters.snapshots,
            "restore": counters.restore_seconds / counters.restores,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    games = [alfworld.tasks("valid_seen", 1, 0, [kind], max_steps=1000)[0] for kind in alfworld.TASK_TYPES[:GAMES]]
    result: dict[str, Any] = {"branches": asyncio.run(branches(games, options.rounds))}
    report(result, options.out)


if __name__ == "__main__":
    main()
