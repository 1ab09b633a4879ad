"""TextWorld: generated text games of three kinds (Côté et al., 2018, https://arxiv.org/abs/1806.11532).

* ``coin_collector``: walk a chain of rooms, with dead ends, to the coin (Yuan et al., 2018,
  https://arxiv.org/abs/1806.11525).
* ``treasure_hunt``: find the thing that the objective names, behind doors and in containers; another thing loses.
* ``cooking``: read a recipe, find its ingredients, cut and cook them, prepare the meal and eat it (First TextWorld
  Problems, 2019).

Games are made and compiled by the package ``textworld`` (``pip install "branchpoint[textworld]"``), which brings its
compiler along; nothing is downloaded. A game is made from a number and takes a few seconds of processor time, so
training wants the dial ``cache``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from branchpoint.env.textworld import live as _live
from branchpoint.env.textworld import recorded as _recorded
from branchpoint.env.textworld.dials import COOKING, LEVELLED, Dials, Foods, Kind, Objective, Reward, Rooms, Style
from branchpoint.env.textworld.expert import Expert, Player
from branchpoint.env.textworld.stories import prepare as _prepare
from branchpoint.env.textworld.stories import story
from branchpoint.env.textworld.world import TextWorld
from branchpoint.noise import Noise
from branchpoint.world import Message, Task, Transcript

__all__ = ["SPLITS", "Dials", "Expert", "TextWorld", "expert", "make", "preload", "prepare", "tasks", "transcripts"]

SPLITS = {"train": range(0, 10_000), "val": range(10_000, 11_000), "test": range(11_000, 12_000)}
"""The numbers of the games of each split."""

FOODS: dict[str, Foods] = {"train": "train", "val": "valid", "test": "test"}
"""The package's own split of foods and of ways to prepare them, by ours."""

RULES = (
    "You play a text game. Reply with one command a turn, e.g. 'look', 'inventory', 'go north', 'open door', "
    "'take coin', 'take carrot from fridge', 'examine cookbook'. Name things as the game names them."
)


def make(task: Task) -> TextWorld:
    """The world of a task. Raises EnvironmentFailure for a bad dial."""
    return TextWorld(task)


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    kind: Kind = "coin_collector",
    level: int | None = None,
    objective: Objective | None = None,
    recipe: int | None = None,
    take: int | None = None,
    go: Rooms | None = None,
    open: bool | None = None,
    cook: bool | None = None,
    cut: bool | None = None,
    drop: bool | None = None,
    recipe_seed: int | None = None,
    foods: Foods | None = None,
    reward: Reward = "dense",
    looking: bool = True,
    style: Style = "plain",
    max_steps: int = 100,
    cache: str | None = None,
) -> tuple[Task, ...]:
    """``n`` games of a split (all when None) in an order keyed by ``seed``; the first m of n are the tasks of ``n=m``.

    Args:
        kind: of game. ``coin_collector`` and ``treasure_hunt`` have ``level`` and ``objective``, ``cooking`` the dials
            after them. None stands for a default.
        level: difficulty as the package numbers it, 1 to 300 and 1 to 30. Default 5.
        objective: the first observation says what to take (``brief``), or every step to it (``detailed``, the
            package's default). Default ``brief``.
        recipe: ingredients, 1 to 5. Default 1.
        take: how many of them have to be found; the others are carried at the start. Default 1.
        go: rooms, 1, 6, 9 or 12. Default 6.
        open: doors and containers are closed at the start. Default true.
        cook, cut: ingredients have to be cooked, cut. Default true.
        drop: no more can be carried than the recipe has ingredients. Default false.
        recipe_seed: draws another recipe in the same house, for 1 and more. Default 0.
        foods: which foods, and ways to prepare them, a game may use: ``train``, ``valid``, ``test`` as the package
            splits them, or ``all``. Default: those of the split; ``val`` and ``test`` have foods not seen in training.
        reward: ``dense``: points as they are made, divided by all there are; ``final``: the same sum, at the end;
            ``win``: 1 for winning.
        looking: list ``look``, ``inventory`` and ``examine`` (save ``examine cookbook``) among the admissible commands.
        style: ``raw``: the interpreter's text. ``plain``: without title picture, prompt, status line, the menu after
            the end, and blank lines in a row.
        max_steps: the step limit.
        cache: a folder for compiled games; None: none is kept.

    Raises ValueError naming the argument that cannot be met.
    """
    given = {"level": level, "objective": objective, "recipe": recipe, "take": take, "go": go, "open": open}
    given |= {"cook": cook, "cut": cut, "drop": drop, "recipe_seed": recipe_seed, "foods": foods}
    free = {"reward": reward, "looking": looking, "style": style, "max_steps": max_steps, "cache": cache}
    numbers = _numbers(split, n, seed)
    dials = {"kind": kind, **_chosen(split, kind, given), **free}
    if problem := Dials(0, **dials).problem():
        raise ValueError(problem)
    return tuple(_task(number, seed, dials) for number in numbers)


def _numbers(split: str, n: int | None, seed: int) -> list[int]:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS)}")
    numbers = SPLITS[split]
    if n is not None and not 0 < n <= len(numbers):
        raise ValueError(f"n is {n}; split {split!r} has {len(numbers)} games")
    order = Noise(seed).at("textworld", "order", split).permutation(len(numbers))
    return [numbers[i] for i in order[:n].tolist()]


def _chosen(split: str, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The dials that a kind has, with its defaults."""
    own = _own(kind)
    if strange := [name for name, value in given.items() if value is not None and name not in own]:
        raise ValueError(f"{strange[0]} is no dial of {kind!r}, which has {', '.join(own)}")
    defaults = {**Dials._field_defaults, "foods": FOODS[split]}
    return {name: defaults[name] if given[name] is None else given[name] for name in own}


def _task(game: int, seed: int, dials: Mapping[str, Any]) -> Task:
    own = "-".join(f"{name}={dials[name]}" for name in _own(dials["kind"]))
    name = f"textworld/{dials['kind']}/{own}/{game}"
    return Task(name, "textworld", (Message("system", RULES),), seed, {**dials, "game": game})


def _own(kind: str) -> tuple[str, ...]:
    return COOKING if kind == "cooking" else LEVELLED


def expert(task: Task, player: Player = "walkthrough") -> Expert:
    """A player that knows the game, for one episode from its first step on: ``walkthrough`` plays the maker's solution
    and plans anew once something else was played; ``planner`` plans from the start."""
    return Expert(story(Dials.of(task)), player)


def transcripts(n: int | None = None, **dials: Any) -> tuple[Transcript, ...] | None:
    """Recorded episodes of the expert that ship with the package and fit the dials of :func:`tasks` (the first ``n``),
    or None when none does.

    100 training games of each kind under its default dials, with ``looking`` on and off. Any ``reward``, ``max_steps``
    and ``cache`` fit: the tasks returned carry the given ones.
    """
    wanted = dict(tasks("train", 1, **dials)[0].metadata)
    free = {name: wanted.pop(name) for name in ("reward", "max_steps", "cache")}
    del wanted["game"]
    chosen = []
    for recorded, turns in _recorded.load(_recorded.shipped()):
        if all(recorded.get(name) == value for name, value in wanted.items()) and len(turns) <= free["max_steps"]:
            chosen.append((_task(recorded["game"], 0, {**recorded, **free}), turns))
    return tuple(chosen[:n]) or None


def prepare(games: Iterable[Task]) -> None:
    """Make the games of tasks that are not in their cache folders yet, several in a process, which is several times
    faster than one by one. Raises ValueError for a task without ``cache``."""
    _prepare([Dials.of(task) for task in games])


def preload() -> None:
    """Import the package and read the rules of all kinds now, some seconds, e.g. in a process that will be forked."""
    _live.preload()
