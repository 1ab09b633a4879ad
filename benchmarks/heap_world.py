"""The world of the fork benchmark, in a module that imports no more than a world does."""

from __future__ import annotations

from typing import Any

from branchpoint.world import Step, Task

_BYTES_PER_ROW = 190  # of one tuple with its string and two integers, measured


class HeapWorld:
    """A world with a heap of so many megabytes. ``touch`` writes to one object in a hundred."""

    def __init__(self, task: Task) -> None:
        megabytes = int(task.metadata["megabytes"])
        if task.metadata.get("kind") == "array":
            import numpy as np

            self.heap: Any = np.ones(megabytes << 17)
        else:
            self.heap = [(n + 1000, n + 2000, f"object {n}") for n in range((megabytes << 20) // _BYTES_PER_ROW)]

    def reset(self) -> Step:
        return Step("ready")

    def step(self, action: str) -> Step:
        return Step(action)

    def close(self) -> None: ...
