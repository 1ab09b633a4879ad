"""Nothing is left behind: no process, no zombie, no descriptor; and everything ends with the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import anyio
import pytest
import sandbox_worlds as worlds
from sandbox_help import alive, descendants, open_fds, run

from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import SandboxFailure, SnapshotUnsupported, Task

NOISE = Noise(1, 2)
TASK = Task("t", "sandbox_worlds:Faulty")


async def _cycles(server: ForkServer, forks: int) -> None:
    """Snapshots, restores, kills and closes, until so many forks are done."""
    env = await server.open(worlds.Faulty, TASK, NOISE)
    await env.reset()
    n = 0
    while server.counters.forks < forks:
        snapshot = await env.snapshot()
        first, second = await snapshot.restore(NOISE), await snapshot.restore(NOISE)
        nested = await second.snapshot()
        if n % 3 == 0:
            os.kill(first.worker.pid, signal.SIGKILL)
        if n % 3 == 1:
            os.kill(snapshot.worker.pid, signal.SIGKILL)
        if n % 5 == 0:
            await snapshot.discard()  # a snapshot may die before what was restored from it
        third = await nested.restore(NOISE)
        assert (await third.step("ping")).observation == "pong"
        for each in (first, second, third):
            await each.close()
        await nested.discard()
        await snapshot.discard()
        n += 1
    await env.close()


def _no_leak(forks: int) -> None:
    async def test() -> None:
        async with ForkServer(preload=("sandbox_worlds",)) as server:
            await _cycles(server, 10)
            fds = open_fds()
            await _cycles(server, forks)
            assert server.live == 0
            assert server._template.process is not None
            with anyio.fail_after(10):
                while descendants(server._template.process.pid):
                    await anyio.sleep(0.01)
            assert abs(open_fds() - fds) <= 2
            zygote = server._template.process.pid
        assert not alive(zygote)

    run(test, 900)


def test_no_leak_after_500_forks() -> None:
    _no_leak(500)


@pytest.mark.slow
def test_no_leak_after_10000_forks() -> None:
    _no_leak(10_000)


def test_300_servers_worth_of_cycles_leave_no_descriptor() -> None:
    """Closing a server gives everything back, whatever was still open."""

    async def test() -> None:
        start = open_fds()
        for _ in range(3):
            server = ForkServer(preload=("sandbox_worlds",))
            env = await server.open(worlds.Faulty, TASK, NOISE)
            await env.reset()
            snapshot = await env.snapshot()
            await snapshot.restore(NOISE)
            assert server._template.process is not None
            tree = [server._template.process.pid, *descendants(server._template.process.pid)]
            assert len(tree) == 4
            await server.close()
            await server.close()
            assert not [pid for pid in tree if alive(pid)]
            with pytest.raises(RuntimeError, match="closed"):
                await server.open(worlds.Faulty, TASK, NOISE)
        assert abs(open_fds() - start) <= 2
        assert not [pid for pid, state in descendants(os.getpid()).items() if state == "Z"]

    run(test)


_TRAINER = """
    import anyio, os, sys, time
    sys.path.insert(0, {here!r})
    import sandbox_worlds as worlds
    from branchpoint.noise import Noise
    from branchpoint.sandbox.forkserver import ForkServer
    from branchpoint.world import Task

    async def main():
        server = ForkServer()
        env = await server.open(worlds.Faulty, Task("t", ""), Noise())
        await env.reset()
        snapshot = await env.snapshot()
        hung = await snapshot.restore(Noise())
        child = (await env.step("spawn")).observation
        pids = [server._template.process.pid, env.worker.pid, snapshot.worker.pid, hung.worker.pid, int(child)]
        print(*pids, flush=True)
        if os.fork() == 0:  # a data loader, say: it must not keep the workers alive
            os.close(1)
            time.sleep(20)
            os._exit(0)
        await hung.step("spin")

    anyio.run(main)
"""


def test_everything_ends_when_the_trainer_is_killed() -> None:
    code = textwrap.dedent(_TRAINER.format(here=str(Path(__file__).parent)))
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 5
        time.sleep(0.3)
        assert all(alive(pid) for pid in pids)
        trainer.kill()
        trainer.wait(10)
        end = time.monotonic() + 15
        while any(alive(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)
        assert not [pid for pid in pids if alive(pid)]
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()  # type: ignore[union-attr]


def test_a_dead_zygote_is_replaced() -> None:
    async def test() -> None:
        async with ForkServer(preload=("sandbox_worlds",)) as server:
            env = await server.open(worlds.Faulty, TASK, NOISE)
            await env.reset()
            assert server._template.process is not None
            os.kill(server._template.process.pid, signal.SIGKILL)
            with pytest.raises(SandboxFailure, match="zygote ended with code -9"):
                await server.open(worlds.Faulty, TASK, NOISE)
            assert (await env.step("ping")).observation == "pong"
            other = await server.open(worlds.Faulty, TASK, NOISE)
            assert (await other.reset()).observation == "ready"

    run(test)


def test_64_live_workers_at_once(server: ForkServer) -> None:
    async def test() -> None:
        env = await server.open("branchpoint.testing.fakes:ProbeWorld", TASK, NOISE)
        await env.reset()
        snapshot = await env.snapshot()
        said: dict[int, str] = {}

        async def one(n: int) -> None:
            branch = await snapshot.restore(NOISE.branch("independent", n))
            await ready.wait()
            said[n] = (await branch.step("event x")).observation
            await branch.close()

        ready = anyio.Event()
        async with anyio.create_task_group() as group:
            for n in range(64):
                group.start_soon(one, n)
            while server.counters.restores % 64 and server.live < 66:
                await anyio.sleep(0.01)
            ready.set()
        assert len(set(said.values())) == 64
        await env.close()
        await snapshot.discard()

    run(test)


def test_a_module_that_leaves_a_thread_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test() -> None:
        async with ForkServer(preload=("threaded_import",)) as server:
            with pytest.raises(SnapshotUnsupported, match="importing threaded_import started a thread"):
                await server.open(worlds.Faulty, TASK, NOISE)

    run(test)


def test_worlds_defined_in_a_script(tmp_path: Path) -> None:
    """What the trainer's own ``__main__`` defines can be opened."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import anyio
        from branchpoint.noise import Noise
        from branchpoint.sandbox.forkserver import ForkServer
        from branchpoint.world import Step, Task

        class Echo:
            def __init__(self, task): ...
            def reset(self): return Step("ready")
            def step(self, action): return Step(action)
            def close(self): ...

        async def main():
            async with ForkServer() as server:
                env = await server.open(Echo, Task("t", ""), Noise())
                print((await env.reset()).observation, (await env.step("hello")).observation)

        if __name__ == "__main__":
            anyio.run(main)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ready hello\n", done.stderr
