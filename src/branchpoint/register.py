"""The training register: of every group that was learnt from, who it was and what it was given.

One line a tree in ``register/NNNNNN.jsonl`` of the run folder, written whole before the weights change, and written
again by a resumed run. A line holds ``key``, ``task``, ``env``, ``arm``, ``estimator``, ``scheduler``, ``informative``
and ``branches``. A branch holds

* ``id``, ``fork`` ([branch, turn, token] or null), ``role`` (trained, value, pilot), ``stop``, ``failure`` (its kind);
* ``world_seed`` and ``policy_seed`` (hexadecimal), ``clean``;
* ``success``, the true outcome as the environment reports it, and ``observed``, the outcome after the grader's error
  where one may err; null where not reported, or not scored;
* ``reward``: the return from the root that the estimator saw; null where not scored;
* ``advantages``: [turn, token, advantage, weight] of each of its trained segments: credit over weight, and the weight,
  as means over the segment's sampled tokens; ``token`` is counted from where the branch's own tokens of the turn start.
  Where several leaves share a segment the advantage is their weighted mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from branchpoint.config import RunConfig
from branchpoint.credit import Credit
from branchpoint.noise import Arm, arm_of
from branchpoint.tree import Branch, RolloutTree, Segments
from branchpoint.world import UserError


def groups(
    trees: Sequence[RolloutTree], pairs: Sequence[tuple[Segments, Credit]], config: RunConfig, update: int
) -> Iterator[dict[str, Any]]:
    """The lines of an update. Raises UserError where two branches of it sampled with one policy seed."""
    refuse_shared(trees)
    names = {"estimator": config.estimator.kind, "scheduler": config.scheduler.kind}
    for i, (tree, (segments, credit)) in enumerate(zip(trees, pairs, strict=True)):
        yield names | group(tree, segments, credit, arm_of(config.noise, update, i))


def refuse_shared(trees: Sequence[RolloutTree]) -> None:
    """Raises UserError where two branches of these trees have one policy seed."""
    seen: dict[int, str] = {}
    for tree in trees:
        for b in tree.branches:
            if b.seeds is None:
                continue
            name = f"branch {b.id} of {tree.key or tree.task.id}"
            if b.seeds.policy in seen:
                raise UserError(
                    f"{name} and {seen[b.seeds.policy]} sampled with one policy seed: give each tree its own noise; "
                    "only the world's luck may be shared"
                )
            seen[b.seeds.policy] = name


def group(tree: RolloutTree, segments: Segments, credit: Credit, arm: Arm) -> dict[str, Any]:
    """The line of one tree, without the names of the run."""
    given = _given(segments, credit)
    return {
        "key": tree.key,
        "task": tree.task.id,
        "env": tree.task.root,
        "arm": arm,
        "informative": credit.informative,
        "branches": [_branch(tree, b, given.get(b.id, [])) for b in tree.branches],
    }


def _branch(tree: RolloutTree, b: Branch, given: list[list[float]]) -> dict[str, Any]:
    scored = b.failure is None
    last = b.turns[-1].info if scored else {}
    return {
        "id": b.id,
        "fork": None if b.fork is None else list(b.fork.node),
        "role": "pilot" if b.pilot else "trained" if b.trained else "value",
        "stop": b.stop,
        "failure": None if b.failure is None else b.failure.kind,
        "world_seed": None if b.seeds is None else f"{b.seeds.world:x}",
        "policy_seed": None if b.seeds is None else f"{b.seeds.policy:x}",
        "clean": None if b.seeds is None else b.seeds.clean,
        "success": last.get("success"),
        "observed": last.get("observed"),
        "reward": tree.total_reward(b.id) if scored else None,
        "advantages": given,
    }


def _given(segments: Segments, credit: Credit) -> dict[int, list[list[float]]]:
    """[turn, token, advantage, weight] of the trained segments of each branch, in order."""
    out: dict[int, list[list[float]]] = {}
    said: dict[tuple[int, int], int] = {}  # sampled tokens of a branch's turn so far
    for s in range(1, len(segments.parent)):
        own = np.arange(segments.start[s], segments.start[s + 1])
        own = own[segments.sampled[own]]
        place = (int(segments.branch[s]), int(segments.turn[s]))
        token = said.get(place, 0)
        said[place] = token + len(own)
        if segments.trained[s] and len(own):
            share = float(np.mean(credit.share[own]))
            total = float(np.mean(credit.up[own] + credit.down[own]))
            out.setdefault(place[0], []).append([place[1], token, total / share if share else 0.0, share])
    return out
