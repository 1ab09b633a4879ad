"""Times calls by processor and by wall."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Adds up processor and wall time of the calls it makes."""

    def __init__(self) -> None:
        self.calls, self.processor, self.wall = 0, 0.0, 0.0

    def time(self, call: Callable[[], T]) -> T:
        processor, wall = time.process_time(), time.perf_counter()
        result = call()
        self.processor += time.process_time() - processor
        self.wall += time.perf_counter() - wall
        self.calls += 1
        return result

    def rates(self) -> dict[str, float]:
        return {"calls": self.calls, "by_processor": self.calls / self.processor, "by_wall": self.calls / self.wall}
