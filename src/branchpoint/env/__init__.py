"""Environments by name. Each module is imported when it is first asked for, so that its optional packages are too.

An environment module holds ``make(task) -> World``, ``tasks(split, n=None, seed=0, **dials) -> tuple[Task, ...]`` and
``expert(task)``, an object whose ``act(step) -> str`` plays from observations alone.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from branchpoint.world import Make, Step, Task

_MODULES = {"backoffice": "branchpoint.env.backoffice", "alfworld": "branchpoint.env.alfworld"}


class Agent(Protocol):
    """Plays one episode: called with every step in turn, answers with the next action."""

    def act(self, step: Step) -> str: ...


def _module(name: str) -> ModuleType:
    if name not in _MODULES:
        raise ValueError(f"no environment {name!r}; known: {', '.join(sorted(_MODULES))}, or 'module:attribute'")
    return import_module(_MODULES[name])


def make(name: str) -> Make:
    """The builder that ``Task.root`` names: a registered environment, or ``module:attribute``.

    Raises ValueError for an unknown name.
    """
    if ":" in name:
        module, attribute = name.split(":", 1)
        return getattr(import_module(module), attribute)
    return _module(name).make


def tasks(name: str, split: str = "train", n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Task, ...]:
    """The tasks of one split of a registered environment; ``n`` of them, drawn by ``seed``, or all."""
    return _module(name).tasks(split, n=n, seed=seed, **dials)


def expert(task: Task) -> Agent:
    """The environment's own scripted agent for a task."""
    return _module(task.root).expert(task)
