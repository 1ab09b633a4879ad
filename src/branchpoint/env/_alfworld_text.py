"""Two styles of the same ALFWorld text: ``full`` (the original) and ``compact`` (one token a thing, for small models).

full     go to desk 1      You arrive at desk 1. On the desk 1, you see a laptop 1, and a pen 2.
compact  go to desk_1      see laptop_1 pen_2
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ASIDE = re.compile(r"(help|look|inventory|examine .*)")
"""Commands that change nothing: what the ``drop`` dial takes out of the admissible commands."""

_THING = re.compile(r"\b([a-z]+) (\d+)\b")
_SENTENCES = (
    (re.compile(r"You arrive at [a-z]+ \d+\. "), ""),
    (re.compile(r"You open the [a-z]+ \d+\. "), ""),
    (re.compile(r"The [a-z]+ \d+ is open\. In it, you see (.*)\."), r"open see \1"),
    (re.compile(r"The [a-z]+ \d+ is closed\."), "closed"),
    (re.compile(r"On the [a-z]+ \d+, you see (.*)\."), r"see \1"),
    (re.compile(r"You are in the middle of a room\. Looking quickly around you, you see (.*)\."), r"see \1"),
    (re.compile(r"You are facing the (.*)\. Next to it, you see (.*)\."), r"at \1 see \2"),
    (re.compile(r"You close the [a-z]+ \d+\."), "closed"),
    (re.compile(r"You pick up the ([a-z]+ \d+) from the [a-z]+ \d+\."), r"hold \1"),
    (re.compile(r"You move the [a-z]+ \d+ to the [a-z]+ \d+\."), "placed"),
    (re.compile(r"You (heat|clean|cool) the [a-z]+ \d+ using the [a-z]+ \d+\."), r"\1 done"),
    (re.compile(r"You turn on the [a-z]+ \d+\."), "on"),
    (re.compile(r"You turn off the [a-z]+ \d+\."), "off"),
    (re.compile(r"You are carrying: (.*)\."), r"hold \1"),
    (re.compile(r"You are not carrying anything\."), "hold nothing"),
    (re.compile(r"There's nothing special about .*\."), "plain"),
    (re.compile(r"Nothing happens\."), "nothing happens"),
)
_FILLER = re.compile(r"\b(?:a|an|and|the|some)\b|[.,:;!=()\n-]+")


def compact_action(command: str) -> str:
    """``take laptop 1 from desk 1`` -> ``take laptop_1 from desk_1``."""
    return _THING.sub(r"\1_\2", command)


def unmarked(command: str) -> str:
    """A command as it is without the marks of :meth:`Goal.mark`."""
    return command.replace("* ", "")


def full_action(command: str) -> str:
    """The inverse of :func:`compact_action`."""
    return command.replace("_", " ")


def compact_observation(text: str) -> str:
    """What an observation says, in few words: see the module's example. Anything unforeseen keeps its words."""
    if text.lstrip().startswith("Available commands:"):
        return "help"
    for sentence, short in _SENTENCES:
        text = sentence.sub(short, text)
    return " ".join(_THING.sub(r"\1_\2", _FILLER.sub(" ", text.lower())).split())


@dataclass(frozen=True, slots=True)
class Goal:
    """What to do, in the games' own words: types of ``item``, ``place``, ``lamp``; a ``change``; how ``many``."""

    item: str
    place: str = ""
    lamp: str = ""
    change: str = ""
    many: int = 1

    @property
    def compact(self) -> str:
        """``put laptop in bed``, ``put two cd in safe``, ``heat mug put in desk``, ``look book under desklamp``."""
        if self.lamp:
            return f"look {self.item} under {self.lamp}"
        if self.change:
            return f"{self.change} {self.item} put in {self.place}"
        return f"put {'two ' if self.many == 2 else ''}{self.item} in {self.place}"

    def mark(self, observation: str) -> str:
        """A compact observation or command with ``*`` before everything of a type that the goal names: ``see pen_2 *
        laptop_1``, ``take * laptop_1 from desk_1``.

        The line that states the goal stays as it is. Nothing is added that the text does not say already.
        """
        names = {self.item, self.place, self.lamp}
        lines = observation.split("\n")
        return "\n".join(
            line
            if line.startswith("task ")
            else " ".join(f"* {w}" if w.partition("_")[0] in names else w for w in line.split())
            for line in lines
        )

    @classmethod
    def of(cls, task_type: str, params: dict[str, Any]) -> Goal:
        """The goal of a game from its task type and parameters."""
        item, place, lamp = (params[field].lower() for field in ("object_target", "parent_target", "toggle_target"))
        change = re.search(r"pick_(clean|heat|cool)_", task_type)
        return cls(
            item,
            place if not lamp else "",
            lamp,
            change.group(1) if change else "",
            2 if task_type == "pick_two_obj_and_place" else 1,
        )


_STATES = {"clean": "clean", "hot": "heat", "cool": "cool"}
_GOALS = (
    r"(?:look at|examine the|look) (?P<item>\w+) (?:under|with)(?: the)? (?P<lamp>\w+)",
    r"(?:put|find) (?P<two>two) (?P<item>\w+)(?: and put them)? in (?P<place>\w+)",
    r"put a (?P<state>clean|hot|cool) (?P<item>\w+) in (?P<place>\w+)",
    r"(?P<change>clean|heat|cool) (?:some )?(?P<item>\w+) (?:and put it|put) in (?P<place>\w+)",
    r"put (?:a |some )?(?P<item>\w+) (?:in|on) (?P<place>\w+)",
)


def read_goal(observation: str) -> Goal | None:
    """The goal stated in a first observation of either style, or None."""
    stated = re.search(r"Your task is to: (.*?)\.?\s*$|^task (.*)$", observation, re.MULTILINE)
    if stated is None:
        return None
    text = stated.group(1) or stated.group(2)
    for form in _GOALS:
        if found := re.fullmatch(form, text):
            part = {"lamp": "", "place": "", "two": "", "change": "", "state": ""} | found.groupdict("")
            change = part["change"] or _STATES.get(part["state"], "")
            return Goal(part["item"], part["place"], part["lamp"], change, 2 if part["two"] else 1)
    return None


def first_observation(text: str, goal: Goal, style: str) -> str:
    """The first observation in a style; compact: a line with the goal, a line with the receptacles."""
    if style == "full":
        return text
    room = text.split("\n\n")[1]
    return f"task {goal.compact}\n{compact_observation(room)}"
