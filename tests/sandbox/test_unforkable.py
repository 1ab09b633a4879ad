"""What a fork cannot copy: refused, or repeated in a process of its own and compared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sandbox_worlds as worlds
from sandbox_help import run

from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.replay import Replay
from branchpoint.world import SandboxFailure, SnapshotUnsupported, Task, settle

TASK = Task("t", "desk")
ACTIONS = ("add 3", "add 4")


def with_server(test: Callable[[ForkServer, list[str]], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        said: list[str] = []
        async with ForkServer(("sandbox_worlds",), step_timeout_s=20.0, say=said.append, **options) as server:
            await test(server, said)
            assert not server._envs

    run(whole)


def test_refused_unless_asked_otherwise() -> None:
    async def test(server: ForkServer, said: list[str]) -> None:
        async with await server.open(worlds.Connected, TASK, Noise(1)) as env:
            await env.reset()
            with pytest.raises(SnapshotUnsupported, match="connection"):
                await env.snapshot()
        assert not said

    with_server(test)


def test_siblings_of_a_repeated_history_equal_those_of_the_replay_sandbox() -> None:
    """Twice over, so that a history holds a change of luck as well."""

    async def play(sandbox: Any, luck: tuple[int, ...]) -> list[str]:
        env = await settle(sandbox.open(worlds.Connected, TASK, Noise(1)))
        shown = [(await settle(env.reset())).observation]
        for n in luck:
            shown += [(await settle(env.step(a))).observation for a in ACTIONS]
            snapshot = await settle(env.snapshot())
            sibling = await settle(snapshot.restore(Noise(2, n)))
            shown.append((await settle(env.step("add 10"))).observation)  # of the parent, which goes on
            await settle(env.close())
            await settle(snapshot.discard())
            env = sibling
        shown.append((await settle(env.step("add 100"))).observation)
        await settle(env.close())
        return shown

    async def test(server: ForkServer, said: list[str]) -> None:
        for luck in ((5, 6), (7, 6), (5, 8)):
            assert await play(server, luck) == await play(Replay(), luck)
        assert server.counters.repeats == server.counters.restores == 6
        assert len(said) == 1
        assert said[0].startswith("desk: snapshots by replay, since a fork cannot copy its state: ")
        assert "connection" in said[0]

    with_server(test, unforkable="replay")


def test_a_history_starts_from_the_last_state_that_could_be_forked() -> None:
    async def test(server: ForkServer, said: list[str]) -> None:
        env = await server.open(worlds.Connected, TASK, Noise(1))
        early = await env.snapshot()  # before the thread is there
        await env.reset()
        late = await env.snapshot()
        opens = server.counters.forks
        branch = await late.restore(Noise(3))
        assert server.counters.forks == opens + 1
        assert (await branch.step("add 1")).observation.startswith("1 ")
        for x in (env, branch):
            await x.close()
        await early.discard()
        again = await late.restore(Noise(3))
        assert (await again.step("add 1")).observation.startswith("1 ")
        await again.close()
        await late.discard()
        with pytest.raises(SandboxFailure, match="was discarded"):
            await late.restore(Noise(3))
        assert server.live == 0

    with_server(test, unforkable="replay")


def test_a_world_that_answers_differently_is_found_and_the_step_named() -> None:
    async def test(server: ForkServer, said: list[str]) -> None:
        async with await server.open(worlds.Connected, TASK, Noise(1)) as env:
            await env.reset()
            await env.step("add 1")
            await env.step("clock")
            snapshot = await env.snapshot()
            with pytest.raises(SnapshotUnsupported, match=r"step 2 of the repetition \('clock'\) was answered"):
                await snapshot.restore(Noise(2))
            assert (await env.step("add 1")).observation.startswith("2 ")  # nobody else is harmed
        assert server.live == 0

    with_server(test, unforkable="replay")


def test_a_world_that_says_it_moves_on_is_refused_at_the_snapshot() -> None:
    async def test(server: ForkServer, said: list[str]) -> None:
        task = Task("t", "desk", metadata={"moves_on": True})
        async with await server.open(worlds.Connected, task, Noise(1)) as env:
            await env.reset()
            with pytest.raises(SnapshotUnsupported, match="deterministic = False"):
                await env.snapshot()
            assert (await env.step("add 1")).observation.startswith("1 ")

    with_server(test, unforkable="replay")
