"""The three identities of a packed row, and its cuts, by brute force on random trees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from learner_helpers import case, paths, random_tree

from branchpoint.advantage import Credit
from branchpoint.kernel import chains, tree_mask, visible
from branchpoint.loss import clipped_surrogate
from branchpoint.pack import PackedBatch, pack, unpack
from branchpoint.tree import Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Task

BIG = 10_000
SEEDS = range(8)


def paths_of_row(batch: PackedBatch) -> list[list[int]]:
    """Every token's path, read off the predictors."""
    out: list[list[int]] = []
    for t, p in enumerate(batch.predictor.tolist()):
        out.append(([] if p < 0 else out[p]) + [t])
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_sees_exactly_its_path(seed):
    rng = np.random.default_rng(seed)
    (batch,) = pack([case(rng)[:2], case(rng)[:2]], BIG)
    want = np.zeros((len(batch), len(batch)), bool)
    for t, path in enumerate(paths_of_row(batch)):
        want[t, path] = True
    assert np.array_equal(visible(batch.subtree_end), want)
    i, j = torch.meshgrid(torch.arange(len(batch)), torch.arange(len(batch)), indexing="ij")
    flex = tree_mask(torch.tensor(batch.subtree_end))(torch.tensor(0), torch.tensor(0), i, j)
    assert np.array_equal(flex.numpy(), want)
    seen = np.zeros_like(want)  # what the segments kernel computes
    for c in chains(batch.subtree_end):
        seen[c.stop : c.below, c.start : c.stop] = True
        seen[c.start : c.stop, c.start : c.stop] = np.tril(np.ones((c.stop - c.start,) * 2, bool))
    assert np.array_equal(seen, want)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [BIG, 60, 40, "tight"])
def test_rows_hold_every_token_once_on_its_own_path(seed, budget):
    rng = np.random.default_rng(seed)
    cases = [case(rng, restricted=True)[:2] for _ in range(3)]
    longest = max(len(p) for s, _ in cases for _, p in paths(s))
    budget = longest if budget == "tight" else max(budget, longest)
    batches = pack(cases, budget)
    owner = np.concatenate([np.full(len(s.tokens), i) for i, (s, _) in enumerate(cases)])
    first = np.cumsum([0] + [len(s.tokens) for s, _ in cases])
    own_paths: dict[int, list[int]] = {}
    for i, (s, _) in enumerate(cases):
        for _, path in paths(s):
            for k, t in enumerate(path):
                own_paths[int(first[i] + t)] = s.tokens[path[: k + 1]].tolist()
    seen = []
    for batch in batches:
        assert len(batch) <= budget
        for t, path in enumerate(paths_of_row(batch)):
            at = int(batch.source[t])
            if at < 0:
                assert not batch.weighed[t]
                assert not batch.sampled[t]
                continue
            seen.append(at)
            s, credit = cases[owner[at]]
            local = at - first[owner[at]]
            assert batch.tokens[path].tolist() == own_paths[at]
            assert batch.position[t] == len(path) - 1
            assert (batch.up[t], batch.down[t], batch.share[t]) == (
                credit.up[local],
                credit.down[local],
                credit.share[local],
            )
            assert batch.old_logprobs[t] == s.logprobs[local]
            assert batch.sampled[t] == s.sampled[local]
            assert batch.allowed(t).tolist() == np.asarray(s.allowed.get(int(local), ())).tolist()
    assert sorted(seen) == list(range(len(owner)))
    values = unpack(batches, [b.up + b.share for b in batches], len(owner))
    assert np.array_equal(values, np.concatenate([c.up + c.share for _, c in cases]))


def test_a_row_needs_room_for_the_longest_path():
    segments, credit, _ = case(np.random.default_rng(0))
    longest = max(len(p) for _, p in paths(segments))
    assert len(pack([(segments, credit)], longest)) >= 1
    with pytest.raises(ValueError, match=rf"tree 0 has a path of {longest} tokens"):
        pack([(segments, credit)], longest - 1)


def test_forks_near_the_root_are_the_preferred_cuts():
    # 4 + two branches of 8 with a fork of 2 + 2 deep inside the first: cutting at the root fork repeats 4 tokens only
    deep = RolloutTree(
        Task("t", "r"),
        (
            Branch(0, None, (turn([1] * 4, [2] * 8),), "done"),
            Branch(1, Fork(0, 0, 6, 1.0), (turn([], [3] * 2),), "done"),
            Branch(2, Fork(0, 0, 0, 1.0), (turn([], [4] * 8),), "done"),
        ),
    )
    segments = Segments.of(deep)
    credit = Credit(*(np.zeros(len(segments.tokens)) for _ in range(2)), segments.sampled.astype(float))
    first, second = pack([(segments, credit)], 16)
    assert first.tokens.tolist() == [1] * 4 + [2] * 8 + [3] * 2
    assert second.tokens.tolist() == [1] * 4 + [4] * 8
    assert second.source.tolist() == [-1] * 4 + list(range(14, 22))


def turn(observation: list[int], action: list[int], **more) -> Turn:
    blank = np.zeros(len(action))
    return Turn(np.array(observation), np.array(action), blank, blank, blank, **more)


def test_positions_and_predictors_of_a_prompt_with_two_branches():
    # known fault 14: P of 3, branches A and B of 2
    tree = RolloutTree(
        Task("t", "r"),
        (
            Branch(0, None, (turn([1, 2, 3], [4, 5]),), "done"),
            Branch(1, Fork(0, 0, 0, 1.0), (turn([], [6, 7]),), "done"),
        ),
    )
    segments = Segments.of(tree)
    credit = Credit.of(segments, np.array([0.0, 1.0, -0.5]), segments.mass)
    (batch,) = pack([(segments, credit)], 7)
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert batch.predictor.tolist() == [-1, 0, 1, 2, 3, 2, 5]
    assert not visible(batch.subtree_end)[5:, 3:5].any()
    assert (batch.up + batch.down).tolist() == [0, 0, 0, 0.5, 0.5, -0.25, -0.25]


def test_the_coefficient_of_a_shared_segment_is_the_mean_over_its_leaves():
    # known fault 14: an action shared by leaves with advantages +1 and -0.5
    tree = RolloutTree(
        Task("t", "r"),
        (
            Branch(0, None, (turn([1], [2, 3, 4]),), "done"),
            Branch(1, Fork(0, 0, 2, 1.0), (turn([], [5]),), "done"),
        ),
    )
    segments = Segments.of(tree)
    up, down = np.array([0, 0.5, 0.5, 0.5, 0]), np.array([0, -0.25, -0.25, 0, -0.25])
    (batch,) = pack([(segments, Credit(up, down, segments.sampled.astype(float)))], 5)
    assert (batch.up + batch.down).tolist() == [0, 0.25, 0.25, 0.5, -0.25]


@pytest.mark.parametrize("seed", SEEDS)
def test_up_and_down_give_the_clipped_loss_of_the_leaves(seed):
    rng = np.random.default_rng(seed)
    segments, credit, advantages = case(rng)
    new, old = -rng.random(len(segments.tokens)), -rng.random(len(segments.tokens))
    low, high, want, clipped = 0.2, 0.28, 0.0, 0
    for leaf, path in paths(segments):
        own = path[segments.sampled[path]]
        r, a = np.exp(new[own] - old[own]), advantages[leaf] / len(advantages)
        want -= np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a).sum()
        clipped += np.sum((r < 1 - low) | (r > 1 + high))
    assert clipped > 10
    got = clipped_surrogate(*map(torch.tensor, (new, old, credit.up, credit.down)), low, high)
    assert float(got) == pytest.approx(want, abs=1e-12)
    net = credit.up + credit.down
    averaged = map(torch.tensor, (new, old, np.maximum(net, 0), np.minimum(net, 0)))
    assert abs(float(clipped_surrogate(*averaged, low, high)) - want) > 1e-6


def test_subtrees_on_which_nothing_weighs_are_left_out():
    tree = random_tree(np.random.default_rng(3), 5)
    idle = dataclasses.replace(tree.branches[-1], trained=False)
    segments = Segments.of(RolloutTree(tree.task, (*tree.branches[:-1], idle)))
    credit = Credit.of(segments, np.ones(len(segments.parent)), np.ones(len(segments.parent)))
    (whole,), (lean,) = pack([(segments, credit)], BIG, prune=False), pack([(segments, credit)], BIG)
    assert len(whole) == len(segments.tokens)
    assert len(lean) < len(whole)
    assert lean.share.sum() == whole.share.sum()
    kept = set(lean.source.tolist())
    dropped = [t for t in range(len(whole)) if t not in kept]
    assert all(segments.branch[np.searchsorted(segments.start, t, side="right") - 1] == idle.id for t in dropped)
    nothing = Credit(*(np.zeros(len(segments.tokens)) for _ in range(3)))
    assert pack([(segments, nothing)], BIG) == []


def test_a_sampled_token_equal_to_the_padding_id_is_trained_and_context_stays_visible():
    # known fault 10: pad = eos = 9 in the prompt, as a sampled end and nowhere appended to a cut action
    tree = RolloutTree(
        Task("t", "r"),
        (
            Branch(0, None, (turn([1, 9, 2], [5, 6, 9]),), "done"),
            Branch(1, Fork(0, 0, 0, 1.0), (turn([], [5, 6, 7, 8, 4], stopped=False),), "length"),
        ),
    )
    segments = Segments.of(tree)
    credit = Credit.of(segments, np.array([0.0, 1.0, -1.0]), segments.mass)
    (batch,) = pack([(segments, credit)], BIG)
    assert batch.tokens.tolist() == [1, 9, 2, 5, 6, 9, 5, 6, 7, 8, 4]
    assert batch.weighed.tolist() == [False] * 3 + [True] * 8
    assert visible(batch.subtree_end)[5, :6].all()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("predictor", lambda x: np.roll(x, 1), "predictor"),
        ("subtree_end", lambda x: np.arange(len(x)), "subtree_end must lie"),
        ("position", lambda x: x + 1, "position"),
        ("up", lambda x: -x - 1, "up must be >= 0"),
        ("down", lambda x: x * np.nan, "down must be finite"),
        ("share", lambda x: x[:-1], "share has shape"),
        ("sampled", lambda x: ~x, "where nothing was sampled"),
        ("old_logprobs", lambda x: x + 2, "old_logprobs must be <= 0"),
        ("allowed_ids", lambda x: x + 100, "not in its own allowed set"),
        ("allowed_start", lambda x: x + 1, "allowed_start must rise from 0"),
    ],
)
def test_a_broken_row_is_refused_by_field(field, change, message):
    (batch,) = pack([case(np.random.default_rng(0), restricted=True)[:2]], BIG)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(batch, **{field: change(getattr(batch, field))})


def test_credit_on_a_token_that_nothing_predicts_is_refused():
    tree = RolloutTree(Task("t", "r"), (Branch(0, None, (turn([], [4, 5]),), "done"),))
    segments = Segments.of(tree)
    with pytest.raises(ValueError, match="nothing predicts it"):
        pack([(segments, Credit.of(segments, np.ones(2), np.ones(2)))], BIG)


def test_credit_of_another_tree_is_refused():
    rng = np.random.default_rng(0)
    a, b = case(rng)[:2], case(rng, branches=9)[:2]
    with pytest.raises(ValueError, match=r"tree 1: credit\.up has"):
        pack([a, (b[0], a[1])], BIG)
