"""Teachers for ALFWorld: one that knows the game and plays a plan, one that explores from observations alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from branchpoint.env import _alfworld_text as text
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Step

Order = Literal["random", "frequency"]

_TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


class Expert(Protocol):
    """Acts for one episode; ``step`` is what the world answered last."""

    def act(self, step: Step) -> str: ...


def _spell(command: str, step: Step) -> str:
    """A compact command in the spelling of the step's admissible commands."""
    compact = any("_" in action for action in step.actions)
    spelled = {text.unmarked(action): action for action in step.actions}
    return spelled.get(command, command) if compact else text.full_action(command)


def kind(thing: str) -> str:
    """``desk_1`` -> ``desk``."""
    return thing.split("_")[0]


class PlanPlayer:
    """Plays the commands of a plan one by one. Raises EnvironmentFailure when the plan has come to its end."""

    def __init__(self, plan: tuple[str, ...]) -> None:
        self._left = list(plan)

    def act(self, step: Step) -> str:
        if not self._left:
            raise EnvironmentFailure("the plan has been played to its end; a planner expert serves one episode")
        return _spell(text.compact_action(self._left.pop(0)), step)


class Explorer:
    """Visits receptacles until it has seen what the goal needs, then takes it, changes it, and brings it.

    It remembers where it saw things. Places not visited yet come in a random order drawn from ``noise``:
    ``order="random"`` uniform; ``order="frequency"`` in proportion to how often, in training games, things of the
    wanted type lay in receptacles of that type (``containers``), shared between the room's receptacles of it, plus a
    little.
    """

    def __init__(self, noise: Noise, order: Order, containers: Mapping[str, Mapping[str, int]]) -> None:
        if order not in ("random", "frequency"):
            raise ValueError(f"order is {order!r}; use 'random' or 'frequency'")
        self._noise, self._order, self._containers = noise, order, containers
        self._goal: text.Goal | None = None
        self._places: list[str] = []
        self._unvisited: list[str] = []
        self._found: dict[str, str] = {}
        self._at = ""
        self._held = ""
        self._changed = False
        self._delivered: dict[str, str] = {}
        self._last = ""

    def act(self, step: Step) -> str:
        """The next command. Raises EnvironmentFailure when the first observation states no goal."""
        if self._goal is None:
            self._begin(step)
        else:
            self._remember(step)
        admissible = {text.compact_action(text.unmarked(action)) for action in step.actions}
        self._last = self._decide(admissible)
        return _spell(self._last, step)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self._goal = text.read_goal(step.observation)
        if self._goal is None:
            raise EnvironmentFailure("an explorer must see the first observation of an episode: no goal found in it")
        commands = (text.compact_action(text.unmarked(action)) for action in step.actions)
        self._places = [command[len("go to ") :] for command in commands if command.startswith("go to ")]
        self._unvisited = self._shuffled()

    def _shuffled(self) -> list[str]:
        """The places in a random order: sorted by exponential clocks, so each is next in proportion to its weight."""
        assert self._goal is not None
        wanted = [self._goal.item] + ([self._goal.lamp] if self._goal.lamp else [])
        weights = []
        for place in self._places:
            alike = sum(kind(other) == kind(place) for other in self._places)
            total = [sum(self._containers.get(item, {}).values()) or 1 for item in wanted]
            seen = [self._containers.get(item, {}).get(kind(place), 0) for item in wanted]
            share = sum(n / t for n, t in zip(seen, total, strict=True)) / alike
            weights.append(1.0 if self._order == "random" else share + 0.002)
        clocks = self._noise.at("order").exponential(size=len(self._places)) / weights
        return [self._places[i] for i in clocks.argsort(kind="stable")]

    def _remember(self, step: Step) -> None:
        assert self._goal is not None
        verb, *words = self._last.split()
        if verb == "go":
            self._at = words[1]
            if self._at in self._unvisited and "closed" not in step.observation:
                self._unvisited.remove(self._at)
        elif verb == "open" and self._at in self._unvisited:
            self._unvisited.remove(self._at)
        elif verb == "take":
            self._held, self._changed = words[0], False
            self._found.pop(words[0], None)
        elif verb == "move":
            self._delivered[words[0]] = words[2]
            self._held = ""
        elif verb in _TOOLS:
            self._changed = True
        if verb in ("go", "open"):
            seen = re.findall(r"\b[a-z]+_\d+\b", text.compact_observation(step.observation).partition("see ")[2])
            self._found |= {thing: self._at for thing in seen if thing not in self._delivered}

    # --- decision ---------------------------------------------------------------------------------------------------

    def _decide(self, admissible: set[str]) -> str:
        goal = self._goal
        assert goal is not None
        if f"open {self._at}" in admissible and (self._at in self._unvisited or self._wants_open()):
            return f"open {self._at}"
        if not self._held:
            return self._fetch(goal, admissible)
        if goal.lamp:
            return self._light(goal, admissible)
        if goal.change and not self._changed:
            tools = [place for place in self._places if kind(place) == _TOOLS[goal.change]]
            return self._use(tools, lambda place: f"{goal.change} {self._held} with {place}", admissible)
        chosen = list(self._delivered.values())[:1] or self._ready_place(goal)
        goals = chosen or [place for place in self._places if kind(place) == goal.place]
        return self._use(goals, lambda place: f"move {self._held} to {place}", admissible)

    def _wants_open(self) -> bool:
        """Whether the goal's thing is to be put into this closed place."""
        goal = self._goal
        assert goal is not None
        ready = bool(self._held) and (not goal.change or self._changed)
        return ready and kind(self._at) == goal.place

    def _ready_place(self, goal: text.Goal) -> list[str]:
        """For a goal of two things: a place of the goal's type where one of them already lies."""
        if goal.many < 2:
            return []
        return [at for thing, at in self._found.items() if kind(thing) == goal.item and kind(at) == goal.place][:1]

    def _fetch(self, goal: text.Goal, admissible: set[str]) -> str:
        done = set(self._delivered.values()) | set(self._ready_place(goal))
        known = [(thing, at) for thing, at in self._found.items() if kind(thing) == goal.item and at not in done]
        for thing, at in known:
            if f"take {thing} from {at}" in admissible:
                return f"take {thing} from {at}"
        if known:
            return f"go to {known[0][1]}"
        return self._explore()

    def _light(self, goal: text.Goal, admissible: set[str]) -> str:
        lamps = [(thing, at) for thing, at in self._found.items() if kind(thing) == goal.lamp]
        for lamp, _ in lamps:
            if f"use {lamp}" in admissible:
                return f"use {lamp}"
        return f"go to {lamps[0][1]}" if lamps else self._explore()

    def _use(self, places: list[str], command: Callable[[str], str], admissible: set[str]) -> str:
        """At one of these places, the command; else the way to one of them."""
        for place in places:
            if command(place) in admissible:
                return command(place)
        away = [place for place in places if place != self._at]
        return f"go to {away[0]}" if away else self._explore()

    def _explore(self) -> str:
        """On to the next place; when all have been seen, around again."""
        if not self._unvisited:
            self._unvisited = self._shuffled()
        if self._unvisited[0] == self._at and len(self._unvisited) > 1:
            self._unvisited.append(self._unvisited.pop(0))
        return f"go to {self._unvisited[0]}"
