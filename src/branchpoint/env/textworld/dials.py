"""The settings of a task."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from branchpoint.world import EnvironmentFailure, Task

Kind = Literal["coin_collector", "treasure_hunt", "cooking"]
Reward = Literal["dense", "final", "win"]
Foods = Literal["all", "train", "valid", "test"]
Objective = Literal["brief", "detailed"]
Style = Literal["plain", "raw"]
Rooms = Literal[1, 6, 9, 12]

LARGEST = 10**8
"""Games have smaller numbers; what is above 2^31 seeds the second and later attempts at a game."""

LEVELS = {"coin_collector": 300, "treasure_hunt": 30}
COOKING = ("recipe", "take", "go", "open", "cook", "cut", "drop", "recipe_seed", "foods")
"""The dials of cooking."""
LEVELLED = ("level", "objective")
"""The dials of the other kinds."""


class Dials(NamedTuple):
    """``game``: the seed given to the package's maker; the rest as in :func:`textworld.tasks`."""

    game: int
    kind: Kind = "coin_collector"
    level: int = 5
    objective: Objective = "brief"
    recipe: int = 1
    take: int = 1
    go: Rooms = 6
    open: bool = True
    cook: bool = True
    cut: bool = True
    drop: bool = False
    recipe_seed: int = 0
    foods: Foods = "all"
    reward: Reward = "dense"
    looking: bool = True
    style: Style = "plain"
    max_steps: int = 100
    cache: str | None = None

    @classmethod
    def of(cls, task: Task) -> Dials:
        """Of a task's metadata. Raises EnvironmentFailure naming the field that is missing or wrong."""
        if "game" not in task.metadata:
            raise EnvironmentFailure(f"task {task.id}: metadata has no 'game'; make tasks with textworld.tasks()")
        dials = cls(**{name: task.metadata[name] for name in cls._fields if name in task.metadata})
        if problem := dials.problem():
            raise EnvironmentFailure(f"task {task.id}: {problem}")
        return dials

    def problem(self) -> str:
        """What is wrong with a value, naming the dial; empty when nothing is."""
        for name, value in zip(self._fields, self, strict=True):
            if problem := _type_problem(name, value):
                return problem
        if not 0 <= self.game < LARGEST:
            return f"game is {self.game}; use 0 to {LARGEST - 1}"
        if self.max_steps < 1:
            return f"max_steps is {self.max_steps}; use a positive integer"
        return self._cooking_problem() if self.kind == "cooking" else self._level_problem()

    def _level_problem(self) -> str:
        if not 1 <= self.level <= LEVELS[self.kind]:
            return f"level is {self.level}; {self.kind} has levels 1 to {LEVELS[self.kind]}"
        rooms = ((self.level - 1) // 100 + 1) * ((self.level - 1) % 100 + 1)
        if self.kind == "coin_collector" and rooms > 100:
            return f"level is {self.level}, which has {rooms} rooms; 100 is the most that can be compiled"
        return ""

    def _cooking_problem(self) -> str:
        if not 1 <= self.recipe <= 5:
            return f"recipe is {self.recipe}; a recipe has 1 to 5 ingredients"
        if not 0 <= self.take <= self.recipe:
            return f"take is {self.take}; of {self.recipe} ingredients, 0 to {self.recipe} are to be found"
        if not 0 <= self.recipe_seed < 2**31:
            return f"recipe_seed is {self.recipe_seed}; use 0 to {2**31 - 1}"
        if self.recipe_seed and not self.take:
            return "recipe_seed needs take of at least 1: the ingredients of a shuffled recipe are to be found"
        return ""

    def challenge(self) -> tuple[str, dict[str, Any]]:
        """The package's name of the game's kind, and its settings."""
        if self.kind != "cooking":
            name = {"coin_collector": "tw-coin_collector", "treasure_hunt": "tw-treasure_hunter"}[self.kind]
            return name, {"level": self.level}
        settings = {name: getattr(self, name) for name in COOKING[:-1]}
        return "tw-cooking", {**settings, "split": None if self.foods == "all" else self.foods}


def _type_problem(name: str, value: Any) -> str:
    known = get_args(_TYPES[name])
    if name == "cache":
        return "" if value is None or isinstance(value, str) else f"cache is {value!r}; use a folder's path or null"
    if known:
        fits = any(type(value) is type(one) and value == one for one in known)
        return "" if fits else f"{name} is {value!r}; use one of {', '.join(map(repr, known))}"
    if type(value) is not _TYPES[name]:
        return f"{name} is {value!r}; use {'true or false' if _TYPES[name] is bool else 'an integer'}"
    return ""


_TYPES: dict[str, Any] = get_type_hints(Dials)
