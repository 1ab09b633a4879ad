"""The settings of a task."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from branchpoint.world import EnvironmentFailure, Task

Style = Literal["text", "compact"]
Tests = Literal["hidden", "visible"]


class Dials(NamedTuple):
    """``instance``: its id in ``source``; the rest as in :func:`branchpoint.env.swe.tasks`."""

    instance: str
    source: str = "injected"
    style: Style = "text"
    tests: Tests = "hidden"
    choices: int = 4
    max_steps: int = 30
    command_seconds: float = 60.0
    observation: int = 4000
    base: str = "host"

    @classmethod
    def of(cls, task: Task) -> Dials:
        """Of a task's metadata. Raises EnvironmentFailure naming the field that is missing or wrong."""
        given = {name: task.metadata[name] for name in cls._fields if name in task.metadata}
        if "instance" not in given:
            raise EnvironmentFailure(f"task {task.id}: metadata has no 'instance'; make tasks with swe.tasks()")
        dials = cls(**given)
        if problem := dials.problem():
            raise EnvironmentFailure(f"task {task.id}: {problem}")
        return dials

    def problem(self) -> str:
        """What is wrong with a value, naming the dial; empty when nothing is."""
        for name, value in zip(self._fields, self, strict=True):
            known = get_args(_TYPES[name])
            if known and value not in known:
                return f"{name} is {value!r}; use one of {', '.join(map(repr, known))}"
            kinds = (int, float) if _TYPES[name] is float else (_TYPES[name],)
            if not known and (type(value) not in kinds or (not isinstance(value, str) and value <= 0)):
                return f"{name} is {value!r}; use {'a text' if _TYPES[name] is str else 'a positive number'}"
        if self.style == "compact" and self.tests != "visible":
            return "style 'compact' runs the failing tests; set tests to 'visible'"
        return ""


_TYPES: dict[str, Any] = get_type_hints(Dials)
