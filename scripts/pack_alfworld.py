"""Re-pack the official ALFWorld games (json_2.1.1) as the package data of ``branchpoint.env.alfworld``.

    python scripts/pack_alfworld.py SOURCE [--out src/branchpoint/env/data/alfworld]

SOURCE holds ``train_*.jsonl.xz``, ``valid_seen.jsonl.xz`` and ``valid_unseen.jsonl.xz``: one game a line with the
fields split, task, trial, task_type, pddl_params, scene, turk_annotations and pddl_problem. Written: one pack per split
and task type, ``games.jsonl.xz`` (the index) and ``containers.json`` (where objects lie at the start).
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from branchpoint.env._alfworld_data import write_pack

BLOCK = 40
"""Games in one xz stream of a pack: the smaller, the faster one game is read, and the larger the pack."""

FIELDS = ("task_type", "pddl_params", "scene", "turk_annotations", "pddl_problem")


def read(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def containers(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How often a type of object lies in a type of receptacle at the start: {object type: {receptacle type: n}}."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        problem = row["pddl_problem"].split("(:goal")[0]
        kind = dict(re.findall(r"\((?:objectType|receptacleType) (\S+) (\S+?)Type\)", problem))
        for item, place in re.findall(r"\(inReceptacle (\S+) (\S+)\)", problem):
            counts[kind[item].lower()][kind[place].lower()] += 1
    return {item: dict(sorted(counts[item].items())) for item in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/branchpoint/env/data/alfworld"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train_pack = max(options.source.glob("train_*.jsonl.xz"), key=lambda path: path.stat().st_size)
    splits = {"train": read(train_pack)}
    splits |= {split: read(options.source / f"{split}.jsonl.xz") for split in ("valid_seen", "valid_unseen")}
    index = []
    for split, rows in splits.items():
        packs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: (row["scene"]["scene_num"], row["task"], row["trial"])):
            packs[row["task_type"]].append({"id": f"{row['task']}/{row['trial']}", **{key: row[key] for key in FIELDS}})
        for task_type, pack in sorted(packs.items()):
            places = write_pack(options.out / f"{split}-{task_type}.jsonl.xz", pack, BLOCK)
            for row, place in zip(pack, places, strict=True):
                index.append({"id": row["id"], "split": split, "task_type": task_type, "place": place})
    write_pack(options.out / "games.jsonl.xz", sorted(index, key=lambda row: (row["split"], row["id"])))
    table = json.dumps(containers(splits["train"]), indent=0, separators=(",", ":"))
    (options.out / "containers.json").write_text(table + "\n", encoding="utf-8")
    print(f"{len(index)} games in {options.out}")


if __name__ == "__main__":
    main()
