"""The menu and the small style: the expert's plan is always on offer, and nothing hidden is."""

from __future__ import annotations

import random
import re

import pytest

from branchpoint.env import backoffice
from branchpoint.env.backoffice.calls import Call, parse
from branchpoint.env.backoffice.render import read
from branchpoint.noise import Noise
from branchpoint.world import Step, Task

DEMO = backoffice.DEMO


def words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def play_expert(task: Task, noise: Noise) -> tuple[list[str], list[Step]]:
    world, agent = backoffice.make(task), backoffice.expert(task)
    world.reseed(noise)
    steps, actions = [world.reset()], []
    while not (steps[-1].done or steps[-1].truncated):
        actions.append(agent.act(steps[-1]))
        steps.append(world.step(actions[-1]))
    return actions, steps


@pytest.mark.parametrize("luck", ["training", "held_out", "challenge"])
@pytest.mark.parametrize("split", ["train", "validation", "test", "diagnostic"])
def test_the_experts_plan_is_always_on_the_menu(split: str, luck: str) -> None:
    n = 16 if split == "diagnostic" else 60
    for k, task in enumerate(backoffice.tasks(split, n, seed=3, style="compact", menu=True, p=0.25, luck=luck)):
        actions, steps = play_expert(task, Noise(k))
        for action, step in zip(actions, steps, strict=False):
            assert action in step.actions
            assert len(step.actions) <= 90
            assert step.grammar == ""
            assert list(step.actions) == sorted(set(step.actions))


def test_the_menu_holds_well_formed_calls_of_visible_things_only() -> None:
    choose = random.Random(5)
    for task in backoffice.tasks("validation", 25, style="compact", menu=True):
        world = backoffice.make(task)
        step = world.reset()
        shown = step.observation
        while not (step.done or step.truncated):
            for action in step.actions:
                made = parse(action)
                assert isinstance(made, Call)
                assert made.problem == ""
                assert made.compact() == action
                for name in ("order", "customer", "sku"):
                    if name in made.args:
                        assert str(made.args[name]) in shown
            step = world.step(choose.choice(step.actions))
            shown += step.observation


def test_menu_is_the_same_after_a_restore_and_absent_without_the_dial() -> None:
    task = backoffice.tasks("train", 1, **DEMO)[0]
    world = backoffice.make(task)
    step = world.reset()
    read_order = next(a for a in step.actions if a.startswith("get_order"))
    saved = world.get_state()
    first = world.step(read_order)
    world.set_state(saved)
    assert world.step(read_order) == first
    plain = backoffice.make(backoffice.tasks("train", 1, **{**DEMO, "menu": False})[0]).reset()
    assert plain.actions == ()
    assert plain.grammar


def test_every_expert_call_matches_the_grammar() -> None:
    for task in backoffice.tasks("test", 80, style="compact"):
        actions, steps = play_expert(task, Noise(clean=True))
        for action, step in zip(actions, steps, strict=False):
            assert re.fullmatch(step.grammar, action)
            assert not re.fullmatch(step.grammar, action + " x=1")
            assert not re.fullmatch(step.grammar, action + "\n" + action)


def test_demo_episodes_are_short_and_random_play_rarely_succeeds() -> None:
    tasks = backoffice.tasks("train", 200, **DEMO, p=0.2)
    for k, task in enumerate(tasks):
        actions, steps = play_expert(task, Noise(k))
        assert all(words(s.observation) <= 45 for s in steps)
        assert sum(map(words, [*actions, *(s.observation for s in steps)])) <= 250
    choose, wins = random.Random(7), 0
    for task in backoffice.tasks("train", 200, **DEMO):
        world = backoffice.make(task)
        step = world.reset()
        while not (step.done or step.truncated):
            step = world.step(choose.choice(step.actions))
        wins += step.info["success"]
    assert wins <= 12  # 1.4 % expected; 12 of 200 is more than six standard deviations above


def test_compact_observations_say_what_json_says() -> None:
    for task in backoffice.tasks("validation", 40):
        small = Task(task.id, task.root, (), task.seed, {**task.metadata, "style": "compact"})
        actions, steps = play_expert(task, Noise(clean=True))
        short, small_steps = play_expert(small, Noise(clean=True))
        assert [parse(a) for a in actions] == [parse(a) for a in short]
        for long, brief in zip(steps[1:], small_steps[1:], strict=True):
            whole, part = read(long.observation, "json"), read(brief.observation, "compact")
            for key, value in part.items():
                if key != "customers":
                    assert whole[key] == value
