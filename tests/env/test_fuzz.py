"""A thousand actions of any kind in every environment: no world raises, and equal actions give equal episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchpoint import env as envs
from branchpoint.env.backoffice import DEMO
from branchpoint.noise import Noise
from branchpoint.world import Step, Task

SHIPPED = str(Path(__file__).parent / "data" / "textworld")
CASES: dict[str, dict[str, Any]] = {
    "alfworld": {},
    "backoffice": {**DEMO, "p": 0.2},
    "bfcl": {},
    "faults": {"env": "backoffice", "dials": DEMO, "p": 0.2},
    "gym": {},
    "minigrid": {},
    "scienceworld": {"task": "find-plant"},
    "tau": {},
    "textworld": {"kind": "cooking", "recipe": 3, "take": 2, "drop": True, "cache": SHIPPED},
    "textworld_express": {},
    "webshop": {},
}
COSTLY = {"alfworld": 8, "scienceworld": 0, "textworld": 8, "textworld_express": 0}
"""Of their 40 episodes, so many are played in the fast suite."""
RUNS = [(name, COSTLY.get(name, 40)) for name in CASES if COSTLY.get(name, 40)]
RUNS += [pytest.param(name, 40, marks=pytest.mark.slow) for name in COSTLY]  # type: ignore[misc]
ODD = ["", " ", "\x00", "\ud800", "猫🐈\u202e", "{", "[]", "a" * 100_000, "-1", "null"]
WORDS = st.text(max_size=40) | st.sampled_from(ODD)
ACTIONS = st.lists(st.integers(0, 999) | st.tuples(st.integers(0, 999), WORDS) | WORDS, min_size=25, max_size=25)
"""A number stands for one of the listed actions, or of the expert's; with a text, for that action spoilt by it."""


def text(action: Any, choices: tuple[str, ...]) -> str:
    if isinstance(action, str):
        return action
    number, spoilt = action if isinstance(action, tuple) else (action, None)
    chosen = choices[number % len(choices)]
    return chosen if spoilt is None else chosen[: number % (len(chosen) + 1)] + spoilt


def episode(task: Task, actions: list[Any], script: tuple[str, ...]) -> list[Step]:
    world = envs.make(task.root)(task)
    if hasattr(world, "reseed"):
        world.reseed(Noise(3))
    try:
        steps = [world.reset()]
        for action in actions:
            if steps[-1].done or steps[-1].truncated:
                break
            steps.append(world.step(text(action, steps[-1].actions or script)))
        return steps
    finally:
        world.close()


def experts(task: Task) -> tuple[str, ...]:
    """What the expert plays, where the world lists no actions."""
    world = envs.make(task.root)(task)
    listed = world.reset().actions
    world.close()
    turns = [] if listed else envs.play(envs.make(task.root)(task), envs.expert(task))[0]
    return listed or tuple(action for _, action in turns)


@pytest.mark.parametrize(("name", "episodes"), RUNS)
def test_no_action_breaks_a_world_and_equal_actions_give_equal_episodes(name: str, episodes: int) -> None:
    if lack := envs.LISTINGS[name].missing():
        pytest.skip(lack)
    task = envs.tasks(name, "test" if name == "textworld" else "train", 1, **CASES[name])[0]
    held = envs.make(name)(task)  # a Java process ends with the last of its worlds
    script = experts(task)

    @settings(max_examples=episodes, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(ACTIONS)
    def fuzz(actions: list[Any]) -> None:
        steps = episode(task, actions, script)
        assert all(len(step.observation) < 300_000 for step in steps)
        assert episode(task, actions, script) == steps

    fuzz()
    held.close()
