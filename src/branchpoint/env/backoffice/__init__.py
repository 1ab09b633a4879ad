"""A synthetic order desk: one customer, one to three requests, twelve tools and ``finish``, and luck under control.

``tasks(split)`` gives the pools (``train`` 2,000, ``validation`` 300, ``test`` 300, ``diagnostic`` 16), ``make(task)``
the world, ``expert(task)`` a scripted agent that serves every clean task within its budget.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from branchpoint.env.backoffice.calls import TOOLS, Malformed, parse, schemas
from branchpoint.env.backoffice.desk import LAST_DAY, TODAY
from branchpoint.env.backoffice.dials import DEMO, POOLS, TEMPLATES, Dials
from branchpoint.env.backoffice.expert import Expert
from branchpoint.env.backoffice.luck import evaluation_noise
from branchpoint.env.backoffice.scenario import Draw, diagnostic
from branchpoint.env.backoffice.world import BackOffice
from branchpoint.env.faults import Event
from branchpoint.noise import digest
from branchpoint.world import Message, Task

__all__ = [
    "DEMO",
    "POOLS",
    "TEMPLATES",
    "BackOffice",
    "Dials",
    "evaluation_noise",
    "event_of",
    "expert",
    "make",
    "tasks",
]

_RULES = f"""You work at the order desk of a shop and serve one customer's requests with tools. Today is day {TODAY}; \
shipments can go out until day {LAST_DAY}. Amounts are in cents. An address changes, an order is cancelled and stock \
is reserved only before shipment. Cancelling says what must be refunded. A shipment needs a paid order with every unit \
reserved. Tools can fail; read their answers. Change nothing that was not asked for. When all is done, call finish.
Answer every turn with exactly one call, a JSON object {{"name": tool, "arguments": {{...}}}}. The tools:"""


def make(task: Task) -> BackOffice:
    """The world of a task. Raises ValueError for metadata that names no task of the pools."""
    return BackOffice(task)


def tasks(split: str, n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Task, ...]:
    """The tasks of a pool in its order, or ``n`` of them drawn by ``seed``; see :class:`Dials` for the dials.

    ``diagnostic``: the first 16 validation tasks with 2 to 4 writes. Raises ValueError for an unknown split or dial,
    or more tasks than the pool has.
    """
    if split not in POOLS:
        raise ValueError(f"no split {split!r}; known: {', '.join(POOLS)}")
    chosen = Dials.of(dials)
    pool: Sequence[int] = diagnostic(chosen) if split == "diagnostic" else range(POOLS[split])
    if n is not None:
        if not 0 <= n <= len(pool):
            raise ValueError(f"n must be 0 to {len(pool)}, the size of {split}; got {n}")
        pool = Draw("choice", split, seed).sample(pool, n)
    source = "validation" if split == "diagnostic" else split
    prompt = () if chosen.style == "compact" else (Message("system", _system()),)
    shared = chosen.json()
    return tuple(_task(source, i, shared, prompt) for i in pool)


def expert(task: Task) -> Expert:
    """A scripted agent for one episode of the task; it plays from observations alone."""
    return Expert(task)


def event_of(action: str) -> Event | None:
    """The key rule for :mod:`branchpoint.env.faults`: tool and resource ids of a well-formed call; None for others, and
    for ``wait`` and ``finish``."""
    call = parse(action)
    if isinstance(call, Malformed) or call.problem or TOOLS[call.tool].kind == "control":
        return None
    resources = tuple(i or "" for i in call.key[1:])
    return Event(call.tool, resources, TOOLS[call.tool].kind == "read")


def _task(split: str, index: int, dials: dict[str, Any], prompt: tuple[Message, ...]) -> Task:
    name = f"backoffice/{split}/{index:04d}"
    metadata = {"split": split, "index": index, **dials}
    return Task(name, "backoffice", prompt, digest(0, "luck", name) >> 65, metadata)


def _system() -> str:
    return "\n".join([_RULES, *(json.dumps(s["function"]) for s in schemas())])
