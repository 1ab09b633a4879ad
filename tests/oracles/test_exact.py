"""The mean gradient, exactly: all trees of small processes, through Segments and the estimators."""

from __future__ import annotations

import itertools
from typing import Any, Self

import numpy as np
import pytest
from exact_kit import known, noisy_two_step, random_mdp, two_token_turns

from branchpoint.advantage import Bpo, DrGrpo, Grpo, Reinforce, Rloo, Tree
from branchpoint.probe.cases import Design, bpo, fixed, look_ahead, poor_so_far
from branchpoint.probe.enumerate import Forest, Moments, exact, gradient, scheduled
from branchpoint.probe.invalid import Faulty
from branchpoint.probe.tabular import Mdp
from branchpoint.scheduler import EquallySpaced, Fixed, Flat, LowestEntropy, Random, Threshold, TopEntropy
from branchpoint.tree import Segments

NONE = Design((), (), True)
DESIGNS = [
    ("two_step", Design((1,), (2,), True)),
    ("two_step_pA0.7", Design((1,), (3,), True)),
    ("M1", NONE),
    ("M1", Design((1,), (2,), True)),
    ("M1", Design((2,), (3,), True)),
    ("M1", Design((1, 2), (2, 2), False)),
    ("M2", Design((1,), (3,), True)),
    ("M2", Design((2, 3), (2, 3), True)),
    ("M2", Design((1, 2), (2, 2), True)),
    ("M3", NONE),
    ("M3", Design((1,), (4,), True)),
    ("M3", Design((1, 2), (2, 2), True)),
    ("M3", Design((1, 2), (2, 3), False)),
]
TREES = [Tree(gamma=1.0), Tree(gamma=0.0), Tree(gamma=(0.3, 0.8)), Tree(baseline_scale=0.25), Reinforce()]


def assert_unbiased(forest: Forest, estimators: list[Any], roots: int = 1) -> None:
    nodes = forest.roots() if roots == 1 else forest.groups(roots)
    assert sum(nodes.values()) == pytest.approx(1.0, abs=1e-12)
    p = np.array(list(nodes.values()))
    segments = [Segments.of(forest.tree(node)) for node in nodes]
    for estimator in estimators:
        mean = p @ np.array([gradient(forest.mdp, s, estimator.credit(s)) for s in segments])
        assert np.linalg.norm(mean - forest.mdp.gradient) <= 1e-12, estimator


@pytest.mark.parametrize(("name", "design"), DESIGNS)
def test_fixed_designs_are_unbiased(name: str, design: Design) -> None:
    mdp = known(name)
    assert_unbiased(Forest(mdp, fixed(mdp, design)), TREES)


@pytest.mark.parametrize("scheduler", [
    Threshold(threshold=0.6, quantile=None, width=3, max_forks=1),
    Threshold(threshold=0.64, quantile=None, max_forks=2, nested=True),
    EquallySpaced(every=2, max_forks=2),
])  # fmt: skip
@pytest.mark.parametrize("name", ["two_step", "M1", "M2", "M3"])
def test_predictable_rules_are_unbiased(name: str, scheduler: Any) -> None:
    mdp = known(name)
    forest = Forest(mdp, scheduled(scheduler, mdp))
    if name != "two_step":
        assert len(forest.roots()) > len(Forest(mdp, scheduled(Flat(), mdp)).roots()) or scheduler.threshold == 0.64
    assert_unbiased(forest, TREES[2:4])


@pytest.mark.parametrize("seed", range(20))
def test_random_processes(seed: int) -> None:
    """Depth 3 to 5, K 2 to 4, nested, rewards on the way, chance, early ends, shared parameters."""
    depth = 3 + seed % 3
    mdp = random_mdp(seed, depth)
    times, widths = [((depth - 2,), (2,)), ((depth - 1,), (4,)), ((depth - 2, depth - 1), (2, 2)), ((1,), (2,))][
        seed % 4
    ]
    if seed % 5 == 0:
        times, widths = (depth - 2,), (3,)
    forest = Forest(mdp, fixed(mdp, Design(times, widths, nested=seed % 2 == 0)))
    assert len(forest.roots()) < 3000
    assert_unbiased(forest, [Tree(gamma=0.7), Tree(gamma=1.0)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 60))
def test_more_random_processes(seed: int) -> None:
    depth = 3 + seed % 2
    mdp = random_mdp(seed, depth)
    for design in (Design((1, 2), (2, 2), True), Design((1,), (3,), True), Design((1, 2), (2, 3), False)):
        assert_unbiased(Forest(mdp, fixed(mdp, design)), TREES)


@pytest.mark.parametrize(("name", "roots"), [("two_step", 2), ("two_step", 3), ("M3", 2), ("noisy", 3)])
def test_groups_of_roots_are_unbiased(name: str, roots: int) -> None:
    mdp = noisy_two_step() if name == "noisy" else known(name)
    forest = Forest(mdp, fixed(mdp, Design((1,), (2,), True) if name != "M3" else NONE))
    assert_unbiased(forest, [Tree(), Tree(gamma=1.0), Tree(gamma=0.0)], roots)


def test_flat_estimators_on_flat_groups() -> None:
    """RLOO is unbiased there, the own return in the mean shrinks by 1 - 1/N, the standard deviation bends."""
    mdp = known("M3")
    forest = Forest(mdp, fixed(mdp, NONE))
    assert_unbiased(forest, [Rloo()], roots=2)
    groups = forest.groups(2)
    np.testing.assert_allclose(exact(forest, groups, DrGrpo()).mean, mdp.gradient / 2, atol=1e-13)
    bent = exact(forest, groups, Grpo()).mean
    cosine = bent @ mdp.gradient / np.linalg.norm(bent) / np.linalg.norm(mdp.gradient)
    assert cosine < 0.999


def test_leafwise_estimators_are_biased_on_forked_trees() -> None:
    """What their docstrings say: the check must see it."""
    mdp = known("M3")
    forest = Forest(mdp, fixed(mdp, Design((1,), (2,), True)))
    assert np.linalg.norm(exact(forest, forest.roots(), Rloo()).mean - mdp.gradient) > 0.01


@pytest.mark.parametrize(("fault", "first", "second"), [
    ("mass", -0.05, 0.25),
    ("down", -0.025, 0.125),
    ("uniform", -0.0375, 0.1875),
])  # fmt: skip
def test_faulty_estimators_where_the_outcome_decides_whether_to_fork(fault: Any, first: float, second: float) -> None:
    """Derived by hand. Steps of reward c = 0.2 or 0.4, then A = 0 or B = -1, then x = 1 or 0; probabilities 1/2.

    Two children at the last step after B, none after A. The first action of a state has score +-1/2, so its mean is
    (a) A, weight 1, no fork: c + x and x; (b) B, one fork: c - 1 + m and m - 1, m the mean of two x.
    mass: the gradient, 1/4 (0.2 - 0.4) and 1/4 (0.5 + 0.5). down: (b) gives 0 at both steps, also two steps ahead of
    the fork. uniform: (b) weighs 1/2. The rewards before a segment are no part of its advantage here.
    """
    trans = [
        [[[1.0, 0.2, 1]], [[1.0, 0.4, 1]]],
        [[[1.0, 0.0, 2]], [[1.0, -1.0, 2]]],
        [[[1.0, 1.0, -1]], [[1.0, 0.0, -1]]],
    ]
    mdp = Mdp.parse({"trans": trans, "pi": [[0.5, 0.5]] * 3, "block": [0, 1, 2], "s0": 0}, "late fork")
    forest = Forest(mdp, poor_so_far(2, 2, 0.0))
    mean = exact(forest, forest.roots(), Tree(gamma=1.0) if fault == "mass" else Faulty(fault)).mean
    np.testing.assert_allclose(mean, [first, -first, second, -second, 0.25, -0.25], rtol=0, atol=1e-12)


class Coins:
    """In place of Noise: heads exactly at the chosen turns."""

    def __init__(self, heads: tuple[int, ...]) -> None:
        self.heads, self.turn = heads, 0

    def child(self, *key: Any) -> Self:
        return self

    def private(self, turn: int, token: int) -> Self:
        self.turn = turn
        return self

    def random(self) -> float:
        return 0.0 if self.turn in self.heads else 0.999


@pytest.mark.parametrize("name", ["M1", "M3"])
def test_coins_are_unbiased(name: str) -> None:
    mdp, p = known(name), 0.3
    scheduler = Random(probability=p, max_forks=1)
    mean = np.zeros_like(mdp.gradient)
    places = range(1, mdp.horizon)
    for tossed in itertools.product([0, 1], repeat=len(places)):
        heads = tuple(t for t, h in zip(places, tossed, strict=True) if h)
        forest = Forest(mdp, scheduled(scheduler, mdp, noise=Coins(heads)))  # type: ignore[arg-type]
        weight = p ** len(heads) * (1 - p) ** (len(places) - len(heads))
        mean += weight * exact(forest, forest.roots(), Tree(gamma=1.0)).mean
    np.testing.assert_allclose(mean, mdp.gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheduler", [
    Fixed(at=(1 / 4,), expected=4, unit="token", boundary="token"),
    Fixed(at=(1 / 4, 3 / 4), expected=4, unit="token", boundary="token", width=(2, 2)),
    Fixed(at=(1 / 4,), expected=4, unit="token", boundary="turn", width=3),
    Threshold(threshold=0.68, quantile=None, boundary="token", max_forks=2),
])  # fmt: skip
def test_forks_in_the_middle_of_an_action_are_unbiased(scheduler: Any) -> None:
    mdp = two_token_turns()
    forest = Forest(mdp, scheduled(scheduler, mdp, turn_tokens=2), turn_tokens=2)
    forks = [b.fork for node in forest.roots() for b in forest.tree(node).branches if b.fork]
    assert any(f.token == 1 for f in forks) == (scheduler.boundary == "token")
    assert_unbiased(forest, TREES)


@pytest.mark.parametrize("post", ["none", "inherit"])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("p", [0.5, 0.7])
def test_bpo_gives_nothing_to_the_step_that_decides(p: float, lam: float, post: Any) -> None:
    mdp = known("two_step" if p == 0.5 else "two_step_pA0.7")
    np.testing.assert_allclose(mdp.gradient[:2], [p * (1 - p), -p * (1 - p)], atol=1e-15)
    found = bpo(mdp, Design((1,), (2,), nested=False), lam, post, "sum")
    assert np.all(found.mean == 0.0)
    assert found.trace == 0.0


@pytest.mark.parametrize(("lam", "power"), [(1.0, 0.0625), (0.95, 0.05640625), (0.0, 0.0)])
def test_the_propagated_part_is_noise(lam: float, power: float) -> None:
    """Theorem A.2: mean zero for every lambda, and a second moment that only lambda = 0 removes."""
    _check_noise(noisy_two_step(), 1, 2, lam, power, 1e-14)


@pytest.mark.parametrize(("lam", "power"), [(1.0, 0.808938), (0.95, 0.692193)])
def test_the_propagated_part_is_noise_in_a_longer_process(lam: float, power: float) -> None:
    _check_noise(known("M1"), 2, 3, lam, power, 1e-6)


def _check_noise(mdp: Mdp, time: int, width: int, lam: float, power: float, within: float) -> None:
    forest = Forest(mdp, fixed(mdp, Design((time,), (width,), nested=False)), ordered=True)
    roots = forest.roots()
    parts = []
    for node in roots:
        s = Segments.of(forest.tree(node))
        with_, without = (Bpo(lam=x, normaliser="sum").credit(s) for x in (lam, 0.0))
        parts.append(gradient(mdp, s, with_) - gradient(mdp, s, without))
    moments = Moments.of(np.array(list(roots.values())), np.array(parts))
    assert np.linalg.norm(moments.mean) <= 1e-14
    assert moments.trace == pytest.approx(power, abs=within)


def test_looking_ahead_is_refused_by_tree() -> None:
    mdp = known("LA1-action")
    scheduler = look_ahead(1, 2)
    forest = Forest(mdp, scheduled(scheduler, mdp), propensity=None)
    with pytest.raises(ValueError, match="predictable scheduler"):
        exact(forest, forest.roots(), Tree())


@pytest.mark.parametrize("scheduler", [TopEntropy(roots=1, spacing=0, start=True), LowestEntropy(spacing=0)])
def test_looking_ahead_is_biased_where_it_is_not_refused(scheduler: Any) -> None:
    mdp = known("M1")
    forest = Forest(mdp, scheduled(scheduler, mdp))
    assert np.linalg.norm(exact(forest, forest.roots(), Tree(gamma=1.0)).mean - mdp.gradient) > 1e-3


def test_the_truth_agrees_with_finite_differences() -> None:
    """J as a function of the logits, differentiated numerically: independent of the policy gradient theorem."""
    mdp = random_mdp(3, 4)  # shared logits
    blocks = sorted(set(mdp.block))
    logits = np.array([np.log(mdp.pi[mdp.block.index(b)]) for b in blocks])

    def j(z: np.ndarray) -> float:
        rows = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        pi = tuple(tuple(rows[blocks.index(b)]) for b in mdp.block)
        return Mdp(mdp.trans, pi, mdp.block).mean_return

    for i in range(logits.size):
        step = np.zeros(logits.size)
        step[i] = 1e-5
        step = step.reshape(logits.shape)
        slope = (j(logits + step) - j(logits - step)) / 2e-5
        assert slope == pytest.approx(mdp.gradient[i], abs=1e-9)
