"""What a person sees while a run goes on: one bar in a terminal, one line an update elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Screen:
    """Reports of a run."""

    def __init__(self, console: Console, updates: int) -> None:
        self.console, self.updates = console, updates
        self._progress: Progress | None = None
        self._said = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def warm_start(self, row: Mapping[str, float]) -> None:
        """Progress of the supervised part, a line every few seconds."""
        now = time.monotonic()
        if now - self._said > 10 or row["step"] == row["steps"]:
            self._said = now
            self.say(f"  warm start {row['step'] / row['steps']:4.0%}   loss {row['loss']:.3f}")

    @contextmanager
    def bar(self, done: int) -> Iterator[None]:
        """A bar over the updates with the time left; the numbers of each update stand above it."""
        columns = (
            TextColumn("update {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._task = progress.add_task("train", total=self.updates, completed=done)
            yield
        self._progress = None

    def update(self, row: Mapping[str, Any]) -> None:
        """One finished update."""
        self.say(line(row))
        if self._progress is not None:
            self._progress.update(self._task, completed=row["update"])

    def summary(self, rows: Sequence[Mapping[str, Any]], ledger: Mapping[str, float]) -> None:
        """Success before and after on the held-out tasks, and what it cost."""
        evaluated = [r for r in rows if any(k.startswith("eval/") for k in r)]
        if evaluated:
            self.console.print(_before_after(evaluated))
        self.console.print(_costs(ledger))


def line(row: Mapping[str, Any]) -> str:
    parts = [f"update {row['update']:>3}"]
    if "score" in row:
        parts += [
            f"score {row['score']:.3f}",
            f"entropy {row['entropy']:.2f}",
            f"kl {row['kl']:.4f}",
            f"clipped {row['clip_share']:.1%}",
            f"with signal {row['informative']:.0%}",
            f"{row['tokens_per_second']:,.0f} tokens/s",
        ]
    failed = sum(v for k, v in row.items() if k.startswith(("failed/", "eval_failed/")))
    parts += [f"{failed} failed"] if failed else []
    parts += [f"held-out {k.removeprefix('eval/')} {v:.1%}" for k, v in row.items() if k.startswith("eval/")]
    return "  ".join([*parts, f"{row['seconds']:.1f} s"])


def _before_after(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="True success on held-out tasks", title_justify="left")
    for name in (
        "environment",
        f"before (update {rows[0]['update']})",
        f"after (update {rows[-1]['update']})",
        "change",
    ):
        table.add_column(name, justify="left" if name == "environment" else "right")
    for key in sorted(k for k in rows[-1] if k.startswith("eval/")):
        before, after = rows[0].get(key, float("nan")), rows[-1][key]
        table.add_row(
            key.removeprefix("eval/"), f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points"
        )
    return table


def _costs(ledger: Mapping[str, float]) -> Table:
    table = Table(title="Ledger", title_justify="left", show_header=False)
    for key, value in ledger.items():
        if value:
            shown = f"{value:,.1f} s" if key.endswith("_seconds") else f"{value:,}"
            table.add_row(key.removesuffix("_seconds").replace("_", " "), shown)
    return table
