"""The settings of a task."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from branchpoint.env.webshop.goals import Source, goals
from branchpoint.env.webshop.reward import Rule
from branchpoint.world import EnvironmentFailure, Task

Style = Literal["text", "text_rich", "compact"]
Reward = Literal["score", "success"]
Queries = Literal["goal", "open"]


class Dials(NamedTuple):
    """``goal``: its place among the goals of ``source`` under ``price_seed``; the rest as in :func:`webshop.tasks`."""

    goal: int
    source: Source = "synthetic"
    price_seed: int = 0
    style: Style = "text"
    reward: Reward = "score"
    option_rule: Rule = "pairs"
    queries: Queries = "goal"
    show_attributes: bool = False
    search_anywhere: bool = True
    mark: bool = False
    max_steps: int = 15

    @classmethod
    def of(cls, task: Task) -> Dials:
        """Of a task's metadata. Raises EnvironmentFailure naming the field that is missing or wrong."""
        given = {name: task.metadata[name] for name in cls._fields if name in task.metadata}
        if "goal" not in given:
            raise EnvironmentFailure(f"task {task.id}: metadata has no 'goal'; make tasks with webshop.tasks()")
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
            if not known and type(value) is not _TYPES[name]:
                return f"{name} is {value!r}; use {'true or false' if _TYPES[name] is bool else 'an integer'}"
        if self.style == "compact" and (self.queries == "open" or self.show_attributes):
            return "style 'compact' has no open queries and no attribute pages; leave both dials as they are"
        if self.mark and self.style != "compact":
            return "mark is true; only style 'compact' marks what the goal names"
        if self.max_steps < 1:
            return f"max_steps is {self.max_steps}; use a positive integer"
        if not 0 <= self.goal < len(goals(self.source, self.price_seed)):
            return f"goal is {self.goal}; there are {len(goals(self.source, self.price_seed))} {self.source} goals"
        return ""


_TYPES: dict[str, Any] = get_type_hints(Dials)
