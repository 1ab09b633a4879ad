"""MiniGrid and BabyAI as text, on the real package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from branchpoint import env as envs
from branchpoint.env import _grid_text, gym, minigrid
from branchpoint.testing import check_env

pytest.importorskip("minigrid", reason='pip install "branchpoint[minigrid]"')


E, W = (1, 0, 0), (2, 5, 0)
U = (0, 0, 0)


def view(rows: list[list[tuple[int, int, int]]], **more: Any) -> dict[str, Any]:
    """An observation from rows of cells as the agent sees them, top row first."""
    return {"mission": "go", "image": np.array(rows, dtype=np.uint8).transpose(1, 0, 2), "direction": 1, **more}


def test_sentences_of_a_view_by_hand() -> None:
    red_ball, locked_blue_door, yellow_key, goal = (6, 0, 0), (4, 2, 2), (5, 4, 0), (8, 1, 0)
    seen = view(
        [
            [U, U, W, locked_blue_door, W],
            [W, goal, E, E, E],
            [W, E, yellow_key, E, red_ball],
        ]
    )
    assert _grid_text.sentences(seen).splitlines() == [
        "goal: go",
        "facing: south",
        "carrying: yellow key",
        "in view: goal 1 step ahead and 1 step left; red ball 2 steps right; "
        "locked blue door 2 steps ahead and 1 step right",
        "walls: 2 steps ahead; 2 steps left",
    ]
    assert _grid_text.chart(seen).splitlines()[-3:] == ["?? ?? ## =b ##", "## GG .. .. ..", "## .. ^^ .. or"]


def test_nothing_to_see() -> None:
    text = _grid_text.sentences(view([[U, U, U], [U, E, U]], direction=0))
    assert text.splitlines()[1:] == ["facing: east", "carrying: nothing", "in view: nothing", "walls: none near"]


def test_the_encoding_is_the_packages() -> None:
    from minigrid.core import constants

    assert tuple(constants.IDX_TO_OBJECT[i] for i in range(11)) == _grid_text.OBJECTS
    assert tuple(constants.IDX_TO_COLOR[i] for i in range(6)) == _grid_text.COLOURS
    assert tuple(sorted(constants.STATE_TO_IDX, key=constants.STATE_TO_IDX.get)) == _grid_text.DOORS


def test_directions_and_places_are_the_real_ones() -> None:
    """What the text says is ahead is found there in the world's own grid, over many layouts and moves."""
    luck, found = np.random.default_rng(0), 0
    for task in minigrid.tasks("validation", 20, level="BabyAI-GoToLocal-v0"):
        world = minigrid.make(task)
        step = world.reset()
        for _ in range(10):
            inner = world._env.unwrapped
            ahead = inner.grid.get(*inner.front_pos)
            near = [t for t in step.observation.split("in view: ")[1].splitlines()[0].split("; ") if "step" in t]
            here = [t.removesuffix(" 1 step ahead") for t in near if t.endswith(" 1 step ahead") and " and " not in t]
            walls = step.observation.split("walls: ")[1].split("; ")
            if ahead is None:
                assert not here
                assert "1 step ahead" not in walls
            elif ahead.type == "wall":
                assert "1 step ahead" in walls
            else:
                assert here[0].split()[-2:] == [ahead.color, ahead.type]
                found += 1
            facing = step.observation.split("facing: ")[1].splitlines()[0]
            assert tuple(inner.dir_vec) == {"east": (1, 0), "south": (0, 1), "west": (-1, 0), "north": (0, -1)}[facing]
            step = world.step(str(luck.choice(["left", "right", "forward", "forward"])))
            if step.done:
                break
    assert found > 3


@pytest.mark.parametrize("level", ["BabyAI-GoToRedBall-v0", "MiniGrid-DoorKey-5x5-v0", "BabyAI-UnlockPickup-v0"])
@pytest.mark.parametrize("observation", ["auto", "map"])
def test_levels_keep_the_contract(level: str, observation: str) -> None:
    task = minigrid.tasks("train", 1, level=level, observation=observation)[0]
    check_env(minigrid.make, task).assert_ok()
    names = minigrid.make(task).reset().actions
    assert names == ("left", "right", "forward", "pickup", "drop", "toggle", "done")


@pytest.mark.parametrize("level", ["BabyAI-GoToRedBall-v0", "BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0"])
def test_the_bot_solves_levels(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    for task in minigrid.tasks("train", 15, level=level):
        turns, last = envs.play(envs.make(task.root)(task), envs.expert(task))
        assert last.done
        assert last.reward > 0.5, task.id
        assert len(turns) < 64
    assert capfd.readouterr().out == ""


def test_the_bot_does_not_play_what_gives_no_instruction() -> None:
    with pytest.raises(ValueError, match="BabyAI levels only"):
        minigrid.expert(minigrid.tasks("train", 1, level="MiniGrid-Empty-5x5-v0")[0])


def test_any_gymnasium_package_by_its_id() -> None:
    task = gym.tasks("train", 1, id="minigrid:MiniGrid-Empty-5x5-v0")[0]
    assert "goal: get to the green goal square" in gym.make(task).reset().observation
