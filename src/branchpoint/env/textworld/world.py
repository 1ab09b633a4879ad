"""A generated game as a world."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from branchpoint.env.textworld.dials import Dials
from branchpoint.env.textworld.live import Game, Saved
from branchpoint.env.textworld.stories import Story, story
from branchpoint.world import EnvironmentFailure, Step, Task

REFUSED = "That is not a command."
LONGEST = 100
"""Longer commands are refused; the interpreter's own buffer ends at 198 bytes."""

_PLAIN = re.compile(r"[a-z](?:[a-z'-]| (?! ))*", re.IGNORECASE)
_VERBS = re.compile(
    r"(go|north|south|east|west|[nsewlxi]|look|examine|inventory|take|get|pick|drop|put|place|insert|open|close|shut|lock|"
    r"unlock|eat|drink|cook|slice|dice|chop|prepare|goal|help)\b.*",
    re.IGNORECASE,
)
_MANY = re.compile(r"\b(all|each|every|everything|and|then|but|except)\b", re.IGNORECASE)
_ASIDE = re.compile(r"look|inventory|examine (?!cookbook$).*")
_PICTURE = re.compile(r"\A(?:[ _|/\\$<>]*\n)+")
_BELOW = re.compile(r"(?:Would you like to RESTART,[^\n]*\s*)?\n>\s+-= [^\n]*\Z")
_BLANK = re.compile(r"\n(?:[ \t]*\n)+")


def plain(text: str) -> str:
    """A text of the interpreter without title picture, prompt, status line, the menu after the end, and blank lines in
    a row."""
    return _BLANK.sub("\n\n", _BELOW.sub("", _PICTURE.sub("", text))).strip()


class Played(NamedTuple):
    """The whole state of an episode, immutable. ``game``: None before the first observation."""

    game: Saved | None = None
    steps: int = 0
    over: bool = True


class TextWorld:
    """One game. ``Step.actions``: the admissible commands, sorted. Any other command of the game's language is tried
    too, as the game's own parser understands it; what is no such command is refused. Each costs a step.

    ``info``: success, lost, score and max_score (points), steps, and ``did``: the admissible commands that the last
    action amounted to.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for a bad dial. The game is made at reset, if it is not in the cache."""
        self._dials = Dials.of(task)
        self._story: Story | None = None
        self._game: Game | None = None
        self._played = Played()

    def reset(self) -> Step:
        """Begin the game. The observation has its objective and the first room.

        Raises EnvironmentFailure when the game cannot be made, ImportError when the extra is not installed.
        """
        self.close()
        self._game = Game(self._known_story())
        self._played = Played(None, 0, False)
        return self._step(self._game.feedback, 0.0)

    def step(self, action: str) -> Step:
        """Play a command. Raises EnvironmentFailure before reset or after the end."""
        if self._game is None or self._played.over:
            raise EnvironmentFailure("the game has not started or is over; call reset()")
        game, before = self._game, self._game.score
        self._played = self._played._replace(steps=self._played.steps + 1)
        command = self._understood(action)
        if not command:
            game.did = ()
            return self._step(REFUSED, 0.0)
        game.play(command)
        return self._step(game.feedback, game.score - before)

    def get_state(self) -> Played:
        """The state, immutable: of the interpreter, of the logic, and the steps played."""
        return self._played._replace(game=self._game.save() if self._game else None)

    def set_state(self, state: Played) -> None:
        """Go to a state of the same task."""
        self.close()
        if state.game is not None:
            self._game = Game(self._known_story(), state.game)
        self._played = state._replace(game=None)

    def close(self) -> None:
        """End the game. Harmless when called twice."""
        if self._game is not None:
            self._game.close()
        self._game, self._played = None, Played()

    def _known_story(self) -> Story:
        self._story = self._story or story(self._dials)
        return self._story

    def _understood(self, action: str) -> str:
        """The command to say to the game, "" for what is none: foreign signs, several commands in one, and the
        interpreter's own (save, restore, quit, the package's marks)."""
        command = action.strip()
        assert self._game is not None
        if command in self._game.facts.said:
            return command
        if len(command) > LONGEST or not _PLAIN.fullmatch(command):
            return ""
        return command if _VERBS.fullmatch(command) and not _MANY.search(command) else ""

    def _step(self, text: str, points: float) -> Step:
        assert self._game is not None
        game, most = self._game, self._known_story().max_score
        done = game.won or game.lost
        truncated = not done and self._played.steps >= self._dials.max_steps
        self._played = self._played._replace(over=done or truncated)
        reward = {
            "dense": points / most,
            "final": game.score / most if self._played.over else 0.0,
            "win": float(game.won),
        }[self._dials.reward]
        actions = tuple(c for c in game.commands if self._dials.looking or not _ASIDE.fullmatch(c))
        info: dict[str, Any] = {"success": game.won, "lost": game.lost, "score": game.score, "max_score": most}
        info |= {"steps": self._played.steps, "did": list(game.did)}
        return Step(plain(text) if self._dials.style == "plain" else text, reward, done, truncated, actions, info=info)
