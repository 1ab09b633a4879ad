"""What a MiniGrid agent sees, as text. The encoding is MiniGrid's: ``image[column, row] = (object, colour, state)``,
the agent in the middle of the last row, facing up, and what it carries shown in its own cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOORS = ("open", "closed", "locked")
DIRECTIONS = ("east", "south", "west", "north")
_PLAIN = {"unseen": "??", "empty": "..", "floor": "..", "wall": "##", "goal": "GG", "lava": "~~", "agent": "AA"}
_MARKS = {"key": "k", "ball": "o", "box": "b"}
_DOOR_MARKS = {"open": "/", "closed": "|", "locked": "="}


def is_grid(observation: Any) -> bool:
    """Whether an observation is MiniGrid's: a mapping with a mission and an encoded view."""
    return isinstance(observation, Mapping) and isinstance(observation.get("mission"), str) and "image" in observation


def sentences(observation: Mapping[str, Any]) -> str:
    """The goal, the facing, what is carried, the objects in view nearest first, and the wall on each side if seen.

    Walls elsewhere are not told: :func:`chart` loses nothing.
    """
    image = _cells(observation)
    columns, rows = len(image), len(image[0])
    here = (columns // 2, rows - 1)
    things = sorted(
        ((row, column) for column in range(columns) for row in range(rows) if (column, row) != here),
        key=lambda cell: (abs(cell[1] - here[0]) + here[1] - cell[0], cell),
    )
    seen = [
        f"{name} {_where(here[0], here[1], column, row)}"
        for row, column in things
        if (name := _name(image[column][row]))
    ]
    walls = [f"{n} {'step' if n == 1 else 'steps'} {side}" for side, n in _walls(image, here)]
    lines = [
        f"goal: {observation['mission']}",
        f"facing: {_facing(observation)}",
        f"carrying: {_name(image[here[0]][here[1]]) or 'nothing'}",
        f"in view: {'; '.join(seen) or 'nothing'}",
        f"walls: {'; '.join(walls) or 'none near'}",
    ]
    return "\n".join(lines)


def chart(observation: Mapping[str, Any]) -> str:
    """The whole view, two characters a cell: ``??`` unseen, ``..`` free, ``##`` wall, ``GG`` goal, ``~~`` lava, ``^^``
    the agent; else the thing (k key, o ball, b box, ``/`` open, ``|`` closed, ``=`` locked door) and its colour's
    initial."""
    image = _cells(observation)
    columns, rows = len(image), len(image[0])
    here = (columns // 2, rows - 1)
    lines = [
        " ".join("^^" if (c, r) == here else _mark(image[c][r]) for c in range(columns)).rstrip() for r in range(rows)
    ]
    carried = _name(image[here[0]][here[1]]) or "nothing"
    head = [f"goal: {observation['mission']}", f"facing: {_facing(observation)}", f"carrying: {carried}"]
    return "\n".join(head + lines)


def _cells(observation: Mapping[str, Any]) -> list[list[list[int]]]:
    image = observation["image"]
    return image.tolist() if hasattr(image, "tolist") else image  # plain integers are quicker to take apart


def _facing(observation: Mapping[str, Any]) -> str:
    return DIRECTIONS[int(observation["direction"])] if "direction" in observation else "unknown"


def _name(cell: list[int]) -> str:
    """``closed red door``; empty for what is no object (free, unseen, wall)."""
    kind, colour, state = cell
    name = OBJECTS[kind]
    if name in ("unseen", "empty", "floor", "wall", "agent"):
        return ""
    if name in ("goal", "lava"):
        return name
    return f"{DOORS[state]} {COLOURS[colour]} door" if name == "door" else f"{COLOURS[colour]} {name}"


def _mark(cell: list[int]) -> str:
    kind, colour, state = cell
    name = OBJECTS[kind]
    if name in _PLAIN:
        return _PLAIN[name]
    return (_DOOR_MARKS[DOORS[state]] if name == "door" else _MARKS[name]) + COLOURS[colour][:1]


def _where(x: int, y: int, column: int, row: int) -> str:
    """``2 steps ahead and 1 step left``: from the agent at (x, y), which faces up."""
    parts = [(y - row, "ahead"), (x - column, "left"), (column - x, "right")]
    return " and ".join(f"{n} {'step' if n == 1 else 'steps'} {side}" for n, side in parts if n > 0)


def _walls(image: list[list[list[int]]], here: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """The first wall straight ahead, left and right, with its distance; what hides it or is unseen ends the look."""
    for side, (dx, dy) in {"ahead": (0, -1), "left": (-1, 0), "right": (1, 0)}.items():
        x, y = here[0] + dx, here[1] + dy
        while 0 <= x < len(image) and y >= 0 and OBJECTS[image[x][y][0]] != "unseen":
            if OBJECTS[image[x][y][0]] == "wall":
                yield side, abs(x - here[0]) + abs(y - here[1])
                break
            x, y = x + dx, y + dy
