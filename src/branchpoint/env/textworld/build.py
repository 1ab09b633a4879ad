"""Make and compile games, in a process of its own: ``python -m branchpoint.env.textworld.build FOLDER < order``.

The order is JSON: ``challenge``, ``settings``, ``objective`` and ``games``, a list of numbers. The files of each game
go into a folder of its number.

The package's makers draw from sets and from unsorted file listings, so a seed alone does not name a game. Here the
process has ``PYTHONHASHSEED=0`` (see :mod:`stories`, which starts it) and listings are sorted. What else it touches
(global generators, temporary files, the home folder) ends with it.
"""

from __future__ import annotations

import functools
import glob
import json
import sys
from pathlib import Path
from typing import Any

from branchpoint.env import _textworld_package as package

ATTEMPTS = 20
"""Seeds tried. Those after the first lie above 2^31, so that they are no other game's."""


def main() -> None:
    order = json.load(sys.stdin)
    sort_listings()
    if not order.get("plain"):
        makers = package.makers()
        makers.maker.set_walkthrough = set_walkthrough
        makers.knowledge.load = functools.cache(makers.knowledge.load)
    for number in order["games"]:
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir()
        game, seed = generate(order["challenge"], order["settings"], number, order["objective"])
        options = package.makers().options()
        options.path, options.force_recompile = str(folder / "game.z8"), True
        package.makers().compile(game, options)
        goals = {"walkthrough": game.walkthrough, "max_score": game.max_score, "seed": seed}
        (folder / "goals.json").write_text(json.dumps(goals))


def sort_listings() -> None:
    """Let ``glob.glob`` sort what it finds. To be called before the package is imported, which reads its rules then."""
    plain = glob.glob

    def listing(*arguments: Any, **options: Any) -> list[Any]:
        return sorted(plain(*arguments, **options))

    glob.glob = listing


def generate(challenge: str, settings: dict[str, Any], seed: int, objective: str = "detailed") -> tuple[Any, int]:
    """A game, and the seed that it was made from: another than ``seed`` where the maker finds no game for it.

    Raises RuntimeError when no attempt succeeds.
    """
    makers, reason = package.makers(), ""
    for attempt in range(ATTEMPTS):
        chosen = 2**31 + seed * ATTEMPTS + attempt if attempt else seed
        options = makers.options()
        options.seeds = chosen
        options.grammar.only_last_action = objective == "brief"
        try:
            return makers.make[challenge](dict(settings), options), chosen
        except (
            Exception
        ) as error:  # the makers raise whatever the dead end led to (a quest, an empty choice, an assert)
            reason = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"the maker found no game in {ATTEMPTS} attempts; the last one: {reason}")


def set_walkthrough(maker: Any, commands: list[str]) -> None:
    """What ``GameMaker.set_walkthrough`` does, by the logic of the game instead of a compiled copy played for the
    purpose, which takes as long as everything else together.

    An event of a quest that the commands trigger gets the actions and commands up to there.
    """
    makers = package.makers()
    game = maker.build()
    progress, inform = makers.progression(game, track_quests=True), makers.inform(game)
    events = [event for quest in game.quests for event in quest.win_events]
    watched = [one for quest in progress.quest_progressions for one in quest.win_events]
    found: dict[int, tuple[list[Any], list[str]]] = {}
    actions: list[Any] = []
    last = None
    for number, command in enumerate(commands):
        if progress.done:
            raise ValueError("the game ended before its walkthrough did")
        before = [one.triggered for one in watched]
        last = _action(progress.valid_actions, inform, command) or last
        if last is not None:
            progress.update(last)
        actions.append(last)
        for place, (was, one) in enumerate(zip(before, watched, strict=True)):
            if one.triggered and not was:
                found[place] = list(actions), list(commands[: number + 1])
    for place, (done, said) in found.items():
        events[place].actions, events[place].commands = done, said


def _action(valid: list[Any], inform: Any, command: str) -> Any:
    """The action of a command, the one with most preconditions when there are several, as the package chooses."""
    named = zip(inform.gen_commands_from_actions(valid), valid, strict=True)
    return max((one for said, one in named if said == command), key=lambda a: len(a.preconditions), default=None)


if __name__ == "__main__":
    main()
