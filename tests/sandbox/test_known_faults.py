"""Public faults of other libraries, restated: 17 (fork after torch, descriptors, zombies) and 22 (seeds)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import anyio
import pytest
import sandbox_worlds as worlds
from sandbox_help import descendants, open_fds, run

from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkEnv, ForkServer
from branchpoint.testing.fakes import FakePolicy
from branchpoint.world import Step, Task

NOISE = Noise(1, 2)
TASK = Task("t", "tests", seed=42)

_AFTER_TORCH = """
    import socket, sys, threading, time
    sys.path[:0] = {path!r}
    import anyio, torch
    import sandbox_worlds as worlds
    from branchpoint.noise import Noise
    from branchpoint.sandbox.forkserver import ForkServer
    from branchpoint.world import Task

    torch.set_num_threads(2)
    torch.einsum("ij,jk->ik", torch.ones(500, 100), torch.ones(100, 500))
    lock = threading.Lock()
    threading.Thread(target=lambda: (lock.acquire(), time.sleep(600)), daemon=True).start()
    pair = socket.socketpair()

    async def main():
        async with ForkServer(preload=("torch",)) as server:
            env = await server.open(worlds.Matmul, Task("t", ""), Noise())
            await env.reset()
            for _ in range(3):
                env = await (await env.snapshot()).restore(Noise())
                print((await env.step("mul")).observation, (await env.step("grad")).observation, flush=True)

    anyio.run(main)
"""


def test_17_a_trainer_that_has_used_torch_and_threads() -> None:
    """Restored workers multiply matrices and run backward, with torch and with numpy, within the time limit."""
    pytest.importorskip("torch")
    code = textwrap.dedent(_AFTER_TORCH.format(path=sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["125000.0 125000.0 2500.0"] * 3, done.stderr


def test_17_cycles_of_create_fork_kill_close(server: ForkServer) -> None:
    """Create, fork two, kill one with SIGKILL, close: no descriptor is left, and no child is a zombie."""

    async def test() -> None:
        start = 0
        for n in range(60):
            env = await server.open(worlds.Faulty, TASK, NOISE)
            await env.reset()
            snapshot = await env.snapshot()
            forks = [await snapshot.restore(NOISE) for _ in range(2)]
            os.kill(forks[n % 2].worker.pid, signal.SIGKILL)
            for each in (*forks, env):
                await each.close()
            await snapshot.discard()
            start = start or open_fds()
        assert abs(open_fds() - start) <= 2
        assert server._template.process is not None
        with anyio.fail_after(10):
            while descendants(server._template.process.pid):
                await anyio.sleep(0.01)
        assert not [p for p, state in descendants(os.getpid()).items() if state == "Z"]

    run(test)


async def _trajectory(env: ForkEnv) -> list[str]:
    await env.reset()
    said = [(await env.step(action)).observation for action in ("random", "numpy", "event x", "set", "luck")]
    await env.close()
    return said


def test_22_siblings_differ_and_equal_keys_agree_in_any_order_and_process() -> None:
    """Eight siblings differ; each is the same in two servers, opened in reverse order."""

    async def test() -> None:
        found: list[dict[int, list[str]]] = []
        for order in (range(8), reversed(range(8))):
            async with ForkServer(preload=("sandbox_worlds",)) as server:
                said = {}
                for n in order:
                    env = await server.open(worlds.Lucky, TASK, NOISE.branch("independent", n))
                    said[n] = await _trajectory(env)
                found.append(said)
        assert found[0] == found[1]
        for i in range(3):
            assert len({said[i] for said in found[0].values()}) == 8

    run(test)


def test_22_the_order_of_sets_is_that_of_every_other_worker(server: ForkServer) -> None:
    """Without PYTHONHASHSEED in the trainer, two servers still agree on the order of a set of strings."""
    assert "PYTHONHASHSEED" not in os.environ

    async def test() -> None:
        said = []
        for each in (server, ForkServer(preload=("sandbox_worlds",))):
            env = await each.open(worlds.Lucky, TASK, NOISE)
            said.append(await _trajectory(env))
            if each is not server:
                await each.close()
        assert said[0] == said[1]

    run(test)


def test_22_siblings_of_a_uniform_policy_are_not_one_text() -> None:
    policy = FakePolicy([f"w{n}" for n in range(1000)], seed=3)
    step = Step("go")

    async def test() -> None:
        actions = []
        for n in range(8):
            noise = NOISE.branch("independent", n)
            actions.append((await policy.open().act(policy.observe(TASK, step, True), step, noise, 8)).text)
        assert len(set(actions)) == 8

    run(test)
