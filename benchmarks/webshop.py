"""WebShop: steps a second in one process, times of its parts, and how the scripted customer does.

    OMP_NUM_THREADS=1 python benchmarks/webshop.py --out benchmarks/baselines/webshop.json

``steps``: of walks that pick listed actions at random and of the customer's visits; only the time within ``reset`` and
``step`` counts, every search is computed (none comes from the cache). By processor time, and by wall clock, which other
processes on the machine lengthen. ``times``, in milliseconds by processor time. ``customer``: its figures on all 500
goals of the test split, on 500 of the training split, and on the goals of people.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from branchpoint import env as envs
from branchpoint.env import webshop
from branchpoint.env.webshop import search
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import Step, Task
from clock import Clock
from report import report


def steps(tasks: tuple[Task, ...], walk: bool) -> dict[str, float]:
    """Rates of ``reset`` and ``step`` over whole episodes."""
    clock, luck = Clock(), random.Random(0)
    for task in tasks:
        search.search.cache_clear()
        world = webshop.make(task)
        agent = None if walk else webshop.expert(task)
        step: Step = clock.time(world.reset)
        while not (step.done or step.truncated):
            action = luck.choice(step.actions) if agent is None else agent.act(step)
            step = clock.time(lambda world=world, action=action: world.step(action))
    return clock.rates()


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    clock = Clock()
    for _ in range(repeats):
        clock.time(call)
    return 1000 * clock.processor / repeats


def times(task: Task) -> dict[str, float]:
    """Of one search, one purchase, taking and setting a state, and building a world."""
    world = webshop.make(task)
    query = world.reset().actions[0]
    step = world.step(query)
    world.step(next(action for action in step.actions if len(action) == len("click[0123456789]")))
    state, other = world.get_state(), webshop.make(task)

    def buy() -> None:
        other.set_state(state)
        other.step("click[buy now]")

    return {
        "search": milliseconds(lambda: search.engine().search(query), 500),
        "set_state_and_buy": milliseconds(buy, 500),
        "get_state": milliseconds(world.get_state, 500),
        "set_state": milliseconds(lambda: other.set_state(state), 500),
        "make": milliseconds(lambda: webshop.make(task), 500),
    }


async def forks(task: Task, restores: int) -> dict[str, float]:
    """Milliseconds by wall clock of the process sandbox: open, snapshot, restore."""
    async with ForkServer(preload=("branchpoint.env.webshop.warm",)) as server:
        env = await server.open("branchpoint.env.webshop:make", task, Noise(0))
        await env.reset()
        snapshot = await env.snapshot()
        for k in range(restores):
            await (await snapshot.restore(Noise(k))).close()
        await env.close()
        c = server.counters
        seconds = {"snapshot": c.snapshot_seconds / c.snapshots, "restore": c.restore_seconds / c.restores}
    return {name: 1000 * value for name, value in seconds.items()}


def customer(tasks: tuple[Task, ...]) -> dict[str, float]:
    """Success rate, mean score and mean number of actions of the scripted customer."""
    played = [envs.play(webshop.make(task), webshop.expert(task)) for task in tasks]
    scores = [last.info["score"] for _, last in played]
    return {
        "goals": len(scores),
        "success": sum(score == 1 for score in scores) / len(scores),
        "mean_score": sum(scores) / len(scores),
        "mean_actions": sum(len(turns) for turns, _ in played) / len(played),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clock = Clock()
    clock.time(webshop.preload)
    train = webshop.tasks("train", options.episodes)
    result: dict[str, Any] = {
        "preload_seconds": {"processor": clock.processor, "wall": clock.wall},
        "steps": {
            "walk_text": steps(train, walk=True),
            "walk_text_rich": steps(webshop.tasks("train", options.episodes, style="text_rich"), walk=True),
            "walk_compact": steps(webshop.tasks("train", options.episodes, style="compact"), walk=True),
            "customer_text": steps(train, walk=False),
        },
        "times": times(train[0]),
        "forks": asyncio.run(forks(train[0], 32)),
        "customer": {
            "test": customer(webshop.tasks("test")),
            "test_values": customer(webshop.tasks("test", option_rule="values")),
            "train_500": customer(webshop.tasks("train", 500, seed=1)),
            "human": customer(webshop.tasks("test", source="human")),
        },
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
