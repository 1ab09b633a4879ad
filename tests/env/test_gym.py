"""Gymnasium environments as worlds, and worlds as Gymnasium environments, on the real package."""

from __future__ import annotations

import asyncio
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchpoint.env import gym
from branchpoint.env import make as make_by_name
from branchpoint.env import tasks as tasks_by_name
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, Step, Task

gymnasium = pytest.importorskip("gymnasium", reason='pip install "branchpoint[gym]"')


NAMES = ["left", "down", "right", "up"]
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "actions": NAMES}


class Echo(gymnasium.Env):
    """Text in, text out: says the action backwards; ``stop`` ends it. Marks its observations with a random letter."""

    def __init__(self, longest: int = 12) -> None:
        self.action_space = gymnasium.spaces.Text(longest, min_length=1, charset="abcdefghijklmnopqrstuvwxyz ")
        self.observation_space = gymnasium.spaces.Text(100, min_length=0, charset="abcdefghijklmnopqrstuvwxyz ")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return self.np_random.choice(list("abc")), {"score": np.float64(0.5), "array": np.arange(2), "odd": object()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        right = action == "stop"
        return action[::-1] + " " + self.np_random.choice(list("abc")), 1.0 * right, right, False, {"is_success": right}


class Pictures(gymnasium.Env):
    """An observation without a text."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 255, (80, 80, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.zeros((80, 80, 3), np.uint8), {}


gymnasium.register("branchpoint-test/Echo-v0", Echo)
gymnasium.register("branchpoint-test/Pictures-v0", Pictures)


def shape(observation: Any, info: Any) -> str:
    return f"a picture of {observation.shape}"


def task(**dials: Any) -> Task:
    return gym.tasks("train", 1, **dials)[0]


def walk(world: Any, actions: list[str]) -> list[Step]:
    steps = [world.reset()]
    for action in actions:
        if steps[-1].done or steps[-1].truncated:
            break
        steps.append(world.step(action))
    return steps


DIALS = [
    LAKE,
    {**LAKE, "observation": "render"},
    {"id": "Taxi-v4"},
    {"id": "Blackjack-v1", "actions": ["stick", "hit"]},
    {"id": "CartPole-v1", "actions": ["left", "right"]},
    {"id": "branchpoint-test/Echo-v0"},
]


@pytest.mark.parametrize("dials", DIALS, ids=lambda d: f"{d['id']} {d.get('observation', '')}")
def test_worlds_keep_the_contract(dials: dict[str, Any]) -> None:
    report = check_env(gym.make, task(**dials))
    report.assert_ok()


@pytest.mark.parametrize("dials", DIALS, ids=lambda d: f"{d['id']} {d.get('observation', '')}")
def test_under_the_seed_alone_an_episode_is_plain_gymnasiums(dials: dict[str, Any]) -> None:
    one = task(**dials, luck="seed")
    world = gym.make(one)
    plain = gymnasium.make(dials["id"], **({"render_mode": "ansi"} if "observation" in dials else {}))
    space: Any = plain.action_space
    observation, info = plain.reset(seed=one.metadata["seed"])
    step, luck = world.reset(), np.random.default_rng(0)
    for _ in range(40):
        if "observation" not in dials:
            assert step.observation == str(gym.plain(observation))
        if step.done or step.truncated:
            break
        if isinstance(space, gymnasium.spaces.Text):
            text = move = str(luck.choice(["ab c", "stop", "xyz"]))
        else:
            index = int(luck.integers(space.n))
            move, text = space.start + index, (dials.get("actions") or [str(i) for i in range(6)])[index]
        observation, reward, terminated, truncated, info = plain.step(move)
        step = world.step(text)
        assert step.reward == reward
        assert step.done == terminated
        assert step.truncated == (truncated and not terminated)
        if "action_mask" in info and not (terminated or truncated):
            assert step.actions == tuple(str(i) for i in np.flatnonzero(info["action_mask"]))


@cache
def lake() -> Task:
    return task(**LAKE, kwargs={"map_name": "8x8"})


def slip(noise: Noise, actions: list[str]) -> list[str]:
    world = gym.make(lake())
    world.reseed(noise)
    return [s.observation for s in walk(world, actions)]


def test_luck_is_the_branches_own_and_shared_when_paired() -> None:
    actions, base = ["right"] * 12, Noise(5)
    paired = {tuple(slip(base.branch("paired", n), actions)) for n in range(20)}
    independent = {tuple(slip(base.branch("independent", n), actions)) for n in range(20)}
    assert len(paired) == 1
    assert len(independent) > 10
    # The luck of a step does not depend on what was done before: the slip of step 3 is the same direction.
    assert slip(base, ["left"] * 3) == slip(base, ["left"] * 3)


def test_independent_luck_has_gymnasiums_law() -> None:
    """From the start of the lake, "right" goes right, down or stays (slips up), one third each."""
    ends = [slip(Noise(7).branch("independent", n), ["right"])[-1] for n in range(300)]
    counts = np.array([ends.count(place) for place in ("1", "8", "0")])
    assert counts.sum() == 300
    assert np.all(np.abs(counts - 100) < 4 * np.sqrt(300 * 2 / 9))


def test_a_text_that_is_no_action_changes_nothing() -> None:
    world = gym.make(task(**LAKE, kwargs={"is_slippery": False}))
    first = world.reset()
    wrong = world.step("jump")
    assert wrong.info == {"invalid": True}
    assert wrong.actions == first.actions == tuple(NAMES)
    assert "left, down, right, up" in wrong.observation
    assert world.step(" RIGHT\n").observation == "1"


def test_text_actions_are_held_to_their_space() -> None:
    world = gym.make(task(id="branchpoint-test/Echo-v0"))
    first = world.reset()
    assert first.info == {"score": 0.5, "array": [0, 1]}
    assert "1 to 12 characters" in world.step("").observation
    assert "1 to 12 characters" in world.step("a" * 13).observation
    assert "'!'" in world.step("a!").observation
    assert world.step("abc").observation.startswith("cba ")
    last = world.step("stop")
    assert (last.done, last.reward, last.info["success"]) == (True, 1.0, True)
    with pytest.raises(EnvironmentFailure, match="reset"):
        world.step("abc")


def test_a_picture_needs_a_function_that_describes_it() -> None:
    with pytest.raises(EnvironmentFailure, match="module:function"):
        gym.make(task(id="branchpoint-test/Pictures-v0")).reset()
    described = task(id="branchpoint-test/Pictures-v0", observation=f"{__name__}:shape")
    assert gym.make(described).reset().observation == "a picture of (80, 80, 3)"


def test_step_limit_truncates() -> None:
    steps = walk(gym.make(task(**LAKE, kwargs={"is_slippery": False}, max_steps=3)), ["left"] * 9)
    assert [s.truncated for s in steps] == [False, False, False, True]
    assert not steps[-1].done


def test_splits_share_no_seed_and_prefixes_agree() -> None:
    seeds = {split: [t.metadata["seed"] for t in gym.tasks(split)] for split in gym.POOLS}
    assert [len(set(s)) for s in seeds.values()] == [10_000, 1_000, 1_000]
    assert len(set().union(*map(set, seeds.values()))) == 12_000
    assert gym.tasks("train", 5, 3) == gym.tasks("train", 9, 3)[:5]
    assert gym.tasks("train", 5, 3) != gym.tasks("train", 5, 4)


@pytest.mark.parametrize(
    ("dials", "word"),
    [
        ({"id": "Pendulum-v1"}, "neither Discrete nor Text"),
        ({"id": "NoSuch-v0"}, "NoSuch"),
        ({"id": "no_such_package:X-v0"}, "no_such_package"),
        ({"id": "FrozenLake-v1", "kwargs": {"no_such": 1}}, "no_such"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b"]}, "4 different names"),
        ({"id": "FrozenLake-v1", "actions": ["a", "A", "b", "c"]}, "4 different names"),
        ({"observation": "video"}, "module:function"),
        ({"luck": "bad"}, "keyed"),
        ({"n": 0}, "n is 0"),
        ({"split": "dev"}, "train"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(dials: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        gym.tasks(**{"split": "train", "n": 1, **dials})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sandbox", [ForkServer, InProcess])
def test_snapshots_by_fork_and_by_copy(sandbox: Any) -> None:
    """Restored twice under equal luck both go on alike, under other luck otherwise."""

    async def run() -> list[list[str]]:
        box = sandbox()
        out = []
        try:
            env = await _settle(box.open(gym.make, task(**LAKE, kwargs={"map_name": "8x8"}), Noise(1)))
            await _settle(env.reset())
            for action in ("right", "right", "down"):
                await _settle(env.step(action))
            frozen = await _settle(env.snapshot())
            for luck in (Noise(2), Noise(2), Noise(3), Noise(4)):
                again = await _settle(frozen.restore(luck))
                seen = []
                for _ in range(12):
                    step = await _settle(again.step("right"))
                    seen.append(step.observation)
                    if step.done or step.truncated:
                        break
                out.append(seen)
                await _settle(again.close())
        finally:
            await _settle(box.close())
        return out

    one, two, *others = asyncio.run(run())
    assert one == two
    assert any(o != one for o in others)


async def _settle(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


WORDS = st.sampled_from(["left", "right", " UP ", "0", "1", "stop", "abc"]) | st.text(max_size=60)


@pytest.mark.parametrize("dials", [LAKE, {"id": "branchpoint-test/Echo-v0"}, {"id": "Taxi-v4"}], ids=lambda d: d["id"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(texts=st.lists(WORDS, max_size=25))
def test_no_text_breaks_a_world_and_equal_texts_give_equal_episodes(dials: dict[str, Any], texts: list[str]) -> None:
    one = task(**dials)
    first, again = (walk(gym.make(one), texts) for _ in range(2))
    assert first == again
    assert all(len(s.observation) < 1000 for s in first)


def test_registered_by_name() -> None:
    one = tasks_by_name("gym", n=1)[0]
    assert make_by_name(one.root)(one).reset().observation == "0"


def test_our_worlds_pass_gymnasiums_own_checker() -> None:
    from gymnasium.utils.env_checker import check_env as check_gymnasium

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*alternative render modes.*")
        check_gymnasium(gym.as_gymnasium("backoffice", "validation", 4))
        check_gymnasium(gym.as_gymnasium("gym", "validation", 4, **LAKE))


def test_our_world_behind_gymnasium_is_the_same_world() -> None:
    from branchpoint.env import backoffice

    env = gym.as_gymnasium("backoffice", "validation", 4, turns=3)
    first = backoffice.tasks("validation", 4)[0]
    world = backoffice.make(first)
    observation, info = env.reset(seed=3, options={"task": 0})
    assert observation == world.reset().observation
    assert info["task"] == first.id
    for n, text in enumerate(["hello", '{"name": "get_order", "arguments": {"order": "O0001"}}', "x"]):
        observation, reward, terminated, truncated, info = env.step(text)
        assert observation == world.step(text).observation
        assert (reward, terminated, truncated) == (0.0, False, n == 2)
    assert env.reset(seed=8)[1]["task"] == env.reset(seed=8)[1]["task"]
    assert len({env.reset(seed=s)[1]["task"] for s in range(20)}) == 4
