"""One thread a process, set before numpy and torch start their pools: repeatable to the last bit."""

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

LONGEST = (
    "swe_grade",
    "swe_verified",
    "swe_world",
    "resume",
    "shell",
    "scienceworld",
    "container",
    "textworld",
    "alfworld",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that of two processes none is left alone with one (``--no-loadscope-reorder``)."""
    place = {f"test_{name}": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
