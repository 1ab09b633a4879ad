"""The rollout tree: the record of what happened (RolloutTree) and the view that the mathematics needs (Segments).

Axes: K branches, S segments, N tokens of one tree with shared tokens once, o / a observation / action tokens of a turn.

A turn is an observation followed by the action that the policy sampled. A fork names a branch, a turn and a token of
that turn's action: the sibling shares everything before that token and samples from there on. ``token == 0`` is a fork
at the turn boundary; ``token > 0`` is a fork in the middle of an action. A GRPO group is a fork at branch 0, turn 0,
token 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from branchpoint.world import Failure, Task

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[np.float64]
Allowed = tuple[Ints | None, ...]
"""For every action token the token ids it was chosen from, or None where the whole vocabulary was open."""

Stop = Literal["done", "truncated", "turns", "length", "failed"]


def _vector(value: Any, dtype: type, length: int | None, name: str) -> Any:
    array = np.array(value, dtype=dtype)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise ValueError(f"{name} has shape {array.shape}; expected ({'*' if length is None else length},)")
    array.flags.writeable = False
    return array


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a view of it that cannot be written through."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def seal(data: Any) -> None:
    """Makes the arrays among a frozen dataclass's fields read-only: no stage writes on another one's data."""
    for name in (f.name for f in fields(data)):
        if isinstance(value := getattr(data, name), np.ndarray):
            object.__setattr__(data, name, read_only(value))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One exchange. All arrays are read-only.

    In the first turn of a forked branch ``observation`` is empty and ``action`` starts at the fork's token: a branch
    stores only what it added. ``logprobs`` are those of the distribution that was really sampled from (temperature,
    top-p, restriction applied); ``raw_logprobs`` those of the model's own softmax. ``entropies`` are in nats, of the
    sampling distribution before each token.
    """

    observation: Ints  # [o]
    action: Ints  # [a]
    logprobs: Floats  # [a]
    raw_logprobs: Floats  # [a]
    entropies: Floats  # [a]
    reward: float = 0.0
    snapshot: str | None = None  # name of the snapshot taken before the action, if there was one
    allowed: Allowed | None = None  # [a]
    text: str = ""  # the whole action as played, shared prefix included
    shown: str = ""  # the observation as text, for people
    stopped: bool = True  # False: the action was cut by the token limit
    info: Mapping[str, Any] = field(default_factory=dict)  # of the step that the action led to

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "observation", _vector(self.observation, np.int32, None, "observation"))
        set_(self, "action", _vector(self.action, np.int32, None, "action"))
        n = len(self.action)
        for name in ("logprobs", "raw_logprobs", "entropies"):
            set_(self, name, _vector(getattr(self, name), np.float32, n, name))
        if self.allowed is not None:
            if len(self.allowed) != n:
                raise ValueError(f"allowed has {len(self.allowed)} entries for {n} action tokens")
            set_(self, "allowed", tuple(None if ids is None else read_only(ids) for ids in self.allowed))
        if not np.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}; an unscored turn belongs to a failed branch")


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a branch leaves another one.

    ``propensity``: the probability with which the history *before this token* chose to fork here; 1.0 for a
    deterministic predictable rule, None when the choice looked at what came later (the unbiased estimator refuses it).
    """

    branch: int
    turn: int
    token: int
    propensity: float | None = None

    @property
    def node(self) -> tuple[int, int, int]:
        """The branch node: siblings are the branches (and the parent's own continuation) that leave the same node."""
        return (self.branch, self.turn, self.token)


class Seeds(NamedTuple):
    """What keyed a branch's randomness: the world's luck (equal in branches that are paired), the policy's own draws
    (never equal), and whether the world's luck was switched off."""

    world: int
    policy: int
    clean: bool


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One path of the tree from its fork on. Append-only: ids never change and equal the position in the tree.

    ``failure`` is set exactly when ``stop`` is "failed": the branch has no score, is never trained as reward 0, and its
    siblings' baselines do not count it. ``trained`` is False for value-only rollouts (they count in values alone).
    ``pilot``: looked at by the scheduler only, and absent from ``Segments``; nothing is forked from it.
    """

    id: int
    fork: Fork | None
    turns: tuple[Turn, ...] = field(repr=False)  # a tree of many rollouts would print megabytes of arrays
    stop: Stop
    failure: Failure | None = None
    trained: bool = True
    pilot: bool = False
    seeds: Seeds | None = None

    def __post_init__(self) -> None:
        if (self.stop == "failed") != (self.failure is not None):
            raise ValueError(f"branch {self.id}: stop {self.stop!r} and failure {self.failure} disagree")
        if self.failure is None and not self.turns:
            raise ValueError(f"branch {self.id} has no turns")

    @property
    def first_turn(self) -> int:
        """The absolute index of ``turns[0]``."""
        return 0 if self.fork is None else self.fork.turn

    @property
    def first_token(self) -> int:
        """The action token at which the branch's own tokens start, in its first turn."""
        return 0 if self.fork is None else self.fork.token

    def width(self, turn: int) -> int:
        """The length of the whole action of an absolute turn, shared prefix included."""
        own = self.turns[turn - self.first_turn]
        return len(own.action) + (self.first_token if turn == self.first_turn else 0)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutTree:
    """All rollouts of one task. ``key`` names the tree within a run.

    Raises ValueError for ids out of order, a fork that lies outside its parent branch, at or before the parent's own
    fork, or a first branch that is not the root.
    """

    task: Task
    branches: tuple[Branch, ...]
    key: str = ""

    def __post_init__(self) -> None:
        for i, b in enumerate(self.branches):
            if b.id != i or (b.fork is None) != (i == 0):
                raise ValueError(f"branch {b.id} at position {i}: branch 0 is the root, the others have a fork")
            if b.fork is not None:
                self._check_fork(b, b.fork)

    def _check_fork(self, b: Branch, fork: Fork) -> None:
        if not 0 <= fork.branch < b.id:
            raise ValueError(f"branch {b.id} forks from branch {fork.branch}, which does not come before it")
        parent = self.branches[fork.branch]
        at = fork.turn - parent.first_turn
        if not 0 <= at < len(parent.turns) or not 0 <= fork.token < max(1, parent.width(fork.turn)):
            raise ValueError(f"branch {b.id}: fork {fork.node} lies outside its parent")
        if parent.fork is not None and (fork.turn, fork.token) <= (parent.fork.turn, parent.fork.token):
            raise ValueError(f"branch {b.id}: fork {fork.node} is not after its parent's own; name the grandparent")

    def total_reward(self, branch: int) -> float:
        """The return of a branch from the root, undiscounted."""
        b = self.branches[branch]
        own = sum(t.reward for t in b.turns)
        if b.fork is None:
            return own
        return own + self._reward_before(b.fork)

    def _reward_before(self, fork: Fork) -> float:
        parent = self.branches[fork.branch]
        own = sum(t.reward for t in parent.turns[: fork.turn - parent.first_turn])
        return own if parent.fork is None else own + self._reward_before(parent.fork)

    @property
    def scored(self) -> tuple[Branch, ...]:
        """The branches that have a return."""
        return tuple(b for b in self.branches if b.failure is None)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A tree as edges in depth-first order: ``parent[s] < s`` and every subtree is contiguous.

    A segment is a run of tokens between two decision points: an action (or the part of it between forks) and the
    observation that answered it. Segment 0 is the first observation and holds no sampled token; its children are the
    independent roots. Failed branches are gone, and so is everything that only they needed. ``reward[s]`` arrives at
    the end of segment s. All token arrays are flat over N; segment s owns ``start[s]:start[s + 1]``. Read-only.
    """

    parent: Ints  # [S], -1 for segment 0
    branch: Ints  # [S], the branch that recorded the tokens
    turn: Ints  # [S], absolute turn of the action (0 for segment 0)
    leaf: npt.NDArray[np.bool_]  # [S]
    trained: npt.NDArray[np.bool_]  # [S]
    reward: Array  # [S]
    propensity: Array  # [S], of the fork that created the segment; NaN when the choice looked ahead
    start: Ints  # [S + 1]
    tokens: Ints  # [N]
    sampled: npt.NDArray[np.bool_]  # [N]
    logprobs: Floats  # [N], 0 where not sampled
    entropies: Floats  # [N], 0 where not sampled
    allowed: Mapping[int, Ints]  # token index -> allowed ids, only where restricted

    def __post_init__(self) -> None:
        seal(self)

    @property
    def kappa(self) -> Ints:
        """[S] the number of children of each segment (0 for a leaf)."""
        counts = np.zeros(len(self.parent), np.int32)
        np.add.at(counts, self.parent[self.parent >= 0], 1)
        return counts

    def children(self) -> tuple[tuple[int, ...], ...]:
        """[S] the children of each segment in order."""
        out: list[list[int]] = [[] for _ in self.parent]
        for s, p in enumerate(self.parent.tolist()):
            if p >= 0:
                out[p].append(s)
        return tuple(map(tuple, out))

    def sum_up(self, values: Array) -> Array:
        """[S] of every segment, the sum of ``values`` over its subtree, itself included."""
        out, parent = np.asarray(values, dtype=np.float64).tolist(), self.parent.tolist()
        for s in range(len(out) - 1, 0, -1):
            out[parent[s]] += out[s]
        return np.array(out, dtype=np.float64)

    def mean_up(self, values: Array) -> Array:
        """[S] of every segment, its value plus the *mean* over its children of theirs: U_e = r_e + mean of U_child."""
        out, parent, kappa = np.asarray(values, dtype=np.float64).tolist(), self.parent.tolist(), self.kappa.tolist()
        for s in range(len(out) - 1, 0, -1):
            out[parent[s]] += out[s] / kappa[parent[s]]
        return np.array(out, dtype=np.float64)

    def sum_down(self, values: Array) -> Array:
        """[S] of every segment, the sum of ``values`` over its path from the root, itself included."""
        out, parent = np.asarray(values, dtype=np.float64).tolist(), self.parent.tolist()
        for s in range(1, len(out)):
            out[s] += out[parent[s]]
        return np.array(out, dtype=np.float64)

    @property
    def mass(self) -> Array:
        """[S] w_e: the product of 1/kappa over the branch nodes on the path, the root group included."""
        kappa = self.kappa
        steps = np.array([0.0 if p < 0 else -np.log(kappa[p]) for p in self.parent])
        return np.exp(self.sum_down(steps))

    def to_tokens(self, values: Array) -> Array:
        """[N] a value of each segment spread over its sampled tokens, 0 elsewhere."""
        return np.repeat(values, np.diff(self.start)) * self.sampled

    @staticmethod
    def of(tree: RolloutTree) -> Segments:
        """The segments of all scored branches. A tree without any gives zero segments (no update, no error)."""
        return _Cutter(tree).run()


@dataclass(slots=True, eq=False)
class _Edge:
    """A segment being written: the tokens of ``turn.action[lo:hi]`` and the observation that answered them."""

    parent: int
    branch: Branch
    turn: int
    lo: int
    hi: int
    answer: Ints
    leaf: bool
    reward: float

    @property
    def record(self) -> Turn:
        return self.branch.turns[self.turn - self.branch.first_turn]

    @property
    def propensity(self) -> float:
        fork = self.branch.fork
        own = self.branch.first_token if self.turn == self.branch.first_turn else 0
        if fork is None or (self.turn, self.lo + own) != (fork.turn, fork.token):
            return 1.0
        return np.nan if fork.propensity is None else fork.propensity


class _Cutter:
    """Walks the scored branches of a tree depth-first and cuts them at turn boundaries and forks."""

    def __init__(self, tree: RolloutTree) -> None:
        self.branches = tree.branches
        self.alive = self._alive()
        self.forks: dict[tuple[int, int, int], list[Branch]] = {}
        for b in tree.branches:
            if b.fork is not None and b.id in self.alive:
                self.forks.setdefault(b.fork.node, []).append(b)

    def run(self) -> Segments:
        if not self.alive:
            return _arrays([])
        root = self.branches[0]
        edges = [_Edge(-1, root, 0, 0, 0, root.turns[0].observation, False, 0.0)]
        pending = self._starts((0, 0, 0), 0)
        while pending:
            branch, turn, token, parent = pending.pop()
            edges.append(self._edge(branch, turn, token, parent))
            if not edges[-1].leaf:
                pending.extend(self._starts(self._end(branch, turn, token), len(edges) - 1))
        return _arrays(edges)

    def _alive(self) -> set[int]:
        """The branches that have a score, and those from which one that has was forked."""
        alive: set[int] = set()
        for b in reversed(self.branches):
            if (b.failure is None and not b.pilot) or b.id in alive:
                alive.add(b.id)
                if b.fork is not None:
                    alive.add(b.fork.branch)
        return alive

    def _starts(self, node: tuple[int, int, int], parent: int) -> list[tuple[Branch, int, int, int]]:
        """What leaves a node, last child first: the branch's own continuation unless only a failure lies ahead, and
        the siblings forked there."""
        i, turn, token = node
        own = self.branches[i]
        leaving = [own] if own.failure is None or self._needed(node) else []
        leaving += self.forks.get(node, [])
        return [(b, turn, token, parent) for b in reversed(leaving)]

    def _needed(self, node: tuple[int, int, int]) -> bool:
        """Whether a living branch was forked from this one beyond the node."""
        return any(i == node[0] and (turn, token) > node[1:] for i, turn, token in self.forks)

    def _end(self, b: Branch, turn: int, token: int) -> tuple[int, int, int]:
        """The node at which the segment starting at (turn, token) ends."""
        cuts = [t for i, j, t in self.forks if i == b.id and j == turn and t > token]
        return (b.id, turn, min(cuts)) if cuts else (b.id, turn + 1, 0)

    def _edge(self, b: Branch, turn: int, token: int, parent: int) -> _Edge:
        _, next_turn, end = self._end(b, turn, token)
        record = b.turns[turn - b.first_turn]
        own = b.first_token if turn == b.first_turn else 0
        if next_turn == turn:
            return _Edge(parent, b, turn, token - own, end - own, np.zeros(0, np.int32), False, 0.0)
        after = next_turn - b.first_turn
        leaf = after == len(b.turns)
        answer = np.zeros(0, np.int32) if leaf else b.turns[after].observation
        return _Edge(parent, b, turn, token - own, len(record.action), answer, leaf, record.reward)


def _arrays(edges: list[_Edge]) -> Segments:
    sizes = [e.hi - e.lo + len(e.answer) for e in edges]
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    n = int(start[-1])
    tokens, sampled = np.zeros(n, np.int32), np.zeros(n, bool)
    logprobs, entropies = np.zeros(n, np.float32), np.zeros(n, np.float32)
    allowed: dict[int, Ints] = {}
    for e, at in zip(edges, start, strict=False):
        mid = at + e.hi - e.lo
        own = slice(e.lo, e.hi)
        tokens[at:mid], tokens[mid : mid + len(e.answer)] = e.record.action[own], e.answer
        logprobs[at:mid], entropies[at:mid] = e.record.logprobs[own], e.record.entropies[own]
        sampled[at:mid] = True
        for i, ids in enumerate(e.record.allowed[own] if e.record.allowed else ()):
            if ids is not None:
                allowed[int(at) + i] = ids
    return Segments(
        parent=np.array([e.parent for e in edges], np.int32),
        branch=np.array([e.branch.id for e in edges], np.int32),
        turn=np.array([e.turn for e in edges], np.int32),
        leaf=np.array([e.leaf for e in edges], bool),
        trained=np.array([e.branch.trained for e in edges], bool),
        reward=np.array([e.reward for e in edges], np.float64),
        propensity=np.array([e.propensity for e in edges], np.float64),
        start=start,
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        entropies=entropies,
        allowed=allowed,
    )
