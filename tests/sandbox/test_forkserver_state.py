"""What a fork copies, what it refuses, and that siblings never share any of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sandbox_worlds as worlds
from sandbox_help import run

from branchpoint.noise import Noise
from branchpoint.sandbox import _drive
from branchpoint.sandbox.forkserver import ForkEnv, ForkServer, ForkSnapshot
from branchpoint.sandbox.inprocess import Luck
from branchpoint.world import Make, SnapshotUnsupported, Task

NOISE = Noise(1, 2)


async def started(server: ForkServer, make: Make, **metadata: object) -> ForkEnv:
    env = await server.open(make, Task("t", "tests", metadata=metadata), NOISE)
    await env.reset()
    return env


async def say(env: ForkEnv, action: str) -> str:
    return (await env.step(action)).observation


@pytest.mark.parametrize(
    ("action", "cure", "message"),
    [
        ("thread", "join", r"1 extra thread\(s\) \(busy-thread\)"),
        ("child", "reap", r"running child processes \[\d+\]"),
        ("pipe", "drop", r"descriptor \d+ \(pipe:.*cannot be copied"),
        ("socket", "drop", r"descriptor \d+ \(socket:.*cannot be copied"),
        ("shared", "drop", r"writable shared memory map"),
        ("sqlite {path}", "drop", r"is open for writing; siblings would write into the same file"),
        ("write {path}", "drop", r"is open for writing"),
    ],
)
def test_what_cannot_be_copied_is_refused_until_it_is_gone(
    server: ForkServer, tmp_path: Path, action: str, cure: str, message: str
) -> None:
    async def test() -> None:
        env = await started(server, worlds.Holder)
        await (await env.snapshot()).discard()
        await say(env, action.format(path=tmp_path / "file"))
        with pytest.raises(SnapshotUnsupported, match=message):
            await env.snapshot()
        await say(env, cure)
        snapshot = await env.snapshot()
        branch = await snapshot.restore(NOISE)
        assert "self" not in await say(branch, "fds")
        await branch.close()
        await env.close()

    run(test)


def test_memory_databases_and_private_maps_are_copied(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server, worlds.Holder)
        await say(env, "private")
        await say(env, "sqlite :memory:")
        await say(env, "insert a")
        snapshot = await env.snapshot()
        b, c = await snapshot.restore(NOISE), await snapshot.restore(NOISE)
        assert await say(b, "insert b") == "[('a',), ('b',)]"
        assert await say(c, "insert c") == "[('a',), ('c',)]"
        assert await say(env, "insert d") == "[('a',), ('d',)]"
        for each in (b, c, env):
            await each.close()

    run(test)


def test_subprocesses_keep_their_exit_status(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server, worlds.Holder)
        assert await say(env, "run 3") == "3"
        branch = await (await env.snapshot()).restore(NOISE)
        for each in (env, branch):
            assert [await say(each, f"run {n}") for n in (0, 5)] == ["0", "5"]
            await each.close()

    run(test)


def test_open_files_have_offsets_of_their_own(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    # Longer than any buffer, so that the offset in the kernel matters.
    path.write_text("".join(f"line{n:06d}\n" for n in range(5000)))

    async def test() -> None:
        env = await started(server, worlds.Files, path=str(path))
        assert [await say(env, "line"), await say(env, "raw 11")] == ["line000000", "line000000\n"]
        snapshot = await env.snapshot()
        first, second = await snapshot.restore(NOISE), await snapshot.restore(NOISE)
        for n in range(1, 3000):
            if n % 1000:
                await say(first, "line")
        assert (await say(first, "raw 11"), await say(first, "raw 11")) == ("line000001\n", "line000002\n")
        assert [await say(second, "line"), await say(second, "raw 11")] == ["line000001", "line000001\n"]
        for _ in range(10):
            await say(env, "raw 11")
        third = await snapshot.restore(NOISE)
        assert [await say(third, "line"), await say(third, "raw 11")] == ["line000001", "line000001\n"]
        for each in (env, first, second, third):
            await each.close()

    run(test)


def test_unnamed_temporary_files_are_copied(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()

    async def test() -> None:
        env = await started(server, worlds.Files, path=str(path))
        await say(env, "note a")
        snapshot = await env.snapshot()
        b, c = await snapshot.restore(NOISE), await snapshot.restore(NOISE)
        assert [await say(b, "note bb"), await say(c, "note c"), await say(env, "note d")] == ["abb", "ac", "ad"]
        assert await say(await snapshot.restore(NOISE), "note e") == "ae"
        for each in (b, c, env):
            await each.close()

    run(test)


def test_a_worker_holds_no_foreign_descriptor(server: ForkServer) -> None:
    """Known fault 17: the child lacks the sockets of its parent, of its siblings and of the trainer."""

    async def test() -> None:
        env = await started(server, worlds.Holder)
        other = await started(server, worlds.Holder)
        snapshot = await env.snapshot()
        branch = await snapshot.restore(NOISE)
        for each in (env, branch):
            held = (await say(each, "fds")).split()
            assert len(held) == 5, held  # stdin, stdout, stderr, its own socket, the pipe that tells deaths
            assert sum(name.startswith("socket:") for name in held) == 1
        for each in (env, other, branch):
            await each.close()

    run(test)


async def _chain(server: ForkServer, depth: int, **metadata: object) -> tuple[list[str], list[ForkSnapshot]]:
    """What is said on a chain of snapshots of restored snapshots, and the snapshots (one more)."""
    env = await started(server, worlds.Mover, **metadata)
    said, snapshots = [], [await env.snapshot()]
    for n in range(depth):
        await env.close()
        env = await snapshots[-1].restore(NOISE.child(n))
        said.append(await say(env, f"move{n}"))
        snapshots.append(await env.snapshot())
    await env.close()
    return said, snapshots


def _reference(depth: int) -> list[str]:
    """The same chain, played in one process by a world that is reseeded where the chain restores."""
    world = worlds.Mover(Task("t", "tests"))
    luck = Luck()
    said = []
    with luck.mine():
        for n in range(depth):
            _drive.reseed(world, NOISE.child(n))
            said.append(world.step(f"move{n}").observation)
    return said


@pytest.mark.parametrize(
    ("depth", "limit", "declared", "rebased"),
    [
        pytest.param(256, 64, False, True, marks=pytest.mark.slow),
        (80, 32, False, True),
        (40, 8, False, True),
        (40, 8, True, False),
    ],
)
def test_depth_stays_correct(depth: int, limit: int, declared: bool, rebased: bool) -> None:
    """With and without rebasing, each snapshot of a deep chain has the future of one process that never forks."""
    right = _reference(depth)

    async def test() -> None:
        async with ForkServer(preload=("sandbox_worlds",), rebase_depth=limit) as server:
            said, snapshots = await _chain(server, depth, declared=declared)
            assert said == right
            assert (server.counters.rebases > 0) == rebased
            assert (max(s.depth for s in snapshots) <= limit + 1) == rebased
            for n in (0, depth // 3, depth // 2, depth - 1):
                branch = await snapshots[n].restore(NOISE.child(n))
                assert await say(branch, f"move{n}") == right[n]
                await branch.close()

    run(test, 240)


def test_a_world_that_does_not_repeat_itself_is_not_rebased() -> None:
    async def test() -> None:
        async with ForkServer(preload=("sandbox_worlds",), rebase_depth=8) as server:
            said, snapshots = await _chain(server, 12, clock=True)
            assert [s.split()[:2] for s in said] == [[str(n + 1), str(n)] for n in range(12)]
            assert server.counters.rebases == 0
            assert snapshots[-1].depth == 26

    run(test)


def test_counters(server: ForkServer) -> None:
    async def test() -> None:
        from dataclasses import replace

        c = replace(server.counters)
        env = await started(server, worlds.Holder)
        snapshot = await env.snapshot()
        for _ in range(3):
            await (await snapshot.restore(NOISE)).close()
        n = server.counters
        assert (n.opens - c.opens, n.snapshots - c.snapshots, n.restores - c.restores) == (1, 1, 3)
        assert n.forks - c.forks == 5
        assert n.restore_seconds > c.restore_seconds
        assert re.fullmatch(r"fork-\d+", snapshot.id)

    run(test)
