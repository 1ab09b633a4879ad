from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import container_kit
import pytest

from branchpoint.sandbox._container_engine import Engine
from branchpoint.sandbox.container import ContainerMachines
from branchpoint.sandbox.forkserver import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One fork server for a module: starting an interpreter is what costs."""
    made = ForkServer(preload=("sandbox_worlds",), step_timeout_s=20.0, start_timeout_s=60.0)
    yield made
    anyio.run(made.close)


@pytest.fixture(scope="session")
def container_engine() -> Iterator[str]:
    """The socket of a container engine."""
    with container_kit.engine() as socket:
        yield socket


@pytest.fixture(scope="session")
def container_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tar of a small root file system."""
    return container_kit.rootfs(tmp_path_factory.mktemp("rootfs") / "root.tar")


@pytest.fixture(scope="session")
def container_base(container_engine: str, container_root: Path) -> str:
    """The id of an image with that root file system, which the engine keeps to its end."""
    engine = Engine(container_engine, 60.0)
    with container_root.open("rb") as stream:
        made = engine.import_(iter(lambda: stream.read(1 << 20), b""), {}, "bp-test-base:1")
    engine.close()
    return made


@pytest.fixture(scope="module")
def containers(container_engine: str) -> Iterator[ContainerMachines]:
    """One back-end for a module. It leaves nothing behind."""
    made = ContainerMachines(container_engine)
    yield made
    made.close()
    rest = Engine(container_engine, 30.0)
    assert rest.containers({"branchpoint.session": made.session}) == []
    assert rest.images({"branchpoint.session": made.session}) == []
    rest.close()
