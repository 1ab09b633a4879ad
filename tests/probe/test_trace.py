"""The trace, its error and its intervals against exact enumeration, numbers derived elsewhere, and scipy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from branchpoint.probe.trace import Estimate, ProbeError, between, inner, mean_square, ratio, t_quantile, within
from branchpoint.tree import Array

ONE = np.zeros(64, np.int64)


def three_arms() -> tuple[Array, Array]:
    """The leave-one-out gradient of two pulls of a three-armed bandit, every pair of pulls: probabilities, [9, 3]."""
    pi, reward = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.0, 0.4])
    score = np.eye(3) - pi
    pairs = list(itertools.product(range(3), repeat=2))
    p = np.array([pi[a] * pi[b] for a, b in pairs])
    return p, np.array([(reward[a] - reward[b]) * (score[a] - score[b]) / 2 for a, b in pairs])


def aligned() -> tuple[Array, Array]:
    """Eight pulls of a fair two-armed bandit whose one parameter tilts the rewarded arm: 5 distinct gradients."""
    g = np.array([k * (8 - k) / 64 for k in range(5)])[:, None]
    p = np.array([math.comb(8, k) for k in range(9)]) / 256
    return np.array([*(p[:4] + p[:4:-1]), p[4]]), g


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        yield tuple(np.diff([-1, *bars, total + parts - 1]) - 1)


def merged(p: Array, g: Array) -> tuple[Array, Array]:
    distinct, where = np.unique(np.round(g, 12), axis=0, return_inverse=True)
    return np.bincount(where.ravel(), p), distinct


def coverage(p: Array, g: Array, n: int, level: float = 0.9) -> float:
    """The exact probability that the interval from n groups holds the true trace: all samples, enumerated."""
    true = float(p @ np.sum((g - p @ g) ** 2, axis=1))
    held = 0.0
    for counts in compositions(n, len(p)):
        sample = np.repeat(g, counts, axis=0)
        found = within(sample @ sample.T, ONE[:n])
        # A relative error of rounding size is one: all groups alike.
        interval = found.interval(level) if found.value > 1e-15 else None
        if interval is not None and interval.low <= true <= interval.high:
            held += math.factorial(n) * math.prod(q**c / math.factorial(c) for q, c in zip(p, counts, strict=True))
    return held


@pytest.mark.parametrize("n", [2, 3])
def test_the_trace_and_the_squared_mean_are_exactly_unbiased(n: int) -> None:
    p, g = three_arms()
    trace = square = 0.0
    for drawn in itertools.product(range(len(p)), repeat=n):
        weight, rows = math.prod(p[list(drawn)]), g[list(drawn)]
        gram = rows @ rows.T
        # Three copies are three prompts: enough for an error, and the mean is the same.
        trace += weight * within(np.kron(np.eye(3), gram), np.repeat(np.arange(3), n)).value
        square += weight * mean_square(gram, ONE[:n])
    assert trace == pytest.approx(0.119928, abs=1e-12)
    assert square == pytest.approx(0.075672, abs=1e-12)


def test_the_error_is_that_of_leaving_out_each_group_by_hand() -> None:
    rng = np.random.default_rng(0)
    g, n = rng.normal(size=(7, 4)), 7
    traces = [float(np.sum(np.var(np.delete(g, i, axis=0), axis=0, ddof=1))) for i in range(n)]
    found = within(g @ g.T, ONE[:n])
    assert found.value == pytest.approx(np.sum(np.var(g, axis=0, ddof=1)), abs=1e-12)
    assert found.error == pytest.approx(math.sqrt((n - 1) / n * np.sum((traces - np.mean(traces)) ** 2)), abs=1e-12)
    assert found.df == 6
    low, high = np.exp(np.log(found.value) + np.array([-1, 1]) * stats.t.ppf(0.95, 6) * found.error / found.value)
    interval = found.interval(0.9)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12)


def test_several_prompts_are_strata_and_cost_multiplies() -> None:
    rng = np.random.default_rng(1)
    g, prompts = rng.normal(size=(12, 5)), np.repeat([0, 1, 2], 4)
    g += 10 * rng.normal(size=(3, 5))[prompts]  # what differs between prompts must not count
    cost = rng.uniform(5, 9, size=12)

    def statistic(kept: Array) -> float:
        parts = [kept[prompts[kept] == p] for p in range(3)]
        return float(
            np.mean([np.sum(np.var(g[k], axis=0, ddof=1)) for k in parts]) * np.mean([np.mean(cost[k]) for k in parts])
        )

    square = 0.0
    for p in range(3):
        left = np.array([statistic(np.delete(np.arange(12), i)) for i in np.flatnonzero(prompts == p)])
        square += 3 / 4 * np.sum((left - left.mean()) ** 2)
    found = within(g @ g.T, prompts, cost)
    assert found.value == pytest.approx(statistic(np.arange(12)), rel=1e-10)
    assert found.error == pytest.approx(math.sqrt(square), rel=1e-8)
    assert found.df == 9


def test_two_groups_a_prompt() -> None:
    rng = np.random.default_rng(2)
    g, prompts = rng.normal(size=(10, 3)), np.repeat(np.arange(5), 2)
    each = np.array([np.sum((g[2 * p] - g[2 * p + 1]) ** 2) / 2 for p in range(5)])
    found = within(g @ g.T, prompts)
    assert found.value == pytest.approx(each.mean(), abs=1e-12)
    assert found.error == pytest.approx(each.std(ddof=1) / math.sqrt(5), abs=1e-12)
    assert found.df == 4


def test_between_prompts_and_inner_products() -> None:
    rng = np.random.default_rng(3)
    mean = rng.normal(size=(4, 6))
    prompts = np.repeat(np.arange(4), 3)
    rows = mean[prompts]  # without noise every estimate is exact
    found = between(rows @ rows.T, prompts)
    assert found == pytest.approx(np.sum(np.var(mean, axis=0, ddof=1)), abs=1e-12)
    assert between(rows[:3] @ rows[:3].T, prompts[:3]) is None
    other = rng.normal(size=(4, 6))
    assert inner(rows @ other[prompts].T, prompts, prompts) == pytest.approx(np.mean(np.sum(mean * other, axis=1)))


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 31, 62, 245])
@pytest.mark.parametrize("p", [0.6, 0.95, 0.995])
def test_quantiles_of_t(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)


@pytest.mark.parametrize(("n", "expected"), [(8, 0.5931706188550453), (16, 0.6435216665249214)])
def test_exact_coverage_in_the_worst_case(n: int, expected: float) -> None:
    """One dimension, five atoms: below 32 groups the interval is far too short, and the documentation says so."""
    assert coverage(*aligned(), n) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "expected"), [(8, 0.879), (16, 0.818)])
def test_exact_coverage_for_three_arms(n: int, expected: float) -> None:
    assert coverage(*merged(*three_arms()), n) == pytest.approx(expected, abs=5e-4)


@pytest.mark.slow
def test_exact_coverage_from_32_groups() -> None:
    assert coverage(*aligned(), 32) == pytest.approx(0.8605474753323508, abs=1e-9)
    assert coverage(*merged(*three_arms()), 32) == pytest.approx(0.809, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "expected"), [(16, 0.906), (32, 0.911), (64, 0.905)])
def test_the_ratio_of_two_designs_covers(n: int, expected: float) -> None:
    """16 arms, groups of 8, flips of successes with probability 0.1, paired against independent: 2000 repetitions."""
    rng = np.random.default_rng(n)
    true = _many_arms(rng, 200_000, True).var(axis=0).sum() / _many_arms(rng, 200_000, False).var(axis=0).sum()
    held = 0
    for _ in range(2000):
        a, b = _many_arms(rng, n, True), _many_arms(rng, n, False)
        found = ratio(within(a @ a.T, ONE[:n]), within(b @ b.T, ONE[:n]))
        assert found is not None
        held += found.low <= true <= found.high
    assert held / 2000 == pytest.approx(expected, abs=0.025)


def _many_arms(rng: np.random.Generator, groups: int, paired: bool) -> Array:
    arms, size = 16, 8
    a = rng.integers(arms, size=(groups, size))
    survives = rng.random((groups, 1 if paired else size)) < 0.9
    reward = (a < 8) * survives
    score = np.eye(arms)[a] - 1 / arms
    return np.mean((reward - reward.mean(axis=1, keepdims=True))[:, :, None] * score, axis=1)


def test_what_cannot_be_estimated_is_said() -> None:
    with pytest.raises(ProbeError, match="at least 2 groups of each prompt"):
        within(np.eye(1), ONE[:1])
    with pytest.raises(ProbeError, match="3 groups of each prompt, or 3 prompts"):
        within(np.eye(4), np.array([0, 0, 1, 1]))
    assert Estimate(0.0, 0.0, 3).interval() is None
    assert ratio(Estimate(1.0, 0.1, 3), Estimate(0.0, 0.0, 3)) is None
