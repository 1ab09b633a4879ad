"""ALFWorld on the real engine, against the plain packages and against itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env import _alfworld_rules as rules
from branchpoint.env import alfworld
from branchpoint.env._alfworld_expert import PlanPlayer
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import EnvironmentFailure, Step, Task

pytest.importorskip("alfworld", reason="the engine is not installed: pip install 'branchpoint[alfworld]'")

SMALL = tuple(
    task for task in alfworld.tasks("valid_seen") if int(task.metadata["game"].split("/")[0].rsplit("-", 1)[1]) > 400
)
"""Games in bathrooms: few things, so quick to translate."""

PLAIN = """
import json, sys, random, hashlib, textworld
from textworld.envs import PddlEnv
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
problem, goal = json.load(sys.stdin)
steps = int(sys.argv[1])  # the translator overwrites sys.argv
env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)
grammar = open(ALFRED_TWL2_PATH).read().replace("UNKNOWN GOAL", goal)
env.load(dict(pddl_domain=open(ALFRED_PDDL_PATH).read(), grammar=grammar, pddl_problem=problem))
state = env.reset()
luck, said = random.Random(0), hashlib.sha256()
def note(state):
    said.update(repr((state.feedback, list(state["admissible_commands"]), bool(state["won"]))).encode())
note(state)
for _ in range(steps):
    state, _, _ = env.step(luck.choice(state["admissible_commands"]))
    note(state)
print(said.hexdigest())
"""
OURS = """
import sys
sys.path.insert(0, sys.argv[2])
import test_alfworld as t
print(t.said(sys.argv[3], int(sys.argv[1])))
"""


def said(game_id: str, steps: int) -> str:
    """The digest of all text, admissible commands and outcomes of a random walk, full style, nothing dropped."""
    row = data.game(game_id)
    game = engine.Game(row["pddl_problem"], engine.goal_text(game_id, row["task_type"], row["pddl_params"]))
    luck, everything = random.Random(0), hashlib.sha256()
    everything.update(repr((game.feedback, list(game.moves), game.won)).encode())
    for _ in range(steps):
        game.play(luck.choice(list(game.moves)))
        everything.update(repr((game.feedback, list(game.moves), game.won)).encode())
    return everything.hexdigest()


def python(code: str, *arguments: str, stdin: str = "", **variables: str) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def same_as_plain(game_id: str, steps: int, folder: Path) -> None:
    row = data.game(game_id)
    goal = engine.goal_text(game_id, row["task_type"], row["pddl_params"])
    plain = python(
        PLAIN, str(steps), stdin=json.dumps([row["pddl_problem"], goal]), ALFWORLD_DATA=str(folder), PYTHONHASHSEED="3"
    )
    here = str(Path(__file__).parent)
    assert plain == said(game_id, steps)
    assert plain == python(OURS, str(steps), here, game_id, PYTHONHASHSEED="1")


def test_text_and_commands_are_those_of_the_plain_packages_in_any_process(tmp_path: Path) -> None:
    same_as_plain(SMALL[0].metadata["game"], 25, tmp_path)


@pytest.mark.slow
def test_games_of_every_type_are_played_as_by_the_plain_packages_through_the_world() -> None:
    script = Path(__file__).parents[2] / "scripts" / "compare_alfworld.py"
    command = [sys.executable, str(script), "--steps", "3000", "--games", "18"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3000 steps of 18 games are equal" in done.stdout


def test_the_rules_allow_the_operators_of_the_packages_planner_library() -> None:
    packages, luck = engine._packages(), random.Random(0)
    row = data.game(SMALL[2].metadata["game"])
    with engine._quiet():
        logic = packages.pddl.GameLogic(domain=packages.domain, grammar=packages.grammar)
        theirs = packages.pddl.PddlState(engine._planner(), row["pddl_problem"], logic)
    ours = rules.State(engine._actions(), row["pddl_problem"])
    assert {p for p in theirs.facts if p.name == "inreceptacle"}
    done = set()
    for _ in range(60):
        operators = {
            f"{action.name} {' '.join(v.name for v in action.mapping.values())}": action
            for action in theirs.all_applicable_actions()
        }
        moves = {f"{name} {' '.join(arguments)}": (name, arguments) for name, arguments in ours.moves()}
        assert sorted(moves) == sorted(operators)
        assert ours.won == theirs.check_goal()
        chosen = luck.choice(sorted(moves))
        theirs.apply(operators[chosen])
        ours.play(moves[chosen])
        done.add(moves[chosen][0])
        told = {(p.name, *(v.name for v in p.arguments)) for p in theirs.facts}
        seen = {fact for fact in told if not fact[0].startswith(("not_", "new-axiom"))}
        assert ours.facts == seen
    assert {"gotolocation", "pickupobject", "putobject"} <= done


def dialled(task: Task, **dials: object) -> Task:
    return Task(task.id, task.root, task.prompt, task.seed, {**task.metadata, **dials})


def walk(world: alfworld.AlfworldWorld, step: Step, seed: int, steps: int) -> Iterator[Step]:
    luck = random.Random(seed)
    for _ in range(steps):
        step = world.step(luck.choice(step.actions))
        yield step


def test_a_game_starts_and_goes_on_the_same_every_time() -> None:
    first, second = (alfworld.make(SMALL[1]) for _ in range(2))
    a, b = first.reset(), second.reset()  # both live at once
    assert a == b
    assert a.info["game"] == SMALL[1].metadata["game"]
    steps = list(walk(first, a, 5, 12))
    assert steps == list(walk(second, b, 5, 12))
    assert first.reset() == a
    assert list(walk(first, a, 5, 12)) == steps
    first.close()
    second.close()


def test_a_saved_state_goes_on_in_another_world() -> None:
    world = alfworld.make(SMALL[1])
    with pytest.raises(EnvironmentFailure, match="no state before reset"):
        world.get_state()
    step = [world.reset(), *walk(world, world.reset(), 5, 12)][-1]
    assert not step.done
    state = json.loads(json.dumps(world.get_state()))
    other = alfworld.make(SMALL[1])
    other.set_state(state)
    assert list(walk(other, step, 6, 12)) == list(walk(world, step, 6, 12))
    assert other.get_state() == world.get_state() != state


def test_a_fork_of_a_live_game_goes_its_own_way() -> None:
    def told(seed: int) -> str:
        world = alfworld.make(SMALL[2])
        step = world.reset()
        before = list(walk(world, step, 1, 4))[-1]
        after = list(walk(world, before, seed, 10))
        world.close()
        return repr(after)

    world = alfworld.make(SMALL[2])
    before = list(walk(world, world.reset(), 1, 4))[-1]
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(send, hashlib.sha256(repr(list(walk(world, before, 2, 10))).encode()).digest())
            status = 0
        finally:
            os._exit(status)
    here = repr(list(walk(world, before, 3, 10)))
    assert os.waitpid(child, 0)[1] == 0
    there = os.read(receive, 32)
    os.close(receive)
    os.close(send)
    world.close()
    assert here == told(3)
    assert there == hashlib.sha256(told(2).encode()).digest()
    assert told(2) != told(3)


def test_branches_of_a_fork_server_go_their_own_ways() -> None:
    async def play() -> tuple[list[str], list[str], list[str]]:
        async with ForkServer(preload=("branchpoint.env.alfworld_warm",)) as server:
            env = await server.open(alfworld.make, SMALL[2], Noise(0))
            first = await env.reset()
            snapshot = await env.snapshot()
            branches = [env, await snapshot.restore(Noise(1)), await snapshot.restore(Noise(2))]
            told = []
            for branch, seed in zip(branches, (1, 1, 2), strict=True):
                luck, step, said = random.Random(seed), first, []
                for _ in range(6):
                    step = await branch.step(luck.choice(step.actions))
                    said.append(f"{step.observation} {step.actions}")
                told.append(said)
            return told[0], told[1], told[2]

    parent, same, other = asyncio.run(play())
    assert parent == same != other


def test_compact_play_is_the_same_play() -> None:
    full, compact = (alfworld.make(dialled(SMALL[3], style=style)) for style in ("full", "compact"))
    a, b = full.reset(), compact.reset()
    luck = random.Random(0)
    for _ in range(15):
        mapped = {alfworld.text.compact_action(action): action for action in a.actions}
        assert sorted(mapped) == list(b.actions)
        assert all(alfworld.text.full_action(short) == action for short, action in mapped.items())
        assert " " not in "".join(word for word in b.observation.split())
        short = luck.choice(b.actions)
        a, b = full.step(mapped[short]), compact.step(short)
        assert alfworld.text.compact_observation(a.observation) == b.observation
    full.close()
    compact.close()


def test_the_mark_dial_marks_what_the_goal_names_and_changes_nothing_else() -> None:
    worlds = [alfworld.make(dialled(SMALL[3], style="compact", mark=mark)) for mark in (False, True)]
    plain, marked = (world.reset() for world in worlds)
    task, *words = plain.observation.splitlines()[0].split()
    assert (task, marked.observation.splitlines()[0]) == ("task", plain.observation.splitlines()[0])
    luck, marks = random.Random(0), 0
    for _ in range(15):
        seen = marked.observation.split()
        assert [word for word in seen if word != "*"] == plain.observation.split()
        behind = {seen[i + 1] for i, word in enumerate(seen) if word == "*"}
        assert behind == {word for word in seen if "_" in word and word.split("_")[0] in words}
        assert (plain.reward, plain.info) == (marked.reward, marked.info)
        commands = [" ".join(f"* {w}" if w.split("_")[0] in words else w for w in a.split()) for a in plain.actions]
        assert marked.actions == tuple(commands)
        marks += len(behind)
        action = luck.choice(plain.actions)
        also = commands[plain.actions.index(action)]
        plain, marked = worlds[0].step(action), worlds[1].step(luck.choice((action, also)))
    assert marks
    for world in worlds:
        world.close()
    with pytest.raises(ValueError, match="mark needs style 'compact'"):
        alfworld.tasks("valid_seen", 1, mark=True)


def test_recorded_episodes_are_marked_as_the_world_marks_them() -> None:
    recorded = alfworld.transcripts(style="compact", drop=True, mark=True, max_steps=30)
    assert recorded is not None
    task, turns = next(p for p in recorded if int(p[0].metadata["game"].split("/")[0].rsplit("-", 1)[1]) > 400)
    world = alfworld.make(task)
    step = world.reset()
    for shown, action in turns:
        assert (step.observation, step.actions) == (shown.observation, shown.actions)
        step = world.step(action)
    assert step.info["success"]
    world.close()


def test_the_drop_dial_takes_out_what_changes_nothing() -> None:
    worlds = [alfworld.make(dialled(SMALL[4], drop=drop)) for drop in (False, True)]
    whole, dropped = (world.reset() for world in worlds)
    assert {"help", "inventory", "look"} <= set(whole.actions)
    gone = set(whole.actions) - set(dropped.actions)
    assert set(dropped.actions) < set(whole.actions)
    assert all(action.split()[0] in ("help", "inventory", "look", "examine") for action in gone)
    assert worlds[1].step("look").observation == "Nothing happens."
    assert "You are in the middle of a room." in worlds[0].step("look").observation
    for world in worlds:
        world.close()


def test_the_step_limit_cuts_and_a_bad_command_costs_a_step() -> None:
    world = alfworld.make(dialled(SMALL[4], max_steps=2))
    first = world.reset()
    step = world.step("fly to moon 1")
    assert (step.observation, step.actions, step.reward) == ("Nothing happens.", first.actions, 0.0)
    step = world.step("look")
    assert (step.done, step.truncated, step.info["success"], step.info["steps"]) == (False, True, False, 2)
    with pytest.raises(EnvironmentFailure, match="is over"):
        world.step("look")
    world.close()


@pytest.mark.parametrize("style", ["full", "compact"])
def test_searched_plans_win(style: str) -> None:
    kinds = {task.metadata["task_type"]: task for task in SMALL}
    assert len(kinds) >= 3
    for task in kinds.values():
        plan = alfworld._plan(alfworld.Dials.of(task))
        episode = alfworld.play(dialled(task, style=style), PlanPlayer(plan))
        assert episode.success
        assert all(action in step.actions for step, action in episode.turns)
        assert len(episode.turns) == len(plan)


def test_a_plan_is_as_short_as_that_of_the_packages_planner() -> None:
    task = next(task for task in SMALL if task.metadata["task_type"] == "pick_and_place_simple")
    row = data.game(task.metadata["game"])
    optimal = engine.Game(row["pddl_problem"], "").packages_plan()
    assert len(alfworld._plan(alfworld.Dials.of(task))) == len(optimal) > 0


def test_shipped_plans_win() -> None:
    shipped = [task for split in ("valid_seen", "valid_unseen") for task in alfworld.tasks(split)]
    shipped = [task for task in shipped if task.metadata["game"] in data.plans()][:3]
    assert shipped
    for task in shipped:
        episode = alfworld.play(task, alfworld.expert(task, "planner"))
        assert episode.success
        assert len(episode.turns) == len(data.plans()[task.metadata["game"]])


@pytest.mark.parametrize("order", ["random", "frequency"])
def test_the_explorer_wins_by_what_it_sees(order: alfworld.Order) -> None:
    games = [dialled(task, style=style) for task, style in zip(SMALL, ("full", "compact") * 3, strict=False)]
    for episode in alfworld.record(games[:4], 1, "explorer", order):
        assert episode.success
        assert all(action in step.actions for step, action in episode.turns)


def test_the_explorer_depends_on_its_luck_alone() -> None:
    task = dialled(SMALL[0], drop=True)
    runs = [[action for _, action in episode.turns] for episode in alfworld.record([task, task], 3, order="random")]
    assert runs[:3] == runs[3:]
    assert runs[0] != runs[1] or runs[1] != runs[2]


def test_an_expert_that_missed_the_start_says_so() -> None:
    with pytest.raises(EnvironmentFailure, match="first observation"):
        alfworld.expert(SMALL[0]).act(Step("You arrive at desk 1.", actions=("look",)))
    with pytest.raises(ValueError, match="kind is 'wizard'"):
        alfworld.expert(SMALL[0], "wizard")  # pyright: ignore[reportArgumentType]


def test_a_recorded_episode_is_what_the_world_says() -> None:
    recorded = alfworld.transcripts(style="compact", drop=True, max_steps=30)
    assert recorded is not None
    assert len(recorded) >= 300
    rooms = [pair for pair in recorded if int(pair[0].metadata["game"].split("/")[0].rsplit("-", 1)[1]) > 400]
    for task, turns in rooms[:2]:
        world = alfworld.make(task)
        step = world.reset()
        for shown, action in turns:
            assert (step.observation, step.actions) == (shown.observation, shown.actions)
            step = world.step(action)
        assert step.info["success"]
        world.close()
    assert alfworld.transcripts(style="full") is None


def test_episodes_survive_a_file(tmp_path: Path) -> None:
    task = dialled(SMALL[0], style="compact")
    episode = alfworld.play(task, alfworld.expert(task))
    alfworld.save_episodes(tmp_path / "e.jsonl.xz", [episode])
    (loaded,) = alfworld.load_episodes(tmp_path / "e.jsonl.xz")
    assert (loaded.task.id, loaded.success) == (task.id, episode.success)
    assert [(s.observation, s.actions, a) for s, a in loaded.turns] == [
        (s.observation, s.actions, a) for s, a in episode.turns
    ]


QUIET = """
import os, sys
from branchpoint.env import alfworld
arguments, variables = list(sys.argv), dict(os.environ)
task = alfworld.tasks("valid_seen")[0]
world = alfworld.make(alfworld.replace(task, metadata={**task.metadata, "game": sys.argv[1]}))
world.reset()
same = sys.argv == arguments and dict(os.environ) == variables
print(same, len(os.listdir("/proc/self/task")), os.listdir(os.environ["HOME"]))
"""
MISSING = """
import sys
sys.modules["alfworld"] = None
from branchpoint.env import alfworld
try:
    alfworld.make(alfworld.tasks("valid_seen", 1)[0]).reset()
except ImportError as error:
    print(error)
"""


def test_the_engine_leaves_no_trace(tmp_path: Path) -> None:
    assert python(QUIET, SMALL[0].metadata["game"], HOME=str(tmp_path)) == "True 1 []"


def test_a_missing_engine_names_the_extra() -> None:
    assert 'pip install "branchpoint[alfworld]"' in python(MISSING)
