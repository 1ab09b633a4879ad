"""What a run has spent. One ledger in every run and comparison, so that "matched compute" names a column."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Ledger:
    """Counters since the start of the run. Counts are exact and repeatable; ``*_seconds`` are clocks and are not: of
    each, the wall time during which at least one such thing was going on.

    What was done twice counts twice: a branch that is retried books its steps, tokens, snapshots, restores and refused
    forks again. ``generated_tokens``: sampled by the policy, those of failed branches and of actions that failed
    half-way included. ``prompt_tokens``: observations. ``warm_start_tokens``: of the expert's rows, each epoch counted.
    ``trained_packed`` / ``trained_flat``: tokens of the rows that were learnt from, counted once a batch however many
    epochs it took: shared ones once / once per leaf. ``forks_refused``: no snapshot could be taken there.
    """

    returns: int = 0
    env_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    warm_start_tokens: int = 0
    trained_packed: int = 0
    trained_flat: int = 0
    snapshots: int = 0
    restores: int = 0
    forks_refused: int = 0
    discarded_branches: int = 0
    retried_branches: int = 0
    batches: int = 0
    snapshot_seconds: float = 0.0
    restore_seconds: float = 0.0
    environment_seconds: float = 0.0
    generation_seconds: float = 0.0
    learning_seconds: float = 0.0
    wall_seconds: float = 0.0
    _running: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False, compare=False)

    @contextmanager
    def clock(self, column: str) -> Iterator[None]:
        """Add the seconds of the block to a ``*_seconds`` column; blocks that run at the same time count once."""
        count, start = self._running.get(column, (0, 0.0))
        self._running[column] = (count + 1, start if count else time.perf_counter())
        try:
            yield
        finally:
            count, start = self._running[column]
            self._running[column] = (count - 1, start)
            if count == 1:
                setattr(self, column, getattr(self, column) + time.perf_counter() - start)

    def as_dict(self) -> dict[str, int | float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}

    def counts(self) -> dict[str, int]:
        """The repeatable columns."""
        columns = self.as_dict().items()
        return {k: int(v) for k, v in columns if not k.endswith("_seconds")}

    def restore(self, values: dict[str, int | float]) -> None:
        """Continue from a saved ledger. Raises ValueError for an unknown column."""
        known = self.as_dict()
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"ledger has no column {name!r}; columns: {', '.join(sorted(known))}")
            setattr(self, name, value)
