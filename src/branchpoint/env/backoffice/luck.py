"""The luck of the desk: which calls go wrong, and how.

A fate is drawn from the noise keyed by tool, resource ids and how often that call was made before; free text, amounts
and the order of unrelated calls never enter. Kinds and mixture after the paired-rollouts study (arXiv 2609.24144).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from branchpoint.env.backoffice.calls import TOOLS, Tool
from branchpoint.env.faults import draw
from branchpoint.noise import Key, Noise, digest
from branchpoint.world import Task

Kind = Literal["transient", "rate_limit", "outage", "stale", "truncation", "timeout", "dropout"]
Mixture = Literal["training", "no_outage", "held_out", "challenge"]

WEIGHTS: Mapping[Kind, float] = {
    "transient": 0.45,
    "rate_limit": 0.15,
    "outage": 0.10,
    "stale": 0.15,
    "truncation": 0.15,
    "timeout": 1.0,
    "dropout": 1.0,
}
MIXTURES: Mapping[Mixture, tuple[Kind, ...]] = {
    "training": ("transient", "rate_limit", "outage", "stale", "truncation"),
    "no_outage": ("transient", "rate_limit", "stale", "truncation"),
    "held_out": ("timeout", "dropout"),
    "challenge": (),
}
RETRY_AFTER = (5, 10, 20, 30)


@dataclass(frozen=True, slots=True)
class Fate:
    """What befalls a call. ``retry_after`` in seconds (rate limit); ``pick`` in [0, 1) chooses the field to drop."""

    kind: Kind
    retry_after: int = 0
    pick: float = 0.0


def _applies(kind: Kind, tool: Tool) -> bool:
    if kind in ("stale", "dropout"):
        return tool.kind == "read"
    if kind == "truncation":
        return tool.listing
    return kind != "timeout" or tool.kind == "write"


@cache
def weights(tool: str, mixture: Mixture) -> Mapping[Kind, float]:
    """The kinds that can befall a call of this tool, given that one does; sums to 1 (empty: none can)."""
    if TOOLS[tool].kind == "control":
        return {}
    raw: dict[Kind, float] = {k: WEIGHTS[k] for k in MIXTURES[mixture] if _applies(k, TOOLS[tool])}
    total = sum(raw.values())
    shares: dict[Kind, float] = {k: w / total for k, w in raw.items()}
    return shares


def fate(noise: Noise, rate: float, mixture: Mixture, key: tuple[Key, ...], repeat: int) -> Fate | None:
    """The fate of a call with event ``key`` (tool first) made for the ``repeat``-th time (0 = first), or None.

    In the challenge set the first attempt of every write fails transiently, by rule and not by chance.
    """
    tool = str(key[0])
    if mixture == "challenge":
        return Fate("transient") if TOOLS[tool].kind == "write" and repeat == 0 else None
    mix = weights(tool, mixture)
    befallen = draw(noise, rate, mix, "fate", *key, repeat)
    if befallen is None:
        return None
    kind, detail = befallen
    if kind == "rate_limit":
        return Fate(kind, retry_after=RETRY_AFTER[int(detail * len(RETRY_AFTER))])
    return Fate(kind, pick=detail)


def flipped(noise: Noise, rate: float) -> bool:
    """Whether the grader reports a true success as a failure: one draw an episode."""
    return rate > 0 and noise.happens(rate, "grader")


def evaluation_noise(task: Task, index: int) -> Noise:
    """The luck of the ``index``-th evaluation episode of a task: a function of these two alone, so equal for every
    arm and checkpoint, and different for every task."""
    seed = digest(task.seed, "evaluation", task.id, index)
    return Noise(seed, seed)
