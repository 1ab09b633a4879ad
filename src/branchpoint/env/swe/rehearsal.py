"""The menu of style ``compact`` without a machine, for expert episodes to learn from.

What the tests would say is known from validation: they fail with the bug and pass with its reverse. Any other edit of
the menu is taken to leave them failing.
"""

from __future__ import annotations

from branchpoint.env.swe import sources
from branchpoint.env.swe.compact import Menu
from branchpoint.env.swe.dials import Dials
from branchpoint.env.swe.expert import Searcher
from branchpoint.env.swe.task import ROOT
from branchpoint.world import Step, Task, Transcript


class Rehearsal:
    """One episode; what it shows and rewards is what the world with a machine would."""

    def __init__(self, task: Task) -> None:
        dials = Dials.of(task)
        instance = sources.instance(dials.source, dials.instance)
        tree = sources.find(dials.source).image(instance).trees[ROOT]
        self._menu, self._most = Menu.of(instance, tree, dials.choices), dials.max_steps
        self._steps, self._applied = 0, 0

    def reset(self) -> Step:
        return self._step(self._menu.opening())

    def step(self, action: str) -> Step:
        self._steps += 1
        name, number = self._menu.parse(action)
        right = self._applied == self._menu.right
        match name:
            case "view":
                return self._step(self._menu.view(number))
            case "apply":
                self._applied = number
                return self._step(f"applied {number}")
            case "run":
                return self._step("tests pass" if right else "tests fail")
            case "submit":
                said = "resolved" if right else "not resolved"
                return Step(said, float(right), done=True, info={"success": right})
        return self._step("no such action")

    def close(self) -> None: ...

    def _step(self, said: str) -> Step:
        over = self._steps >= self._most
        return Step(said, truncated=over, actions=() if over else self._menu.actions())


def rehearse(task: Task) -> Transcript | None:
    """The :class:`~branchpoint.env.swe.expert.Searcher`'s episode, or None when it does not win."""
    world, agent, turns = Rehearsal(task), Searcher(task.id), []
    step = world.reset()
    while not (step.done or step.truncated):
        turns.append((step, agent.act(step)))
        step = world.step(turns[-1][1])
    return (task, turns) if step.reward else None
