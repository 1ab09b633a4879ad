"""The fingerprint of the pools: a change of any task, world or plan changes it. ``manifest.json`` holds the right one.

``python -m branchpoint.env.backoffice.manifest`` prints what the code generates now.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any

from branchpoint.env.backoffice.dials import POOLS, Dials
from branchpoint.env.backoffice.scenario import diagnostic, scenario
from branchpoint.env.backoffice.wording import message


def recorded() -> dict[str, Any]:
    """Of every pool the number of tasks and their sha256, as released."""
    return json.loads(files("branchpoint.env.backoffice").joinpath("manifest.json").read_text())


def fingerprint(split: str) -> dict[str, Any]:
    """The same, of what the code generates now (a few milliseconds a task)."""
    dials, h = Dials(), hashlib.sha256()
    source = "validation" if split == "diagnostic" else split
    pool = diagnostic(dials) if split == "diagnostic" else range(POOLS[split])
    for index in pool:
        s = scenario(source, index, dials)
        desk = [*s.desk.customers.values(), *s.desk.products.values(), *s.desk.orders.values()]
        h.update(repr((source, index, message(s, "json"), [c.compact() for c in s.plan], desk)).encode())
    return {"tasks": len(pool), "sha256": h.hexdigest()}


if __name__ == "__main__":
    print(json.dumps({split: fingerprint(split) for split in POOLS}, indent=1))
