"""Scripted agents: one that knows the reference repair and makes it through the actions, one that tries a menu."""

from __future__ import annotations

import re
from collections.abc import Iterator

from branchpoint.env.swe import actions
from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.task import Instance, Recipe
from branchpoint.noise import Noise
from branchpoint.world import Step

_AROUND = 10


class Expert:
    """Plays the reference patch step by step: searches a changed line, views its surroundings, edits hunk by hunk, runs
    the tests that the agent has, submits. ``act`` takes the steps in order, the reset's first."""

    def __init__(self, instance: Instance, recipe: Recipe) -> None:
        self._script = self._plan(instance, recipe)
        self._wanted: tuple[str, diffs.Hunk] | None = None

    def act(self, step: Step) -> str:
        """The next action."""
        return next(self._script, "submit")

    def _plan(self, instance: Instance, recipe: Recipe) -> Iterator[str]:
        for file in diffs.parse(instance.patch):
            path = file.new or file.old or ""
            if file.new is None:
                yield f"run rm -- {path}"
                continue
            if file.old is None:
                new = "".join(file.hunks[0].after)
                yield actions.edit(path, "", new.removesuffix("\n"))
                continue
            for hunk in file.hunks:
                yield from self._repair(path, hunk)
        tests = " ".join(recipe.targets)
        if recipe.kind == "pytest":
            yield f"run python -S -m pytest -q -x --tb=short -o addopts= {tests}"
        yield "submit"

    def _repair(self, path: str, hunk: diffs.Hunk) -> Iterator[str]:
        line = next((text.strip() for text in hunk.before if text not in hunk.after and text.strip()), "")
        if line:
            pattern = re.sub(r"([\\^$.|?*+()\[\]{}\"`])", r"\\\1", line[:60]).replace("'", "'\"'\"'")
            yield f"search '{pattern}' {path}"
        first = max(1, hunk.start - _AROUND)
        yield f"view {path} {first} {hunk.start + len(hunk.before) + _AROUND}"
        old, new = "".join(hunk.before), "".join(hunk.after)
        yield actions.edit(path, old.removesuffix("\n"), new.removesuffix("\n"))


class Searcher:
    """Plays the menu of style ``compact`` from what it sees: applies the edits one by one, in an order keyed by the
    task, runs the tests after each, and submits when they pass or no edit is left."""

    def __init__(self, name: str) -> None:
        self._name, self._order, self._applied = name, None, False

    def act(self, step: Step) -> str:
        """The next action."""
        if self._order is None:
            numbers = [action.split()[1] for action in step.actions if action.startswith("apply ")]
            keys = Noise().at("swe", "searcher", self._name).permutation(len(numbers))
            self._order = [numbers[int(i)] for i in keys]
        if step.observation == "tests pass" or not self._order:  # the last edit needs no test
            return "submit"
        self._applied = not self._applied
        return f"apply {self._order.pop()}" if self._applied else "run"
