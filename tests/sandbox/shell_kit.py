"""Machines of the shell sandbox for tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from branchpoint.sandbox import shell
from branchpoint.sandbox.machine import Image


@functools.cache
def missing() -> str:
    """Why there is no shell sandbox here, or ""."""
    return shell.available()


def machines(**settings: Any) -> shell.ShellMachines:
    """A back-end, or a skip that says why there is none. The test closes it."""
    if missing():
        pytest.skip(f"no shell sandbox here: {missing()}")
    return shell.ShellMachines(**settings)


def opened(**settings: Any) -> Iterator[shell.ShellMachines]:
    """For fixtures."""
    made = machines(**settings)
    yield made
    made.close()


def one(box: shell.ShellMachines, **image: Any) -> Any:
    return box.start(Image(**image))
