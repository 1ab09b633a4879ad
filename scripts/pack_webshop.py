"""Re-pack the WebShop data as the package data of ``branchpoint.env.webshop``.

    python scripts/pack_webshop.py SOURCE [--out src/branchpoint/env/data/webshop]

SOURCE holds ``products_1000.jsonl.xz`` (the products as the original loads them), ``items_ins_v2_1000.json``
(attributes and synthetic instruction by asin), ``title_nouns_en_core_web_sm.json.xz`` (nouns of every product name) and
``human_goals.json.xz`` (instruction texts of people). Written: ``products.jsonl.xz`` with what the shop shows, searches
and grades, and ``human_texts.json.xz``.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 8 << 20}]


def product(row: Mapping[str, Any], instruction: Mapping[str, Any], nouns: list[str]) -> dict[str, Any]:
    """One product. Raises ValueError when the text made of its parts is not the text that the original indexes."""
    bullets = row["small_description"] if isinstance(row["small_description"], list) else [row["small_description"]]
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in row["options"].items())
    indexed = " ".join([row["name"], row["full_description"], bullets[0], options]).lower()
    if indexed != row["search_contents"]:
        raise ValueError(f"{row['asin']}: the indexed text is not title, description, first bullet and options")
    people = [
        {"text": i["instruction"], "attributes": i["instruction_attributes"], "options": i["instruction_options"]}
        for i in row.get("instructions", ())
    ]
    synthetic = instruction.get("instruction")
    return {
        "asin": row["asin"],
        "title": row["name"],
        "description": row["full_description"],
        "bullets": bullets,
        "options": row["options"],
        "prices": row["pricing"],
        "tag": row["Price"],
        "attributes": row["Attributes"],
        "category": row["category"],
        "query": row["query"],
        "levels": row["product_category"],
        "nouns": nouns,
        "synthetic": synthetic and {"text": synthetic, "attributes": instruction["instruction_attributes"]},
        "people": people,
    }


def read(path: Path) -> Any:
    return json.loads(lzma.decompress(path.read_bytes()))


def write(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode(), format=lzma.FORMAT_XZ, filters=FILTERS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/branchpoint/env/data/webshop"))
    args = parser.parse_args()
    instructions = json.loads((args.source / "items_ins_v2_1000.json").read_text(encoding="utf-8"))
    nouns = read(args.source / "title_nouns_en_core_web_sm.json.xz")
    lines = lzma.decompress((args.source / "products_1000.jsonl.xz").read_bytes()).decode().splitlines()
    rows = [product(row, instructions[row["asin"]], nouns[row["asin"]]) for row in map(json.loads, lines)]
    dumps = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    write(args.out / "products.jsonl.xz", "\n".join(dumps) + "\n")
    write(args.out / "human_texts.json.xz", json.dumps(read(args.source / "human_goals.json.xz"), ensure_ascii=False))


if __name__ == "__main__":
    main()
