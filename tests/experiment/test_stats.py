"""The statistics of comparisons against derived examples and brute force."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats

from branchpoint.experiment import stats
from branchpoint.noise import Noise

RAMP = [(0.0, 0.0), (10.0, 0.5), (30.0, 0.7)]


def test_area_by_hand_and_by_a_fine_sum() -> None:
    assert stats.area(RAMP, 30) == pytest.approx((10 * 0.25 + 20 * 0.6) / 30, abs=1e-12)
    assert stats.area(RAMP, 20) == pytest.approx((10 * 0.25 + 10 * 0.55) / 20, abs=1e-12), "cut where the budget ends"
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = np.concatenate([[0], np.cumsum(rng.uniform(1, 5, 6))])
        curve = list(zip(x.tolist(), rng.uniform(size=7).tolist(), strict=True))
        amount = float(rng.uniform(1, x[-1]))
        fine = (np.arange(200_000) + 0.5) / 200_000 * amount
        brute = np.interp(fine, *zip(*curve, strict=True)).mean()
        assert stats.area(curve, amount) == pytest.approx(brute, abs=1e-8)


@pytest.mark.parametrize(
    ("curve", "told"),
    [
        ([], "at 0"),
        ([(3, 0.1), (9, 0.2)], "at 0"),
        ([(0, 0.1), (4, 0.2)], "ends at 4 of 9"),
        ([(0, 0), (0, 1)], "grow"),
    ],
)
def test_a_curve_that_has_no_area(curve: list[tuple[float, float]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        stats.area(curve, 9)


def test_steps_to_a_threshold() -> None:
    assert stats.steps_to(RAMP, 0.25, 30) == pytest.approx(5)
    assert stats.steps_to(RAMP, 0.6, 30) == pytest.approx(20)
    assert stats.steps_to(RAMP, 0.6, 19) is None, "reached, but beyond the budget"
    assert stats.steps_to(RAMP, 0.8, 30) is None
    assert stats.steps_to([(0, 0.4), (9, 0.1)], 0.3, 9) == 0.0
    dip = [(0.0, 0.0), (10.0, 0.6), (20.0, 0.1), (30.0, 0.9)]
    assert stats.steps_to(dip, 0.5, 30) == pytest.approx(10 * 0.5 / 0.6), "the first time counts"


def test_censored_steps_are_kept_out_of_the_median_and_bounded_in_the_mean() -> None:
    found = stats.reached([5.0, None, 20.0, None, 10.0], 30)
    assert (found.reached, found.seeds, found.median) == (3, 5, 20.0)
    assert found.restricted == pytest.approx((5 + 30 + 20 + 30 + 10) / 5)
    assert stats.reached([5.0, None, 7.0, None], 30).median is None
    assert stats.reached([5.0, 9.0], 30).median == 7.0


def test_paired_differences_against_scipy_and_full_enumeration() -> None:
    rng = np.random.default_rng(1)
    for n in (2, 3, 5):
        a, b = rng.normal(size=n), rng.normal(size=n)
        d = a - b
        found = stats.paired(dict(enumerate(a)), dict(enumerate(b)), level=0.9)
        low, high = scipy_stats.t.interval(0.9, n - 1, d.mean(), d.std(ddof=1) / math.sqrt(n))
        assert found.t == pytest.approx((low, high), abs=1e-9)
        means = np.sort([np.mean(pick) for pick in product(d, repeat=n)])
        for q, got in zip((0.05, 0.95), found.bootstrap, strict=True):
            assert got == pytest.approx(means[math.ceil(q * len(means) - 1e-9) - 1], abs=1e-12)
        flips = [abs(np.mean(d * signs)) >= abs(d.mean()) - 1e-12 for signs in product((1, -1), repeat=n)]
        assert found.p == pytest.approx(np.mean(flips))


def test_only_common_seeds_are_paired() -> None:
    found = stats.paired({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.0, 0: 0.5, 7: 3.0})
    assert found.seeds == (0, 1)
    assert found.differences == (0.5, 1.0)
    with pytest.raises(ValueError, match="2 common seeds"):
        stats.paired({0: 1.0, 1: 1.0}, {1: 1.0, 2: 1.0})


def test_drawn_bootstrap_agrees_with_the_normal_limit_and_repeats() -> None:
    d = dict(enumerate(np.random.default_rng(2).normal(0.3, 1.0, size=40)))
    zero = dict.fromkeys(d, 0.0)
    found = stats.paired(d, zero, 0.95, Noise(4))
    values = np.array(list(d.values()))
    reach = 1.96 * values.std() / math.sqrt(40)
    assert found.bootstrap == pytest.approx((values.mean() - reach, values.mean() + reach), abs=0.04)
    assert found == stats.paired(d, zero, 0.95, Noise(4))
    assert found.p == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue, abs=0.02)


def test_coverage_of_five_seeds() -> None:
    """What the docstring says: the t interval holds its level, the bootstrap's does not."""
    rng, inside = np.random.default_rng(3), np.zeros(2)
    for _ in range(600):
        d = rng.normal(size=5)
        found = stats.paired(dict(enumerate(d)), dict.fromkeys(range(5), 0.0), 0.95)
        inside += [low <= 0 <= high for low, high in (found.t, found.bootstrap)]
    t, bootstrap = inside / 600
    assert 0.92 < t < 0.98
    assert 0.76 < bootstrap < 0.88


def test_band() -> None:
    x, mean, error = stats.band([RAMP, [(0.0, 0.2), (30.0, 0.2)]], 30, points=4)
    assert x.tolist() == [0, 10, 20, 30]
    assert mean == pytest.approx([0.1, 0.35, 0.4, 0.45])
    assert error == pytest.approx([0.1, 0.15, 0.2, 0.25])
