"""The record and its view: a tree worked out by hand, and brute force over paths on random trees."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from learner_helpers import random_tree

from branchpoint.advantage import Credit
from branchpoint.tree import Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Failure, Task

TASK = Task("t", "r")


def turn(observation: list[int], action: list[int], reward: float = 0.0, **rest: object) -> Turn:
    n = len(action)
    values = {"logprobs": np.full(n, -1.0), "raw_logprobs": np.full(n, -2.0), "entropies": np.arange(n) / 10}
    return Turn(observation, action, **values, reward=reward, **rest)  # type: ignore[arg-type]


def example() -> tuple[Branch, ...]:
    """Root group of two; branch 2 forks in the middle of the last action of 0, branch 3 at a turn boundary of 1."""
    return (
        Branch(0, None, (turn([1, 2], [3, 4, 5]), turn([6], [7, 8], 1.0)), "done"),
        Branch(1, Fork(0, 0, 0, 1.0), (turn([], [9]), turn([6], [10], 2.0)), "done"),
        Branch(2, Fork(0, 1, 1, 1.0), (turn([], [11, 12], 3.0),), "done"),
        Branch(3, Fork(1, 1, 0), (turn([], [13], 4.0),), "done"),
    )


def test_the_worked_example() -> None:
    s = Segments.of(RolloutTree(TASK, example()))
    assert s.parent.tolist() == [-1, 0, 1, 2, 2, 0, 5, 5]
    assert s.branch.tolist() == [0, 0, 0, 0, 2, 1, 1, 3]
    assert s.start.tolist() == [0, 2, 6, 7, 8, 10, 12, 13, 14]
    assert s.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 9, 6, 10, 13]
    assert s.sampled.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1]
    assert s.reward.tolist() == [0, 0, 0, 1, 3, 0, 2, 4]
    assert s.leaf.tolist() == [False, False, False, True, True, False, True, True]
    assert np.isnan(s.propensity).tolist() == [False] * 7 + [True]
    assert s.mass.tolist() == pytest.approx([1, 0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.25], abs=1e-15)
    assert s.mean_up(s.reward).tolist() == [2.5, 2, 2, 1, 3, 3, 2, 4]
    assert s.sum_up(s.reward).tolist() == [10, 4, 4, 1, 3, 6, 2, 4]
    assert s.entropies[s.sampled].tolist() == pytest.approx([0, 0.1, 0.2, 0, 0.1, 0, 0.1, 0, 0, 0])


def paths(tree: RolloutTree) -> dict[int, list[tuple[int, Turn, int, int]]]:
    """Brute force: for every scored branch its (branch, turn record, from, to) pieces from the root, by definition."""
    out = {}
    for b in tree.scored:
        chain, at = [b], b
        while at.fork is not None:
            at = tree.branches[at.fork.branch]
            chain.insert(0, at)
        pieces = []
        for i, part in enumerate(chain):
            until = chain[i + 1].fork if i + 1 < len(chain) else None
            for k, record in enumerate(part.turns):
                index = part.first_turn + k
                if until is not None and (index, 0) > (until.turn, until.token):
                    break
                own = part.first_token if k == 0 else 0
                end = len(record.action)
                if until is not None and index == until.turn:
                    end = until.token - own
                pieces.append((part.id, record, own, end))
                if until is not None and index == until.turn:
                    break
        out[b.id] = pieces
    return out


def expected_tokens(pieces: list[tuple[int, Turn, int, int]]) -> list[int]:
    return [int(x) for _, record, _, end in pieces for x in (*record.observation, *record.action[:end])]


@pytest.mark.parametrize("seed", range(40))
def test_every_path_of_a_random_tree_is_what_its_branch_recorded(seed: int) -> None:
    tree = random_tree(np.random.default_rng(seed), branches=8)
    s = Segments.of(tree)
    by_branch = paths(tree)
    leaves = np.flatnonzero(s.leaf)
    assert sorted(s.branch[leaves]) == sorted(by_branch)
    for leaf in leaves:
        chain, at = [], int(leaf)
        while at >= 0:
            chain.insert(0, at)
            at = int(s.parent[at])
        tokens = [int(x) for e in chain for x in s.tokens[s.start[e] : s.start[e + 1]]]
        assert tokens == expected_tokens(by_branch[int(s.branch[leaf])])
        total = sum(s.reward[e] for e in chain)
        assert total == pytest.approx(tree.total_reward(int(s.branch[leaf])), abs=1e-12)
        mass = Fraction(1)
        for e in chain[:-1]:
            mass /= int(s.kappa[e])
        assert s.mass[leaf] == pytest.approx(float(mass), abs=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_depth_first_order_and_conservation(seed: int) -> None:
    s = Segments.of(random_tree(np.random.default_rng(1000 + seed), branches=9))
    index = np.arange(len(s.parent))
    assert (s.parent[1:] < index[1:]).all()
    size = s.sum_up(np.ones(len(index)))
    for e in index:
        inside = {e}
        for f in index[e + 1 :]:
            if s.parent[f] in inside:
                inside.add(f)
        assert inside == set(range(e, e + int(size[e]))), "a subtree is contiguous"
    assert s.mass[s.leaf].sum() == pytest.approx(1.0, abs=1e-12), "the leaves carry the whole mass"
    # The root's value is the mass-weighted mean of the leaves' returns.
    full = s.sum_down(s.reward)
    assert s.mean_up(s.reward)[0] == pytest.approx((s.mass * full)[s.leaf].sum(), abs=1e-12)


def test_failed_branches_leave_what_others_need() -> None:
    b0, b1, b2, b3 = example()
    failed = dataclasses.replace(b0, stop="failed", failure=Failure("sandbox", "worker died"))
    s = Segments.of(RolloutTree(TASK, (failed, b1, b2, b3)))
    assert s.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12, 9, 6, 10, 13]
    assert s.leaf.sum() == 3
    assert s.kappa.tolist() == [2, 1, 1, 0, 2, 0, 0]
    # Without the branch that needed it, nothing of the failed one is left.
    alone = dataclasses.replace(b3, id=2, fork=Fork(1, 1, 0, 1.0))
    s = Segments.of(RolloutTree(TASK, (failed, b1, alone)))
    assert s.tokens.tolist() == [1, 2, 9, 6, 10, 13]


def test_a_tree_without_any_score_has_no_segments() -> None:
    b0 = dataclasses.replace(example()[0], stop="failed", failure=Failure("environment", "raised"))
    s = Segments.of(RolloutTree(TASK, (b0,)))
    assert len(s.parent) == 0
    assert len(s.tokens) == 0
    nothing = Branch(0, None, (), "failed", Failure("sandbox", "could not start"))
    assert len(Segments.of(RolloutTree(TASK, (nothing,))).tokens) == 0


def test_untrained_branches_get_no_credit() -> None:
    b0, b1, b2, b3 = example()
    s = Segments.of(RolloutTree(TASK, (b0, dataclasses.replace(b1, trained=False), b2, b3)))
    credit = Credit.of(s, np.ones(len(s.parent)), s.mass)
    assert (credit.share[np.repeat(~s.trained, np.diff(s.start))] == 0).all()
    assert credit.share.sum() > 0


@pytest.mark.parametrize(
    ("fork", "message"),
    [
        (Fork(0, 5, 0), "outside"),
        (Fork(0, 1, 2), "outside"),
        (Fork(0, -1, 0), "outside"),
        (Fork(3, 0, 0), "before"),
        (Fork(2, 1, 1), "not after its parent"),
        (Fork(2, 1, 0), "not after its parent"),
    ],
)
def test_impossible_forks_are_refused(fork: Fork, message: str) -> None:
    b0, b1, b2, _ = example()
    with pytest.raises(ValueError, match=message):
        RolloutTree(TASK, (b0, b1, b2, Branch(3, fork, (turn([], [1]),), "done")))


def test_malformed_records_are_refused() -> None:
    with pytest.raises(ValueError, match="logprobs has shape"):
        dataclasses.replace(turn([1], [2, 3]), logprobs=np.zeros(1))
    with pytest.raises(ValueError, match="unscored"):
        turn([1], [2], float("nan"))
    with pytest.raises(ValueError, match="disagree"):
        Branch(0, None, (turn([1], [2]),), "failed")
    with pytest.raises(ValueError, match="down <= 0"):
        Credit(np.zeros(1), np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="read-only"):
        turn([1], [2]).action[0] = 5


def test_no_stage_can_write_on_what_it_is_given() -> None:
    """Turns, segments and credit are read-only; the arrays that they were made from stay their owner's."""
    ids = np.array([3, 4], np.int32)
    kept = Turn([1], [3], [-1.0], [-2.0], [0.5], allowed=(ids,))  # type: ignore[arg-type]
    tree = RolloutTree(TASK, (Branch(0, None, (kept,), "done"),))
    segments = Segments.of(tree)
    up = np.array([0.0, 1.0])
    credit = Credit(up, -up, up)
    arrays = [kept.observation, kept.action, kept.logprobs, kept.entropies, kept.allowed[0]]  # type: ignore[index]
    for data in (segments, credit):
        arrays += [v for f in dataclasses.fields(data) if isinstance(v := getattr(data, f.name), np.ndarray)]
    arrays += segments.allowed.values()
    assert len(arrays) == 5 + 12 + 3 + 1
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    ids[0] = up[0] = 2


def test_a_tree_prints_without_its_turns() -> None:
    turns = tuple(turn([7] * 50, [8] * 50) for _ in range(100))
    tree = RolloutTree(TASK, (Branch(0, None, turns, "done"),))
    assert len(repr(tree)) < 400
