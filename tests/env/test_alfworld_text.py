"""The two styles of ALFWorld text say the same, and the data files are read or refused in one clear line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from branchpoint.env import _alfworld_data as data
from branchpoint.env import alfworld
from branchpoint.env._alfworld_text import Goal, compact_action, compact_observation, full_action, read_goal
from branchpoint.world import EnvironmentFailure, Task

COMMANDS = {
    "go to desk 12": "go to desk_12",
    "take laptop 1 from desk 1": "take laptop_1 from desk_1",
    "clean mug 2 with sinkbasin 1": "clean mug_2 with sinkbasin_1",
    "use desklamp 1": "use desklamp_1",
    "slice apple 1 with butterknife 2": "slice apple_1 with butterknife_2",
    "inventory": "inventory",
}
SIGHTS = {
    "You arrive at desk 1. On the desk 1, you see a laptop 1, and a pen 2.": "see laptop_1 pen_2",
    "You arrive at shelf 3. On the shelf 3, you see nothing.": "see nothing",
    "You arrive at fridge 1. The fridge 1 is closed.": "closed",
    "You arrive at safe 1. The safe 1 is open. In it, you see a cd 1.": "open see cd_1",
    "You open the drawer 2. The drawer 2 is open. In it, you see a pen 1, and a cd 3.": "open see pen_1 cd_3",
    "You close the drawer 2.": "closed",
    "You pick up the mug 1 from the desk 1.": "hold mug_1",
    "You move the mug 1 to the shelf 2.": "placed",
    "You heat the mug 1 using the microwave 1.": "heat done",
    "You turn on the desklamp 1.": "on",
    "You are carrying: a mug 1.": "hold mug_1",
    "You are not carrying anything.": "hold nothing",
    "You are facing the desk 1, and shelf 2. Next to it, you see nothing.": "at desk_1 shelf_2 see nothing",
    "This is a hot and clean mug 1.": "this is hot clean mug_1",
    "There's nothing special about pen 2.": "plain",
    "Nothing happens.": "nothing happens",
}
GOALS = {
    "put a mug in shelf": Goal("mug", "shelf"),
    "put some mug on shelf": Goal("mug", "shelf"),
    "put a clean mug in shelf": Goal("mug", "shelf", change="clean"),
    "clean some mug and put it in shelf": Goal("mug", "shelf", change="clean"),
    "put a hot mug in shelf": Goal("mug", "shelf", change="heat"),
    "heat some mug and put it in shelf": Goal("mug", "shelf", change="heat"),
    "put a cool mug in shelf": Goal("mug", "shelf", change="cool"),
    "cool some mug and put it in shelf": Goal("mug", "shelf", change="cool"),
    "put two mug in shelf": Goal("mug", "shelf", many=2),
    "find two mug and put them in shelf": Goal("mug", "shelf", many=2),
    "look at mug under the desklamp": Goal("mug", lamp="desklamp"),
    "examine the mug with the desklamp": Goal("mug", lamp="desklamp"),
}


@pytest.mark.parametrize(("full", "compact"), COMMANDS.items())
def test_actions_go_both_ways(full: str, compact: str) -> None:
    assert compact_action(full) == compact
    assert full_action(compact) == full


@pytest.mark.parametrize(("full", "compact"), SIGHTS.items())
def test_observations_keep_what_was_seen(full: str, compact: str) -> None:
    assert compact_observation(full) == compact
    assert compact_observation(compact) == compact


@pytest.mark.parametrize(("sentence", "goal"), GOALS.items())
def test_goals_are_read_in_every_wording(sentence: str, goal: Goal) -> None:
    assert read_goal(f"-= Welcome =-\n\nYou see a desk 1.\n\nYour task is to: {sentence}.") == goal
    assert read_goal(f"task {goal.compact}\nsee desk_1") == goal


def test_an_observation_without_a_goal() -> None:
    assert read_goal("You arrive at desk 1.") is None


def test_official_counts_and_disjoint_splits() -> None:
    counts = {split: len(alfworld.tasks(split)) for split in alfworld.SPLITS}
    assert counts == {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
    games = [
        {task.metadata["game"] for task in alfworld.tasks(split, seed=seed)} for split in counts for seed in (0, 1)
    ]
    train, train_1, seen, seen_1, unseen, unseen_1 = games
    assert train == train_1
    assert seen == seen_1
    assert unseen == unseen_1
    assert not train & seen | train & unseen | seen & unseen


def test_tasks_are_an_order_keyed_by_the_seed() -> None:
    ten = alfworld.tasks("train", 10, 3, ["pick_two_obj_and_place"])
    assert [task.id for task in ten[:4]] == [
        task.id for task in alfworld.tasks("train", 4, 3, ["pick_two_obj_and_place"])
    ]
    assert {task.metadata["task_type"] for task in ten} == {"pick_two_obj_and_place"}
    assert [task.id for task in ten] != [task.id for task in alfworld.tasks("train", 10, 4, ["pick_two_obj_and_place"])]
    assert all(json.loads(json.dumps(task.metadata)) == task.metadata for task in ten)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("test",), "split"),
        (("train", 0), "n is 0"),
        (("train", 9999), "n is 9999"),
        (("train", 1, 0, ["pick"]), "'pick'"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        alfworld.tasks(*arguments)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({}, "no 'game'"),
        ({"game": "x", "style": "short"}, "style is 'short'"),
        ({"game": "x", "max_steps": 0}, "max_steps is 0"),
        ({"game": "x"}, "unknown ALFWorld game 'x'"),
    ],
)
def test_bad_dials_are_named(metadata: dict, named: str) -> None:
    with pytest.raises(EnvironmentFailure, match=named):
        alfworld.make(Task("t", "alfworld", metadata=metadata))


def test_every_shipped_file_is_small_and_every_game_is_where_the_index_says() -> None:
    assert all(path.stat().st_size < 3_000_000 for path in data.folder().iterdir())
    for split in alfworld.SPLITS:
        for kind in alfworld.TASK_TYPES:
            task = alfworld.tasks(split, 1, 7, [kind])[0]
            row = data.game(task.metadata["game"])
            assert row["task_type"] == kind
            assert row["pddl_problem"].lstrip().startswith("(define (problem")


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    whole = lzma.compress(b'{"id": "a", "plan": []}\n' * 1000)
    (tmp_path / "cut.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EnvironmentFailure, match=r"^ALFWorld pack cut.jsonl.xz is damaged \(.*\): install") as caught:
        data.read_pack(tmp_path / "cut.jsonl.xz", ("id",))
    assert "\n" not in str(caught.value)
    for content, complaint in ((b'{"id": 1}\n{"name": 1}\n', "line 2: no field id"), (b"[1]\n", "line 1: no field id")):
        (tmp_path / "keys.jsonl.xz").write_bytes(lzma.compress(content))
        with pytest.raises(EnvironmentFailure, match=complaint):
            data.read_pack(tmp_path / "keys.jsonl.xz", ("id",))
    (tmp_path / "text.jsonl.xz").write_bytes(lzma.compress(b"no json\n"))
    with pytest.raises(EnvironmentFailure, match="line 1: not JSON"):
        data.read_pack(tmp_path / "text.jsonl.xz", ("id",))
    with pytest.raises(EnvironmentFailure, match="is missing"):
        data.read_pack(tmp_path / "none.jsonl.xz", ("id",))


def test_damaged_counts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "containers.json"
    with pytest.raises(EnvironmentFailure, match=r"containers\.json is missing"):
        data.read_counts(path)
    for content, complaint in (
        ('{"mug": {"sh', "damaged"),
        ('{"mug": 1}', "counts"),
        ("[]", "counts"),
        ("3", "counts"),
    ):
        path.write_text(content)
        with pytest.raises(EnvironmentFailure, match=complaint):
            data.read_counts(path)
    path.write_text('{"mug": {"shelf": 2}}')
    assert data.read_counts(path) == {"mug": {"shelf": 2}}


def test_a_pack_is_read_in_blocks_as_it_is_read_whole(tmp_path: Path) -> None:
    rows = [{"id": number, "text": "x" * number} for number in range(7)]
    places = data.write_pack(tmp_path / "p.jsonl.xz", rows, block=3)
    assert data.read_pack(tmp_path / "p.jsonl.xz", ("id",)) == tuple(rows)
    assert len(set(places)) == 3
    whole = (tmp_path / "p.jsonl.xz").read_bytes()
    for row, (start, length) in zip(rows, places, strict=True):
        assert json.dumps(row, separators=(",", ":")) in lzma.decompress(whole[start : start + length]).decode()
