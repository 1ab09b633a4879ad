"""A player that knows the game: its maker's walkthrough and, once the game has left that, a plan from where it is."""

from __future__ import annotations

from typing import Literal

from branchpoint.env.textworld import plan
from branchpoint.env.textworld.live import logic
from branchpoint.env.textworld.stories import Story
from branchpoint.world import EnvironmentFailure, Step

Player = Literal["walkthrough", "planner"]


class Expert:
    """Plays one episode; it must see every step of it, from the first on.

    It follows the game by ``Step.info["did"]``, so it notices when another command was played than it answered, and
    plans anew from there. Commands of the walkthrough that are not admissible (a door opened twice) are left out.
    """

    def __init__(self, story: Story, player: Player = "walkthrough") -> None:
        self._story, self._logic = story, logic(story)
        self._facts = self._logic.start()
        self._script = list(story.walkthrough) if player == "walkthrough" else []
        self._said = ""
        self._steps = 0

    def act(self, step: Step) -> str:
        """The next command. Raises EnvironmentFailure when steps were missed."""
        if step.info.get("steps") != self._steps:
            raise EnvironmentFailure(
                f"the expert has seen {self._steps} steps of the game and this one is number {step.info.get('steps')}; "
                "show it every step from the first observation on"
            )
        for command in step.info["did"]:
            self._facts = self._logic.played(self._facts, command)
        if self._said and tuple(step.info["did"]) != (self._said,):
            self._script = []
        self._steps += 1
        while self._script and self._script[0] not in step.actions:
            self._script.pop(0)
        self._said = self._script.pop(0) if self._script else self._plan()
        return self._said

    def _plan(self) -> str:
        """The next command of a plan, ``look`` when there is none: the game is lost, or cannot be won any more."""
        scene = plan.Scene(self._facts.state.facts, self._logic.names)
        try:
            if self._story.recipe:
                return plan.cooked(scene, self._story.recipe)
            return plan.taken(scene, plan.fetch(self._story.quests))
        except plan.Impossible:
            return "look"
