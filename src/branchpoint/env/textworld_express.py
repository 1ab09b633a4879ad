"""TextWorldExpress: eight kinds of small text games, generated from a seed (Jansen and Cote, 2023, arXiv:2208.01174).

The games are those of the package ``textworld-express`` (Apache-2.0), a Java program: ``pip install
"branchpoint[textworld-express]"`` brings it with a Java runtime. Dials (``Task.metadata``, set by :func:`tasks`):

* ``game``: cookingworld, twc (commonsense), coin, mapreader, arithmetic, sorting, simonsays or peckingorder.
* ``parameters``: the package's own settings of the game as a mapping of integers, e.g. ``{numLocations: 3}``.
* ``reward``: ``score``: the increase of the score (0 to 1); ``success``: 1 when the game is won, else 0.
* ``max_steps``: actions until the episode is cut.

A Java process cannot be forked: snapshots are by repetition (``sandbox: replay``), exact, since a game is deterministic
given its seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from branchpoint.env import _java
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Message, Step, Task

PROGRAM = _java.Program("textworld_express", "textworldexpress.runtime.PythonInterface", isolated=False)
_SWITCH, _LIMITS = (0, 1), {"includeDoors": (0, 1), "limitInventorySize": (0, 1)}
GAMES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "cookingworld": {"numLocations": (1, 11), "numIngredients": (1, 5), "numDistractorItems": (0, 10), **_LIMITS},
    "twc": {"numLocations": (1, 3), "numItemsToPutAway": (1, 4), **_LIMITS},
    "coin": {"numLocations": (1, 11), "numDistractorItems": (0, 10), **_LIMITS},
    "mapreader": {
        "numLocations": (1, 50),
        "maxDistanceApart": (1, 8),
        "maxDistractorItemsPerLocation": (0, 3),
        **_LIMITS,
    },
    "arithmetic": {},
    "sorting": {},
    "simonsays": {"gameLength": (1, 1000), "numDistractors": (0, 5), "memorization": _SWITCH, "verbose": _SWITCH},
    "peckingorder": {},
}
"""The games with their parameters and the values that these may have."""
SEEDS: Mapping[str, int] = {"train": 0, "dev": 10_000, "test": 20_000}
"""The first of the 1,000 seeds of each of the package's splits; ``validation`` is another name of ``dev``."""
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Dials:
    """The settings of a task, checked."""

    game: str = "coin"
    split: str = "train"
    seed: int = 0
    parameters: Mapping[str, int] = field(default_factory=dict)
    reward: str = "score"
    max_steps: int = 50

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Dials:
        """Raises EnvironmentFailure naming the dial and the cure."""
        if not {"game", "split", "seed"} <= metadata.keys():
            raise EnvironmentFailure(
                "no game, split and seed in the metadata; make tasks with textworld_express.tasks()"
            )
        dials = cls(**{f.name: metadata[f.name] for f in fields(cls) if f.name in metadata})
        if problem := dials.problem():
            raise EnvironmentFailure(problem)
        return dials

    def problem(self) -> str:
        """What is wrong with the dials, in a line; empty when nothing is."""
        if self.game not in GAMES:
            return f"game is {self.game!r}; use one of {', '.join(GAMES)}"
        if self.split not in SEEDS or not isinstance(self.seed, int):
            return f"split is {self.split!r} and seed {self.seed!r}; use one of {', '.join(SEEDS)} and an integer"
        if not isinstance(self.parameters, Mapping):
            return f"parameters is a {type(self.parameters).__name__}; use a mapping of names to integers"
        for name, value in self.parameters.items():
            allowed = GAMES[self.game].get(name)
            if allowed is None:
                return f"{self.game} has no parameter {name!r}; known: {', '.join(GAMES[self.game]) or 'none'}"
            if not isinstance(value, int) or not allowed[0] <= value <= allowed[1]:
                return f"{name} is {value!r}; use {allowed[0]} to {allowed[1]}"
        if self.reward not in ("score", "success"):
            return f"reward is {self.reward!r}; use score or success"
        ok = isinstance(self.max_steps, int) and self.max_steps > 0
        return "" if ok else f"max_steps is {self.max_steps!r}; use a positive integer"


class TextWorldExpress:
    """One game. The first observation is the task's description and what the agent sees; the admissible actions of each
    state are in ``Step.actions``. Any other text is answered with an excuse and costs a step.

    ``Step.info``: ``score`` (0 to 1), ``steps``, ``success``.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for bad dials, UserError or ImportError for what is not installed."""
        self._dials = Dials.of(task.metadata)
        self._java = _java.lease(PROGRAM)
        self._score, self._steps, self._over = 0.0, 0, True

    def reset(self) -> Step:
        """Generates the game."""
        first = _begin(self._java, self._dials, gold=False)
        self._score, self._steps, self._over = 0.0, 0, False
        return self._show(first, f"{self._java.call('getTaskDescription').strip()}\n\n")

    def step(self, action: str) -> Step:
        """Plays an action. After the end it is answered with a step that is done and has reward 0."""
        if self._over:
            return Step("The game is over.", done=True, info={"score": self._score, "success": self._score >= 1})
        self._steps += 1
        text = " ".join(action.split())
        return self._show(self._java.call("stepJSON", text if len(text) <= _LONGEST else ""))

    def close(self) -> None:
        """Gives the simulator back; with the last open world the Java process ends. Safe to repeat."""
        self._over = True
        self._java.close()

    def _show(self, answer: str, before: str = "") -> Step:
        told = _read(answer)
        last, self._score = self._score, float(told["score"])
        success = bool(told["tasksuccess"]) or self._score >= 1
        done = success or bool(told["taskfailure"])
        self._over = done or self._steps >= self._dials.max_steps
        reward = self._score - last if self._dials.reward == "score" else float(success)
        actions = () if self._over else tuple(sorted(set(filter(None, told["validActions"]))))
        info = {"score": self._score, "steps": self._steps, "success": success}
        return Step(before + told["observation"].strip(), reward, done, self._over and not done, actions, info=info)


class Expert(_java.Script):
    """Plays the package's own solution of a game, which walks about at random where it has to search: another one each
    time."""

    def __init__(self, task: Task) -> None:
        java = _java.lease(PROGRAM)
        try:
            _begin(java, Dials.of(task.metadata), gold=True)
            super().__init__(java.lines("getGoldActionSequence"))
        finally:
            java.close()


def make(task: Task) -> TextWorldExpress:
    """The world of a task."""
    return TextWorldExpress(task)


def expert(task: Task) -> Expert:
    """An agent that plays the package's solution of the task."""
    return Expert(task)


def tasks(split: str, n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Task, ...]:
    """The 1,000 games of a split, or ``n`` of them drawn by ``seed``; for the dials see the module.

    Raises ValueError for an unknown split, game, parameter or dial, or more tasks than there are.
    """
    split = "dev" if split == "validation" else split
    if split not in SEEDS:
        raise ValueError(f"no split {split!r}; known: train, dev, validation, test")
    known = [f.name for f in fields(Dials) if f.name not in ("split", "seed")]
    if unknown := sorted(dials.keys() - set(known)):
        raise ValueError(f"no dial {unknown[0]!r}; known: {', '.join(known)}")
    if problem := Dials(**dials).problem():
        raise ValueError(problem)
    numbers = list(range(1000))
    if n is not None:
        if not 0 <= n <= 1000:
            raise ValueError(f"n must be 0 to 1000, the size of {split}; got {n}")
        numbers = sorted(int(i) for i in Noise(seed).at("textworld_express", split).permutation(1000)[:n])
    return tuple(_task(Dials(split=split, seed=SEEDS[split] + i, **dials)) for i in numbers)


def _task(dials: Dials) -> Task:
    name = f"textworld_express/{dials.game}/{dials.split}/{dials.seed}"
    rules = Message("system", "You play a text game. Answer every observation with one action and nothing else.")
    return Task(name, "textworld_express", (rules,), dials.seed, asdict(dials))


def _begin(java: _java.Lease, dials: Dials, gold: bool) -> str:
    parameters = ",".join(f"{name}={int(value)}" for name, value in sorted(dials.parameters.items()))
    if problem := java.call("load", dials.game, parameters):
        raise EnvironmentFailure(f"textworld-express: {problem:.300}")
    return java.call("generateNewGameJSON", dials.seed, dials.split, gold)


def _read(answer: str) -> dict[str, Any]:
    try:
        return json.loads(answer)
    except ValueError as error:
        raise EnvironmentFailure(f"textworld-express answered what is no JSON ({error}): {answer:.200}") from error
