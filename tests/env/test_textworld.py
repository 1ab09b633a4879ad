"""TextWorld: text, commands and points are those of the plain package; snapshots are replays; experts win."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from branchpoint import env as envs
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, Step, Task

pytest.importorskip("textworld", reason='pip install "branchpoint[textworld]"')

from branchpoint.env import _textworld_package as package
from branchpoint.env import textworld
from branchpoint.env.textworld import build, recorded, stories
from branchpoint.env.textworld.world import REFUSED

pytestmark = pytest.mark.filterwarnings("ignore:Game '.*' is not fully supported")

GAMES: dict[str, dict[str, Any]] = {
    "coin": {"kind": "coin_collector", "level": 103},
    "treasure": {"kind": "treasure_hunt", "level": 23},
    "cooking": {"kind": "cooking", "recipe": 2, "take": 2},
    "carrying": {"kind": "cooking", "recipe": 3, "take": 2, "drop": True},
}


KINDS = ["treasure", "carrying", *(pytest.param(name, marks=pytest.mark.slow) for name in ("coin", "cooking"))]
"""Making a game takes seconds: two come with the tests (a cache folder of the tested version; one is made again by
:func:`test_a_game_is_the_same_in_any_process_and_leaves_no_trace`), the others are left to the slow tests."""
SHIPPED = Path(__file__).parent / "data" / "textworld"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("textworld") / "games"))


def game(name: str, cache: str, **dials: Any) -> Task:
    return textworld.tasks("test", 1, 0, **GAMES[name], cache=cache, **dials)[0]


def plain(task: Task, folder: Path) -> Any:
    """The same compiled game in the package's own environment."""
    import textworld as original

    story = stories.story(textworld.Dials.of(task))
    (folder / "game.z8").write_bytes(story.code)
    data = {"version": 1, "grammar": {}, "metadata": {}, "objective": "", "world": story.facts, "infos": story.infos}
    data |= {"quests": story.quests, "KB": {"logic": story.logic, "text_grammars_path": ""}}
    (folder / "game.json").write_text(json.dumps(data))
    infos = original.EnvInfos(admissible_commands=True, won=True, lost=True, score=True)
    return original.start(str(folder / "game.z8"), infos)


def free(step: Step, luck: random.Random) -> str:
    """An admissible command, said in another way, or something that may be wrong."""
    command = luck.choice(step.actions)
    first, *others = command.split()
    loose = [command, command.upper(), f"{first} {others[-1]}" if others else first, command.removeprefix("go ")]
    loose += [f"take {others[0]}" if others else "i", "go north", "n", "open door", "x me", "take coin", "eat meal"]
    return luck.choice(loose)


@pytest.mark.parametrize("name", KINDS)
def test_text_commands_and_points_are_those_of_the_plain_package(name: str, cache: str, tmp_path: Path) -> None:
    task = game(name, cache, style="raw", max_steps=1000)
    theirs, world = plain(task, tmp_path), textworld.make(task)
    luck, said = random.Random(1), 0
    for _ in range(3):
        state, step = theirs.reset(), world.reset()
        for number in range(25):
            assert step.observation == state.feedback
            assert step.actions == tuple(state.admissible_commands)
            assert step.info["score"] == (state.score or 0)
            assert (step.done, step.info["success"], step.info["lost"]) == (
                state.won or state.lost,
                state.won,
                state.lost,
            )
            if step.done:
                break
            command = luck.choice(step.actions) if number % 3 else free(step, luck)
            step = world.step(command)
            if step.observation != REFUSED:
                state, _, _ = theirs.step(command)
                said += 1
    assert said > 40
    world.close()
    theirs.close()


@pytest.mark.parametrize("name", KINDS)
def test_the_plain_style_leaves_out_what_says_nothing(name: str, cache: str) -> None:
    """What is left stands in the raw text, in its order; prompt, status line and menu are gone."""
    raw, less = (textworld.make(game(name, cache, style=style)) for style in ("raw", "plain"))
    expert = textworld.expert(game(name, cache))
    shown, cut, steps = raw.reset(), less.reset(), 0
    assert len(cut.observation) < len(shown.observation) - 1000
    while True:
        lines = [line for line in shown.observation.splitlines() if line.strip()]
        kept = cut.observation.splitlines()
        gone = [line for line in lines if line.strip() not in {one.strip() for one in kept}]
        assert [line.strip() for line in kept if line.strip()] == [line.strip() for line in lines if line not in gone]
        assert all(set(line) <= set(" _|/\\$<>") or line[:6] in (">     ", "Would ") for line in gone), gone
        assert "\n\n\n" not in cut.observation
        assert cut.observation == cut.observation.strip()
        if shown.done:
            break
        action, steps = expert.act(cut), steps + 1
        shown, cut = raw.step(action), less.step(action)
        assert replace(shown, observation="") == replace(cut, observation="")
    assert steps >= 3
    assert "*** The End ***" in cut.observation
    assert "RESTART" not in cut.observation


@pytest.mark.slow
def test_the_objective_says_less_when_it_is_brief(cache: str) -> None:
    brief, detailed = (game("treasure", cache, objective=much) for much in ("brief", "detailed"))
    said = [textworld.make(task).reset().observation.split("-=")[0] for task in (brief, detailed)]
    assert 0 < len(said[0]) < len(said[1]) / 2
    assert brief.id != detailed.id


def walk(world: Any, step: Step, seed: int, steps: int) -> list[Step]:
    luck, seen = random.Random(seed), []
    for _ in range(steps):
        if step.done or step.truncated:
            break
        step = world.step(luck.choice(step.actions))
        seen.append(step)
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_a_restored_game_goes_on_like_a_replay(name: str, cache: str) -> None:
    world, other = textworld.make(game(name, cache)), textworld.make(game(name, cache))
    before = walk(world, world.reset(), 1, 6)
    state = world.get_state()
    after = walk(world, before[-1], 2, 10)
    for _ in range(2):
        other.set_state(state)
        assert walk(other, before[-1], 2, 10) == after
    assert walk(other, other.reset(), 1, 6) == before
    assert walk(other, before[-1], 2, 10) == after
    world.set_state(state)
    assert walk(world, before[-1], 3, 4) == walk(other, (other.set_state(state), before[-1])[1], 3, 4)
    for one in (world, other):
        one.close()


def test_branches_of_both_sandboxes_go_their_own_ways(cache: str) -> None:
    task = game("carrying", cache)

    async def told(sandbox: Any) -> list[list[str]]:
        opened = sandbox.open(textworld.make, task, Noise(0))
        env = await opened if asyncio.iscoroutine(opened) else opened

        async def settled(value: Any) -> Any:
            return await value if asyncio.iscoroutine(value) else value

        first = await settled(env.reset())
        snapshot = await settled(env.snapshot())
        branches = [env, *[await settled(snapshot.restore(Noise(n))) for n in (1, 2)]]
        all_said = []
        for branch, seed in zip(branches, (1, 1, 2), strict=True):
            luck, step, said = random.Random(seed), first, []
            for _ in range(6):
                step = await settled(branch.step(luck.choice(step.actions)))
                said.append(f"{step.observation} {step.actions} {step.reward}")
            all_said.append(said)
        await settled(sandbox.close())
        return all_said

    local = asyncio.run(told(InProcess("state")))
    assert local[0] == local[1] != local[2]
    assert asyncio.run(told(ForkServer(preload=envs.preload("textworld")))) == local


def test_the_contract_is_kept(cache: str) -> None:
    for name in ("treasure", "carrying"):
        check_env(textworld.make, game(name, cache)).assert_ok()


def episode(task: Task, player: textworld.Player = "walkthrough") -> tuple[list[tuple[Step, str]], Step]:
    return envs.play(textworld.make(task), textworld.expert(task, player))


@pytest.mark.parametrize("player", ["walkthrough", "planner"])
@pytest.mark.parametrize("name", KINDS)
def test_experts_win_with_admissible_commands(name: str, player: textworld.Player, cache: str) -> None:
    for looking in (True, False):
        turns, last = episode(game(name, cache, looking=looking), player)
        assert last.info["success"]
        assert all(action in step.actions for step, action in turns)
        assert last.info["score"] == last.info["max_score"]


def astray(world: Any, expert: Any, luck: random.Random, steps: int) -> Step:
    """Random steps that do not end the game, shown to an expert whose own answers are not played."""
    step = world.reset()
    for _ in range(steps):
        expert.act(step)
        safe = [c for c in step.actions if c.split()[0] in ("go", "open", "close", "drop", "put", "insert", "look")]
        step = world.step(luck.choice(safe))
    return step


@pytest.mark.parametrize("name", KINDS)
def test_an_expert_led_astray_finds_its_way_back(name: str, cache: str) -> None:
    for seed in range(4):
        world, expert = textworld.make(game(name, cache)), textworld.expert(game(name, cache))
        step = astray(world, expert, random.Random(seed), 8)
        while not (step.done or step.truncated):
            step = world.step(expert.act(step))
        assert step.info["success"], (name, seed)
        world.close()


def test_an_expert_that_missed_a_step_says_so(cache: str) -> None:
    world, expert = textworld.make(game("treasure", cache)), textworld.expert(game("treasure", cache))
    world.reset()
    with pytest.raises(EnvironmentFailure, match="every step"):
        expert.act(world.step("look"))
    world.close()


@pytest.mark.parametrize("seed", range(3))
def test_rewards_add_up_to_the_points(seed: int, cache: str) -> None:
    """Of the whole walkthrough, and of one cut short by the step limit or spoiled by eating."""
    spoil = {1: 9, 2: 0}.get(seed, 100)
    played, _ = episode(game("carrying", cache))
    script = [action for _, action in played][: spoil or None]
    rewards = {}
    for reward in ("dense", "final", "win"):
        world = textworld.make(game("carrying", cache, reward=reward, max_steps=len(script)))
        world.reset()
        steps = [world.step(action) for action in script]
        rewards[reward] = [step.reward for step in steps]
        points = steps[-1].info["score"] / steps[-1].info["max_score"]
        world.close()
    assert sum(rewards["dense"]) == pytest.approx(points, abs=1e-12)
    assert rewards["final"] == [0.0] * (len(script) - 1) + [points]
    assert sum(rewards["win"]) == float(points == 1)
    assert sum(reward > 0 for reward in rewards["dense"]) > 1


def test_the_wrong_thing_loses(cache: str) -> None:
    """The treasure hunt's other thing, where some way leads to it."""
    task = game("treasure", cache, reward="final")
    story = stories.story(textworld.Dials.of(task))
    (wrong,) = [e["condition"]["preconditions"] for q in story.quests for e in q["fail_events"]]
    thing = wrong[0]["arguments"][0]["name"]
    from branchpoint.env.textworld import live, plan

    logic = live.logic(story)
    world, facts = textworld.make(task), logic.start()
    step = world.reset()
    while not step.done and not step.truncated:
        step = world.step(plan.taken(plan.Scene(facts.state.facts, logic.names), thing))
        for command in step.info["did"]:
            facts = logic.played(facts, command)
    assert (step.done, step.reward, step.info["success"], step.info["lost"]) == (True, 0.0, False, True)
    world.close()


def test_what_is_no_command_is_refused_and_costs_a_step(cache: str) -> None:
    world = textworld.make(game("carrying", cache, max_steps=30))
    first = world.reset()
    odd = [
        "",
        "quit",
        "save",
        "restore",
        "restart",
        "undo",
        "tw-print version",
        "print_state",
        "take all",
        "look. look",
    ]
    odd += ["look, then go north", "drop all and look", "script", "x" * 99, "g" * 5000, "猫", "look\x00", "go\nnorth"]
    for number, command in enumerate(odd, 1):
        step = world.step(command)
        assert (step.observation, step.actions, step.reward, step.done) == (REFUSED, first.actions, 0.0, False), command
        assert (step.info["steps"], step.info["did"]) == (number, [])
    assert world.step("inventory").info["did"] == ["inventory"]
    world.close()


def test_the_step_limit_cuts_and_the_end_is_the_end(cache: str) -> None:
    world = textworld.make(game("treasure", cache, max_steps=2))
    with pytest.raises(EnvironmentFailure, match="not started"):
        world.step("look")
    world.reset()
    world.step("look")
    step = world.step("look")
    assert (step.done, step.truncated, step.info["success"]) == (False, True, False)
    with pytest.raises(EnvironmentFailure, match="over"):
        world.step("look")
    world.close()


def test_looking_can_be_left_out_of_the_list(cache: str) -> None:
    whole, less = (textworld.make(game("carrying", cache, looking=looking)).reset() for looking in (True, False))
    gone = set(whole.actions) - set(less.actions)
    assert {"look", "inventory"} <= gone
    assert all(action.split()[0] in ("look", "inventory", "examine") for action in gone)
    assert set(less.actions) < set(whole.actions)
    assert "examine cookbook" not in gone


def python(code: str, *arguments: str, **variables: str) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


AGAIN = """
import hashlib, json, os, random, sys
import numpy as np
random.seed(5); np.random.seed(5)
state = random.getstate(), np.random.get_state()[1].tolist()
from branchpoint.env import textworld
from branchpoint.world import Task
task = Task("again", "textworld", metadata=json.loads(sys.argv[1]))
world = textworld.make(task)
step, luck, said = world.reset(), random.Random(3), hashlib.sha256()
for _ in range(20):
    said.update(repr((step.observation, step.actions, step.reward)).encode())
    step = world.step(luck.choice(step.actions))
world.close()
kept = state == (random.getstate(), np.random.get_state()[1].tolist())
left = [os.listdir(os.environ[name]) for name in ("HOME", "TMPDIR")] + [os.listdir()]
print(json.dumps([said.hexdigest(), kept, left]))
"""


def test_a_game_is_the_same_in_any_process_and_leaves_no_trace(cache: str, tmp_path: Path) -> None:
    """The maker of this kind draws from sets, whose order the process would decide."""
    metadata = dict(game("treasure", cache).metadata)
    home, temporary, here = (tmp_path / name for name in ("home", "temporary", "here"))
    for folder in (home, temporary, here):
        folder.mkdir()
    code = f"import os; os.chdir({str(here)!r})\n" + AGAIN
    places = {"HOME": str(home), "TMPDIR": str(temporary)}
    made = json.loads(python(code, json.dumps({**metadata, "cache": None}), **places, PYTHONHASHSEED="3"))
    cached = json.loads(python(code, json.dumps(metadata), **places, PYTHONHASHSEED="4"))
    assert made == cached
    assert made[1:] == [True, [[], [], []]]


def made(order: stories.Order, number: int, folder: Path, plain: bool) -> dict[str, Any]:
    folder.mkdir()
    stories.run_maker(order, [number], folder, plain)
    files = folder / str(number)
    data = json.loads((files / "game.json").read_text()) | json.loads((files / "goals.json").read_text())
    return {**data, "source": (files / "game.ni").read_text()}


def same_as_plain_maker(name: str, number: int, folder: Path) -> None:
    """The package's own ``set_walkthrough`` plays a compiled copy; ours asks the logic."""
    order = stories.Order.of(textworld.Dials.of(game(name, ""))._replace(game=number))
    ours, theirs = (made(order, number, folder / str(plain), plain) for plain in (False, True))
    assert ours == theirs
    assert ours["walkthrough"]


@pytest.mark.slow
def test_games_made_together_are_those_made_alone(cache: str, tmp_path: Path) -> None:
    tasks = textworld.tasks("test", 3, 0, **GAMES["carrying"], cache=str(tmp_path))
    textworld.prepare(tasks)
    one, other = (stories.story(textworld.Dials.of(task)) for task in (tasks[0], game("carrying", cache)))
    assert tasks[0].id == game("carrying", cache).id
    assert (one.facts, one.infos, one.walkthrough) == (other.facts, other.infos, other.walkthrough)
    assert len({stories.story(textworld.Dials.of(task)).walkthrough for task in tasks}) > 1
    with pytest.raises(ValueError, match="dial cache"):
        textworld.prepare([game("carrying", cache), textworld.tasks("test", 1)[0]])


def test_the_rules_that_are_read_in_advance_are_those_of_the_games(cache: str) -> None:
    texts = package.rules()
    assert len(set(texts)) == len(texts)
    for name in ("treasure", "carrying"):
        assert stories.story(textworld.Dials.of(game(name, cache))).logic in texts


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", KINDS)
def test_games_are_those_that_the_plain_maker_makes(name: str, number: int, tmp_path: Path) -> None:
    same_as_plain_maker(name, number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_experts_win_a_hundred_games(name: str, cache: str) -> None:
    for task in textworld.tasks("train", 100, 5, **GAMES[name], cache=cache):
        for player in ("walkthrough", "planner"):
            assert episode(task, player)[1].info["success"], task.id


def test_recorded_episodes_fit_the_dials() -> None:
    for kind in ("coin_collector", "treasure_hunt", "cooking"):
        for looking in (True, False):
            shipped = textworld.transcripts(kind=kind, looking=looking, max_steps=77, reward="final", cache="here")
            assert shipped is not None
            assert len(shipped) >= 30
            numbers = {task.metadata["game"] for task, _ in shipped}
            assert len(numbers) == len(shipped)
            assert numbers <= set(textworld.SPLITS["train"])
            for task, turns in shipped:
                assert (task.metadata["max_steps"], task.metadata["reward"], task.metadata["cache"]) == (
                    77,
                    "final",
                    "here",
                )
                assert all(action in step.actions for step, action in turns)
            known = {task.id: task for task in textworld.tasks("train", kind=kind, looking=looking, max_steps=77)}
            assert {task.id for task, _ in shipped} <= known.keys()
    assert len(textworld.transcripts(5, kind="cooking") or ()) == 5
    assert textworld.transcripts(kind="cooking", recipe=2) is None
    assert all(len(turns) <= 4 for _, turns in textworld.transcripts(kind="treasure_hunt", max_steps=4) or ())


@pytest.mark.slow
def test_a_recorded_episode_is_what_the_world_says(cache: str) -> None:
    task, turns = (textworld.transcripts(kind="cooking", cache=cache) or ())[0]
    world = textworld.make(task)
    step = world.reset()
    for shown, action in turns:
        assert (step.observation, step.actions) == (shown.observation, shown.actions)
        step = world.step(action)
    assert step.info["success"]
    world.close()


def test_a_damaged_file_of_episodes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl.xz"
    recorded.save(path, [recorded.Episode({"game": 1}, ((Step("here", actions=("look",)), "look"),))])
    assert recorded.load(path)[0].turns == ((Step("here", actions=("look",)), "look"),)
    good = path.read_bytes()
    for bad in (good[:-9], b"nothing", b""):
        path.write_bytes(bad)
        with pytest.raises(EnvironmentFailure, match=r"episodes\.jsonl\.xz cannot be read"):
            recorded.load(path)


def test_a_damaged_cache_entry_is_made_again(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = game("treasure", cache)
    story = stories.story(textworld.Dials.of(task))
    (entry,) = Path(cache).glob(f"{story.key}.*")
    good = entry.read_bytes()
    raw = stories._read(entry)
    assert raw is not None
    (tmp_path / entry.name).write_bytes(good[: len(good) // 2])
    asked: list[Any] = []
    monkeypatch.setattr(stories, "make", lambda *order: asked.append(order) or [raw])
    again = stories.story(textworld.Dials.of(replace(task, metadata={**task.metadata, "cache": str(tmp_path)})))
    assert (again.code, again.walkthrough) == (story.code, story.walkthrough)
    assert len(asked) == 1
    assert stories._read(tmp_path / entry.name) == raw


def test_a_maker_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    order = stories.Order("tw-coin_collector", json.dumps({"level": 301}), "brief")
    with pytest.raises(EnvironmentFailure, match=r"could not be made.*20 attempts.*Expected level"):
        stories.run_maker(order, [1], tmp_path)


def test_a_dead_end_of_the_maker_leads_to_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Options:
        seeds = 0
        grammar = SimpleNamespace()

    def maker(settings: dict[str, Any], options: Options) -> str:
        tried.append(options.seeds)
        if len(tried) < 3:
            raise ValueError("low >= high")
        return "a game"

    class Makers:
        make = {"tw-x": maker}  # noqa: RUF012
        options = Options

    monkeypatch.setattr(build.package, "makers", lambda: Makers)
    assert build.generate("tw-x", {}, 7) == ("a game", 2**31 + 7 * 20 + 2)
    assert tried == [7, 2**31 + 141, 2**31 + 142]


def splits(**dials: Any) -> Iterator[set[int]]:
    for split in textworld.SPLITS:
        yield {task.metadata["game"] for task in textworld.tasks(split, **dials)}


def test_splits_share_no_game_and_tasks_are_prefixes() -> None:
    train, val, test = splits()
    assert (len(train), len(val), len(test)) == (10_000, 1_000, 1_000)
    assert not train & val
    assert not (train | val) & test
    some = textworld.tasks("train", 20, 4, kind="cooking")
    assert textworld.tasks("train", 5, 4, kind="cooking") == some[:5]
    assert textworld.tasks("train", 5, 5, kind="cooking") != some[:5]
    assert {task.metadata["foods"] for task in some} == {"train"}
    assert textworld.tasks("val", 1, kind="cooking")[0].metadata["foods"] == "valid"
    assert len({t.id for k in ("coin_collector", "treasure_hunt") for t in textworld.tasks("test", 50, kind=k)}) == 100
    for task in some:
        assert json.loads(json.dumps(dict(task.metadata))) == dict(task.metadata)


@pytest.mark.parametrize(
    ("dials", "says"),
    [
        ({"kind": "chess"}, "kind is 'chess'; use one of 'coin_collector'"),
        ({"level": 301}, "level is 301; coin_collector has levels 1 to 300"),
        ({"level": 280}, "240 rooms; 100 is the most"),
        ({"kind": "treasure_hunt", "level": 31}, "levels 1 to 30"),
        ({"recipe": 2}, "recipe is no dial of 'coin_collector', which has level, objective"),
        ({"kind": "cooking", "level": 2}, "level is no dial of 'cooking'"),
        ({"kind": "cooking", "recipe": 6}, "1 to 5 ingredients"),
        ({"kind": "cooking", "take": 2}, "take is 2; of 1 ingredients"),
        ({"kind": "cooking", "go": 5}, "go is 5; use one of 1, 6, 9, 12"),
        ({"kind": "cooking", "cut": 1}, "cut is 1; use true or false"),
        ({"kind": "cooking", "take": 0, "recipe_seed": 3}, "recipe_seed needs take"),
        ({"reward": "sparse"}, "reward is 'sparse'; use one of 'dense', 'final', 'win'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": "9"}, "max_steps is '9'; use an integer"),
        ({"style": "compact"}, "style is 'compact'; use one of 'plain', 'raw'"),
        ({"objective": "none"}, "objective is 'none'; use one of 'brief', 'detailed'"),
        ({"cache": 3}, "cache is 3; use a folder's path or null"),
    ],
)
def test_bad_dials_are_told(dials: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        textworld.tasks("train", 1, **dials)


def test_bad_tasks_are_told() -> None:
    with pytest.raises(ValueError, match="split is 'dev'; use one of train, val, test"):
        textworld.tasks("dev")
    with pytest.raises(ValueError, match="n is 1001"):
        textworld.tasks("val", 1001)
    with pytest.raises(EnvironmentFailure, match="no 'game'; make tasks with"):
        textworld.make(Task("t", "textworld"))
    with pytest.raises(EnvironmentFailure, match="game is -1"):
        textworld.make(Task("t", "textworld", metadata={"game": -1}))


MISSING = """
import sys
sys.modules["textworld"] = sys.modules["jericho"] = None
from branchpoint.env import textworld
try:
    textworld.make(textworld.tasks("val", 1)[0]).reset()
except ImportError as error:
    print(error)
"""


def test_a_missing_package_names_the_extra() -> None:
    assert 'pip install "branchpoint[textworld]"' in python(MISSING)
