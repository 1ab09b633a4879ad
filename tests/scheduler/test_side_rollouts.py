"""Schedulers that restore rollouts on the side: ``vine`` (values) and ``oracle_value`` (pilots), on a real grower."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from branchpoint.advantage import Tree, VinePpo
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.rollout import Grower, Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import OracleValue, Vine
from branchpoint.store import dump_tree, load_tree
from branchpoint.testing.fakes import CoinWorld, CounterWorld, FakePolicy
from branchpoint.tree import RolloutTree, Segments
from branchpoint.watch import Point, Side, Start
from branchpoint.world import EnvironmentFailure, Make, Step, Task

TASK = Task("count", "counter", seed=5, metadata={"target": 2, "limit": 6, "flips": 3})


def grow(scheduler: Any, seed: int = 0, make: Make = CounterWorld, live: int = 64) -> tuple[RolloutTree, Ledger]:
    ledger = Ledger()
    grower = Grower(
        FakePolicy(restrict=True), InProcess(), scheduler, Limits(live=live, turns=8), "independent", ledger
    )
    return asyncio.run(asyncio.wait_for(grower.grow(make, TASK, Noise(seed, seed)), 60)), ledger


def vines(tree: RolloutTree) -> dict[tuple[int, int], list[int]]:
    """(branch, turn) -> the branches on the side that were restored there."""
    out: dict[tuple[int, int], list[int]] = {}
    for b in tree.branches:
        if b.fork is not None and not b.trained:
            assert b.fork.token == 0
            out.setdefault((b.fork.branch, b.fork.turn), []).append(b.id)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("roots", [1, 2, 3])
def test_vine_restores_value_rollouts_at_every_turn_and_once_at_the_first(roots: int, seed: int) -> None:
    tree, ledger = grow(Vine(roots=roots, rollouts=2), seed)
    main = [b for b in tree.branches if b.trained]
    assert len(main) == roots
    expected = {(0, 0)} | {(b.id, t) for b in main for t in range(1, len(b.turns))}
    found = vines(tree)
    assert set(found) == expected
    assert all(len(v) == 2 for v in found.values())
    assert ledger.restores >= len(tree.branches) - 1 - roots
    assert ledger.env_steps == sum(len(b.turns) for b in tree.branches)


def test_vine_and_vineppo_agree_on_what_the_rollouts_said() -> None:
    """From the tree's own rewards: r + mean of the next side returns - mean of those here."""
    tree, _ = grow(Vine(roots=2, rollouts=3), 1)
    segments = Segments.of(tree)
    credit = VinePpo().credit(segments)
    side = {node: float(np.mean([sum(t.reward for t in tree.branches[i].turns) for i in ids]))
            for node, ids in vines(tree).items()}  # fmt: skip
    checked = 0
    for s in range(1, len(segments.parent)):
        b, t = tree.branches[int(segments.branch[s])], int(segments.turn[s])
        token = credit.up[segments.start[s]] + credit.down[segments.start[s]]
        if not b.trained:
            assert token == 0
            continue
        here = side[(b.id, t)] if t else side[(0, 0)]
        ahead = 0.0 if t == len(b.turns) - 1 else side[(b.id, t + 1)]
        assert token == pytest.approx((b.turns[t].reward + ahead - here) / 2, abs=1e-12)
        checked += 1
    assert checked > 4


def test_seeds_of_roots_and_side_rollouts_differ() -> None:
    """Of the same node; were the keys equal, a rollout on the side would repeat the root beside it."""
    task = Task("coins", "coins", seed=1, metadata={"flips": 12, "coins": 2})
    grower = Grower(
        FakePolicy(restrict=True), InProcess(), Vine(roots=3, rollouts=3), Limits(), "independent", Ledger()
    )
    tree = asyncio.run(grower.grow(CoinWorld, task, Noise(0, 0)))
    first = [b for b in tree.branches if b.fork is None or b.fork.node == (0, 0, 0)]
    assert len(first) == 6
    assert len({tuple(t.text + t.shown for t in b.turns) for b in first}) == 6


@pytest.mark.parametrize("scheduler", [Vine(roots=2, rollouts=2), OracleValue(roots=2, rollouts=3, max_forks=2)])
def test_side_rollouts_need_no_more_than_one_live_branch_and_do_not_depend_on_timing(scheduler: Any) -> None:
    for seed in range(3):
        narrow, wide = (grow(scheduler, seed, live=n)[0] for n in (1, 64))
        assert dump_tree(narrow) == dump_tree(wide)
        assert dump_tree(load_tree(dump_tree(wide))) == dump_tree(wide)


@pytest.mark.parametrize("seed", range(6))
def test_oracle_value_forks_the_first_turns_at_which_pilots_disagree(seed: int) -> None:
    tree, _ = grow(OracleValue(roots=2, rollouts=3, width=3, max_forks=1), seed)
    forks: dict[int, set[int]] = {}
    for b in tree.branches:
        if b.trained and b.fork is not None and b.fork.turn > 0:
            assert b.fork.propensity == 1.0
            forks.setdefault(b.fork.branch, set()).add(b.fork.turn)
    pilots = vines(tree)
    assert all(tree.branches[i].pilot for ids in pilots.values() for i in ids)
    for b in tree.branches:
        if not b.trained or (b.fork is not None and b.fork.turn > 0):
            continue
        returns = {t: [sum(x.reward for x in tree.branches[i].turns) for i in pilots[(b.id, t)]]
                   for t in range(1, len(b.turns))}  # fmt: skip
        apart = [t for t, r in returns.items() if max(r) > min(r)]
        assert forks.get(b.id, set()) == set(apart[:1])


def test_pilots_are_in_no_segment_and_change_no_credit() -> None:
    """Without its pilots the same tree gives the same segments and credit."""
    tree, _ = grow(OracleValue(roots=2, rollouts=3), 1)
    segments = Segments.of(tree)
    pilots = {b.id for b in tree.branches if b.pilot}
    assert pilots
    assert not pilots & set(segments.branch.tolist())
    assert segments.kappa.max() <= 2
    Tree().credit(segments)  # predictable: not refused


def test_pilots_that_fail_are_left_out_and_their_turn_forked_or_not_without_them() -> None:
    class Broken(CounterWorld):
        def step(self, action: str) -> Step:
            if self.count == 1 and action == "down":
                raise EnvironmentFailure("the floor")
            return super().step(action)

    lost = 0
    for seed in range(8):
        tree, _ = grow(OracleValue(roots=2, rollouts=4, max_forks=3), seed, make=Broken)
        lost += sum(b.failure is not None and b.pilot for b in tree.branches)
        Tree().credit(Segments.of(tree))
    assert lost > 0


def test_the_rule_by_itself() -> None:
    side = Side(Start(), 3, "pilot", least=0.4, width=2, most=2)
    assert side.meet(0, 0.1) == ()
    assert side.meet(1, 0.1) == (Point(1, 0, 4, 1.0, "pilot"),)
    assert side.judge(1, [1.0, 1.0]) == ()
    assert side.judge(2, [1.0]) == ()
    assert side.judge(3, [1.0, 0.0]) == (Point(3, 0, 2, 1.0),)
    assert side.judge(4, [0.5, 0.0]) == ()
    assert side.judge(5, [1.0, 0.0, 0.0]) == (Point(5, 0, 2, 1.0),)
    assert side.judge(6, [1.0, 0.0]) == ()
