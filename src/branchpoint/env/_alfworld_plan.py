"""A shortest plan of an ALFWorld game, found with full knowledge of its first state.

Going anywhere is one command, so a plan is one choice of things and places: all choices are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from branchpoint.env._alfworld_engine import Game
from branchpoint.env._alfworld_text import Goal

TOOLS = {"clean": "sinkbasintype", "heat": "microwavetype", "cool": "fridgetype"}


class Room:
    """The facts of a game's first state that a plan depends on, under the names that commands use."""

    def __init__(self, game: Game) -> None:
        facts = [(name, [game.name_of(argument) for argument in arguments]) for name, *arguments in game.facts()]

        def pairs(predicate: str) -> list[tuple[str, str]]:
            return sorted((args[0].strip(), args[1].strip()) for name, args in facts if name == predicate)

        def names(predicate: str) -> set[str]:
            return {args[0] for name, args in facts if name == predicate}

        self.inside = pairs("inreceptacle")
        self.location = dict(pairs("receptacleatlocation"))
        self.type = dict(pairs("objecttype") + pairs("receptacletype"))
        self.fits = set(pairs("cancontain"))
        self.start = pairs("atlocation")[0][1]
        self.closed = names("openable") - names("opened")
        self.pickupable, self.toggleable = names("pickupable"), names("toggleable")
        self.able = {"clean": names("cleanable"), "heat": names("heatable"), "cool": names("coolable")}

    def of(self, kind: str) -> list[str]:
        return [thing for thing, its in self.type.items() if its == kind]


class Walk:
    """Commands so far, where they lead, and what they open."""

    def __init__(self, room: Room) -> None:
        self.room, self.commands, self.location, self.opened = room, [], room.start, set()

    def to(self, place: str, use: bool) -> Walk:
        """Go to a place and, to put things in or take them out (``use``), open it."""
        if self.room.location[place] != self.location:
            self.commands.append(f"go to {place}")
            self.location = self.room.location[place]
        if use and place in self.room.closed - self.opened:
            self.commands.append(f"open {place}")
            self.opened.add(place)
        return self

    def do(self, command: str) -> Walk:
        self.commands.append(command)
        return self


def candidates(room: Room, goal: Goal) -> Iterator[list[str]]:
    """The commands of every sensible choice of things and places for a goal."""
    items = [(thing, at) for thing, at in room.inside if room.type.get(thing) == goal.item + "type"]
    items = [(thing, at) for thing, at in items if thing in room.pickupable and at in room.location]
    if goal.lamp:
        lamps = [(thing, at) for thing, at in room.inside if room.type.get(thing) == goal.lamp + "type"]
        for thing, at in items:
            for lamp, stand in lamps:
                if lamp in room.toggleable and stand in room.location:
                    walk = Walk(room).to(at, True).do(f"take {thing} from {at}")
                    yield walk.to(stand, False).do(f"use {lamp}").commands
        return
    places = [place for place in room.of(goal.place + "type") if place in room.location]
    tools = [tool for tool in room.of(TOOLS[goal.change]) if tool in room.location] if goal.change else [""]
    for chosen in permutations(items, goal.many):
        for place in places:
            for tool in tools:
                walk = Walk(room)
                for thing, at in chosen:
                    if at == place and not goal.change:
                        continue
                    walk.to(at, True).do(f"take {thing} from {at}")
                    if goal.change:
                        walk.to(tool, False).do(f"{goal.change} {thing} with {tool}")
                    walk.to(place, True).do(f"move {thing} to {place}")
                able = not goal.change or all(thing in room.able[goal.change] for thing, _ in chosen)
                fits = all((room.type[place], room.type[thing]) in room.fits for thing, _ in chosen)
                if able and fits and walk.commands:
                    yield walk.commands


def shortest_plan(game: Game, goal: Goal) -> tuple[str, ...]:
    """The commands (full style) from the game's first state to the goal; of several the first in alphabetical order.
    Empty when there is none."""
    return tuple(min(candidates(Room(game), goal), key=lambda commands: (len(commands), commands), default=()))
