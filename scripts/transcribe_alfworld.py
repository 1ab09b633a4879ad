"""Record won episodes of the frequency-weighted explorer on training games, for the demo's warm start.

    python scripts/transcribe_alfworld.py record episodes.jsonl [--games 350] [--repeats 2]
    python scripts/transcribe_alfworld.py pack episodes.jsonl        write the package data transcripts.jsonl.xz

Compact style, no help, look, inventory or examine, at most 30 steps, the task types of the demo. Recording goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from branchpoint.env import _alfworld_data as data
from branchpoint.env import alfworld

TYPES = ("pick_and_place_simple", "look_at_obj_in_light")


def record(path: Path, games: int, repeats: int, minutes: float) -> None:
    """Append episodes to a file, game by game."""
    path.touch()
    known = {(row["id"], row["seed"]) for row in map(json.loads, path.read_text().splitlines())}
    end = time.monotonic() + 60 * minutes
    for task in alfworld.tasks("train", games, 0, TYPES, style="compact", drop=True, max_steps=30):
        if time.monotonic() > end:
            return
        for seed in range(repeats):
            if (task.id, seed) not in known:
                (episode,) = alfworld.record([replace(task, seed=seed)])
                with path.open("a") as file:
                    file.write(json.dumps(alfworld.episode_row(episode)) + "\n")


def pack(path: Path, out: Path) -> None:
    """Write the won episodes as package data."""
    episodes = [alfworld.episode_of(json.loads(line)) for line in path.read_text().splitlines()]
    won = [episode for episode in episodes if episode.success]
    alfworld.save_episodes(out, won)
    turns = sum(len(episode.turns) for episode in won)
    print(f"{len(won)} of {len(episodes)} episodes won, {turns} turns, {out.stat().st_size} bytes in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "pack"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--games", type=int, default=350)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6)
    options = parser.parse_args()
    if options.what == "record":
        record(options.file, options.games, options.repeats, options.minutes)
    else:
        pack(options.file, data.folder() / "transcripts.jsonl.xz")


if __name__ == "__main__":
    main()
