"""The variance probe against exact numbers: small worlds enumerated sample by sample."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from branchpoint.probe.trace import ProbeError
from branchpoint.probe.variance import (
    Leaf,
    decompose,
    flip_sides,
    luck_share,
    luck_share_of_arms,
    pairing_difference,
    spurious,
)

SAMPLE = [
    ("a", "h1", "w1", 1.0), ("a", "h1", "w1", 0.0), ("a", "h1", "w2", 1.0),
    ("a", "h2", "w3", 0.0), ("a", "h2", "w3", 0.0), ("a", "h2", "w4", 1.0),
    ("b", "h3", "w5", 0.5), ("b", "h3", "w5", 1.0), ("b", "h3", "w6", 0.0),
    ("b", "h4", "w7", 1.0), ("b", "h4", "w7", 1.0), ("b", "h4", "w8", 1.0),
]  # fmt: skip
TABLE = np.array([[1.0, 0.0, 1.0, 0.5], [0.2, 0.0, 1.0, 0.0], [0.0, 0.0, 0.7, -0.3]])  # 3 schedules, 4 policy draws
OMEGA, XI = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.3, 0.2, 0.1])


def values(leaves: list[Leaf]) -> list[float]:
    found = decompose(leaves)
    parts = (found.prompt, found.prefix, found.luck, found.policy)
    return [math.nan if p is None else p.value for p in parts]


def test_the_worked_sample() -> None:
    found = decompose([Leaf(*x) for x in SAMPLE])
    assert values([Leaf(*x) for x in SAMPLE]) == pytest.approx([-0.0546875, 0.0, 0.0, 0.265625], abs=1e-15)
    assert found.total is not None
    assert found.remaining is not None
    assert found.total.value == pytest.approx(sum(values([Leaf(*x) for x in SAMPLE])))
    assert found.remaining.value == pytest.approx(0.265625)
    assert found.remarks == ()


def test_the_components_are_unbiased() -> None:
    """All samples of one prompt with two prefixes of three rollouts, each with its probability."""
    scores = np.random.default_rng(0).uniform(size=(2, 2, 2))  # prefix, schedule, policy
    ph, pw, pa = (np.array(p) for p in ([0.3, 0.7], [0.75, 0.25], [0.6, 0.4]))
    nodes = []  # probability, returns: two under one schedule, one under another draw
    for h, w, v, a, b, c in product(range(2), repeat=6):
        p = ph[h] * pw[w] * pw[v] * pa[a] * pa[b] * pa[c]
        nodes.append((p, (scores[h, w, a], scores[h, w, b], scores[h, v, c])))
    found = np.zeros(3)
    merged: dict[tuple[float, ...], float] = {}
    for p, (one, two, other) in nodes:
        key = (min(one, two), max(one, two), other)
        merged[key] = merged.get(key, 0.0) + p
    for (first, p), (second, q) in combinations_with_replacement(merged.items(), 2):
        leaves = [Leaf(0, i, s, r) for i, n in enumerate((first, second)) for s, r in zip("aab", n, strict=True)]
        found += (1 + (first != second)) * p * q * np.array(values(leaves))[1:]
    by_prefix = np.einsum("hwa,w,a->h", scores, pw, pa)
    moments = [(ph @ by_prefix) ** 2, ph @ by_prefix**2]
    moments.append(np.einsum("h,w,hw->", ph, pw, np.einsum("hwa,a->hw", scores, pa) ** 2))
    moments.append(np.einsum("h,w,a,hwa->", ph, pw, pa, scores**2))
    np.testing.assert_allclose(found, np.diff(moments), atol=1e-12)


def test_a_balanced_design_is_nested_analysis_of_variance() -> None:
    rng = np.random.default_rng(2)
    x, j, w, p = 4, 3, 2, 3
    r = rng.normal(size=(x, j, w, p)) + rng.normal(size=(x, j, w, 1)) + rng.normal(size=(x, 1, 1, 1))
    leaves = [Leaf(i[0], i[:2], i[:3], float(r[i])) for i in np.ndindex(*r.shape)]
    within = r.var(axis=3, ddof=1).mean()
    ms_w = p * r.mean(axis=3).var(axis=2, ddof=1).mean()
    ms_h = p * w * r.mean(axis=(2, 3)).var(axis=1, ddof=1).mean()
    ms_x = p * w * j * r.mean(axis=(1, 2, 3)).var(ddof=1)
    wanted = [(ms_x - ms_h) / (p * w * j), (ms_h - ms_w) / (p * w), (ms_w - within) / p, within]
    assert values(leaves) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("leaves", "unknown", "words"),
    [
        ([x for x in SAMPLE if x[0] == "a"], {0}, "one prompt only"),
        ([x for x in SAMPLE if x[1] in ("h1", "h3")], {1}, "one prefix of each prompt"),
        ([(a, b, i, r) for i, (a, b, _, r) in enumerate(SAMPLE)], {2, 3}, "cannot be told apart"),
        ([(a, b, b, r) for a, b, _, r in SAMPLE], {1, 2}, "cannot be told apart"),
    ],
)
def test_what_is_not_identified_is_said(leaves: list[tuple], unknown: set[int], words: str) -> None:
    found = values([Leaf(*x) for x in leaves])
    assert {i for i, v in enumerate(found) if math.isnan(v)} >= unknown
    assert words in " ".join(decompose([Leaf(*x) for x in leaves]).remarks)


def test_incomplete_prefixes_are_left_out_and_remarked() -> None:
    whole = [Leaf(*x) for x in SAMPLE]
    more = [*whole, Leaf("a", "h9", "w", 1.0)]
    assert values(more) == values(whole)
    assert "1 incomplete" in decompose(more).remarks[0]
    assert "all returns are alike" in " ".join(decompose([x._replace(score=1.0) for x in whole]).remarks)


def test_bad_returns_are_refused_in_one_line() -> None:
    for leaves, words in (([], "no scored rollout"), ([Leaf("a", "b", "c", math.nan)], "NaN")):
        with pytest.raises(ProbeError, match=words):
            decompose(leaves)
    for tables, words in (([], "no table"), ([np.ones((1, 2))], "2 schedules"), ([np.full((2, 2), np.nan)], "finite")):
        with pytest.raises(ProbeError, match=words):
            luck_share(tables)
    with pytest.raises(ProbeError, match="2 schedules"):
        pairing_difference(np.eye(2), np.ones((1, 2)))
    with pytest.raises(ProbeError, match="true outcome"):
        spurious([np.ones(2)], [np.ones(3)])


def test_the_luck_share_is_that_of_the_table() -> None:
    """E of numerator and denominator over all samples of two schedules with two rollouts each."""
    luck = rest = 0.0
    for w, v in product(range(3), repeat=2):
        for a, b, c, d in product(range(4), repeat=4):
            p = OMEGA[w] * OMEGA[v] * XI[a] * XI[b] * XI[c] * XI[d]
            found = luck_share([np.array([[TABLE[w, a], TABLE[w, b]], [TABLE[v, c], TABLE[v, d]]])])
            luck, rest = luck + p * found.luck, rest + p * found.rest
    assert luck == pytest.approx(0.051429, abs=1e-12)
    assert rest == pytest.approx(0.16151, abs=1e-12)
    assert luck / (luck + rest) == pytest.approx(0.2415198719, abs=1e-10)


def test_the_interval_of_the_luck_share() -> None:
    rng = np.random.default_rng(3)
    rows = [rng.choice(3, 6, p=OMEGA) for _ in range(40)]
    tables = [np.array([[TABLE[w, a] for a in rng.choice(4, 4, p=XI)] for w in row]) for row in rows]
    found = luck_share(tables)
    assert found.interval
    assert found.interval.low < 0.2415 < found.interval.high
    alike = luck_share([np.ones((2, 2)), np.ones((2, 2))])
    assert (alike.value, alike.interval) == (None, None)
    assert "alike" in alike.remarks[0]
    none = luck_share([np.array([[0.0, 1.0], [1.0, 0.0]])] * 3)
    assert none.value == -1.0, "unclipped"
    assert none.interval is None


def test_the_luck_share_of_paired_and_independent_groups() -> None:
    rng = np.random.default_rng(4)

    def group(shared: bool) -> np.ndarray:
        w = np.full(4, rng.choice(3, p=OMEGA)) if shared else rng.choice(3, 4, p=OMEGA)
        return TABLE[w, rng.choice(4, 4, p=XI)]

    found = luck_share_of_arms([group(True) for _ in range(1500)], [group(False) for _ in range(1500)])
    assert found == pytest.approx(0.2415, abs=0.06)
    assert luck_share_of_arms([np.ones(2)], [np.ones(2)]) is None


def test_spurious_variance_is_as_expected_of_independent_flips() -> None:
    rng, q, g = np.random.default_rng(5), 0.1, 4
    truth = [np.full(g, float(rng.random() < 0.6)) for _ in range(1500)]
    observed = [t * (rng.random(g) >= q) for t in truth]
    found = spurious(truth, observed)
    good, bad = found["succeeded"], found["failed"]
    assert good is not None
    assert bad is not None
    assert good.expected == pytest.approx(1 - 0.9**4 - 0.1**4, abs=0.02)
    assert good.seen == pytest.approx(good.expected, abs=0.04)
    assert (bad.q, bad.seen, bad.expected) == (0.0, 0.0, 0.0)
    paired = spurious(truth, [t * (rng.random() >= q) for t in truth])["succeeded"]
    assert paired is not None
    assert paired.seen == 0.0
    assert spurious([np.array([0.0, 1.0])], [np.array([0.0, 1.0])]) == {"succeeded": None, "failed": None}


def groups(pi: np.ndarray, g: int) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """All groups of g actions: probability, actions, Gram matrix of the scores e_a - pi."""
    scores = np.eye(len(pi)) - pi
    out = []
    for actions in product(range(len(pi)), repeat=g):
        at = np.array(actions)
        out.append((float(np.prod(pi[at])), at, scores[at] @ scores[at].T))
    return out


@pytest.mark.parametrize(
    ("pi", "r", "g", "lhs", "rhs"),
    [
        ([0.5, 0.3, 0.2], [1, 0, 1], 2, 0.0525, 0.1025),
        ([0.5, 0.3, 0.2], [1, 0, 1], 3, 0.05777777777777779, 0.08933333333333332),
        ([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], 3, 0.054814814814814844, 0.05851851851851855),
        ([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], 4, 0.05409374999999995, 0.050625),
    ],
)
def test_both_sides_of_the_condition_for_flips(pi: list[float], r: list[int], g: int, lhs: float, rhs: float) -> None:
    sides = sum(p * np.array(flip_sides(gram, np.array(r)[at])) for p, at, gram in groups(np.array(pi), g))
    np.testing.assert_allclose(sides, [lhs, rhs], atol=1e-14)
    q = 0.1
    replays = np.array([np.zeros(len(r)), *[r] * 9], float)  # all flips of one table of ten equal schedules
    scale = 9 / 10  # ddof = 1 over the ten schedules against the law's own covariance
    found = sum(p * pairing_difference(gram, replays[:, at]) * scale for p, at, gram in groups(np.array(pi), g))
    assert found == pytest.approx(q * (1 - q) * (lhs - rhs), abs=1e-15)


@pytest.mark.parametrize(
    ("g", "apart"), [(2, 0.03828462 - 0.03128461999999998), (3, 0.04016821333333334 - 0.026600924444444438)]
)
def test_the_general_condition_for_pairing(g: int, apart: float) -> None:
    table = np.array([[1.0, 0.2, 0.0], [0.0, 0.8, -0.5], [0.4, 0.4, 0.9]])  # arms, schedules
    replays = np.repeat(table.T, [5, 3, 2], axis=0)
    found = sum(
        p * pairing_difference(gram, replays[:, at]) * 0.9 for p, at, gram in groups(np.array([0.5, 0.3, 0.2]), g)
    )
    assert found == pytest.approx(apart, abs=1e-15)


def test_the_aligned_bandit() -> None:
    """G = 8 fair coins with a scalar score: 203/4096 against 56/4096, so pairing hurts."""
    sides = np.zeros(2)
    for k in range(9):
        a = np.array([1.0] * k + [0.0] * (8 - k))
        sides += math.comb(8, k) / 2**8 * np.array(flip_sides(np.outer(a - 0.5, a - 0.5), a))
    np.testing.assert_allclose(sides, [203 / 4096, 56 / 4096], atol=1e-15)
