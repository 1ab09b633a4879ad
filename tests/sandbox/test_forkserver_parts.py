"""The parts of the fork server below its public face: messages, plain forks, late imports, the reaper."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import textwrap

import anyio
import pytest
import sandbox_worlds as worlds
from sandbox_help import alive, descendants, run

from branchpoint.noise import Noise
from branchpoint.sandbox import _wire
from branchpoint.sandbox._drive import globals_seed
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.world import SandboxFailure, Task

NOISE = Noise(1, 2)


def test_messages_are_put_together_however_they_arrive() -> None:
    luck = random.Random(0)
    bodies = [luck.randbytes(luck.choice([0, 1, 3, 4, 5, 300])) for _ in range(200)]
    stream = b"".join(map(_wire.frame, bodies))
    inbox, got = _wire.Inbox(), []
    while stream:
        n = luck.randint(1, 400)
        inbox.data += stream[:n]
        stream = stream[n:]
        while (body := inbox.take()) is not None:
            got.append(body)
    assert got == bodies
    assert inbox.missing == 0
    inbox.data += _wire.frame(b"12345")[:6]
    assert (inbox.take(), inbox.missing) == (None, 3)
    inbox.data[:4] = b"\xff" * 4
    with pytest.raises(SandboxFailure, match="the limit is"):
        inbox.take()


def test_an_inbox_closes_the_descriptors_it_forgets() -> None:
    read, write = os.pipe()
    inbox = _wire.Inbox()
    inbox.fds.append(write)
    inbox.clear()
    assert os.read(read, 1) == b""  # the last writer is gone
    os.close(read)


@pytest.mark.parametrize("noise", [Noise(), Noise(1, 2, True), Noise(-5, 2**127, False)])
def test_the_luck_of_a_fork_survives_the_wire(noise: Noise) -> None:
    body = _wire.fork_request(noise, 77)[_wire.HEADER.size :]
    assert _wire.fork_luck(body) == [77, noise.seed, noise.own, noise.clean]
    assert _wire.fork_luck(_wire.fork_request(None, 0)[_wire.HEADER.size :]) is None


def test_a_plain_fork_is_an_exact_copy() -> None:
    """``random`` goes on in parent and child alike; ``os.fork`` gives the child a new seed."""
    code = """
        import os, random, sys
        from branchpoint.sandbox._fork import fork
        from branchpoint.sandbox._guard import children
        os.register_at_fork(after_in_child=lambda: print("a hook ran", flush=True))
        random.seed(1)
        pid = fork()
        if pid == 0:
            print("child", random.random(), flush=True)
            os._exit(3)
        assert children() == [pid]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert children() == []
        print("parent", random.random(), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    expected = random.Random(1).random()
    assert done.stdout.splitlines() == [f"child {expected}", f"parent {expected}"]


def test_a_refused_plain_fork_raises() -> None:
    code = """
        import os, resource
        from branchpoint.sandbox._fork import fork
        if os.getuid() == 0:
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            fork()
        except OSError as error:
            print(type(error).__name__, error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "BlockingIOError 11\n"


_LATE = """
    import random, sys
    from branchpoint.noise import Noise
    from branchpoint.world import Step

    class Late:
        def __init__(self, task): ...
        def reset(self): return Step(str("numpy" in sys.modules))
        def step(self, action):
            import numpy as np
            return Step(f"{np.random.random()} {random.random()}")
        def close(self): ...
"""


def test_generators_imported_after_a_restore_are_seeded(tmp_path: os.PathLike[str], monkeypatch) -> None:
    """A worker imports numpy only when its world does, and it makes no difference to the draws."""
    np = pytest.importorskip("numpy")
    path = os.path.join(tmp_path, "late_world.py")
    with open(path, "w") as f:
        f.write(textwrap.dedent(_LATE))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test() -> None:
        async with ForkServer() as server:
            env = await server.open("late_world:Late", Task("t", "t"), NOISE)
            assert (await env.reset()).observation == "False"
            snapshot = await env.snapshot()
            for noise in (Noise(5, 6), Noise(5, 7)):
                branch = await snapshot.restore(noise)
                seed = globals_seed(noise)
                expected = f"{np.random.RandomState(seed & 0xFFFFFFFF).random()} {random.Random(seed).random()}"
                assert (await branch.step("draw")).observation == expected

    run(test)


def test_own_forks_are_reaped_beside_a_dead_child_of_the_environment(server: ForkServer) -> None:
    """It keeps its exit status for the environment, and hides none of ours, which must not stay zombies."""

    async def test() -> None:
        env = await server.open(worlds.Holder, Task("t", "t"), NOISE)
        await env.reset()
        snapshots = [await env.snapshot() for _ in range(3)]
        dead = int((await env.step("dead")).observation)
        for snapshot in snapshots:
            await snapshot.discard()
        with anyio.fail_after(5):
            while set(descendants(env.worker.pid)) != {dead}:
                await anyio.sleep(0.01)
        assert (await env.step("reap")).observation == "0"
        await (await env.snapshot()).discard()
        await env.close()

    run(test)


def test_ending_an_environment_ends_no_snapshot(server: ForkServer) -> None:
    """Every worker has a process group of its own from the moment that the trainer knows it."""

    async def test() -> None:
        env = await server.open(worlds.Faulty, Task("t", "t"), NOISE)
        await env.reset()
        for _ in range(20):
            snapshot = await env.snapshot()
            assert os.getpgid(snapshot.worker.pid) == snapshot.worker.pid
            other = await snapshot.restore(NOISE)
            assert os.getpgid(other.worker.pid) == other.worker.pid
            env.worker.kill("the test")  # its whole group
            await env.worker.gone()
            assert alive(snapshot.worker.pid)
            await snapshot.discard()
            assert (await other.step("ping")).observation == "pong"
            env = other
        await env.close()

    run(test)


def test_a_request_that_was_cut_ends_the_worker(server: ForkServer) -> None:
    async def test() -> None:
        env = await server.open(worlds.Faulty, Task("t", "t"), NOISE)
        pid = env.worker.pid
        env.worker.sock.send(_wire.frame(b"longer than what follows")[:8])
        env.worker.sock.shutdown(socket.SHUT_WR)
        with anyio.fail_after(5):
            while alive(pid):
                await anyio.sleep(0.01)
        await env.close()

    run(test)
