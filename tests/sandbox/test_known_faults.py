"""Public faults of other libraries, restated: 17 (fork after torch, descriptors, zombies), 19 (descendants of a command
whose time is over), 20 (snapshots that resurrect or keep files) and 22 (seeds)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import sandbox_worlds as worlds
import shell_kit
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


@pytest.fixture(scope="module")
def shells() -> Iterator[Any]:
    yield from shell_kit.opened()


def _tree(machine: Any, place: str) -> str:
    """A listing of all below a folder, with the content of files."""
    listed = f"cd {place} && find . -printf '%P|%y|%m|%n|%l|%T@\\n' | sort"
    return machine.run(f"{listed} && find . -type f -print0 | sort -z | xargs -0 sha256sum").output


OVERDUE = (
    "touch before; (sleep 1; echo late >after.txt) & echo partial; sleep 300",
    "touch before; echo partial; setsid sh -c 'sleep 1; echo late >after.txt'",
    "touch before; echo partial; trap '' TERM; (sleep 1; echo late >after.txt) & while :; do sleep 1; done",
    "touch before; (sleep 1; echo late >after.txt) & echo partial; exec 3<> <(:); read x <&3",
)


def test_19_descendants_end_with_a_command_whose_time_is_over(shells: Any) -> None:
    machines = [shell_kit.one(shells, workdir="/job") for _ in OVERDUE]
    first = []
    for command, machine in zip(OVERDUE, machines, strict=True):
        begun = time.monotonic()
        ran = machine.run(command, seconds=0.5)
        assert time.monotonic() - begun < 20, command
        assert (ran.timed_out, ran.output) == (True, "partial\n"), command
        first.append(machine.freeze())
    time.sleep(1.2)
    for command, machine, frozen in zip(OVERDUE, machines, first, strict=True):
        assert machine.run("ls").output == "before\n", command
        trees = []
        for each in (frozen, machine.freeze()):
            branch = each.thaw()
            trees.append(_tree(branch, "/job"))
            branch.close()
        assert trees[0] == trees[1], command
        machine.close()


def test_20_snapshots_neither_resurrect_nor_keep_files(shells: Any, tmp_path: Any) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    for name in ("d/old", "d/sub/foo", "a.txt"):
        (tmp_path / name).write_text(name)
    machine = shell_kit.one(shells, trees={"/job": tmp_path}, workdir="/job")
    machine.run("rm -r d; mkdir -p d/sub; touch d/new")  # (a)
    first = machine.freeze()
    tree = _tree(machine, "/job")
    for _ in range(2):
        branch = first.thaw()
        assert branch.run("find d | sort").output == "d\nd/new\nd/sub\n"
        assert _tree(branch, "/job") == tree
        branch.run("echo mine >own; rm a.txt")
        branch.close()
    machine.run("touch x")  # (b)
    branch = first.thaw()
    assert branch.run("ls").output == "a.txt\nd\n"
    branch.run("rm a.txt; ln -s d/new a.txt; touch .wh.x .wh..wh..opq d/.wh.new; rm .wh.x")  # (c), (d)
    third = branch.freeze().thaw()
    assert (
        third.run("readlink a.txt; ls -A . d").output == "d/new\n.:\n.wh..wh..opq\na.txt\nd\n\nd:\n.wh.new\nnew\nsub\n"
    )
    third.run("ln d/new hard; mkdir empty; chmod 2750 empty; touch -d @1000000000 d/new")  # (f)
    tree = _tree(third, "/job")
    for n in range(40):  # (e)
        third = third.freeze().thaw()
        assert _tree(third, "/job") == tree, f"depth {n}"


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
