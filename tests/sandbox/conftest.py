from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from branchpoint.sandbox.forkserver import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One fork server for a module: starting an interpreter is what costs."""
    made = ForkServer(preload=("sandbox_worlds",), step_timeout_s=20.0, start_timeout_s=60.0)
    yield made
    anyio.run(made.close)
