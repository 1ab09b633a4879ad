"""Every shipped environment: steps a second in one process, and what a fork of it takes.

    OMP_NUM_THREADS=1 python benchmarks/environments.py --out benchmarks/baselines/environments.json

``steps_per_second``: calls of ``reset`` and ``step`` of whole episodes in this process, building worlds not counted, by
processor time, and by wall clock, which other work on the machine lengthens (worlds in Java are there to be judged by
wall clock alone). Actions are drawn evenly from those that the world lists; where it lists none (``actions: expert``),
they are the expert's, whose thinking is not counted. ``fork_ms``: one snapshot and one restore through the ``process``
sandbox, the default of a run, in the middle of an episode, by wall clock; ``kind`` says whether that forked a process
or repeated the history. ``own_ms``: the same in this process, through the ``state`` sandbox where the world saves its
own state, else, for what a process cannot fork, through ``replay``. Medians of ``--rounds`` rounds, with the least and
the most. ``tasks``: how many each split holds. A world is open all the time, so that what worlds share (a Java process)
is started once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from branchpoint import env as envs
from branchpoint.env.backoffice import DEMO
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.sandbox.replay import Replay
from branchpoint.world import Sandbox, Step, Task, World, settle
from clock import Clock
from report import report


@dataclass(frozen=True)
class Case:
    """What is played: an environment under some dials, the split, and how many steps lie before the fork."""

    env: str
    dials: Mapping[str, Any] = field(default_factory=dict)
    depth: int = 3
    split: str = "train"
    others: tuple[str, ...] = ("validation", "test")


CASES = {
    "alfworld": Case("alfworld", others=("valid_seen", "valid_unseen")),
    "backoffice": Case("backoffice", DEMO),
    "bfcl": Case("bfcl", others=("validation",)),
    "faults on backoffice": Case("faults", {"env": "backoffice", "dials": DEMO, "p": 0.1}),
    "gym: FrozenLake": Case("gym"),
    "minigrid: GoToRedBall": Case("minigrid"),
    "scienceworld": Case("scienceworld", others=("dev", "test")),
    "tau: retail": Case("tau", others=("dev", "test")),
    "tau: airline": Case("tau", {"domain": "airline"}, split="test", others=()),
    "textworld: coin collector": Case("textworld", {"kind": "coin_collector"}, others=("val", "test")),
    "textworld: treasure hunt": Case("textworld", {"kind": "treasure_hunt"}, others=("val", "test")),
    "textworld: cooking": Case("textworld", {"kind": "cooking"}, others=("val", "test")),
    "textworld_express: coin": Case("textworld_express", others=("dev", "test")),
    "webshop": Case("webshop", depth=2, others=("val", "test")),
}
TASKS = 3


def actor(task: Task, listed: bool, luck: random.Random) -> Callable[[Step], str]:
    """Draws from what is listed, or asks the expert."""
    return (lambda step: luck.choice(step.actions)) if listed else envs.expert(task).act


def rate(tasks: tuple[Task, ...], listed: bool, seconds: float, luck: random.Random) -> tuple[float, float]:
    """Calls of ``reset`` and ``step`` a second by processor time and by wall clock, over episodes that add up to
    ``seconds``."""
    clock, episode = Clock(), 0
    while clock.wall < seconds:
        task = tasks[episode % len(tasks)]
        world, act = envs.make(task.root)(task), actor(task, listed, luck)
        episode += 1
        step = clock.time(world.reset)
        while not (step.done or step.truncated) and clock.wall < 2 * seconds:
            step = clock.time(partial(world.step, act(step)))
        world.close()
    return clock.calls / clock.processor, clock.calls / clock.wall


def opening(task: Task, depth: int) -> tuple[bool, bool, list[str]]:
    """Whether actions are listed, whether the world saves its own state, and the first actions of an episode that does
    not end with them."""
    world = envs.make(task.root)(task)
    step = world.reset()
    listed, played = bool(step.actions), list[str]()
    act = actor(task, listed, random.Random(0))
    while len(played) < depth:
        action = act(step)
        step = world.step(action)
        if step.done or step.truncated:
            break
        played.append(action)
    stateful = hasattr(world, "get_state")
    world.close()
    return listed, stateful, played


async def fork(sandbox: Sandbox, task: Task, actions: list[str], repeats: int) -> list[float]:
    """Milliseconds of a snapshot and a restore, each time from the same state."""
    env = await settle(sandbox.open(envs.make(task.root), task, Noise(0)))
    await settle(env.reset())
    for action in actions:
        await settle(env.step(action))
    took = []
    for k in range(repeats):
        start = time.perf_counter()
        snapshot = await settle(env.snapshot())
        branch = await settle(snapshot.restore(Noise(k)))
        took.append(1000 * (time.perf_counter() - start))
        await settle(branch.close())
        await settle(snapshot.discard())
    await settle(env.close())
    await settle(sandbox.close())
    return took


def summary(numbers: list[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers)}


def warm(tasks: tuple[Task, ...]) -> World:
    """A world to be left open. Whatever tasks do once is done: imports, making games."""
    world = envs.make(tasks[0].root)(tasks[0])
    for task in tasks:
        other = envs.make(task.root)(task)
        other.reset()
        other.close()
    return world


def measure(case: Case, rounds: int, seconds: float, cache: str) -> dict[str, Any]:
    """All figures of one environment. ``cache``: where TextWorld keeps the games it makes, so as to make each once."""
    dials: dict[str, Any] = dict(case.dials) | ({"cache": cache} if case.env == "textworld" else {})
    tasks = envs.tasks(case.env, case.split, TASKS, **dials)
    open_ = warm(tasks)
    listed, stateful, actions = opening(tasks[0], case.depth)
    rates, forks, own, said = [], list[float](), list[float](), list[str]()
    for number in range(rounds):
        rates.append(rate(tasks, listed, seconds, random.Random(number)))
        server = ForkServer(preload=envs.preload(case.env, case.dials), unforkable="replay", say=said.append)
        forks.append(statistics.median(asyncio.run(fork(server, tasks[0], actions, 5))))
        if stateful or said:
            local = InProcess("state") if stateful else Replay()
            own.append(statistics.median(asyncio.run(fork(local, tasks[0], actions, 9))))
    open_.close()
    counts = {split: len(envs.tasks(case.env, split, **dials)) for split in (case.split, *case.others)}
    return {
        "actions": "random" if listed else "expert",
        "steps_per_second": {
            "by_processor": summary([processor for processor, _ in rates]),
            "by_wall": summary([wall for _, wall in rates]),
        },
        "kind": "replay" if said else "fork",
        "fork_ms": summary(forks),
        "own_ms": summary(own) if own else None,
        "steps_before_the_fork": len(actions),
        "tasks": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of play, each round")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {}
    for name in options.only:
        if lack := envs.LISTINGS[CASES[name].env].missing():
            print(f"{name}: left out: {lack}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as cache:
            result[name] = measure(CASES[name], options.rounds, options.seconds, cache)
        print(name, result[name], flush=True)
    report(result, options.out)


if __name__ == "__main__":
    main()
