"""OpenEnv servers as worlds and ours as OpenEnv servers, on the real package; servers are processes of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from branchpoint import env as envs
from branchpoint.env import backoffice, openenv
from branchpoint.env.openenv import Form
from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.replay import Replay
from branchpoint.testing import check_env
from branchpoint.world import EnvironmentFailure, GraderFailure, SnapshotUnsupported, Task

# --- the form of an action, which needs no package


def test_a_text_field_takes_the_text_whole() -> None:
    form = Form.of({"properties": {"metadata": {}, "text": {"type": "string"}}, "required": ["text"]}, None)
    assert form.read('{"name": "x"}') == ({"text": '{"name": "x"}'}, "")
    assert form.read("") == ({"text": ""}, "")


def test_choices_become_actions_also_by_reference() -> None:
    schema = {"properties": {"move": {"$ref": "#/$defs/Move"}}, "required": ["move"], "title": "A",
              "$defs": {"Move": {"enum": ["up", "down"], "type": "string"}}}  # fmt: skip
    form = Form.of(schema, None)
    assert form.actions == ("up", "down")
    assert form.read(" up ") == ({"move": "up"}, "")
    assert "up, down" in form.read("left")[1]


def test_numbers_and_objects_are_written_as_json() -> None:
    number = Form.of({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, None)
    assert number.read("7") == ({"n": 7}, "")
    assert "n as JSON: integer" in number.read("seven")[1]
    two = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
    assert Form.of(two, None).read('{"a": "1", "b": "2"}') == ({"a": "1", "b": "2"}, "")
    for text in ("[1]", "x", "", "[" * 5000, "9" * 30_000):
        assert "a, b" in Form.of(two, None).read(text)[1]
    assert Form.of(two, "b").read("[1]") == ({"b": "[1]"}, "")
    with pytest.raises(ValueError, match="a, b"):
        Form.of(two, "c")


def test_no_server_is_said_in_a_line() -> None:
    for url in ("http://127.0.0.1:9", "ftp://x", "file:///etc/passwd"):
        with pytest.raises(ValueError, match=r"server answers|must start") as error:
            openenv.tasks("train", 1, url=url)
        assert "\n" not in str(error.value)


# --- servers

THEIRS = '''
import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    hint: str
    left: int


class GuessEnvironment(Environment):
    """A secret number from reset's seed; the moody kind's hints have noise, the bad kind gives no last reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, kind="plain"):
        self.secret, self.left, self.kind = random.Random(seed).randrange(10), 5, kind
        return Told(hint="guess", left=self.left)

    def step(self, action, timeout_s=None):
        self.left -= 1
        if action.number == self.secret or not self.left:
            won = action.number == self.secret
            over = {"truncated": not won, "tries": 5 - self.left}
            reward = None if self.kind == "bad" else float(won)
            return Told(hint="over", left=self.left, done=True, reward=reward, metadata=over)
        hint = "higher" if action.number < self.secret else "lower"
        return Told(hint=hint + (str(random.random()) if self.kind == "moody" else ""), left=self.left, reward=-0.1)

    @property
    def state(self):
        return State()


app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=32)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''
OURS = "import sys; from branchpoint.env.openenv import serve; serve('backoffice', int(sys.argv[1]), p=0.4)"


def _serve(*command: str) -> Iterator[str]:
    pytest.importorskip("openenv.core", reason='pip install "branchpoint[openenv]"')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, *command, str(port)])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = tmp_path_factory.mktemp("server") / "guess_server.py"
    script.write_text(THEIRS)
    yield from _serve(str(script))


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    yield from _serve("-c", OURS)


def guess(url: str, **reset: Any) -> Task:
    return openenv.tasks("train", 1, url=url, reset=reset)[0]


def test_their_server_is_played_as_a_world(theirs: str) -> None:
    task = guess(theirs)
    secret = __import__("random").Random(task.metadata["reset"]["seed"]).randrange(10)
    world = openenv.make(task)
    try:
        assert world.reset().observation == "hint: guess\nleft: 5"
        wrong = world.step("seven")
        assert wrong.info == {"invalid": True}
        assert "VALIDATION_ERROR" in world.step('"seven"').observation
        miss = world.step(str(9 if secret != 9 else 0))
        assert (miss.observation.split("\n")[0], miss.reward, miss.done) == (
            "hint: lower" if secret != 9 else "hint: higher", -0.1, False,
        )  # fmt: skip
        hit = world.step(str(secret))
        assert (hit.reward, hit.done, hit.truncated, hit.info) == (1.0, True, False, {"tries": 2})
        with pytest.raises(EnvironmentFailure, match="over"):
            world.step("1")
        world.reset()
        lost = [world.step("11") for _ in range(5)][-1]
        assert (lost.reward, lost.done, lost.truncated) == (0.0, False, True)
    finally:
        world.close()


def test_a_missing_reward_at_the_end_is_no_reward_of_zero(theirs: str) -> None:
    world = openenv.make(guess(theirs, kind="bad"))
    try:
        world.reset()
        for _ in range(4):
            world.step("11")
        with pytest.raises(GraderFailure, match="without a reward"):
            world.step("11")
    finally:
        world.close()


def test_one_field_can_be_shown(theirs: str) -> None:
    shown = openenv.make(openenv.tasks("train", 1, url=theirs, observation="hint")[0])
    assert shown.reset().observation == "guess"
    shown.close()
    lost = openenv.make(openenv.tasks("train", 1, url=theirs, observation="sound")[0])
    with pytest.raises(EnvironmentFailure, match="hint, left"):
        lost.reset()
    lost.close()


def test_they_keep_the_contract(theirs: str, ours: str) -> None:
    check_env(openenv.make, guess(theirs), actions=["3", "11", "5"]).assert_ok()
    check_env(openenv.make, openenv.tasks("train", 1, url=ours)[0]).assert_ok()


def test_our_environment_through_a_server_is_the_same(ours: str) -> None:
    native = backoffice.tasks("validation", p=0.4)
    for task in openenv.tasks("validation", 3, url=ours, by="index"):
        original = native[task.metadata["reset"]["index"]]
        assert task.prompt == original.prompt
        luck = Noise(2**90 + task.seed, 5)
        here, there = backoffice.make(original), openenv.make(task)
        for world in (here, there):
            world.reseed(luck)
        turns, last = envs.play(here, backoffice.expert(original))
        again, end = envs.play(there, backoffice.expert(original))
        assert [(s.observation, a, s.actions) for s, a in again] == [(s.observation, a, s.actions) for s, a in turns]
        assert (end.reward, end.done, end.truncated) == (last.reward, last.done, last.truncated)
        assert end.info["success"] == last.info["success"]


async def _branches(sandbox: Any, task: Task, before: list[str], after: list[str]) -> list[list[str]]:
    async def settle(value: Any) -> Any:
        return await value if hasattr(value, "__await__") else value

    out = []
    try:
        env = await settle(sandbox.open(openenv.make, task, Noise(1, 1)))
        await settle(env.reset())
        for text in before:
            await settle(env.step(text))
        frozen = await settle(env.snapshot())
        for seed in (2, 2, 3, 4):
            branch = await settle(frozen.restore(Noise(seed, seed)))
            out.append([(await settle(branch.step(text))).observation for text in after])
            await settle(branch.close())
        await settle(env.close())
    finally:
        await settle(sandbox.close())
    return out


def test_snapshots_are_replayed_and_luck_reaches_our_servers(ours: str, theirs: str) -> None:
    calls = [json.dumps({"name": "list_orders", "arguments": {"customer": f"C00{n:02d}"}}) for n in range(12)]
    task = openenv.tasks("validation", 1, url=ours, by="index")[0]
    one, two, *others = asyncio.run(_branches(Replay(), task, calls[:3], calls[3:]))
    assert one == two
    assert any(other != one for other in others)
    same = asyncio.run(_branches(Replay(), guess(theirs), ["11"], ["11", "11"]))
    assert len(set(map(tuple, same))) == 1


def test_a_fork_is_refused_and_so_is_the_replay_of_what_does_not_repeat(theirs: str) -> None:
    with pytest.raises(SnapshotUnsupported, match=r"thread|socket"):
        asyncio.run(_branches(ForkServer(), guess(theirs), ["11"], ["11"]))
    with pytest.raises(SnapshotUnsupported, match="does not repeat itself"):
        asyncio.run(_branches(Replay(), guess(theirs, kind="moody"), ["11"], ["11"]))
    declared = openenv.tasks("train", 1, url=theirs, deterministic=False)[0]
    with pytest.raises(SnapshotUnsupported, match="deterministic = False"):
        asyncio.run(_branches(Replay(), declared, ["11"], ["11"]))


def test_our_server_listens_on_loopback_only(ours: str) -> None:
    port = int(ours.rsplit(":", 1)[1])
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
