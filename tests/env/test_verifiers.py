"""Environments of verifiers as worlds, and ours as theirs, on the real package."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from branchpoint import env as envs
from branchpoint.env import backoffice, verifiers
from branchpoint.env._dialogue import Dialogue, Stuck
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.replay import Replay
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, SnapshotUnsupported, Step, Task

# --- the dialogue, which needs no package


async def _adds(ask: Any) -> int:
    total = 0
    while (text := await ask(f"total {total}")) != "stop":
        await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            total += int(text)
    return total


def test_a_dialogue_goes_from_question_to_question() -> None:
    talk = Dialogue(_adds)
    assert [talk.next(), talk.next("3"), talk.next("4"), talk.next("stop")] == ["total 0", "total 3", "total 7", None]
    assert talk.result == 7
    talk.close()
    talk.close()


def test_two_dialogues_interleave_also_within_a_running_loop() -> None:
    async def outer() -> list[str | None]:
        one, two = Dialogue(_adds), Dialogue(_adds, io=True)
        said = [one.next(), two.next(), one.next("1"), two.next("10"), one.next("2"), two.next("20")]
        one.close()
        two.close()
        await asyncio.sleep(0)
        return said

    expected = ["total 0", "total 0", "total 1", "total 10", "total 3", "total 30"]
    assert asyncio.run(outer()) == expected


def test_a_dialogue_waits_for_threads() -> None:
    async def run(ask: Any) -> str:
        return await asyncio.to_thread(lambda: "from a thread")

    talk = Dialogue(run)
    assert talk.next() is None
    assert talk.result == "from a thread"


def test_what_the_coroutine_raises_comes_out_and_close_unwinds_it() -> None:
    closed = []

    async def run(ask: Any) -> None:
        try:
            if await ask("?") == "raise":
                raise KeyError("x")
            await ask("again?")
        finally:
            closed.append(True)

    talk = Dialogue(run)
    talk.next()
    with pytest.raises(KeyError):
        talk.next("raise")
    other = Dialogue(run)
    other.next()
    other.next("go on")
    other.close()
    assert closed == [True, True]


def test_input_and_output_are_refused_with_the_cure() -> None:
    async def run(ask: Any) -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises(Stuck, match="io=True"):
        Dialogue(run).next()


# --- theirs as ours

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TasksetConfig):
    first: int = 0
    count: int = 40


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, task, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumConfig]):
    def load(self):
        for i in range(self.config.first, self.config.first + self.config.count):
            yield Sum(SumData(prompt=f"{i} + 1 = ?", system_prompt="Add.", answer=i + 1), self.config.task)
"""

NUMBERS = """
import random

import verifiers.v1 as vf

__all__ = ["Numbers", "NumberEnv"]


class NumberData(vf.TaskData):
    secret: int


class Number(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class NumberConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=6)
    bonus: float = 0.0


class NumberEnv(vf.Env[NumberConfig]):
    async def run(self, task, agents):
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("guess a number from 0 to 99")
            while not segment.terminated:
                guess = int(segment.last_reply) if segment.last_reply.isdigit() else -1
                if guess == task.data.secret:
                    won = True
                    break
                hint = "higher" if guess < task.data.secret else "lower"
                segment = await interaction.turn([{"role": "user", "content": f"{hint} {random.randint(0, 9)}"}])
        interaction.trace.record_reward("won", float(won))

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("bonus", self.config.bonus)


class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield Number(NumberData(secret=i * 37 % 100), self.config.task)
            i += 1
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("verifiers.v1", reason='pip install "branchpoint[verifiers]" (0.4 or newer)')
    folder = tmp_path_factory.mktemp("tasksets")
    for name, text in {
        "bp_sums": SUMS,
        "bp_numbers": NUMBERS,
        "bp_two_seats": NUMBERS.replace("    bonus:", "    judge: vf.AgentConfig = vf.AgentConfig()\n    bonus:"),
        "bp_box": SUMS.replace('system_prompt="Add."', 'image="python:3.12"'),
        "bp_runtime": SUMS.replace("correct(self, trace: vf.Trace)", "correct(self, trace, runtime)").replace(
            "return float(trace.last_reply ==", "await runtime.read('x'); return float(trace.last_reply =="
        ),
        "bp_desk": "from branchpoint.env.verifiers import export\n"
        'Desk, DeskEnv = export("backoffice", "validation", 20)\n'
        '__all__ = ["Desk", "DeskEnv"]\n',
    }.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


def replies(task: Task, *texts: str) -> list[Step]:
    world = verifiers.make(task)
    try:
        steps = [world.reset()]
        for text in texts:
            steps.append(world.step(text))
        return steps
    finally:
        world.close()


def test_a_single_turn_task(modules: Path) -> None:
    task = verifiers.tasks("validation", 1, taskset="bp_sums", config={"first": 7}, held_out=1)[0]
    assert [m.content for m in task.prompt] == ["Add."]
    first, last = replies(task, "8")
    assert (first.observation, first.reward, first.done) == ("7 + 1 = ?", 0.0, False)
    assert (last.reward, last.done, last.truncated) == (2.5, True, False)
    assert last.info == {
        "rewards": {"correct": 2.0, "short": 0.5},
        "metrics": {"length": 1.0},
        "stop": "agent_completed",
    }
    assert replies(task, "eight")[-1].reward == 0.0
    assert replies(task, "9")[-1].reward == 0.5


def test_a_conversation(modules: Path) -> None:
    task = verifiers.tasks("train", 1, taskset="bp_numbers", env={"bonus": 0.25}, held_out=1)[0]
    steps = replies(task, "50", "what?", "37")
    assert [s.observation.split()[0] for s in steps[:3]] == ["guess", "lower", "higher"]
    assert (steps[-1].reward, steps[-1].done) == (1.25, True)
    assert steps[-1].info["metrics"] == {"turns": 3.0}
    with pytest.raises(EnvironmentFailure, match="over"):
        replies(task, "37", "38")


def test_limits_and_stop_conditions_are_the_environments(modules: Path) -> None:
    task = verifiers.tasks("train", 1, taskset="bp_numbers", held_out=1)[0]
    cut = replies(task, *["5"] * 6)[-1]
    assert (cut.truncated, cut.done, cut.reward, cut.info["stop"]) == (True, False, 0.0, "max_turns")
    gave_up = replies(task, "5", "I give up")[-1]
    assert (gave_up.truncated, gave_up.done, gave_up.info["stop"]) == (False, True, "gave_up")


@pytest.mark.parametrize("taskset", ["bp_sums", "bp_numbers"])
def test_they_keep_the_contract(modules: Path, taskset: str) -> None:
    task = verifiers.tasks("train", 1, taskset=taskset)[0]
    task = Task(task.id, task.root, task.prompt, task.seed, json.loads(json.dumps(task.metadata)))
    check_env(verifiers.make, task, actions=["1", "2", "3"]).assert_ok()


def test_one_of_the_environments_that_ship_with_verifiers(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TextArena's Hangman, over a word list of our own in place of the one that it downloads."""
    nltk = pytest.importorskip("nltk", reason="pip install textarena nltk")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path), *nltk.data.path])
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("bread\n" * 6)
    pytest.importorskip("textarena", reason="pip install textarena nltk")
    task = verifiers.tasks("train", 1, taskset="textarena", config={"game": "Hangman-v0"}, held_out=1)[0]
    assert "competitive game player" in task.prompt[0].content
    first, *steps = replies(task, "[b]", "[x]", "no bracket", "[r]", "[e]", "[a]", "[d]")
    assert "6 tries left" in first.observation
    assert steps[0].observation.endswith("B   _   _   _   _")
    assert [s.reward for s in steps] == [0.0] * 6 + [1.0]
    assert (steps[-1].done, steps[-1].info["rewards"]) == (True, {"game_reward": 1.0})


def test_splits(modules: Path) -> None:
    parts = [verifiers.tasks(s, taskset="bp_sums", held_out=10) for s in ("train", "validation")]
    assert [len(p) for p in parts] == [30, 10]
    assert len({t.id for p in parts for t in p}) == 40
    assert verifiers.tasks("train", 4, taskset="bp_sums") == verifiers.tasks("train", 8, taskset="bp_sums")[:4]
    one, two = (verifiers.tasks("train", 4, seed, taskset="bp_numbers") for seed in (0, 1))
    assert not {t.id for t in one} & {t.id for t in two}


@pytest.mark.parametrize(
    ("dials", "word"),
    [
        ({"taskset": "bp_no_such"}, "bp_no_such"),
        ({"taskset": "bp_sums", "config": {"no_such": 1}}, "no_such"),
        ({"taskset": "bp_numbers", "n": None}, "infinite; give n"),
        ({"taskset": "bp_sums", "n": 100}, "has 8 tasks"),
        ({"taskset": "bp_two_seats"}, "player, judge"),
        ({"taskset": "bp_box"}, "box"),
        ({"taskset": "bp_sums", "split": "test"}, "validation"),
    ],
)
def test_what_cannot_be_played_here_is_said_in_a_line(modules: Path, dials: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        verifiers.tasks(**{"split": "train", "n": 1, **dials})
    assert "\n" not in str(error.value)


def test_a_reward_that_uses_the_box_is_no_reward_of_zero(modules: Path) -> None:
    task = verifiers.tasks("train", 1, taskset="bp_runtime")[0]
    with pytest.raises(Exception, match=r"runtime\.read"):
        replies(task, "8")


def _snapshots(sandbox: Any, task: Task) -> list[list[tuple[str, float]]]:
    """What two branches see that go on from one snapshot, under equal luck and under another."""

    async def settle(value: Any) -> Any:
        return await value if hasattr(value, "__await__") else value

    async def run() -> list[list[tuple[str, float]]]:
        out = []
        try:
            env = await settle(sandbox.open(verifiers.make, task, Noise(1)))
            await settle(env.reset())
            await settle(env.step("50"))
            frozen = await settle(env.snapshot())
            for luck in (Noise(2, 2), Noise(2, 2), Noise(3, 3)):
                again = await settle(frozen.restore(luck))
                steps = [await settle(again.step(text)) for text in ("20", "30", "37")]
                out.append([(s.observation, s.reward) for s in steps])
                await settle(again.close())
        finally:
            await settle(sandbox.close())
        return out

    return asyncio.run(run())


@pytest.mark.parametrize("sandbox", [ForkServer, Replay])
def test_snapshots_by_fork_and_by_replay(modules: Path, sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(modules))
    one, two, other = _snapshots(sandbox(), verifiers.tasks("train", 1, taskset="bp_numbers", held_out=1)[0])
    assert one == two != other
    assert [reward for _, reward in one] == [0.0, 0.0, 1.0]


def test_with_input_and_output_a_fork_is_refused(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(modules))
    task = verifiers.tasks("train", 1, taskset="bp_numbers", held_out=1, io=True)[0]
    with pytest.raises(SnapshotUnsupported):
        _snapshots(ForkServer(), task)


# --- ours as theirs


def test_our_environment_through_theirs_is_the_same(modules: Path) -> None:
    """Exported, loaded by verifiers' loader, and driven through its Env, Task, Trace and scoring."""
    native = {t.id: t for t in backoffice.tasks("validation", 20)}
    for task in verifiers.tasks("train", 6, taskset="bp_desk", held_out=0):
        original = native[task.metadata["data"]["id"]]
        assert [m.content for m in task.prompt] == [m.content for m in original.prompt]
        turns, last = envs.play(verifiers.make(task), backoffice.expert(original))
        own_turns, own_last = envs.play(backoffice.make(original), backoffice.expert(original))
        assert [(s.observation, a) for s, a in turns] == [(s.observation, a) for s, a in own_turns]
        assert (last.reward, last.info["metrics"]) == (own_last.reward, {"success": 1.0}) == (1.0, {"success": 1.0})


def test_the_exported_taskset_is_configurable(modules: Path) -> None:
    import verifiers.v1 as vf

    made = vf.load_environment(
        vf.resolve_env_config({"taskset": {"id": "bp-desk", "split": "test", "n": 3, "dials": {"p": 0.2}}})
    )
    rows = list(made.taskset)
    assert [r.data.world["metadata"]["p"] for r in rows] == [0.2] * 3
    assert all(r.data.id.startswith("backoffice/test/") for r in rows)
    assert vf.task_type("bp-desk") is type(rows[0])
