"""Counting as an environment of one's own: what ``branchpoint probe`` is tried on."""

from __future__ import annotations

from branchpoint.testing import CounterWorld
from branchpoint.world import Step, Task

make = CounterWorld


def tasks(split: str, n: int | None = None, seed: int = 0) -> tuple[Task, ...]:
    first = {"train": 1, "validation": 4}[split]
    return tuple(
        Task(f"{split}{i}", "count_kit:make", metadata={"target": first + i, "limit": 6})
        for i in range(3 if n is None else n)
    )


class Expert:
    def __init__(self, target: int) -> None:
        self.left = target

    def act(self, step: Step) -> str:
        self.left -= 1
        return "up" if self.left >= 0 else "stop"


def expert(task: Task) -> Expert:
    return Expert(task.metadata["target"])
