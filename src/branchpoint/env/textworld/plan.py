"""The next command towards winning, from what holds in a state. Knows everything, so it can go on from any state that
is not lost: it is what an expert falls back on when the game has left its maker's walkthrough."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

DIRECTIONS = ("north", "south", "east", "west")
APPLIANCES = {"fried": "stove", "roasted": "oven", "grilled": "toaster"}
VERBS = {"chopped": "chop", "sliced": "slice", "diced": "dice"}
INVENTORY, PLAYER = "I", "P"


class Scene:
    """A state of the logic, by what a planner asks of it. Things are known by their ids; ``names`` says what commands
    call them."""

    def __init__(self, facts: Iterable[Any], names: dict[str, str]) -> None:
        self.names = names
        self.facts: set[tuple[str, ...]] = set()
        self.exits: dict[str, list[tuple[str, str]]] = {}
        self.doors: dict[tuple[str, str], str] = {}
        self.holder: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.of_type: dict[str, list[str]] = {}
        for fact in sorted(facts):
            self._learn(fact.name, [a.name for a in fact.arguments], [a.type for a in fact.arguments])
        self.room = self.holder[PLAYER]
        self.carried = sorted(thing for thing, where in self.holder.items() if where == INVENTORY)
        self.full = bool(self.of_type.get("slot")) and not any(("free", s) in self.facts for s in self.of_type["slot"])

    def _learn(self, name: str, things: list[str], types: list[str]) -> None:
        self.facts.add((name, *things))
        for thing, kind in zip(things, types, strict=True):
            if thing not in self.of_type.setdefault(kind, []):
                self.of_type[kind].append(thing)
        if name.removesuffix("_of") in DIRECTIONS:
            self.exits.setdefault(things[1], []).append((name.removesuffix("_of"), things[0]))
        elif name == "link":
            self.doors[things[0], things[2]] = things[1]
        elif name == "match":
            self.keys[things[1]] = things[0]
        elif name in ("in", "on", "at") and types[0] not in ("ingredient", "slot"):
            self.holder[things[0]] = things[1]

    def holds(self, name: str, *things: str) -> bool:
        return (name, *things) in self.facts

    def room_of(self, thing: str) -> str:
        """Where a thing is, in whatever it is; the player's room for what is carried; "" when it is nowhere."""
        while thing in self.holder:
            thing = self.room if self.holder[thing] == INVENTORY else self.holder[thing]
        return thing if thing in self.of_type.get("r", ()) else ""


class Impossible(Exception):
    """No way to the goal that this planner knows of."""


def fetch(story_quests: Sequence[Any]) -> str:
    """The id of the thing that has to be taken, in a game whose goal is to take one."""
    for quest in story_quests:
        for event in quest["win_events"]:
            for fact in event["condition"]["preconditions"]:
                if fact["name"] == "in" and fact["arguments"][-1]["name"] == INVENTORY:
                    return fact["arguments"][0]["name"]
    raise Impossible("no quest of the game is to take something")


def towards(scene: Scene, room: str, wanted: tuple[str, ...] = ()) -> str:
    """The next command on a shortest way to a room, "" when the player is there. Locked doors only where there is no
    other way."""
    for locked in (False, True):
        path = _path(scene, room, locked)
        if path is not None:
            break
    else:
        raise Impossible(f"no way to {scene.names[room] or room}")
    if not path:
        return ""
    direction, there = path[0]
    door = scene.doors.get((scene.room, there), "")
    return (opened(scene, door, wanted) if door else "") or f"go {direction}"


def _path(scene: Scene, goal: str, locked: bool) -> list[tuple[str, str]] | None:
    came: dict[str, list[tuple[str, str]]] = {scene.room: []}
    todo = deque([scene.room])
    while todo:
        here = todo.popleft()
        if here == goal:
            return came[here]
        for direction, there in scene.exits.get(here, ()):
            door = scene.doors.get((here, there), "")
            shut = bool(door) and scene.holds("locked", door)
            if there not in came and (door or scene.holds("free", here, there)) and (locked or not shut):
                came[there] = [*came[here], (direction, there)]
                todo.append(there)
    return None


def opened(scene: Scene, thing: str, wanted: tuple[str, ...] = ()) -> str:
    """The next command to open a door or container at hand, "" when it is open."""
    if scene.holds("closed", thing):
        return f"open {scene.names[thing]}"
    if not scene.holds("locked", thing):
        return ""
    key = scene.keys.get(thing, "")
    if not key or key in wanted:
        raise Impossible(f"no key to {scene.names[thing]} within reach")
    return taken(scene, key, (*wanted, key)) or f"unlock {scene.names[thing]} with {scene.names[key]}"


def taken(scene: Scene, thing: str, wanted: tuple[str, ...] = ()) -> str:
    """The next command to have a thing, "" when it is carried. ``wanted``: what must not be put down for it."""
    if thing in scene.carried:
        return ""
    room = scene.room_of(thing)
    if not room:
        raise Impossible(f"{scene.names[thing]} is gone")
    where = scene.holder[thing]
    command = towards(scene, room, (*wanted, thing))
    if not command and where != room:
        command = opened(scene, where, (*wanted, thing))
    if not command and scene.full:
        command = _dropped(scene, wanted)
    return command or f"take {scene.names[thing]}" + (f" from {scene.names[where]}" if where != room else "")


def _dropped(scene: Scene, wanted: tuple[str, ...]) -> str:
    spare = [thing for thing in scene.carried if thing not in wanted]
    if not spare:
        raise Impossible("no hand is free")
    return f"drop {scene.names[spare[0]]}"


def cooked(scene: Scene, recipe: Sequence[tuple[str, str, str]]) -> str:
    """The next command of a cook: fetch the ingredients, cut and cook them, prepare the meal in the kitchen, eat it.

    With hands for few things, one ingredient is made ready after the other before all are gathered.
    """
    if any(scene.holds("in", meal, INVENTORY) for meal in scene.of_type.get("meal", ())):
        return "eat meal"
    ids = {name: thing for thing, name in scene.names.items()}
    foods = tuple(ids[name] for name, _, _ in recipe)
    if not scene.of_type.get("slot"):
        for food in foods:
            if command := taken(scene, food):
                return command
    for food, (_, cooking, cutting) in zip(foods, recipe, strict=True):
        if command := _ready(scene, food, cooking, cutting):
            return command
    for food in foods:
        if command := taken(scene, food, foods):
            return command
    kitchen = next(fact[1] for fact in scene.facts if fact[0] == "cooking_location")
    return towards(scene, kitchen, foods) or "prepare meal"


def _ready(scene: Scene, food: str, cooking: str, cutting: str) -> str:
    name = scene.names[food]
    if cutting in VERBS and not scene.holds(cutting, food):
        knife = next((fact[1] for fact in scene.facts if fact[0] == "sharp"), "")
        command = taken(scene, food, (knife,)) or taken(scene, knife, (food,))
        return command or f"{VERBS[cutting]} {name} with {scene.names[knife]}"
    if cooking in APPLIANCES and not scene.holds(cooking, food):
        appliance = scene.of_type[APPLIANCES[cooking]][0]
        command = taken(scene, food) or towards(scene, scene.room_of(appliance), (food,))
        return command or f"cook {name} with {scene.names[appliance]}"
    return ""
