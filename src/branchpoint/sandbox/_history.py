"""What a fork server's environments went through: enough to repeat it in another process, and to see a difference."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from branchpoint.noise import Noise
from branchpoint.world import SnapshotUnsupported, Task

if TYPE_CHECKING:
    from branchpoint.sandbox._worker import Worker
    from branchpoint.sandbox.forkserver import ForkSnapshot

Origin = tuple[dict[str, Any], Task]
"""How a world is built, and for which task."""


@dataclass(slots=True)
class Counters:
    """What a fork server has done since it was made; ``seconds`` are wall-clock, waiting included.

    ``rebases`` and ``repeats``: restores that repeated a history, to get nearer to the zygote and for want of a fork.
    """

    opens: int = 0
    snapshots: int = 0
    restores: int = 0
    rebases: int = 0
    repeats: int = 0
    forks: int = 0
    failures: int = 0
    open_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """What happened to a lineage, as a list linked towards its origin. ``argument`` of ``open``: origin and luck."""

    before: Event | None
    call: str  # open, reset, step, noise
    argument: Any
    answer: str = ""  # fingerprint
    frozen: list[weakref.ref[ForkSnapshot]] = field(default_factory=list)  # snapshots taken at this point

    @property
    def opened(self) -> tuple[Origin, Noise]:
        """Where the lineage began."""
        event = self
        while event.before is not None:
            event = event.before
        return event.argument

    def since(self, deepest: int) -> tuple[Worker | None, list[Event]]:
        """The nearest frozen process of the lineage at most so many forks deep, if any, and what came after it (or
        after the opening)."""
        event, after = self, []
        while True:
            for snapshot in (reference() for reference in event.frozen):
                if snapshot is not None and snapshot.alive and snapshot.depth <= deepest:
                    return snapshot.worker, after[::-1]
            if event.before is None:
                return None, after[::-1]
            after.append(event)
            event = event.before


def compare(events: Sequence[Event], answers: Sequence[str]) -> None:
    """Raises SnapshotUnsupported, naming the first step that was answered differently."""
    steps = 0
    for event, answer in zip(events, answers, strict=True):
        steps += event.call == "step"
        if event.answer != answer:
            where = "reset" if event.call == "reset" else f"step {steps} of the repetition ({event.argument!r:.200})"
            raise SnapshotUnsupported(
                f"the world does not repeat itself: {where} was answered differently; make it deterministic under its "
                "noise, or declare deterministic = False"
            )
