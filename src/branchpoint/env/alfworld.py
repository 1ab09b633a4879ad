"""ALFWorld: household text games with long horizons, on the real games and engine.

3,553 training games and two evaluation splits (140 games in rooms seen in training, 134 in new rooms), six task types.
The games ship with the package; the engine needs ``pip install "branchpoint[alfworld]"``.

Dials (``Task.metadata``, set by :func:`tasks`):

* ``style``: ``full`` (the original text) or ``compact`` (few words, ``desk_1`` for ``desk 1``).
* ``mark``: put ``*`` before the things and places that the goal names (compact style), as in ``see pen_2 * laptop_1``
  and ``take * laptop_1 from desk_1``. A command without the marks is understood too. Easier than the game itself: a
  small model needs not compare the words.
* ``drop``: take help, look, inventory and examine out of the admissible commands.
* ``max_steps``: the step limit, 50 as in the ALFWorld paper (Shridhar et al., 2021, https://arxiv.org/abs/2010.03768).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from branchpoint import env as envs
from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env import _alfworld_text as text
from branchpoint.env._alfworld_expert import Expert, Explorer, Order, PlanPlayer
from branchpoint.env._alfworld_plan import shortest_plan
from branchpoint.env.faults import Event
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Message, Step, Task

Style = Literal["full", "compact"]
Kind = Literal["explorer", "planner"]
SPLITS, TASK_TYPES = data.SPLITS, data.TASK_TYPES

_THING = r"([a-z]+[ _][0-9]+)"
_COMMAND = re.compile(
    rf"(look|inventory|help)|(go) to {_THING}|(open|close|use|examine) {_THING}|(take) {_THING} from {_THING}"
    rf"|(move) {_THING} to {_THING}|(clean|heat|cool|slice) {_THING} with {_THING}"
)

RULES = (
    "You are in a house. Reach the goal by acting on what you see. Reply with one command a turn, e.g. 'go to desk 1', "
    "'open drawer 2', 'take mug 1 from desk 1', 'move mug 1 to shelf 1', 'clean mug 1 with sinkbasin 1', "
    "'heat mug 1 with microwave 1', 'cool mug 1 with fridge 1', 'use desklamp 1'. You can carry one thing at a time."
)


class AlfworldWorld:
    """One game. Its state is the list of actions played, so it can be saved and set (``get_state``, ``set_state``).

    ``Step.actions``: the admissible commands, sorted. Reward 1 and ``done`` at the goal, else 0; ``truncated`` at the
    step limit. An inadmissible command costs a step and changes nothing. ``info``: success, steps, game.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for a bad dial or unknown game, ImportError when the engine is not installed."""
        self._dials = Dials.of(task)
        self._row = data.game(self._dials.game)
        self._goal = text.Goal.of(self._row["task_type"], self._row["pddl_params"])
        self._game: engine.Game | None = None
        self._offered: dict[str, str] = {}
        self._steps = 0
        self._over = True

    def reset(self) -> Step:
        """Load the game anew. The observation states the goal and lists the receptacles."""
        row = self._row
        goal = engine.goal_text(row["id"], row["task_type"], row["pddl_params"])
        self._game = engine.Game(row["pddl_problem"], goal)
        self._steps, self._over = 0, False
        return self._step(text.first_observation(self._game.feedback, self._goal, self._dials.style))

    def step(self, action: str) -> Step:
        """Play a command in the spelling of the style. Raises EnvironmentFailure before reset or after the end."""
        if self._game is None or self._over:
            raise EnvironmentFailure(f"game {self._dials.game}: the episode has not started or is over; call reset()")
        self._game.play(self._offered.get(text.unmarked(action.strip()), ""))
        self._steps += 1
        feedback = self._game.feedback
        return self._step(text.compact_observation(feedback) if self._dials.style == "compact" else feedback)

    def close(self) -> None:
        """End the game. Harmless when called twice."""
        self._game, self._over = None, True

    def get_state(self) -> dict[str, Any]:
        """JSON values for :meth:`set_state` of a world of the same task. Raises EnvironmentFailure before reset."""
        if self._game is None:
            raise EnvironmentFailure(f"game {self._dials.game}: no state before reset()")
        return {"played": [[name, *things] for name, things in self._game.played], "steps": self._steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the game and go where ``state`` was."""
        played = [(name, tuple(things)) for name, *things in state["played"]]
        self._game = engine.Game(self._row["pddl_problem"], "", played)
        self._steps, self._over = state["steps"], False
        self._step("")

    def _step(self, observation: str) -> Step:
        assert self._game is not None
        compact, drop = self._dials.style == "compact", self._dials.drop
        commands = [command for command in self._game.moves if not (drop and text.ASIDE.fullmatch(command))]
        self._offered = {text.compact_action(command) if compact else command: command for command in commands}
        won = self._game.won
        truncated = not won and self._steps >= self._dials.max_steps
        self._over = won or truncated
        info = {"success": won, "steps": self._steps, "game": self._dials.game}
        step = Step(observation, float(won), won, truncated, tuple(sorted(self._offered)), info=info)
        return _marked(self._goal, step) if self._dials.mark else step


class Dials(NamedTuple):
    """The settings of a task, checked."""

    game: str
    style: str = "full"
    drop: bool = False
    max_steps: int = 50
    mark: bool = False

    @classmethod
    def of(cls, task: Task) -> Dials:
        given = {name: task.metadata[name] for name in cls._fields if name in task.metadata}
        if "game" not in given:
            raise EnvironmentFailure(f"task {task.id}: metadata has no 'game'; make tasks with alfworld.tasks()")
        dials = cls(**given)
        if dials.style not in ("full", "compact"):
            raise EnvironmentFailure(f"task {task.id}: style is {dials.style!r}; use 'full' or 'compact'")
        if dials.mark and dials.style != "compact":
            raise EnvironmentFailure(f"task {task.id}: mark needs style 'compact', found {dials.style!r}")
        if not isinstance(dials.max_steps, int) or dials.max_steps < 1:
            raise EnvironmentFailure(f"task {task.id}: max_steps is {dials.max_steps!r}; use a positive integer")
        return dials


def make(task: Task) -> AlfworldWorld:
    """The world of a task."""
    return AlfworldWorld(task)


def preload() -> None:
    """Import the engine and read its grammar and rules now (a second or two), e.g. in a process that will be forked."""
    engine.preload()


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    task_types: Iterable[str] | None = None,
    *,
    style: Style = "full",
    drop: bool = False,
    max_steps: int = 50,
    mark: bool = False,
) -> tuple[Task, ...]:
    """``n`` games of a split (all when None) in an order keyed by ``seed``; splits never share a game.

    The first m of n tasks are the tasks of ``n=m``. Raises ValueError naming the argument that cannot be met.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS)}")
    kinds = tuple(TASK_TYPES if task_types is None else task_types)
    if unknown := [kind for kind in kinds if kind not in TASK_TYPES]:
        raise ValueError(f"task_types has {unknown[0]!r}; use some of {', '.join(TASK_TYPES)}")
    games = [entry for entry in data.index().values() if entry.split == split and entry.task_type in kinds]
    if mark and style != "compact":
        raise ValueError(f"mark needs style 'compact', found {style!r}")
    if n is not None and not 0 < n <= len(games):
        raise ValueError(f"n is {n}; {split} has {len(games)} games of these task types")
    order = Noise(seed).at("alfworld", "order", split).permutation(len(games))
    dials = {"style": style, "drop": drop, "max_steps": max_steps, "mark": mark}
    return tuple(_task(games[i], seed, dials) for i in order[:n])


def _task(entry: data.Entry, seed: int, dials: Mapping[str, Any]) -> Task:
    metadata = {"game": entry.id, "split": entry.split, "task_type": entry.task_type, **dials}
    return Task(f"alfworld/{entry.split}/{entry.id}", "alfworld", _prompt(metadata), seed, metadata)


def _prompt(metadata: Mapping[str, Any]) -> tuple[Message, ...]:
    """The rules in words for a model that reads; a small model of the compact style learns them from transcripts."""
    return (Message("system", RULES),) if metadata["style"] == "full" else ()


def _plan(dials: Dials) -> tuple[str, ...]:
    row = data.game(dials.game)
    return shortest_plan(engine.Game(row["pddl_problem"], ""), text.Goal.of(row["task_type"], row["pddl_params"]))


def event_of(action: str) -> Event | None:
    """The key rule for :mod:`branchpoint.env.faults`: the verb and the things of a well-formed command, whether they
    are there or not; None for other text. Marks make no difference."""
    match = _COMMAND.fullmatch(text.unmarked(action))
    if match is None:
        return None
    verb, *things = (part.replace(" ", "_") for part in match.groups() if part)
    return Event(verb, tuple(things), verb in {"look", "inventory", "help", "examine"})


def expert(task: Task, kind: Kind = "explorer", *, order: Order = "frequency") -> Expert:
    """A teacher with ``act(step) -> command`` for one episode of a task, from its first step on.

    ``explorer`` knows only what was observed: it visits receptacles in a random order, or (``order="frequency"``) the
    likely ones first. ``planner`` plays a shortest plan, found with full knowledge of the game: a shipped one,
    or one searched now, which takes the time of loading the game.
    """
    dials = Dials.of(task)
    if kind == "planner":
        return PlanPlayer(data.plans().get(dials.game) or _plan(dials))
    if kind == "explorer":
        return Explorer(Noise(task.seed).child("alfworld", "explorer", task.id), order, data.containers())
    raise ValueError(f"kind is {kind!r}; use 'planner' or 'explorer'")


class Episode(NamedTuple):
    """What was seen and what was done, turn by turn; the last step of the world is not kept."""

    task: Task
    turns: tuple[tuple[Step, str], ...]
    success: bool


def play(task: Task, teacher: Expert) -> Episode:
    """One episode of a teacher."""
    turns, last = envs.play(make(task), teacher, Dials.of(task).max_steps)
    return Episode(task, tuple(turns), last.done)


def record(
    games: Iterable[Task], repeats: int = 1, kind: Kind = "explorer", order: Order = "frequency"
) -> Iterator[Episode]:
    """Episodes of an expert, ``repeats`` for each task, with other luck each time."""
    for task in games:
        for repeat in range(repeats):
            again = replace(task, seed=task.seed + repeat)
            yield play(again, expert(again, kind, order=order))


def save_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """Write episodes as ``.jsonl.xz``: the task, and [observation, admissible commands, command] for every turn."""
    data.write_pack(path, map(episode_row, episodes))


def load_episodes(path: Path) -> tuple[Episode, ...]:
    """Episodes written by :func:`save_episodes`. Raises EnvironmentFailure for a damaged file."""
    return tuple(map(episode_of, data.read_pack(path, ("id", "seed", "metadata", "success", "turns"))))


def episode_row(episode: Episode) -> dict[str, Any]:
    """An episode as JSON values."""
    task, turns, success = episode
    rows = [[step.observation, list(step.actions), action] for step, action in turns]
    return {"id": task.id, "seed": task.seed, "metadata": dict(task.metadata), "success": success, "turns": rows}


def episode_of(row: Mapping[str, Any]) -> Episode:
    """The inverse of :func:`episode_row`."""
    turns = tuple((Step(seen, actions=tuple(actions)), action) for seen, actions, action in row["turns"])
    metadata = row["metadata"]
    return Episode(Task(row["id"], "alfworld", _prompt(metadata), row["seed"], metadata), turns, row["success"])


def transcripts(
    n: int | None = None, task_types: Iterable[str] | None = None, **dials: Any
) -> tuple[tuple[Task, tuple[tuple[Step, str], ...]], ...] | None:
    """Recorded episodes that ship with the package and fit the dials (the first ``n``), or None when none does.

    They were won by the frequency-weighted explorer on training games of the types pick_and_place_simple and
    look_at_obj_in_light, with ``style="compact"`` and ``drop=True``. Any ``max_steps`` and ``mark`` fit: the tasks
    returned carry the given ones, and the marks are set here as the world sets them.
    """
    kinds = TASK_TYPES if task_types is None else tuple(task_types)
    free = {name: dials.pop(name) for name in ("max_steps", "mark") if name in dials}
    chosen = []
    for task, turns, _ in load_episodes(data.folder() / "transcripts.jsonl.xz"):
        fits = all(task.metadata.get(name) == value for name, value in dials.items())
        if fits and task.metadata["task_type"] in kinds and len(turns) <= free.get("max_steps", len(turns)):
            if free.get("mark"):
                goal = text.read_goal(turns[0][0].observation)
                assert goal is not None
                turns = tuple((_marked(goal, step), goal.mark(action)) for step, action in turns)
            chosen.append((replace(task, metadata={**task.metadata, **free}), turns))
    return tuple(chosen[:n]) or None


def _marked(goal: text.Goal, step: Step) -> Step:
    """A step as it looks with ``mark``."""
    return replace(step, observation=goal.mark(step.observation), actions=tuple(map(goal.mark, step.actions)))
