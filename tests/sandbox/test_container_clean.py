"""Containers: nothing is left behind, images of every source, and the sandbox over them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandbox_help import run

from branchpoint.cli import main
from branchpoint.noise import Noise
from branchpoint.sandbox import _container_owner as owner
from branchpoint.sandbox._container_engine import Engine, EngineError
from branchpoint.sandbox.container import Container, ContainerMachines, Limits, reap
from branchpoint.sandbox.machine import Image, Machine
from branchpoint.testing import check_sandbox
from branchpoint.world import SandboxFailure, Step, Task, UserError


@pytest.fixture(scope="module")
def eye(container_engine: str) -> Iterator[Engine]:
    """An engine to look with."""
    made = Engine(container_engine, 60.0)
    yield made
    made.close()


def left(eye: Engine, session: str) -> tuple[int, int]:
    return len(eye.containers({owner.SESSION: session})), len(eye.images({owner.SESSION: session}))


def test_images_live_as_long_as_something_needs_them(container_engine: str, container_root: Path, eye: Engine) -> None:
    machines = ContainerMachines(container_engine)
    image = Image(str(container_root), workdir="/job")
    try:
        machine = machines.start(image)
        machine.run("echo 1 >a")
        first = machine.freeze()
        machine.close()
        branch = first.thaw()
        branch.run("echo 2 >b")
        second = branch.freeze()
        started = left(eye, machines.session)
        first.discard()  # its image is what the second one is built on, and what the branch runs on
        assert left(eye, machines.session) == started
        branch.close()
        assert left(eye, machines.session) == (0, started[1])
        child = second.thaw()
        second.discard()
        assert child.run("cat a b").output == "1\n2\n"
        child.close()
        assert left(eye, machines.session) == (0, started[1] - 2)
        machines.start(image)
        machines.start(image).freeze().thaw()
    finally:
        machines.close()
        machines.close()
    assert left(eye, machines.session) == (0, 0)
    with pytest.raises(SandboxFailure, match="sandbox is closed"):
        machines.start(image)


def test_an_image_without_bash_leaves_nothing(container_engine: str, tmp_path: Path, eye: Engine) -> None:
    with tarfile.open(tmp_path / "bare.tar", "w") as tar:
        entry = tarfile.TarInfo("etc")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
    machines = ContainerMachines(container_engine)
    try:
        with pytest.raises(UserError, match="has no bash"):
            machines.start(Image(str(tmp_path / "bare.tar")))
        assert left(eye, machines.session)[0] == 0
    finally:
        machines.close()
    assert left(eye, machines.session) == (0, 0)


def test_images_by_name_from_docker_save_and_with_volumes(
    container_engine: str, container_root: Path, tmp_path: Path, eye: Engine
) -> None:
    client: Any = eye._client()
    with container_root.open("rb") as stream:
        parts = iter(lambda: stream.read(1 << 20), b"")
        told = client.import_image_from_stream(parts, changes=["ENV FROM_IMAGE=1", "VOLUME /data"])
    made = told.split('"sha256:')[1].split('"')[0]
    client.tag(made, "bp-test", "1")
    saved = tmp_path / "saved.tar"
    saved.write_bytes(b"".join(client.get_image("bp-test:1")))
    machines = ContainerMachines(container_engine)
    try:
        machine = machines.start(Image("bp-test:1"))
        assert machine.run("echo $FROM_IMAGE; echo kept >/data/file").output == "1\n"
        thawed = machine.freeze().thaw()
        assert thawed.run("cat /data/file; echo $FROM_IMAGE").output == "kept\n1\n"
        machines.close()
        assert eye.base("bp-test:1").id.endswith(made)  # the user's own image stays
        eye.remove_image("bp-test:1")
        machines = ContainerMachines(container_engine)
        assert machines.start(Image(str(saved))).run("echo $FROM_IMAGE").output == "1\n"
        machines.close()
        with pytest.raises(EngineError):  # it was loaded, so it goes
            eye.base("bp-test:1")
    finally:
        machines.close()


TRAINER = """
import sys, time
from pathlib import Path
from branchpoint.sandbox.container import ContainerMachines
from branchpoint.sandbox.machine import Image
machines = ContainerMachines(sys.argv[1])
machine = machines.start(Image(sys.argv[2], workdir="/job"))
machine.run("echo 1 >a")
frozen = machine.freeze()
branch = frozen.thaw()
print(machines.session, flush=True)
branch.run("sleep 600", seconds=600)
"""


def test_what_a_killed_trainer_left_is_removed(container_engine: str, container_base: str, eye: Engine) -> None:
    def trainer() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, container_engine, container_base], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    (one, dead), (two, alive) = trainer(), trainer()
    try:
        before = left(eye, dead), left(eye, alive)
        assert before[0] == before[1]
        assert before[0][0] == 2
        one.send_signal(signal.SIGKILL)
        one.wait(10)
        assert left(eye, dead) == before[0]
        ContainerMachines(container_engine).close()  # starting is what removes it
        assert left(eye, dead) == (0, 0)
        assert left(eye, alive) == before[1]
        two.send_signal(signal.SIGKILL)
        two.wait(10)
        assert main(["reap", "--socket", container_engine]) == 0
        assert left(eye, alive) == (0, 0)
        assert reap(container_engine) == (0, 0)
    finally:
        for process in (one, two):
            process.kill()
            process.wait(10)


def test_who_is_dead() -> None:
    mine = owner.me()
    host, boot, namespace, pid, start = mine.split("/")
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not owner.dead(mine)
    assert owner.dead("/".join([host, boot, namespace, str(ended.pid), "1"]))
    assert owner.dead("/".join([host, boot, namespace, pid, start + "0"]))  # the number is another process's now
    assert owner.dead("/".join([host, "another-boot", namespace, pid, start]))
    assert not owner.dead("/".join(["elsewhere", "another-boot", namespace, pid, start]))
    assert not owner.dead("/".join([host, boot, "4026530000", str(ended.pid), "1"]))  # not to be seen from here
    assert not owner.dead("not one of ours")
    zombie = subprocess.Popen(["true"])
    label = "/".join([host, boot, namespace, str(zombie.pid), owner._start(zombie.pid) or "1"])
    while owner._start(zombie.pid):
        pass
    assert owner.dead(label)
    zombie.wait()


def test_a_sweep_goes_from_children_to_parents() -> None:
    """Whatever order the engine lists them in, and though two were made in the same second."""
    parents = {"c": "b", "b": "a", "a": "", "x": ""}
    there = dict.fromkeys(parents, True)

    def remove(image: str) -> None:
        if image == "x" or any(there[i] and parents[i] == image for i in parents):
            raise EngineError("in use")
        there[image] = False

    labels = {owner.OWNER: owner.me()}
    engine: Any = SimpleNamespace(
        containers=lambda _: [],
        images=lambda _: [{"Id": i, "Labels": labels, "Created": 7} for i in "abcx"],
        remove_image=remove,
    )
    assert owner.sweep(engine, {}, only_dead=True) == (0, 0)
    assert owner.sweep(engine, {}, only_dead=False) == (0, 3)
    assert there == {"a": False, "b": False, "c": False, "x": True}


class Notebook:
    """A world that acts through a machine: each action is a command; ``count`` is what its Python side knows."""

    root = ""

    def __init__(self, task: Task) -> None:
        self.image = Image(task.metadata["base"], workdir="/job")
        self.count = 0
        self.machine: Machine | None = None

    def attach(self, machine: Machine) -> None:
        self.machine = machine

    def get_state(self) -> int:
        return self.count

    def set_state(self, state: int) -> None:
        self.count = state

    def reset(self) -> Step:
        return Step("ready")

    def step(self, action: str) -> Step:
        assert self.machine is not None
        self.count += 1
        return Step(f"{self.count}: {self.machine.run(action).output}")

    def close(self) -> None:
        pass


def test_the_sandbox_passes_the_suite_and_branches_worlds(container_engine: str, container_base: str) -> None:
    async def suite() -> None:
        (await check_sandbox(lambda: Container(container_engine))).assert_ok()

    async def branches() -> None:
        sandbox = Container(container_engine, limits=Limits(memory_bytes=256 << 20))
        try:
            env = await sandbox.open(Notebook, Task("t", "", metadata={"base": container_base}), Noise(1, 2))
            await env.reset()
            assert (await env.step("x=5; echo one >file")).observation == "1: "
            snapshot = await env.snapshot()
            forks = [await snapshot.restore(Noise(1, n)) for n in range(2)]
            said = [
                (await fork.step(f"echo {n} >>file; cat file; echo $x")).observation for n, fork in enumerate(forks)
            ]
            assert said == ["2: one\n0\n5\n", "2: one\n1\n5\n"]
            assert (await env.step("cat file")).observation == "2: one\n"
            for each in (env, *forks):
                await each.close()
            await snapshot.discard()
        finally:
            sandbox.close()

    run(suite, 60)
    run(branches, 60)


def test_the_config_makes_the_sandbox(container_engine: str, container_base: str) -> None:
    pytest.importorskip("torch")
    from branchpoint.command import build
    from branchpoint.config import ConfigError, parse

    raw = {"envs": [{"name": "backoffice"}], "sandbox": {"kind": "container", "socket": container_engine}}
    told: list[str] = []
    config = parse(raw | {"sandbox": raw["sandbox"] | {"processes": 33, "output_kb": 1}})  # type: ignore[operator]
    sandbox: Any = build.sandbox(config, told.append)
    try:
        assert told == [f"sandbox: not enforced here: {u}" for u in sandbox.machines.unenforced]
        machine = sandbox.machines.start(Image(container_base))
        assert len(machine.run("head -c 5000 /dev/zero").output) == 1024
        assert sandbox.machines.engine._client().inspect_container(machine.container)["HostConfig"]["PidsLimit"] == 33
    finally:
        sandbox.close()
    with pytest.raises(ConfigError, match=r"sandbox\.processes"):
        parse({"envs": [{"name": "backoffice"}], "sandbox": {"kind": "container", "processes": 1}})
