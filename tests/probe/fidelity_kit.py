"""Worlds that are what they claim, and one for each way of not being it."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from branchpoint.noise import Noise
from branchpoint.probe.fidelity import Fidelity, fidelity
from branchpoint.probe.restore import Question
from branchpoint.rollout import Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.testing import FakePolicy
from branchpoint.world import Step, Task

ACTIONS = ("up", "down")


class Faithful:
    """Three choices; each ``up`` is worth 0.3 and, by keyed luck, another 0.5."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.played: list[str] = []
        self.noise = Noise(task.seed)

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def reset(self) -> Step:
        return Step("choose", actions=ACTIONS)

    def step(self, action: str) -> Step:
        reward = self.reward(action, len(self.played))
        self.played.append(action)
        done = len(self.played) == 3
        return Step(f"{action} {len(self.played)}", reward, done=done, actions=() if done else ACTIONS)

    def reward(self, action: str, turn: int) -> float:
        return 0.3 * (action == "up") + 0.5 * self.lucky(turn)

    def lucky(self, turn: int) -> bool:
        return self.noise.happens(0.5, "luck", turn)

    def close(self) -> None: ...


class Sure(Faithful):
    """Without any luck."""

    def lucky(self, turn: int) -> bool:
        return False


class Dice(Faithful):
    """Luck from the global generator, which a sandbox seeds for each branch."""

    def lucky(self, turn: int) -> bool:
        return random.random() < 0.5


COUNTED = [0]


class Global(Faithful):
    """A counter of the module, shared by every world of the process: every third answer is worse."""

    def reward(self, action: str, turn: int) -> float:
        COUNTED[0] += 1
        return super().reward(action, turn) - (COUNTED[0] % 3 == 0)


class Clock(Faithful):
    """Busy in every other three milliseconds of the wall clock."""

    def reward(self, action: str, turn: int) -> float:
        return super().reward(action, turn) - (time.time_ns() // 3_000_000 % 2)


class Leaked(Faithful):
    """A generator made when the world starts and never seeded again: it travels with the snapshot."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.own: random.Random | None = None

    def reseed(self, noise: Noise) -> None:
        super().reseed(noise)
        if self.own is None:
            self.own = random.Random(noise.seed)

    def lucky(self, turn: int) -> bool:
        assert self.own is not None
        return self.own.random() < 0.5


class Shared(Faithful):
    """A file of the task, used by all: who goes up where somebody has just gone down finds the way blocked."""

    def reward(self, action: str, turn: int) -> float:
        file = Path(tempfile.gettempdir()) / f"branchpoint-{os.getpid()}-{self.task.id}"
        last = file.read_text() if file.exists() else ""
        file.write_text(action)
        return super().reward(action, turn) - 0.5 * (last == "down")


class Stolen(Faithful):
    """What a sibling does while it lives takes from the others, and is forgotten when nobody is left."""

    living: dict[int, str] = {}  # noqa: RUF012 - shared on purpose

    def reward(self, action: str, turn: int) -> float:
        taken = sum(a == "up" for w, a in Stolen.living.items() if w != id(self))
        Stolen.living[id(self)] = action
        return super().reward(action, turn) - 0.8 * min(taken, 2)

    def close(self) -> None:
        Stolen.living.pop(id(self), None)


FAITHFUL = (Faithful, Sure, Dice)
FAULTY = {"global": Global, "clock": Clock, "leaked": Leaked, "file": Shared}


def ask(world: Any, seed: int, prompts: int = 6, permutations: int = 199, siblings: int = 4) -> Fidelity:
    """One run of the probe on a world, with a small policy that knows nothing."""
    tasks = [(world, Task(f"{world.__name__}{seed}-{i}", "kit")) for i in range(prompts)]
    policy = FakePolicy(ACTIONS, seed=seed, restrict=True)
    question = Question(policy, InProcess, tasks, Limits(turns=5), siblings)
    return asyncio.run(fidelity(question, Noise(seed, seed), permutations=permutations, say=lambda line: None))
