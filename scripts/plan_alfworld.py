"""Plan every shipped ALFWorld game, play the plan in the real engine, and keep what wins.

    python scripts/plan_alfworld.py plan plans.jsonl [--minutes 30]     add plans for games not in the file yet
    python scripts/plan_alfworld.py pack plans.jsonl                    write the package data plans.jsonl.xz

The packages' own planner (optimal, A*) takes from 10 ms to more than three minutes and a gigabyte for one game. A plan
of this domain is one choice of things and places, so it is searched here directly: fewest commands over all choices.
Where the plan found does not win, the packages' planner is asked, in a process of its own with a limit of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NoReturn

from branchpoint.env import _alfworld_data as data
from branchpoint.env import _alfworld_engine as engine
from branchpoint.env._alfworld_text import Goal

TOOLS = {"clean": "sinkbasintype", "heat": "microwavetype", "cool": "fridgetype"}
PLANNER_SECONDS = 120


class Room:
    """The facts of a game's first state that a plan depends on, under the names that commands use."""

    def __init__(self, game: engine.Game) -> None:
        facts = [(name, [game.name_of(argument) for argument in arguments]) for name, arguments in game.facts()]

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


def wins(game: engine.Game, plan: list[str] | tuple[str, ...]) -> bool:
    """Whether the plan, played from here, is admissible throughout and reaches the goal at its end and not before."""
    for command in plan:
        if game.won or command not in game.moves:
            return False
        game.play(command)
    return game.won


def solve(row: dict[str, Any]) -> dict[str, Any]:
    """The plan of a game, played and won, or an empty one."""
    start = time.perf_counter()
    goal = Goal.of(row["task_type"], row["pddl_params"])
    game = engine.Game(row["pddl_problem"], "")
    plan = tuple(min(candidates(Room(game), goal), key=lambda commands: (len(commands), commands), default=()))
    won, source = wins(game, plan), "search"
    game.close()
    if not won:
        source = "planner"
        game = engine.Game(row["pddl_problem"], "", planning=True)
        plan = game.plan()
        won = wins(game, plan)
        game.close()
    seconds = round(time.perf_counter() - start, 2)
    return {"id": row["id"], "plan": plan if won else (), "won": won, "source": source, "seconds": seconds}


def games() -> Iterator[dict[str, Any]]:
    """All games: evaluation splits first, then training games by task type."""

    def order(entry: data.Entry) -> tuple[bool, int, str, str]:
        return entry.split == "train", data.TASK_TYPES.index(entry.task_type), entry.split, entry.id

    return (data.game(entry.id) for entry in sorted(data.index().values(), key=order))


def work(row: dict[str, Any], path: Path) -> NoReturn:
    """In a process of its own: append the plan of one game to a file, or die of the limit."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (PLANNER_SECONDS, PLANNER_SECONDS))
        result = json.dumps(solve(row)) + "\n"
        with path.open("a") as file:
            file.write(result)
        status = 0
    finally:
        os._exit(status)


def plan(path: Path, minutes: float) -> None:
    """Append the plans of games that the file lacks. Each game runs in a forked process with a time limit."""
    path.touch()
    known = {json.loads(line)["id"] for line in path.read_text().splitlines()}
    end = time.monotonic() + 60 * minutes
    engine.preload()
    for row in games():
        if row["id"] in known:
            continue
        if time.monotonic() > end:
            return
        child = os.fork()
        if child == 0:
            work(row, path)
        if os.waitpid(child, 0)[1]:
            print(f"no plan within {PLANNER_SECONDS} s of CPU time: {row['id']}", flush=True)


def pack(path: Path, out: Path) -> None:
    """Write the won plans as package data, in the order of the index."""
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines()) if row["won"]}
    plans = [{"id": name, "plan": rows[name]["plan"]} for name in data.index() if name in rows]
    data.write_pack(out, plans)
    print(f"{len(plans)} of {len(data.index())} games have a plan; {out.stat().st_size} bytes in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "pack"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop starting new games after this time")
    options = parser.parse_args()
    if options.what == "plan":
        plan(options.file, options.minutes)
    else:
        pack(options.file, data.folder() / "plans.jsonl.xz")


if __name__ == "__main__":
    main()
