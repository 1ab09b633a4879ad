"""Estimators on trees with forks: worked examples, and definitions evaluated leaf by leaf on random trees."""

from __future__ import annotations

import numpy as np
import pytest
from credit_kit import branch, given, group, paths, random_tree, tree
from pydantic import TypeAdapter, ValidationError

from branchpoint.advantage import Bpo, DrGrpo, Estimator, Grpo, Reinforce, Rloo, Tree, full_returns, trained_mass
from branchpoint.tree import Array, Segments

ADAPTER: TypeAdapter[Estimator] = TypeAdapter(Estimator)


def worked() -> Segments:
    """Two roots; the first forks into three at turn 1: returns 1 + {0, 2, 4}, the second root has 3."""
    return Segments.of(
        tree(
            branch(0, None, [1.0, 0.0]),
            branch(1, (0, 0, 0), [3.0]),
            branch(2, (0, 1, 0), [2.0]),
            branch(3, (0, 1, 0), [4.0]),
        )
    )


def test_the_tree_estimator_on_a_worked_example() -> None:
    segments = worked()
    # depth-first: prompt, first root's turn 0, its three continuations, second root. Values 3 and 3 at the roots.
    np.testing.assert_allclose(full_returns(segments), [3, 3, 1, 3, 5, 3])
    weights = np.array([0, 1 / 2, 1 / 6, 1 / 6, 1 / 6, 1 / 2])
    for gamma in (0.0, 0.5, 1.0):
        siblings, roots = np.array([4.0, 3.0, 2.0]), 3.0
        base = np.array([0, 3.0, *(gamma * siblings + (1 - gamma) * roots), 3.0])
        got = given(segments, Tree(gamma=gamma).credit(segments))
        np.testing.assert_allclose(got[1:], (weights * (full_returns(segments) - base))[1:], atol=1e-15)
    half = given(segments, Tree(gamma=1.0, baseline_scale=0.5).credit(segments))
    np.testing.assert_allclose(half[1:], [0.75, -1 / 6, 0.25, 2 / 3, 0.75], atol=1e-15)


def test_bpo_on_a_worked_example() -> None:
    """Backbone of four turns, return 4, forked before turns 1 and 3 into returns 1 and 2."""
    segments = Segments.of(
        tree(branch(0, None, [0, 0, 0, 4.0]), branch(1, (0, 1, 0), [0.0, 1.0]), branch(2, (0, 3, 0), [2.0]))
    )
    at = {(int(b), int(t)): s for s, (b, t) in enumerate(zip(segments.branch, segments.turn, strict=True)) if s}
    a1, a3 = 3.0, 2.0
    for post in ("none", "inherit"):
        got = given(segments, Bpo(lam=0.5, post=post, normaliser="sum").credit(segments))
        expected = {
            (0, 0): 0.5 * a1 + 0.125 * a3,
            (0, 1): a1,
            (0, 2): 0.5 * a3,
            (0, 3): a3,
            (1, 1): -a1,
            (1, 2): -a1 if post == "inherit" else 0.0,
            (2, 3): -a3,
        }
        for place, value in expected.items():
            assert got[at[place]] == pytest.approx(value, abs=1e-15), place
    got = given(segments, Bpo(lam=0.5, normaliser="leaves").credit(segments))
    assert got[at[0, 1]] == pytest.approx(1.0)
    got = given(segments, Bpo(lam=0.5, normaliser="pairs").credit(segments))
    assert got[at[0, 1]] == pytest.approx(3 / 7)


def test_bpo_leaves_out_a_backbone_that_failed() -> None:
    segments = Segments.of(
        tree(
            branch(0, None, [0.0, 0.0, None]),
            branch(1, (0, 1, 0), [1.0]),
            branch(2, (0, 1, 0), [3.0]),
            branch(3, (0, 2 - 1, 0), [5.0]),
        )
    )
    got = given(segments, Bpo(normaliser="sum").credit(segments))
    np.testing.assert_allclose(got[segments.leaf], [-3.0, 0.0, 3.0])
    assert np.all(got[~segments.leaf] == 0.0)


def brute_baseline(segments: Segments, gamma: float) -> Array:
    """b from its definition, walking up from each segment; values are means over descendants, by recursion."""
    children = segments.children()

    def value(s: int) -> float:
        kids = children[s]
        return float(segments.reward[s]) + (sum(map(value, kids)) / len(kids) if kids else 0.0)

    def before(s: int) -> float:
        p = int(segments.parent[s])
        return 0.0 if p < 0 else before(p) + float(segments.reward[p])

    def base(s: int) -> float:
        p = int(segments.parent[s])
        if p < 0:
            return 0.0
        others = [c for c in children[p] if c != s]
        if not others:
            return base(p)
        mean = before(s) + sum(map(value, others)) / len(others)
        return mean if p == 0 else gamma * mean + (1 - gamma) * base(p)

    return np.array([base(s) for s in range(len(children))])


@pytest.mark.parametrize("seed", range(12))
def test_the_baseline_is_its_definition_on_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments = Segments.of(random_tree(rng))
    gamma = float(rng.random())
    full = full_returns(segments)
    base = brute_baseline(segments, gamma)
    np.testing.assert_allclose(Tree(gamma=gamma).baseline(segments, full), base, rtol=0, atol=1e-12)
    got = given(segments, Tree(gamma=gamma).credit(segments))
    np.testing.assert_allclose(got[1:], (segments.mass * (full - base))[1:], rtol=0, atol=1e-12)


def test_gamma_by_level() -> None:
    segments = Segments.of(
        tree(
            branch(0, None, [0, 0, 1.0]),
            branch(1, (0, 0, 0), [7.0]),
            branch(2, (0, 1, 0), [3.0]),
            branch(3, (0, 2, 0), [5.0]),
        )
    )
    leaf = (segments.branch == 0) & segments.leaf
    for gammas in ((0.25, 0.75), (0.25, 0.75, 0.1)):
        base = Tree(gamma=gammas).baseline(segments, full_returns(segments))
        np.testing.assert_allclose(base[leaf], 0.75 * 5.0 + 0.25 * (0.25 * 3.0 + 0.75 * 7.0))
    base = Tree(gamma=(0.25,)).baseline(segments, full_returns(segments))
    np.testing.assert_allclose(base[leaf], 0.25 * 5.0 + 0.75 * (0.25 * 3.0 + 0.75 * 7.0))


@pytest.mark.parametrize("seed", range(6))
def test_leafwise_credit_is_the_sum_over_the_leaves_below(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    segments = Segments.of(random_tree(rng, trained=0.8))
    routes = paths(segments)
    returns = np.array([sum(segments.reward[s] for s in route) for route in routes])
    trained = np.array([segments.trained[route[-1]] for route in routes])
    n = len(returns)
    forms = {
        Rloo(): (returns - returns.mean()) * n / (n - 1),
        DrGrpo(): returns - returns.mean(),
        Grpo(): (returns - returns.mean()) / (returns.std(ddof=1) + 1e-4),
    }
    for estimator, a in forms.items():
        up, down = np.zeros(len(segments.parent)), np.zeros(len(segments.parent))
        for route, value, counts in zip(routes, a, trained, strict=True):
            for s in route if counts else ():
                up[s] += max(value, 0) / trained.sum()
                down[s] += min(value, 0) / trained.sum()
        credit = estimator.credit(segments)
        np.testing.assert_allclose(credit.up, segments.to_tokens(up * segments.trained), rtol=0, atol=1e-12)
        np.testing.assert_allclose(credit.down, segments.to_tokens(down * segments.trained), rtol=0, atol=1e-12)


def test_value_only_rollouts_count_in_values_and_take_no_weight() -> None:
    segments = group([1.0, 2.0, 6.0], trained=[True, True, False])
    got = given(segments, Tree().credit(segments))
    np.testing.assert_allclose(got[1:], [-1.5, -0.75, 0.0])
    segments = Segments.of(
        tree(
            branch(0, None, [0.0, 1.0]),
            branch(1, (0, 0, 0), [0.0]),
            branch(2, (0, 1, 0), [3.0], trained=False),
        )
    )
    np.testing.assert_allclose(trained_mass(segments), [1, 0.5, 0.5, 0, 0.5])
    got = given(segments, Tree(gamma=1.0).credit(segments))
    np.testing.assert_allclose(got[1:], [1.0, -1.0, 0.0, -1.0])


def test_a_fork_left_with_one_child_has_no_baseline_of_its_own() -> None:
    segments = Segments.of(tree(branch(0, None, [0.0, 1.0]), branch(1, (0, 0, 0), [4.0]), branch(2, (0, 1, 0), [None])))
    got = given(segments, Tree(gamma=1.0).credit(segments))
    np.testing.assert_allclose(got[1:], [-1.5, -1.5, 1.5])


def test_look_ahead_is_refused_with_a_reason() -> None:
    segments = Segments.of(tree(branch(0, None, [0.0, 1.0]), branch(1, (0, 1, 0), [1.0], propensity=None)))
    for estimator in (Tree(), Reinforce()):
        with pytest.raises(ValueError, match=r"chosen after their parent had finished.*predictable scheduler.*bpo"):
            estimator.credit(segments)
    assert Bpo().credit(segments).up.shape == segments.tokens.shape


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"kind": "tree", "gamma": 1.5}, "gamma"),
        ({"kind": "tree", "gamma": []}, "gamma"),
        ({"kind": "tree", "gama": 0.5}, "gama"),
        ({"kind": "bpo", "lam": -0.1}, "lam"),
        ({"kind": "bpo", "post": "both"}, "post"),
        ({"kind": "grpo", "eps": 0}, "eps"),
        ({"kind": "nothing"}, "kind"),
    ],
)
def test_wrong_options_are_named(raw: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        ADAPTER.validate_python(raw)


def test_an_estimator_is_its_own_configuration() -> None:
    for estimator in (Tree(gamma=(0.2, 0.4)), Bpo(lam=0.0, post="inherit"), Grpo(), Rloo(), DrGrpo(), Reinforce()):
        assert ADAPTER.validate_json(ADAPTER.dump_json(estimator)) == estimator
