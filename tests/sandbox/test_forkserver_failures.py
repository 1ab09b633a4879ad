"""Every way a worker can go wrong is a typed failure of its branch, and of nothing else. Real processes."""

from __future__ import annotations

import os
import re
import signal

import anyio
import pytest
import sandbox_worlds as worlds
from sandbox_help import alive, run

from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkEnv, ForkServer
from branchpoint.world import (
    BranchFailure,
    EnvironmentFailure,
    Failure,
    GraderFailure,
    SandboxFailure,
    Step,
    Task,
)

NOISE = Noise(1, 2)


def task(**metadata: object) -> Task:
    return Task("t", "sandbox_worlds:Faulty", metadata=metadata)


async def started(server: ForkServer, **metadata: object) -> ForkEnv:
    env = await server.open(worlds.Faulty, task(**metadata), NOISE)
    await env.reset()
    return env


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("nosuch", EnvironmentFailure, "AttributeError while in step: .*do_nosuch"),
        ("sysexit", EnvironmentFailure, "SystemExit while in step: 4"),
        ("interrupt", EnvironmentFailure, "KeyboardInterrupt"),
        ("segfault", SandboxFailure, "signal 11, SIGSEGV"),
        ("closefds", SandboxFailure, "the worker process died in step"),
        ("info", EnvironmentFailure, "info must hold JSON values: object"),
        ("bytes", EnvironmentFailure, "observation is bytes; expected str"),
    ],
)
def test_failure_is_typed_and_leaves_the_snapshot(
    server: ForkServer, action: str, kind: type[BranchFailure], message: str
) -> None:
    async def test() -> None:
        env = await started(server)
        snapshot = await env.snapshot()
        bad = await snapshot.restore(NOISE)
        with pytest.raises(kind, match=message) as caught:
            await bad.step(action)
        assert type(caught.value) is kind
        assert not alive(bad.worker.pid)
        with pytest.raises(RuntimeError, match="has failed"):
            await bad.step("ping")
        good = await snapshot.restore(NOISE)
        assert (await good.step("ping")).observation == "pong"
        assert (await env.step("ping")).observation == "pong"
        for each in (bad, good, env):
            await each.close()

    run(test)


@pytest.mark.parametrize("action", ["hang", "spin"])
def test_hang_is_cut_and_the_process_ended(server: ForkServer, action: str) -> None:
    async def test() -> None:
        env = await started(server)
        snapshot = await env.snapshot()
        bad = await snapshot.restore(NOISE)
        server.step_timeout_s = 0.5
        try:
            with pytest.raises(SandboxFailure, match=r"step took longer than its limit of 0\.5 s"):
                await bad.step(action)
        finally:
            server.step_timeout_s = 20.0
        assert not alive(bad.worker.pid)
        good = await snapshot.restore(NOISE)
        assert (await good.step("ping")).observation == "pong"
        await env.close()

    run(test)


def test_a_hang_blocks_no_other_branch(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        snapshot = await env.snapshot()
        bad, good = await snapshot.restore(NOISE), await snapshot.restore(NOISE)
        answers = []
        async with anyio.create_task_group() as group:

            async def hang() -> None:
                with pytest.raises(SandboxFailure, match="killed by signal 9"):
                    await bad.step("hang")

            group.start_soon(hang)
            for _ in range(20):
                answers.append((await good.step("ping")).observation)
            os.kill(bad.worker.pid, signal.SIGKILL)
        assert answers == ["pong"] * 20
        await env.close()

    run(test)


def test_cancelled_step_ends_its_process(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        with anyio.move_on_after(0.3) as scope:
            await env.step("hang")
        assert scope.cancelled_caught
        await env.worker.gone()
        assert not alive(env.worker.pid)
        await env.close()

    run(test)


@pytest.mark.parametrize(
    ("fail", "kind", "message"),
    [
        ("make", EnvironmentFailure, "OSError while building the environment: no such game file"),
        ("exit", SandboxFailure, "exited with code 7"),
        ("hang", SandboxFailure, "open took longer than its limit of 1 s"),
    ],
)
def test_failures_of_building(server: ForkServer, fail: str, kind: type[BranchFailure], message: str) -> None:
    async def test() -> None:
        live = server.live
        server.start_timeout_s = 1.0 if fail == "hang" else 60.0
        try:
            with pytest.raises(kind, match=message):
                await server.open(worlds.Faulty, task(fail=fail), NOISE)
        finally:
            server.start_timeout_s = 60.0
        assert server.live == live
        await (await started(server)).close()

    run(test)


def test_failure_of_the_first_reset(server: ForkServer) -> None:
    async def test() -> None:
        env = await server.open(worlds.Faulty, task(fail="reset"), NOISE)
        with pytest.raises(EnvironmentFailure, match="KeyError while in reset"):
            await env.reset()
        await env.close()

    run(test)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("sandbox_worlds:nothing", "AttributeError while importing 'sandbox_worlds:nothing'"),
        ("no_such_module_1:make", "ModuleNotFoundError while importing"),
        ("sandbox_worlds", "expected 'module:attribute'"),
        ("sandbox_worlds:__doc__", "is a str, not something that builds a world"),
        ("sandbox_worlds:boom", "RuntimeError while building the environment: boom"),
    ],
)
def test_builders_that_cannot_be_found(server: ForkServer, make: str, message: str) -> None:
    async def test() -> None:
        with pytest.raises(EnvironmentFailure, match=re.escape(message)):
            await server.open(make, task(), NOISE)

    run(test)


def test_builder_that_cannot_be_sent(server: ForkServer) -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="pass a function or class of a module, or 'module:attribute'"):
            await server.open(lambda t: worlds.Faulty(t), task(), NOISE)

    run(test)


def test_killed_snapshot_and_killed_env(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        doomed, kept = await env.snapshot(), await env.snapshot()
        os.kill(doomed.worker.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailure, match=r"died in fork: killed by signal 9, SIGKILL"):
            await doomed.restore(NOISE)
        os.kill(env.worker.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailure, match=r"died in step: killed by signal 9, SIGKILL"):
            await env.step("ping")
        good = await kept.restore(NOISE)
        assert (await good.step("ping")).observation == "pong"
        await good.close()

    run(test)


def test_refused_fork_leaves_the_environment_usable(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        await env.step("exhaust")
        for _ in range(3):
            with pytest.raises(SandboxFailure, match=r"fork failed: .*Resource temporarily unavailable"):
                await env.snapshot()
        assert (await env.step("ping")).observation == "pong"
        await env.close()

    run(test)


def test_memory_limit() -> None:
    async def test() -> None:
        async with ForkServer(memory_bytes=100 << 20) as server:
            env = await started(server)
            snapshot = await env.snapshot()
            assert (await env.step("allocate 40")).observation == "allocated"
            with pytest.raises(SandboxFailure, match=r"out of memory while in step.*memory_bytes"):
                await env.step("allocate 200")
            branch = await snapshot.restore(NOISE)
            with pytest.raises(SandboxFailure, match="out of memory"):
                await branch.step("allocate 200")
            other = await snapshot.restore(NOISE)
            assert (await other.step("allocate 40")).observation == "allocated"

    run(test)


def test_output_and_large_answers_do_not_disturb_the_protocol(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        assert (await env.step("flood 2000")).observation == "flooded"
        assert len((await env.step("big 5000000")).observation) == 5_000_000
        assert (await env.step("ping")).observation == "pong"
        long = await env.step("numpy")
        assert long == Step("x", 0.5, info={"a": [0, 1, 2], "b": 2.0})
        await env.close()

    run(test)


def test_closing_ends_what_the_environment_started(server: ForkServer) -> None:
    async def test() -> None:
        env = await started(server)
        pid = int((await env.step("spawn")).observation)
        assert alive(pid)
        await env.close()
        with anyio.fail_after(30):
            while alive(pid):
                await anyio.sleep(0.01)

    run(test)


def test_an_environment_that_dies_takes_what_it_started_with_it(server: ForkServer) -> None:
    """By then its parent has waited for it: the trainer can no longer name its process group."""

    async def test() -> None:
        env = await started(server)
        snapshot = await env.snapshot()
        branch = await snapshot.restore(NOISE)
        for each in (env, branch):
            pid = int((await each.step("spawn")).observation)
            with pytest.raises(SandboxFailure, match="signal 11"):
                await each.step("segfault")
            with anyio.fail_after(30):
                while alive(pid):
                    await anyio.sleep(0.01)
        good = await snapshot.restore(NOISE)
        assert (await good.step("ping")).observation == "pong"
        await good.close()

    run(test)


def test_siblings_with_rewards_and_failures_known_fault_18(server: ForkServer) -> None:
    """Four siblings, one of which times out, dies, or has no score: the other three have their rewards."""

    async def play(env: ForkEnv, action: str, rewards: list[float | Failure], i: int) -> None:
        try:
            rewards[i] = (await env.step(action)).reward
        except BranchFailure as error:
            rewards[i] = Failure(error.kind, str(error))
        finally:
            await env.close()

    async def test() -> None:
        for fault, kind in (("hang", "sandbox"), ("exit", "sandbox"), ("raise", "environment"), ("nan", "grader")):
            env = await server.open("branchpoint.testing.fakes:ProbeWorld", task(), NOISE)
            await env.reset()
            snapshot = await env.snapshot()
            server.step_timeout_s = 1.0 if fault == "hang" else 20.0
            rewards: list[float | Failure] = [0.0] * 4
            async with anyio.create_task_group() as group:
                for i, action in enumerate(("end", "add a", fault, "end")):
                    branch = await snapshot.restore(NOISE)

                    group.start_soon(play, branch, action, rewards, i)
            assert [rewards[i] for i in (0, 1, 3)] == [1.0, 0.0, 1.0]
            failed = rewards[2]
            assert isinstance(failed, Failure)
            assert failed.kind == kind
            server.step_timeout_s = 20.0
            await env.close()
            await snapshot.discard()

    run(test)


def test_unscored_is_a_grader_failure(server: ForkServer) -> None:
    async def test() -> None:
        env = await server.open("branchpoint.testing.fakes:ProbeWorld", task(), NOISE)
        await env.reset()
        with pytest.raises(GraderFailure, match="reward is nan"):
            await env.step("nan")
        await env.close()

    run(test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_timeout_s": 0.0}, "step_timeout_s is 0.0"),
        ({"start_timeout_s": -1.0}, "start_timeout_s is -1.0"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"rebase_depth": 1}, "rebase_depth is 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForkServer(**arguments)  # type: ignore[arg-type]


def test_failed_preload() -> None:
    async def test() -> None:
        server = ForkServer(preload=("no_such_module_2",))
        with pytest.raises(EnvironmentFailure, match="preloading no_such_module_2"):
            await server.start()
        await server.close()

    run(test)
