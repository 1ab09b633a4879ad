"""Record won episodes of the expert on training games: the package data of ``textworld.transcripts``.

    python scripts/transcribe_textworld.py --cache FOLDER [--games 100]

Every kind of game under its default dials, with ``looking`` on and off. Games that are in the cache folder are not made
again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from branchpoint import env as envs
from branchpoint.env import textworld
from branchpoint.env.textworld import recorded

FREE = ("reward", "max_steps", "cache")
"""Dials that change nothing of what an episode shows."""


def episodes(games: int, cache: str) -> Iterator[recorded.Episode]:
    """Won ones, by kind."""
    for kind in ("coin_collector", "treasure_hunt", "cooking"):
        for looking in (True, False):
            for task in textworld.tasks("train", games, 0, kind=kind, looking=looking, cache=cache):
                turns, last = envs.play(textworld.make(task), textworld.expert(task))
                if last.info["success"]:
                    dials = {name: value for name, value in task.metadata.items() if name not in FREE}
                    yield recorded.Episode(dials, tuple(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--cache", required=True)
    options = parser.parse_args()
    won = list(episodes(options.games, options.cache))
    path = recorded.shipped()
    recorded.save(path, won)
    print(f"{len(won)} episodes, {sum(len(e.turns) for e in won)} turns, {path.stat().st_size} bytes in {path.name}")


if __name__ == "__main__":
    main()
