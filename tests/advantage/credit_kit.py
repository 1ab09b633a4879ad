"""Small trees written by hand."""

from __future__ import annotations

import numpy as np

from branchpoint.advantage import Credit
from branchpoint.tree import Array, Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Failure, Task


def turn(reward: float = 0.0, tokens: int = 1) -> Turn:
    zeros = np.zeros(tokens, np.float32)
    return Turn(np.array([1], np.int32), np.zeros(tokens, np.int32), zeros, zeros, zeros, reward)


def branch(
    i: int,
    at: tuple[int, int, int] | None,
    rewards: list[float | None],
    trained: bool = True,
    propensity: float | None = 1.0,
) -> Branch:
    """A branch with one reward a turn; None as the last reward: it was played and never scored."""
    fork = None if at is None else Fork(*at, propensity)
    failed = rewards[-1] is None
    turns = tuple(turn(r or 0.0) for r in rewards)
    failure = Failure("grader", "no score") if failed else None
    return Branch(i, fork, turns, "failed" if failed else "done", failure, trained)


def tree(*branches: Branch) -> RolloutTree:
    return RolloutTree(Task("t", "r"), branches)


def group(rewards: list[float | None], trained: list[bool] | None = None) -> Segments:
    """A flat group of one-turn rollouts."""
    flags = trained or [True] * len(rewards)
    return Segments.of(tree(*(branch(i, (0, 0, 0) if i else None, [r], flags[i]) for i, r in enumerate(rewards))))


def given(segments: Segments, credit: Credit) -> Array:
    """[S] the credit of each segment's first sampled token; all its sampled tokens must carry the same."""
    both = credit.up + credit.down
    out = np.zeros(len(segments.parent))
    for s in range(len(out)):
        own = both[segments.start[s] : segments.start[s + 1]][
            segments.sampled[segments.start[s] : segments.start[s + 1]]
        ]
        assert np.all(own == own[:1])
        out[s] = own[0] if len(own) else 0.0
    return out


def advantages(segments: Segments, credit: Credit) -> Array:
    """[leaves] credit over share at the leaves."""
    leaf = np.flatnonzero(segments.leaf)
    share = credit.share[segments.start[leaf]]
    total = given(segments, credit)[leaf]
    return np.divide(total, share, out=np.zeros_like(total), where=share > 0)


def random_tree(rng: np.random.Generator, branches: int = 9, trained: float = 1.0) -> RolloutTree:
    """Forks anywhere, in the middle of actions too; some roots besides the first."""
    made: list[Branch] = []
    for i in range(branches):
        fork = None
        if i:
            parent = made[int(rng.integers(i))]
            t = int(rng.integers(len(parent.turns))) + parent.first_turn
            k = int(rng.integers(parent.width(t)))
            fork = Fork(parent.id, t, k, 1.0)
            if parent.fork is not None and (t, k) <= (parent.fork.turn, parent.fork.token):
                fork = Fork(parent.fork.branch, parent.fork.turn, parent.fork.token, 1.0)
        turns = tuple(turn(float(rng.normal()), int(rng.integers(1, 5))) for _ in range(int(rng.integers(1, 4))))
        made.append(Branch(i, fork, turns, "done", trained=bool(i == 0 or rng.random() < trained)))
    return tree(*made)


def paths(segments: Segments) -> list[list[int]]:
    """Of every leaf, the segments from the root to it."""
    out = []
    for leaf in np.flatnonzero(segments.leaf):
        path = [int(leaf)]
        while path[-1]:
            path.append(int(segments.parent[path[-1]]))
        out.append(path[::-1])
    return out
