"""A game being played: the Z-machine, which says the text, and the logic, which says the admissible commands."""

from __future__ import annotations

import functools
import re
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from branchpoint.env import _textworld_package as package
from branchpoint.env.textworld.stories import Story

SEED = 1
"""Of the interpreter, which would start from the time. The games seed their own generator when play begins."""

_WON, _LOST = "*** The End ***", "*** You lost! ***"
_FINAL = re.compile(r"You scored (-?\d+) out of a possible \d+, in \d+ turns?\.")
_TRACKED = ["moves", "score"]


class Facts(NamedTuple):
    """A state of the logic, never changed: what holds, the applicable actions, and the command of each."""

    state: Any
    actions: tuple[Any, ...]
    said: tuple[str, ...]

    def __deepcopy__(self, _: Any) -> Facts:
        return self


class Logic:
    """The rules of a game. :meth:`start` gives the first state; the other methods give new states and change none."""

    def __init__(self, story: Story) -> None:
        parts = package.player()
        self._kb = _knowledge(story.logic)
        infos = {name: parts.entity.deserialize(info) for name, info in story.infos}
        self._facts = [parts.fact.deserialize(fact) for fact in story.facts]
        self._inform = parts.inform(SimpleNamespace(infos=infos, kb=self._kb))
        self.names: dict[str, str] = {name: info.name for name, info in infos.items()}

    def start(self) -> Facts:
        """The state that the game begins in."""
        return self._known(package.player().state(self._kb.logic, self._facts))

    def _known(self, state: Any) -> Facts:
        kb = self._kb
        actions = tuple(state.all_applicable_actions(kb.rules.values(), kb.types.constants_mapping))
        return Facts(state, actions, tuple(self._inform.gen_commands_from_actions(actions)))

    def after(self, facts: Facts, action: Any) -> Facts:
        """The state that an applicable action leads to."""
        if not action.added and not action.removed:  # looking changes nothing
            return facts
        state = facts.state.copy()
        state.apply(action)
        return self._known(state)

    def heard(self, facts: Facts, event: str) -> tuple[Facts, str]:
        """The state after what the Z-machine said it did, and the command that this answers to; the state as it is and
        "" when it is no action of the logic."""
        action = self._inform.detect_action(event, facts.actions)
        if action is None:
            return facts, ""
        return self.after(facts, action), self._inform.gen_commands_from_actions([action])[0]

    def played(self, facts: Facts, command: str) -> Facts:
        """The state after a command; the state as it is when the command is not admissible."""
        named = [action for said, action in zip(facts.said, facts.actions, strict=True) if said == command]
        return self.after(facts, max(named, key=lambda a: len(a.preconditions))) if named else facts


_KNOWN: dict[str, Any] = {}
"""The rules that were read, by their text. Reading takes a second or two."""


def _knowledge(logic: str) -> Any:
    if logic not in _KNOWN:
        _KNOWN[logic] = package.player().knowledge.deserialize({"logic": logic, "text_grammars_path": ""})
    return _KNOWN[logic]


def preload() -> None:
    """Read the rules of all kinds of games."""
    for text in package.rules():
        _knowledge(text)


@functools.lru_cache(maxsize=32)
def logic(story: Story) -> Logic:
    """The rules of a story, read once."""
    return Logic(story)


class Saved(NamedTuple):
    """The whole state of a game, immutable."""

    memory: bytes
    stack: bytes
    registers: tuple[Any, ...]
    facts: Facts
    score: int

    def __deepcopy__(self, _: Any) -> Saved:
        return self


class Game:
    """A live game. ``feedback``, ``did``, ``facts``, ``score``, ``won`` and ``lost`` tell of the last command:
    what was said, the commands that the logic saw carried out, the state reached, the points so far, and whether the
    game is over."""

    def __init__(self, story: Story, saved: Saved | None = None) -> None:
        """At the beginning, or where another game of the same story was saved."""
        self._story, self._logic = story, logic(story)
        self._machine: Any = None
        self.feedback = ""
        self.did: tuple[str, ...] = ()
        self.won = self.lost = False
        self.score = 0
        if saved is None:
            self._machine, self.feedback = _begun(story)
            for ask in ("tw-extra-infos moves", "tw-extra-infos score", "tw-trace-actions"):
                self._machine.step(ask)
            self.facts = self._logic.start()
            return
        memory, stack, registers, self.facts, self.score = saved
        arrays = (np.frombuffer(part, np.uint8).copy() for part in (memory, stack))
        self._machine = _holding(story)
        self._machine.set_state((*arrays, *registers))

    @property
    def commands(self) -> tuple[str, ...]:
        """The admissible commands, sorted."""
        return tuple(sorted(set(self.facts.said)))

    def play(self, command: str) -> None:
        """Say a command to the game."""
        text, *_ = self._machine.step(command)
        marks, text = package.player().tagged(text, list(_TRACKED))
        events, self.feedback = package.player().events(text)
        self._follow(events)
        self.won, self.lost = _WON in self.feedback, _LOST in self.feedback
        final = _FINAL.search(self.feedback) if self.won or self.lost else None
        if final:
            self.score = int(final[1])
        elif marks["score"]:
            self.score = int(marks["score"].split("\n")[0])

    def _follow(self, events: Iterable[str]) -> None:
        did = []
        for event in events:
            self.facts, command = self._logic.heard(self.facts, event)
            if command:
                did.append(command)
        self.did = tuple(did)

    def save(self) -> Saved:
        """The state now."""
        memory, stack, *registers = self._machine.get_state()
        return Saved(memory.tobytes(), stack.tobytes(), tuple(registers), self.facts, self.score)

    def close(self) -> None:
        """Give the interpreter back. Harmless when called twice."""
        if self._machine is not None:
            _FREE.append((self._story, self._machine))
            self._machine = None


_FREE: list[tuple[Story, Any]] = []
"""Interpreters of closed games, with what they hold. Each is a copy of a C library; after a fork each process has its
own copy of all."""


def _begun(story: Story) -> tuple[Any, str]:
    """An interpreter at the start of a story, and what it says there. It reads the code from a file, which is not
    needed any more once it has begun."""
    with tempfile.TemporaryDirectory(prefix="branchpoint-textworld-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the interpreter knows no score of the game; the game tells it
        path = Path(folder) / "game.z8"
        path.write_bytes(story.code)
        if _FREE:
            _, machine = _FREE.pop(0)
            machine.close()
            machine._cache.clear()
            machine.load(str(path), SEED)
        else:
            machine = package.player().interpreter(str(path), SEED)
        text, _ = machine.reset()
        return machine, text


def _holding(story: Story) -> Any:
    """An interpreter that holds a story, in whatever state."""
    for place, (held, machine) in enumerate(_FREE):
        if held.key == story.key:
            del _FREE[place]
            return machine
    return _begun(story)[0]
