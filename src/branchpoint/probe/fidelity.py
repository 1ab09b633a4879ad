"""Whether a restored snapshot is what it claims to be: a world of its own, equal to the one that was frozen.

Four tests, on siblings restored from snapshots in two *sessions* each. A session is a world built afresh (in a sandbox
of its own), brought to the same history, and frozen; at the root each session is opened with its own luck, deeper down
both repeat the same actions with the same luck.

* **replay**: the same actions with the same luck must get the same answers, in both sessions. Exact: one difference is
  one too many.
* **sessions**: gamma = E Cov(R_i, R_j | h) among siblings of one session must be 0. One session a snapshot cannot show
  it: a leak that all its siblings share looks like a better state.
* **backbone**: the rollout that went on in the frozen world and those restored from it have one mean.
* **cross-talk**: E[R_j S_i | h] = 0 for siblings i != j. Only this one biases the gradient.

The last three are permutation tests, exact for any distribution of the returns, and are judged together (Holm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from branchpoint.noise import Noise, digest
from branchpoint.probe.restore import Played, Question, Session
from branchpoint.probe.trace import ProbeError
from branchpoint.tree import Array

Ints = npt.NDArray[np.int64]
WIDTH = 8
"""Entries of the feature vector of a rollout's actions."""


@dataclass(frozen=True, eq=False)
class Siblings:
    """What was restored from one snapshot: [n] returns, [n, d] scores, [n] sessions, in the order of restoring."""

    returns: Array
    scores: Array
    session: Ints

    def __post_init__(self) -> None:
        sizes = np.unique(self.session, return_counts=True)[1]
        if len(sizes) < 2 or sizes.max() < 2:
            raise ProbeError(
                "a leak within a session cannot be told from a good state with fewer than 2 sessions of a snapshot, "
                "one of them with 2 siblings"
            )

    @property
    def orders(self) -> Ints:
        """The order of :meth:`shuffled` that changes nothing."""
        return np.arange(len(self.returns))[None]

    def shuffled(self, count: int, noise: Noise) -> Ints:
        """[count, n] permutations: siblings that change their places, and so their sessions."""
        return noise.at("shuffle").permuted(np.tile(np.arange(len(self.returns)), (count, 1)), axis=1)


def gamma(siblings: Siblings, orders: Ints | None = None) -> Array:
    """[orders] the mean of R_i R_j over pairs of one session less that over pairs of different sessions.

    Unbiased for E Cov(R_i, R_j | h) within a session: siblings of different sessions are independent given h, and all
    have the same mean. ``orders``: [orders, n], see :meth:`Siblings.shuffled`; by default as they are.
    """
    r = siblings.returns[siblings.orders if orders is None else orders]
    n, total = r.shape[1], r.sum(axis=1) ** 2 - (r**2).sum(axis=1)
    same, pairs = np.zeros(len(r)), 0
    for s in np.unique(siblings.session):
        own = r[:, siblings.session == s]
        same += own.sum(axis=1) ** 2 - (own**2).sum(axis=1)
        pairs += own.shape[1] * (own.shape[1] - 1)
    return same / pairs - (total - same) / (n * (n - 1) - pairs)


def cross_talk(siblings: Siblings, orders: Ints | None = None) -> Array:
    """[orders, 2, d] the mean of R_j S_i within a session less that across sessions: for i restored before j (what the
    earlier does to the later), and after. Unbiased for Cov(S_i, R_j | h), which is E[R_j S_i | h] for a score."""
    orders = siblings.orders if orders is None else orders
    r, s = siblings.returns[orders][:, :, None], siblings.scores[orders]
    n, across = r.shape[1], s.sum(axis=1) * r.sum(axis=1)
    within, pairs = np.zeros((len(r), 2, s.shape[2])), 0
    for k in np.unique(siblings.session):
        own, score = r[:, siblings.session == k], s[:, siblings.session == k]
        across -= score.sum(axis=1) * own.sum(axis=1)
        before, after = np.cumsum(score, axis=1) - score, np.cumsum(score[:, ::-1], axis=1)[:, ::-1] - score
        within += np.stack([(before * own).sum(axis=1), (after * own).sum(axis=1)], axis=1)
        pairs += own.shape[1] * (own.shape[1] - 1) // 2
    return within / pairs - (across / (n * (n - 1) - 2 * pairs))[:, None]


def residual(snapshots: Sequence[Siblings]) -> list[Siblings]:
    """With that part of the returns taken off which the snapshot and the rollout's *own* actions explain (least squares
    over all snapshots): less noise in a permutation test, and as exact: places and sessions play no part in it."""
    returns = np.concatenate([s.returns - np.mean(s.returns) for s in snapshots])
    scores = np.concatenate([s.scores - np.mean(s.scores, axis=0) for s in snapshots])
    rest = returns - scores @ np.linalg.lstsq(scores, returns, rcond=None)[0]
    ends = np.cumsum([len(s.returns) for s in snapshots])[:-1]
    return [Siblings(r, s.scores, s.session) for s, r in zip(snapshots, np.split(rest, ends), strict=True)]


@dataclass(frozen=True, slots=True)
class Finding:
    """An estimate that is 0 in a faithful world, and its permutation p-value (two-sided)."""

    estimate: float
    p: float


def session_test(snapshots: Sequence[Siblings], permutations: int, noise: Noise) -> Finding:
    """gamma, averaged over the snapshots; sessions permuted within each."""
    found = float(np.mean([gamma(s)[0] for s in snapshots]))
    orders = [s.shuffled(permutations, noise.child("gamma", k)) for k, s in enumerate(snapshots)]
    null = np.mean([gamma(s, o) for s, o in zip(snapshots, orders, strict=True)], axis=0)
    return Finding(found, _p(abs(found), np.abs(null)))


def cross_talk_test(snapshots: Sequence[Siblings], permutations: int, noise: Noise) -> Finding:
    """The norm of the mean cross-talk over the snapshots; sessions permuted within each."""
    found = np.linalg.norm(np.mean([cross_talk(s)[0] for s in snapshots], axis=0))
    flat = residual(snapshots)
    orders = [s.shuffled(permutations, noise.child("talk", k)) for k, s in enumerate(flat)]
    seen = np.mean([cross_talk(s) for s in flat], axis=0)
    null = np.mean([cross_talk(s, o) for s, o in zip(flat, orders, strict=True)], axis=0)
    return Finding(float(found), _p(float(np.sum(seen**2)), np.sum(null**2, axis=(1, 2))))


def backbone_test(groups: Sequence[tuple[float, Array]], permutations: int, noise: Noise) -> Finding:
    """The mean of R^(0) - mean R^(i), the backbone's return less that of its siblings; any of a group may have been the
    backbone."""
    members = [np.append(first, rest) for first, rest in groups]

    def difference(group: Array, which: Ints) -> Array:
        own = group[which]
        return own - (np.sum(group) - own) / (len(group) - 1)

    found = float(np.mean([difference(g, np.zeros(1, np.int64)) for g in members]))
    drawn = [noise.at("backbone", k).integers(len(g), size=permutations) for k, g in enumerate(members)]
    null = np.mean([difference(g, d) for g, d in zip(members, drawn, strict=True)], axis=0)
    return Finding(found, _p(abs(found), np.abs(null)))


def _p(found: float, null: Array) -> float:
    # Sums in another order differ in the last digit: a tie is a tie.
    return float((1 + np.sum(null >= found - 1e-9 * max(1.0, abs(found)))) / (1 + len(null)))


def features(actions: Iterable[str]) -> Array:
    """[WIDTH] a rollout's actions counted in hashed bins with signs: any function of the actions is, in a faithful
    world, uncorrelated with the returns of siblings."""
    out = np.zeros(WIDTH)
    for action in actions:
        key = digest(0, "feature", action)
        out[key % WIDTH] += 1.0 if key // WIDTH % 2 else -1.0
    return out


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The findings. ``luck``: the variance of the return of the same actions under fresh luck, which is what replays
    are allowed to differ by. ``differences``: of the replays, described."""

    tests: dict[str, Finding]
    replays: int
    differences: tuple[str, ...]
    luck: float
    snapshots: int
    siblings: int
    failed: int
    level: float
    remarks: tuple[str, ...] = field(default=())

    @property
    def caught(self) -> tuple[str, ...]:
        """The tests that found the world unfaithful: a replay that differs, and by Holm at the level, the others."""
        out = ["replay"] if self.differences else []
        ordered = sorted(self.tests, key=lambda name: self.tests[name].p)
        for k, name in enumerate(ordered):
            if self.tests[name].p > self.level / (len(ordered) - k):
                break
            out.append(name)
        return tuple(out)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "probe": "fidelity",
            "caught": list(self.caught),
            "tests": {name: {"estimate": t.estimate, "p": t.p} for name, t in self.tests.items()},
            "replays": self.replays,
            "differences": list(self.differences),
            "luck": self.luck,
            "snapshots": self.snapshots,
            "siblings": self.siblings,
            "failed": self.failed,
            "level": self.level,
            "remarks": list(self.remarks),
        }


async def fidelity(
    question: Question, noise: Noise, level: float = 0.05, permutations: int = 999, say: Callable[[str], None] = print
) -> Fidelity:
    """Freeze worlds, restore siblings, and test them. Raises ProbeError when nothing could be restored."""
    sessions = await question.ask(noise, say)
    pairs = [pair for pair in sessions if all(s.siblings for s in pair)]
    differences = [d for pair in sessions for s in pair for d in s.differences]
    if not pairs and not differences:
        why = next((s.failure for pair in sessions for s in pair if s.failure), "no episode was long enough")
        raise ProbeError(f"no snapshot could be restored in two sessions: {why}")
    return _judged(sessions, pairs, differences, noise.child("judge"), level, permutations)


def _judged(
    sessions: Sequence[tuple[Session, Session]],
    pairs: Sequence[tuple[Session, Session]],
    differences: list[str],
    noise: Noise,
    level: float,
    permutations: int,
) -> Fidelity:
    every = [s for pair in sessions for s in pair]
    snapshots = [_siblings(pair) for pair in pairs]
    tests = {}
    if snapshots:
        backbones = [(s.backbone.total, _returns(s.siblings)) for s, _ in pairs if s.backbone is not None]
        tests = {
            "sessions": session_test(snapshots, permutations, noise),
            "backbone": backbone_test(backbones, permutations, noise),
            "cross-talk": cross_talk_test(snapshots, permutations, noise),
        }
    lucks = [float(np.var(_returns(s.fresh), ddof=1)) for s in every if len(s.fresh) > 1]
    return Fidelity(
        tests,
        sum(s.replays for s in every),
        tuple(differences),
        float(np.mean(lucks)) if lucks else 0.0,
        len(pairs),
        sum(len(s.siblings) for s in every),
        sum(s.failed for s in every),
        level,
        tuple(_remarks(snapshots)),
    )


def _siblings(pair: Sequence[Session]) -> Siblings:
    rollouts = [r for s in pair for r in s.siblings]
    session = np.repeat(np.arange(len(pair)), [len(s.siblings) for s in pair])
    return Siblings(_returns(rollouts), np.array([features(r.actions) for r in rollouts]), session)


def _returns(rollouts: Sequence[Played]) -> Array:
    return np.array([r.total for r in rollouts], np.float64)


def _remarks(snapshots: Sequence[Siblings]) -> Iterable[str]:
    if not snapshots:
        yield "the statistical tests were not made: no snapshot could be restored in both sessions"
    elif all(np.ptp(s.returns) == 0 for s in snapshots):
        yield "all siblings of a snapshot scored alike: only replays say anything; choose other tasks (envs.N.train)"
