"""TextWorld: what making, playing and copying a game takes, and how the experts do.

    OMP_NUM_THREADS=1 python benchmarks/textworld_games.py --cache FOLDER --out benchmarks/baselines/textworld.json

For every kind of game under its default dials and for harder ones. ``make``: seconds of processor time of the maker's
process for one game, and for each of several. ``times``: milliseconds by processor time. ``experts``: wins and mean
number of commands on training games; ``astray``: wins of the walkthrough player after 10 random commands that it did
not give. Making all the games takes about an hour; those in the cache folder are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from branchpoint import env as envs
from branchpoint.env import textworld
from branchpoint.env.textworld import stories
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import Step, Task
from report import report

GAMES: dict[str, dict[str, Any]] = {
    "coin_collector": {"kind": "coin_collector"},
    "treasure_hunt": {"kind": "treasure_hunt"},
    "cooking": {"kind": "cooking"},
    "coin_collector, level 120": {"kind": "coin_collector", "level": 120},
    "treasure_hunt, level 25": {"kind": "treasure_hunt", "level": 25},
    "cooking, recipe 3, take 3, go 12": {"kind": "cooking", "recipe": 3, "take": 3, "go": 12},
    "cooking, recipe 3, take 3, go 12, drop": {"kind": "cooking", "recipe": 3, "take": 3, "go": 12, "drop": True},
}
SAFE = ("go", "open", "close", "drop", "put", "insert", "look", "inventory", "examine")
"""Verbs that end no game."""


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return 1000 * (time.process_time() - start) / repeats


def make(task: Task, games: int) -> dict[str, float]:
    """Seconds of processor time of the maker and its compilers for one game, and for each of several made together."""
    return {"alone": _maker(task, 1), "each_of_several": _maker(task, games) / games, "several": games}


def _maker(task: Task, games: int) -> float:
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        stories.run_maker(stories.Order.of(textworld.Dials.of(task)), range(games), Path(folder))
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def times(task: Task) -> dict[str, float]:
    """Of reset, a step of a random walk, taking a state, and setting it in a fresh world."""
    world, luck = textworld.make(task), random.Random(0)
    world.reset()
    taken = {"reset": milliseconds(world.reset, 50)}
    spent, count, longest = 0.0, 0, 0
    while count < 500:
        step = world.reset()
        while not (step.done or step.truncated):
            action = luck.choice(step.actions)
            start = time.process_time()
            step = world.step(action)
            spent, count, longest = spent + time.process_time() - start, count + 1, max(longest, len(step.actions))
    world.reset()
    state = world.get_state()

    def restore() -> None:
        other = textworld.make(task)
        other.set_state(state)
        other.close()

    taken |= {"step": 1000 * spent / count, "get_state": milliseconds(world.get_state, 500)}
    return taken | {"set_state": milliseconds(restore, 200), "most_actions": longest, "steps_a_second": count / spent}


async def forks(task: Task, restores: int) -> dict[str, float]:
    """Milliseconds by wall clock of the process sandbox: snapshot, restore."""
    async with ForkServer(preload=envs.preload("textworld")) as server:
        env = await server.open("branchpoint.env.textworld:make", task, Noise(0))
        await env.reset()
        snapshot = await env.snapshot()
        for k in range(restores):
            await (await snapshot.restore(Noise(k))).close()
        await env.close()
        c = server.counters
    return {"snapshot": 1000 * c.snapshot_seconds / c.snapshots, "restore": 1000 * c.restore_seconds / c.restores}


def expert(tasks: tuple[Task, ...], player: textworld.Player) -> dict[str, Any]:
    """How often it wins, in how many commands, and whether all were admissible."""
    played = [envs.play(textworld.make(task), textworld.expert(task, player)) for task in tasks]
    return {
        "games": len(played),
        "wins": sum(last.info["success"] for _, last in played),
        "mean_commands": sum(len(turns) for turns, _ in played) / len(played),
        "most_commands": max(len(turns) for turns, _ in played),
        "inadmissible": sum(action not in step.actions for turns, _ in played for step, action in turns),
    }


def astray(tasks: tuple[Task, ...], commands: int = 10) -> int:
    """Wins of the expert when other commands than its own were played at first."""
    return sum(_astray(task, random.Random(number), commands) for number, task in enumerate(tasks))


def _astray(task: Task, luck: random.Random, commands: int) -> bool:
    world, player = textworld.make(task), textworld.expert(task)
    step: Step = world.reset()
    for _ in range(commands):
        player.act(step)
        step = world.step(luck.choice([c for c in step.actions if c.split()[0] in SAFE]))
    while not (step.done or step.truncated):
        step = world.step(player.act(step))
    world.close()
    return step.info["success"]


def measure(name: str, games: int, cache: str) -> dict[str, Any]:
    """All figures of one kind of game."""
    tasks = textworld.tasks("train", games, **GAMES[name], cache=cache, max_steps=200)
    textworld.prepare(tasks)
    return {
        "make": make(tasks[0], 8),
        "times": times(tasks[0]),
        "forks": asyncio.run(forks(tasks[0], 16)),
        "experts": {player: expert(tasks, player) for player in ("walkthrough", "planner")},
        "astray": astray(tasks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--games", type=int, default=100, help="of each kind under its default dials")
    parser.add_argument("--harder", type=int, default=20, help="of each kind under other dials")
    parser.add_argument("--only", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for name in options.only:
        result[name] = measure(name, options.harder if "," in name else options.games, options.cache)
        print(name, json.dumps(result[name]), flush=True)
    report(result, options.out)


if __name__ == "__main__":
    main()
