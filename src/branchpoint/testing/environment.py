"""Does a world keep its contract?"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np

from branchpoint.noise import Noise
from branchpoint.testing.report import Checks, Report, expect
from branchpoint.world import Make, Step, Task, World

STRANGE = (
    "",
    "   ",
    "no such action 7f3a",
    "a" * 100_000,
    "猫は🐈‍⬛ \u202eright to left\u202c \x00 \n\t é",
    '{"cmd": "ls',
    "null",
)


def _rooted(make: Make | str) -> Make:
    if not isinstance(make, str):
        return make
    module, _, attribute = make.partition(":")
    return getattr(import_module(module), attribute)


def check_env(
    make: Make | str, task: Task, *, actions: Iterable[str] = (), steps: int = 20, noise: Noise | None = None
) -> Report:
    """Whether the worlds that ``make(task)`` builds keep the contract of :class:`~branchpoint.world.World`.

    Args:
        actions: what to play, in turn; where it is empty or used up, the step's own ``actions`` are taken round-robin,
            then ``look``.
        steps: how many steps to play at most.
        noise: the luck under which two episodes must be equal (unless the world says ``deterministic = False``).
    """
    builder = _rooted(make)
    luck = noise or Noise(task.seed, task.seed)
    plan = tuple(actions)
    checks = Checks(f"environment {getattr(builder, '__qualname__', builder)}, task {task.id}")

    def fresh() -> World:
        random.seed(0)
        np.random.seed(0)
        world = builder(task)
        if hasattr(world, "reseed"):
            world.reseed(luck)  # type: ignore[attr-defined]
        return world

    def episode() -> list[Step]:
        world = fresh()
        try:
            return _play(world, world.reset(), plan, steps)
        finally:
            world.close()

    outside = random.getstate(), np.random.get_state()
    try:
        checks.run("builds, resets and closes", lambda: _check_reset(fresh()))
        checks.run("steps have the right types", lambda: _check_steps(episode()))
        checks.run("equal luck, equal episode", lambda: _check_deterministic(fresh(), episode))
        checks.run("own snapshot goes on alike", lambda: _check_state(fresh, luck, plan, steps))
        for action in STRANGE:
            name = f"takes {action[:12]!r}{f' ({len(action)} characters)' if len(action) > 40 else ''}"
            checks.run(name, lambda action=action: _check_strange(fresh(), action))
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])
    return checks.report()


def _play(world: World, step: Step, plan: tuple[str, ...], steps: int) -> list[Step]:
    out = [step]
    for n in range(steps):
        if out[-1].done or out[-1].truncated:
            break
        listed = out[-1].actions
        action = plan[n] if n < len(plan) else listed[n % len(listed)] if listed else "look"
        out.append(world.step(action))
    return out


def _check_reset(world: World) -> None:
    step = world.reset()
    expect(isinstance(step, Step), f"reset returned {type(step).__name__}; expected branchpoint.world.Step")
    expect(step.reward == 0, f"reset has reward {step.reward}; expected 0")
    expect(not step.done and not step.truncated, "the episode is over at reset")
    world.close()


def _check_steps(steps: list[Step]) -> None:
    for n, step in enumerate(steps):
        at = f"step {n}"
        expect(isinstance(step, Step), f"{at} is a {type(step).__name__}; expected branchpoint.world.Step")
        expect(isinstance(step.observation, str), f"{at}: observation is a {type(step.observation).__name__}")
        expect(isinstance(step.actions, tuple), f"{at}: actions is a {type(step.actions).__name__}; expected tuple")
        expect(all(isinstance(a, str) and a for a in step.actions), f"{at}: actions must be non-empty strings")
        expect(len(set(step.actions)) == len(step.actions), f"{at}: an action is listed twice")
        for name in ("done", "truncated"):
            value = getattr(step, name)
            expect(isinstance(value, bool), f"{at}: {name} is a {type(value).__name__}; expected bool")
        try:
            json.dumps(dict(step.info), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{at}: info must hold finite JSON values: {error}") from error
        if step.grammar:
            re.compile(step.grammar)


def _check_deterministic(world: Any, episode: Callable[[], list[Step]]) -> str | None:
    declared = getattr(world, "deterministic", True)
    world.close()
    if not declared:
        return "the world declares deterministic = False"
    one, two = episode(), episode()
    for n, (first, again) in enumerate(zip(one, two, strict=False)):
        for name in ("observation", "reward", "done", "truncated", "actions"):
            a, b = getattr(first, name), getattr(again, name)
            expect(a == b, f"step {n}: {name} was {a!r:.200}, then {b!r:.200} (or declare deterministic = False)")
    expect(len(one) == len(two), f"the episode had {len(one)} steps, then {len(two)}")
    return None


def _check_state(fresh: Callable[[], Any], luck: Noise, plan: tuple[str, ...], steps: int) -> str | None:
    world = fresh()
    if not (hasattr(world, "get_state") and hasattr(world, "set_state")):
        world.close()
        return "the world has no get_state and set_state"
    half = steps // 2
    before = _play(world, world.reset(), plan, half)[-1]
    state, copied = world.get_state(), fresh()
    copied.set_state(state)
    futures = []
    for each in (world, copied):
        if hasattr(each, "reseed"):
            each.reseed(luck)
        random.seed(0)
        np.random.seed(0)
        futures.append([(s.observation, s.reward) for s in _play(each, before, plan[half:], half)])
        each.close()
    expect(futures[0] == futures[1], f"after set_state the episode went {futures[1]!r:.200}, not {futures[0]!r:.200}")
    return None


def _check_strange(world: World, action: str) -> None:
    world.reset()
    step = world.step(action)
    expect(isinstance(step, Step), f"step returned {type(step).__name__}")
    expect(len(step.observation) < 50_000, f"the observation has {len(step.observation)} characters; do not echo input")
    world.close()
