"""ScienceWorld: elementary science as text, 30 tasks in 7,207 variations (Wang et al., 2022, arXiv:2203.07540).

The simulator is that of the package ``scienceworld`` (Apache-2.0), a Java program: ``pip install
"branchpoint[scienceworld]"`` brings it with a Java runtime. Dials (``Task.metadata``, set by :func:`tasks`):

* ``simplifications``: ``easy``, or names of the package joined by commas; empty: none.
* ``actions``: list the admissible actions (hundreds, some 2,700 in the kitchen) of every state in ``Step.actions``.
* ``reward``: ``score``: the increase of the score over 100, which is negative when the task is failed (score -100);
  ``success``: 1 when the task is done, else 0.
* ``max_steps``: actions until the episode is cut.

A Java process cannot be forked: snapshots are by repetition (``sandbox: replay``). Worlds are deterministic given their
task, so it repeats exactly; a difference would be refused, with the step. The chance in a world is the variation's, so
all siblings share it, in every arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from branchpoint.env import _java
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Message, Step, Task

PROGRAM = _java.Program("scienceworld", "scienceworld.runtime.pythonapi.PythonInterface")
VARIATIONS: Mapping[str, int] = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
"""The tasks with the number of their variations."""
SPLITS = ("train", "dev", "validation", "test")
"""As the package splits the variations of each task; ``validation`` is another name of ``dev``."""
SIMPLIFICATIONS = ("teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction")
_ELECTRICAL = ("power-component", "conductivity")
_LONGEST = 500
_TEMPLATES = (
    "look around", "look at OBJ", "look in OBJ", "open OBJ", "close OBJ", "go to OBJ", "activate OBJ", "deactivate OBJ",
    "use OBJ on OBJ", "pick up OBJ", "put down OBJ", "move OBJ to OBJ", "pour OBJ into OBJ", "dunk OBJ into OBJ",
    "mix OBJ", "eat OBJ", "flush OBJ", "read OBJ", "focus on OBJ", "connect OBJ to OBJ", "disconnect OBJ", "inventory",
    "task", "wait", "wait1", "reset task",
)  # fmt: skip
_RULES = (
    "You do an elementary science task in a house. Answer every observation with one action and nothing else. Actions "
    "(OBJ is a thing you see, A in B where two have one name): {}. wait lets ten steps pass, wait1 one. Focus only on "
    "what the task asks for: focusing on a wrong thing fails it. If you are asked which of several things you mean, "
    "answer with its number."
)
_OBJECT = "[A-Za-z0-9][A-Za-z0-9 '(),.:%/-]*"


@dataclass(frozen=True, slots=True)
class Dials:
    """The settings of a task, checked."""

    task: str
    variation: int
    simplifications: str = ""
    actions: bool = False
    reward: str = "score"
    max_steps: int = 100

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Dials:
        """Raises EnvironmentFailure naming the dial and the cure."""
        if not {"task", "variation"} <= metadata.keys():
            raise EnvironmentFailure("no task and variation in the metadata; make tasks with scienceworld.tasks()")
        dials = cls(**{f.name: metadata[f.name] for f in fields(cls) if f.name in metadata})
        if dials.task not in VARIATIONS:
            raise EnvironmentFailure(f"task is {dials.task!r}; use one of {', '.join(VARIATIONS)}")
        if not isinstance(dials.variation, int) or not 0 <= dials.variation < VARIATIONS[dials.task]:
            raise EnvironmentFailure(
                f"variation is {dials.variation!r}; {dials.task} has 0 to {VARIATIONS[dials.task] - 1}"
            )
        if problem := dials.problem():
            raise EnvironmentFailure(problem)
        return dials

    def problem(self) -> str:
        """What is wrong with the dials, in a line; empty when nothing is."""
        for name in str(self.simplifications).split(",") if self.simplifications != "easy" else ():
            if name and name not in SIMPLIFICATIONS:
                return f"simplifications has {name!r}; use easy, or some of {','.join(SIMPLIFICATIONS)}"
        if "noElectricalAction" in self.simplifications and any(word in self.task for word in _ELECTRICAL):
            return f"noElectricalAction takes away what {self.task} needs; leave it out"
        if self.reward not in ("score", "success"):
            return f"reward is {self.reward!r}; use score or success"
        if not isinstance(self.max_steps, int) or self.max_steps < 1:
            return f"max_steps is {self.max_steps!r}; use a positive integer"
        return "" if isinstance(self.actions, bool) else f"actions is {self.actions!r}; use true or false"


class ScienceWorld:
    """One episode. The first observation is the task's description and what the agent sees.

    A text that is no action is answered by the simulator ("No known action matches that input.") and costs a step.
    ``Step.info``: ``score`` (0 to 100, -100 when failed), ``steps``, ``success``.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for bad dials, UserError or ImportError for what is not installed."""
        self._dials = Dials.of(task.metadata)
        self._grammar = grammar(self._dials.simplifications)
        self._java = _java.lease(PROGRAM, self._dials.simplifications)
        self._score, self._steps, self._over = 0, 0, True

    def reset(self) -> Step:
        """Loads the task and looks around."""
        dials = self._dials
        if problem := self._java.call("load", dials.task, dials.variation, dials.simplifications, False):
            raise EnvironmentFailure(f"{dials.task}, variation {dials.variation}: {problem}")
        seen = self._java.call("step", "look around")
        self._score, self._steps, self._over = 0, 0, False
        return self._show(f"{self._java.call('getTaskDescription').strip()}\n\n{seen.strip()}")

    def step(self, action: str) -> Step:
        """Plays an action. After the end it is answered with a step that is done and has reward 0."""
        if self._over:
            return Step("The episode is over.", done=True, info={"score": self._score, "success": self._score >= 100})
        self._steps += 1
        text = " ".join(action.split())
        if len(text) > _LONGEST:
            return self._show(f"No known action matches that input: it has {len(text)} characters.")
        return self._show(self._java.call("step", text).strip())

    def close(self) -> None:
        """Gives the simulator back; with the last open world the Java process ends. Safe to repeat."""
        self._over = True
        self._java.close()

    def _show(self, text: str) -> Step:
        before, self._score = self._score, round(100 * self._java.call("getScore"))
        if self._score < 0:
            self._check()
        success, failed = self._score >= 100, self._score < 0
        done = success or failed or bool(self._java.call("getCompleted"))
        self._over = done or self._steps >= self._dials.max_steps
        reward = (self._score - before) / 100 if self._dials.reward == "score" else float(success)
        listed = self._dials.actions and not self._over
        return Step(
            text,
            reward,
            done,
            self._over and not done,
            tuple(sorted(set(self._java.lines("getValidActionObjectCombinations")))) if listed else (),
            "" if self._over else self._grammar,
            {"score": self._score, "steps": self._steps, "success": success},
        )

    def _check(self) -> None:
        """The simulator answers its own errors with a score of -100; they are no failure of the agent."""
        inner = self._java.call("agentInterface").get()
        if inner.isInErrorState():
            raise EnvironmentFailure(f"scienceworld: {str(inner.getErrorStateMessage()).splitlines()[0]:.300}")


class Expert(_java.Script):
    """Plays the package's own solution of a task ("gold path"), made with full knowledge of the world."""

    def __init__(self, task: Task) -> None:
        dials = Dials.of(task.metadata)
        java = _java.lease(PROGRAM, dials.simplifications)
        try:
            if problem := java.call("load", dials.task, dials.variation, dials.simplifications, True):
                raise EnvironmentFailure(f"{dials.task}, variation {dials.variation}: {problem}")
            super().__init__(java.lines("getGoldActionSequence"))
        finally:
            java.close()


def make(task: Task) -> ScienceWorld:
    """The world of a task."""
    return ScienceWorld(task)


def expert(task: Task) -> Expert:
    """An agent that plays the package's solution of the task."""
    return Expert(task)


def tasks(
    split: str, n: int | None = None, seed: int = 0, *, task: str | Sequence[str] = "", **dials: Any
) -> tuple[Task, ...]:
    """The variations of a split, of all tasks or of those named in ``task``: all, or ``n`` drawn by ``seed``, from each
    task as many as from the others, as far as it has them.

    Raises ValueError for an unknown split, task or dial, or more tasks than there are.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    split = "dev" if split == "validation" else split
    names = [task] if isinstance(task, str) and task else list(task) or list(VARIATIONS)
    if unknown := [name for name in names if name not in VARIATIONS]:
        raise ValueError(f"no task {unknown[0]!r}; known: {', '.join(VARIATIONS)}")
    known = [f.name for f in fields(Dials) if f.name not in ("task", "variation")]
    if unknown := sorted(dials.keys() - set(known)):
        raise ValueError(f"no dial {unknown[0]!r}; known: task, {', '.join(known)}")
    for name in names:
        if problem := Dials(name, 0, **dials).problem():
            raise ValueError(problem)
    pairs = [(name, i) for name in names for i in variations(name, split)]
    if n is not None:
        if not 0 <= n <= len(pairs):
            raise ValueError(f"n must be 0 to {len(pairs)}, the size of {split}; got {n}")
        pairs = sorted(_dealt(names, split, seed)[:n], key=lambda pair: (names.index(pair[0]), pair[1]))
    rules = Message("system", _RULES.format("; ".join(_templates(dials.get("simplifications", "")))))
    return tuple(
        Task(f"scienceworld/{split}/{name}/{i}", "scienceworld", (rules,), i, asdict(Dials(name, i, **dials)))
        for name, i in pairs
    )


def variations(task: str, split: str) -> tuple[int, ...]:
    """The variations of a task in a split, by the package's rule: quarters of the list, two of them for training."""
    n = VARIATIONS[task]
    quarter = n // 4  # every task has more than four
    begin, end = {"train": (0, 2 * quarter), "dev": (2 * quarter, 3 * quarter), "test": (3 * quarter, n)}[split]
    return tuple(range(begin, min(end, 5 * quarter)))


def _dealt(names: Sequence[str], split: str, seed: int) -> list[tuple[str, int]]:
    """All variations of a split in the order they are drawn in: a round takes one of each task that has one left."""
    noise, hands = Noise(seed), []
    for name in names:
        pool = variations(name, split)
        order = noise.at("scienceworld", split, name).permutation(len(pool))
        hands.append([(name, pool[i]) for i in order])
    out: list[tuple[str, int]] = []
    for turn in range(max(map(len, hands))):
        left = [hand[turn] for hand in hands if turn < len(hand)]
        out += [left[i] for i in noise.at("scienceworld", split, "round", turn).permutation(len(left))]
    return out


def _templates(simplifications: str) -> tuple[str, ...]:
    teleports = simplifications == "easy" or "teleportAction" in simplifications
    return (*_TEMPLATES, "teleport to OBJ") if teleports else _TEMPLATES


def grammar(simplifications: str = "") -> str:
    """A regular expression of all actions, with any words for the things, and of the numbers that answer a question."""
    return "|".join([*(t.replace("OBJ", _OBJECT) for t in _templates(simplifications)), "[0-9]+"])
