"""MiniGrid and BabyAI as text: the agent's own view in words, seven actions by name, BabyAI's bot as expert.

:func:`tasks` takes ``level`` (any id of the package, e.g. ``BabyAI-GoToLocal-v0``, ``MiniGrid-DoorKey-5x5-v0``) and
the dials of :mod:`branchpoint.env.gym`. Needs ``pip install "branchpoint[minigrid]"``.
"""

from __future__ import annotations

from typing import Any

from branchpoint.env import gym
from branchpoint.world import EnvironmentFailure, Step, Task

make = gym.make


def tasks(
    split: str, n: int | None = None, seed: int = 0, *, level: str = "BabyAI-GoToRedBall-v0", **dials: Any
) -> tuple[Task, ...]:
    """``n`` layouts of a level; as :func:`branchpoint.env.gym.tasks`."""
    return gym.tasks(split, n, seed, id=f"minigrid:{level}", root="minigrid", **dials)


class Bot:
    """BabyAI's planner on a twin of the task's world. It knows the whole grid and plays one episode, step by step."""

    def __init__(self, task: Task) -> None:
        """Raises ValueError for a level without an instruction that the bot understands (those of MiniGrid itself)."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        dials = gym.Dials.of(task)
        self._twin = gym.open_env(dials)
        self._names = gym.Vocabulary.of(self._twin, dials.actions).names or ()
        gym.begin(self._twin, dials)
        if not hasattr(self._twin.unwrapped, "instrs"):
            raise ValueError(f"{dials.id}: the bot plays BabyAI levels only; this one has no expert")
        self._bot, self._last = BabyAIBot(self._twin), None

    def act(self, step: Step) -> str:
        """The next action. Raises EnvironmentFailure where the bot gives up."""
        if self._last is not None:
            self._twin.step(self._last)
        try:
            action: Any = self._bot.replan(self._last)
        except Exception as e:  # the bot asserts what it believes, and some layouts prove it wrong
            raise EnvironmentFailure(f"BabyAI's bot gave up: {type(e).__name__} {e}") from e
        self._last = action
        return self._names[int(action)]


def expert(task: Task) -> Bot:
    """The bot, for one episode of a task of a BabyAI level."""
    return Bot(task)
