"""Groups of independent rollouts: the estimators against a few lines of numpy, and faults reported elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from credit_kit import advantages, branch, given, group, tree

from branchpoint.advantage import Bpo, DrGrpo, Estimator, Grpo, Reinforce, Rloo, Tree
from branchpoint.tree import Segments

ALL: list[Estimator] = [Reinforce(), Rloo(), Grpo(), DrGrpo(), Bpo(), Tree()]
CENTRED: list[Estimator] = [Rloo(), Grpo(), DrGrpo(), Bpo(), Tree()]


def loo(r: np.ndarray) -> np.ndarray:
    return np.array([r[i] - np.mean(np.delete(r, i)) for i in range(len(r))])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_flat_groups_match_the_definitions(n: int) -> None:
    rng = np.random.default_rng(n)
    rewards = rng.normal(size=(n, 3))
    total = rewards.sum(axis=1)
    segments = Segments.of(tree(*(branch(i, (0, 0, 0) if i else None, list(r)) for i, r in enumerate(rewards))))
    expected = {
        Rloo(): loo(total),
        Bpo(post="inherit"): loo(total),
        DrGrpo(): total - total.mean(),
        Grpo(): (total - total.mean()) / (total.std(ddof=1) + 1e-4),
        Tree(gamma=0.3): loo(total),
    }
    for estimator, a in expected.items():
        credit = estimator.credit(segments)
        np.testing.assert_allclose(given(segments, credit)[1:], np.repeat(a, 3) / n, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(credit.share[segments.sampled], 1 / n)
    togo = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1].ravel()
    np.testing.assert_allclose(given(segments, Reinforce().credit(segments))[1:], togo / n, rtol=0, atol=1e-12)


def test_own_return_in_the_mean_is_a_factor_on_a_flat_group() -> None:
    segments = group([0.3, -1.0, 2.0, 0.25, 0.0])
    a, b = DrGrpo().credit(segments), Rloo().credit(segments)
    np.testing.assert_allclose(a.up, 0.8 * b.up, atol=1e-15)
    np.testing.assert_allclose(a.down, 0.8 * b.down, atol=1e-15)


def test_equal_texts_of_two_tasks_are_two_groups() -> None:
    for rewards in ([0.0] * 16, [1.0] * 16):
        for estimator in CENTRED:
            assert not estimator.credit(group(list(rewards))).informative


def test_equal_texts_at_two_forks_are_two_groups() -> None:
    """Hidden states differ, all tokens are equal: A ends in 0 sixteen times, B in 1 sixteen times."""
    a = [branch(0, None, [0.0, 0.0]), branch(1, (0, 0, 0), [0.0, 1.0])]
    a += [branch(i, (0, 1, 0), [0.0]) for i in range(2, 17)] + [branch(i, (1, 1, 0), [1.0]) for i in range(17, 32)]
    segments = Segments.of(tree(*a))
    below = segments.turn == 1
    for estimator in (Tree(gamma=1.0), Bpo()):
        assert np.all(given(segments, estimator.credit(segments))[below] == 0.0)


def test_one_fork_is_one_group_whatever_the_texts() -> None:
    segments = group([1.0, 0.0, 0.0, 0.0])
    for estimator in (Rloo(), Tree(), Bpo()):
        a = given(segments, estimator.credit(segments))[1:] * 4
        np.testing.assert_allclose(a, [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-15)


@pytest.mark.parametrize("where", [2, 0, 3])
def test_an_unscored_member_is_absent(where: int) -> None:
    rewards: list[float | None] = [1.0, 0.0, 0.5]
    rewards.insert(where, None)
    segments = group(rewards)
    for estimator in (Rloo(), Tree(), Bpo()):
        np.testing.assert_allclose(given(segments, estimator.credit(segments))[1:] * 3, [0.75, -0.75, 0.0], atol=1e-15)
    np.testing.assert_allclose(given(segments, Grpo(eps=1e-6).credit(segments))[1:] * 3, [1.0, -1.0, 0.0], atol=1e-5)
    assert len(segments.sampled) == segments.sampled.sum() + 1
    np.testing.assert_allclose(Tree().credit(segments).share.sum(), 1.0)


@pytest.mark.parametrize("estimator", ALL)
def test_one_or_no_member_is_finite(estimator: Estimator) -> None:
    nobody = estimator.credit(group([None, None]))
    assert len(nobody.up) == 0
    assert not nobody.informative
    lone = group([None, None, 1.0])
    one = estimator.credit(lone)
    if isinstance(estimator, Reinforce | Tree):
        assert given(lone, one)[1] == 1.0
    else:
        assert not one.informative


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ([1, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    ],
)
def test_the_odd_one_out_is_kept(rewards: list[float], expected: list[float]) -> None:
    segments = group(list(map(float, rewards)))
    for estimator in (Rloo(), Tree()):
        credit = estimator.credit(segments)
        assert credit.informative
        np.testing.assert_allclose(advantages(segments, credit), expected, atol=1e-15)


@pytest.mark.parametrize("rewards", [[0.4] * 4, [0.1] * 3, [0.1 + 0.2, 0.3], [1e6 + 0.1] * 7, [0.0, 0.0], [-1e-3] * 3])
@pytest.mark.parametrize("estimator", CENTRED)
def test_a_constant_group_gives_exactly_nothing(rewards: list[float], estimator: Estimator) -> None:
    credit = estimator.credit(group(list(rewards)))
    assert not credit.informative
    assert np.all(credit.up == 0.0)


def test_small_true_differences_survive() -> None:
    for estimator in CENTRED:
        assert estimator.credit(group([1.0, 1.0 + 1e-9])).informative
