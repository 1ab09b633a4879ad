"""Named results of checks, and the report that holds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Result:
    """One named check. ``detail`` says what was wrong, or why it was skipped."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All results about one subject. ``ok``: nothing failed."""

    subject: str
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        return all(r.status != "failed" for r in self.results)

    def __str__(self) -> str:
        width = max((len(r.name) for r in self.results), default=0)
        lines = [f"{r.status:>7}  {r.name:<{width}}  {r.detail}".rstrip() for r in self.results]
        counts = {s: sum(r.status == s for r in self.results) for s in ("ok", "failed", "skipped")}
        summary = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        return "\n".join([f"{self.subject}: {summary}", *lines])

    def assert_ok(self) -> None:
        """Raises AssertionError with the whole report when anything failed."""
        if not self.ok:
            raise AssertionError(str(self))


class Checks:
    """Collects results: each check is a function that raises to fail and returns a text to explain a skip."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.results: list[Result] = []

    def run(self, name: str, check: Callable[[], str | None]) -> None:
        try:
            skipped = check()
        except Exception as error:  # any fault of the subject is a result
            self._failed(name, error)
        else:
            self._passed(name, skipped)

    async def run_async(self, name: str, check: Callable[[], Awaitable[str | None]]) -> None:
        try:
            skipped = await check()
        except Exception as error:  # any fault of the subject is a result
            self._failed(name, error)
        else:
            self._passed(name, skipped)

    def _failed(self, name: str, error: Exception) -> None:
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        self.results.append(Result(name, "failed", " ".join(text.split())[:500]))

    def _passed(self, name: str, skipped: str | None) -> None:
        self.results.append(Result(name, "skipped" if skipped else "ok", skipped or ""))

    def report(self) -> Report:
        return Report(self.subject, tuple(self.results))


def expect(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds (also under ``python -O``)."""
    if not condition:
        raise AssertionError(message)
