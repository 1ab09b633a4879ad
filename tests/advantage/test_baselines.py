"""PPO, VinePPO, GiGPO and Tree-GRPO against their definitions, computed rollout by rollout from plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from credit_kit import branch, given, group, paths, random_tree, tree, turn

from branchpoint.advantage import Gigpo, Grpo, Ppo, TreeGrpo, VinePpo
from branchpoint.tree import Branch, Fork, RolloutTree, Segments, Turn

SEEDS = range(12)
EXACT = {"rtol": 0, "atol": 1e-12}


def flat(rng: np.random.Generator, rollouts: int = 4, tokens: int = 3, places: int = 4) -> RolloutTree:
    """A flat group whose observations are few, so that states are met again."""
    made = []
    for i in range(rollouts):
        turns = []
        for t in range(int(rng.integers(2, 6))):
            n = int(rng.integers(1, tokens + 1))
            shown = [7] if t == 0 else [7, int(rng.integers(places))]
            zeros = np.zeros(n, np.float32)
            turns.append(
                Turn(
                    np.array(shown, np.int32),
                    rng.integers(9, size=n).astype(np.int32),
                    zeros,
                    zeros,
                    zeros,
                    float(rng.normal()),
                )
            )
        made.append(Branch(i, Fork(0, 0, 0, 1.0) if i else None, tuple(turns), "done"))
    return RolloutTree(tree(branch(0, None, [0.0])).task, tuple(made))


def weights(segments: Segments, path: list[int]) -> list[float]:
    """Of each segment of a path, the chance that a uniform descent from it ends at the path's leaf."""
    return [float(np.prod([1.0 / segments.kappa[s] for s in path[i:-1]])) for i in range(len(path))]


def both(credit: Any) -> np.ndarray:
    return credit.up + credit.down


# --- ppo ---------------------------------------------------------------------------------------------------------


def gae_of_path(rewards: list[float], values: list[float], lam: float, discount: float) -> list[float]:
    """A_t = sum over l of (discount lam)^l delta_{t+l}, written out."""
    v = [*values, 0.0]
    delta = [r + discount * v[i + 1] - v[i] for i, r in enumerate(rewards)]
    return [sum((discount * lam) ** (j - i) * delta[j] for j in range(i, len(delta))) for i in range(len(delta))]


def steps_of(segments: Segments, path: list[int], unit: str) -> list[tuple[int, int, float]]:
    """(segment, token, reward) of the steps of a path."""
    out = []
    for s in path[1:]:
        own = [t for t in range(segments.start[s], segments.start[s + 1]) if segments.sampled[t]]
        own = own if unit == "token" else own[:1]
        out += [(s, t, float(segments.reward[s]) if t == own[-1] else 0.0) for t in own]
    return out


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_is_gae_along_every_path_of_a_group_and_its_mean_where_a_tree_forks(seed: int, unit: Any) -> None:
    rng = np.random.default_rng(seed)
    segments = Segments.of(flat(rng) if seed % 2 else random_tree(rng))
    values = rng.normal(size=len(segments.tokens))
    lam, discount = float(rng.random()), float(rng.uniform(0.5, 1.0))
    if seed % 2 == 0 and unit == "turn":  # siblings start in one state, where V is one number
        for children in segments.children():
            values[[segments.start[c] for c in children]] = rng.normal()
    estimator = Ppo(lam=lam, discount=discount, unit=unit)
    expected, target = np.zeros(len(values)), np.zeros(len(values))
    mass = np.zeros(len(values))
    for path in paths(segments):
        steps = steps_of(segments, path, unit)
        found = gae_of_path([r for _, _, r in steps], [values[t] for _, t, _ in steps], lam, discount)
        chance = dict(zip(path, weights(segments, path), strict=True))
        for (s, t, _), a in zip(steps, found, strict=True):
            expected[t] += chance[s] * a
            mass[t] = segments.mass[s]
    target = np.where(mass > 0, expected + values, 0.0)
    targets = estimator.targets(segments, values)
    np.testing.assert_allclose(targets.value, target, **EXACT)
    np.testing.assert_allclose(targets.weight, mass, **EXACT)
    got = both(estimator.credit(segments, values))
    if unit == "token":
        np.testing.assert_allclose(got, mass * expected, **EXACT)
    else:
        first = [segments.start[s] for s in range(1, len(segments.parent))]
        np.testing.assert_allclose(given(segments, estimator.credit(segments, values))[1:], (mass * expected)[first])


@pytest.mark.parametrize("unit", ["turn", "token"])
def test_ppo_at_lambda_one_is_the_return_to_go_minus_the_value(unit: Any) -> None:
    segments = Segments.of(random_tree(np.random.default_rng(5)))
    values = np.zeros(len(segments.tokens))
    targets = Ppo(unit=unit, lam=0.0).targets(segments, values)
    go = segments.to_tokens(segments.mean_up(segments.reward))
    at = targets.weight > 0
    np.testing.assert_allclose(targets.observed[at], go[at], **EXACT)
    credit = Ppo(unit=unit, lam=1.0).credit(segments, values)
    np.testing.assert_allclose(both(credit), segments.to_tokens(segments.mass) * go, **EXACT)


def test_ppo_gives_nothing_to_value_only_branches_and_does_not_ask_the_critic_to_learn_them() -> None:
    segments = group([1.0, 0.0, 5.0], trained=[True, True, False])
    credit = Ppo(lam=1.0).credit(segments, np.zeros(len(segments.tokens)))
    np.testing.assert_allclose(given(segments, credit), [0.0, 0.5, 0.0, 0.0], **EXACT)
    assert Ppo().targets(segments, np.zeros(len(segments.tokens))).weight.sum() == pytest.approx(1.0)


def test_ppo_says_what_is_missing() -> None:
    segments = group([1.0, 0.0])
    with pytest.raises(ValueError, match="values of a critic"):
        Ppo().credit(segments)
    with pytest.raises(ValueError, match="values must be"):
        Ppo().credit(segments, np.zeros(2))
    with pytest.raises(ValueError, match="finite"):
        Ppo().credit(segments, np.full(len(segments.tokens), np.nan))


# --- vineppo -----------------------------------------------------------------------------------------------------


def vine(rng: np.random.Generator, lost: float) -> tuple[RolloutTree, list[dict[str, Any]]]:
    """Two roots with auxiliary rollouts at each state, some of them lost, and the same as plain numbers."""
    branches: list[Branch] = []
    plain: list[dict[str, Any]] = []
    shared: list[float] = []
    for root in range(2):
        rewards = [float(r) for r in rng.normal(size=int(rng.integers(2, 5)))]
        plain.append({"id": len(branches), "rewards": rewards, "values": [shared] + [[] for _ in rewards[1:]]})
        branches.append(branch(len(branches), (0, 0, 0) if root else None, [*rewards]))
    for r in plain:
        for t in range(len(r["rewards"])):
            if (t == 0 and r["id"]) or rng.random() < lost:
                continue
            for _ in range(2):
                rest = [float(x) for x in rng.normal(size=int(rng.integers(1, 3)))]
                branches.append(branch(len(branches), (r["id"], t, 0), [*rest], trained=False))
                r["values"][t].append(sum(rest))
    return tree(*branches), plain


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_vineppo_is_the_reward_plus_the_difference_of_mean_auxiliary_returns(seed: int, lost: float) -> None:
    made, plain = vine(np.random.default_rng(seed), lost)
    segments = Segments.of(made)
    found = given(segments, VinePpo().credit(segments))
    for r in plain:
        own = [s for s in range(1, len(segments.parent)) if segments.branch[s] == r["id"]]
        n = len(r["rewards"])
        so_far = np.concatenate([[0.0], np.cumsum(r["rewards"])])
        level = [so_far[t] + np.mean(v) if v else None for t, v in enumerate(r["values"])] + [so_far[n]]
        for t, s in enumerate(own):
            after = next(x for x in level[t + 1 :] if x is not None)
            before = next((x for x in reversed(level[: t + 1]) if x is not None), 0.0)
            assert found[s] == pytest.approx((after - before) / 2, abs=1e-12)
    assert not found[~segments.trained].any()


def test_vineppo_on_a_group_without_auxiliary_rollouts_has_no_baseline() -> None:
    segments = group([1.0, 3.0])
    np.testing.assert_allclose(given(segments, VinePpo().credit(segments)), [0.0, 0.5, 1.5], **EXACT)


# --- gigpo -------------------------------------------------------------------------------------------------------


def gigpo_by_hand(made: RolloutTree, omega: float, discount: float, norm: str, eps: float) -> list[list[float]]:
    """[rollouts][turns] A_E + omega A_S from the turns themselves."""
    rows = [[t.reward for t in b.turns] for b in made.branches]
    go = [[sum(discount ** (j - i) * r[j] for j in range(i, len(r))) for i in range(len(r))] for r in rows]
    met: dict[tuple[int, ...], list[float]] = {}
    for b, ahead in zip(made.branches, go, strict=True):
        for t, g in zip(b.turns, ahead, strict=True):
            met.setdefault(tuple(t.observation.tolist()), []).append(g)

    def relative(x: float, among: list[float]) -> float:
        scale = (np.std(among, ddof=1) if len(among) > 1 else 0.0) + eps if norm == "std" else 1.0
        return float((x - np.mean(among)) / scale)

    totals = [sum(r) for r in rows]
    return [
        [
            relative(total, totals) + omega * relative(g, met[tuple(t.observation.tolist())])
            for t, g in zip(b.turns, ahead, strict=True)
        ]
        for b, total, ahead in zip(made.branches, totals, go, strict=True)
    ]


@pytest.mark.parametrize("norm", ["std", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_compares_trajectories_and_visits_of_equal_states(seed: int, norm: Any) -> None:
    made = flat(np.random.default_rng(seed))
    segments = Segments.of(made)
    expected = gigpo_by_hand(made, 0.7, 0.9, norm, 1e-6)
    found = given(segments, Gigpo(omega=0.7, discount=0.9, norm=norm).credit(segments))
    for s in range(1, len(segments.parent)):
        at = expected[int(segments.branch[s])][int(segments.turn[s])]
        assert found[s] == pytest.approx(at / len(made.branches), abs=1e-12)


def test_gigpo_without_steps_is_grpo_and_ignores_states_met_once() -> None:
    rng = np.random.default_rng(3)
    segments = Segments.of(flat(rng))
    mine, grpo = Gigpo(omega=0.0, eps=1e-4).credit(segments), Grpo().credit(segments)
    np.testing.assert_allclose(both(mine), both(grpo), **EXACT)
    np.testing.assert_allclose(mine.share, grpo.share, **EXACT)
    alone = Segments.of(flat(rng, rollouts=1, places=10**6))
    assert not Gigpo().credit(alone).informative


def test_gigpo_tells_states_apart_that_start_inside_an_action() -> None:
    """Two forks inside two different actions: the states differ by the tokens before the fork."""
    made = tree(
        branch(0, None, [0.0, 1.0]),
        Branch(1, Fork(0, 0, 0, 1.0), (turn(0.0), turn(2.0, tokens=2)), "done"),
        Branch(2, Fork(1, 1, 1, 1.0), (turn(5.0),), "done"),
    )
    segments = Segments.of(made)
    found = given(segments, Gigpo(norm="none", discount=1.0).credit(segments))
    inside = [s for s in range(1, len(found)) if segments.branch[s] in (1, 2) and segments.leaf[s]]
    trajectories = np.array([2.0, 5.0]) - np.mean([1.0, 2.0, 5.0])
    steps = np.array([2.0, 5.0]) - np.mean([2.0, 5.0])
    np.testing.assert_allclose(found[inside], (trajectories + steps) / 3, **EXACT)


# --- tree_grpo ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_tree_grpo_compares_leaves_within_their_tree_and_with_all(seed: int) -> None:
    segments = Segments.of(random_tree(np.random.default_rng(seed)))
    routes = paths(segments)
    returns = [sum(float(segments.reward[s]) for s in path) for path in routes]

    def relative(x: float, among: list[float]) -> float:
        return float((x - np.mean(among)) / ((np.std(among, ddof=1) if len(among) > 1 else 0.0) + 1e-6))

    up, down = np.zeros(len(segments.parent)), np.zeros(len(segments.parent))
    for path, x in zip(routes, returns, strict=True):
        kin = [y for other, y in zip(routes, returns, strict=True) if other[1] == path[1]]
        a = (relative(x, kin) + relative(x, returns)) / len(routes)
        for s in path[1:]:
            up[s] += max(a, 0.0)
            down[s] += min(a, 0.0)
    credit = TreeGrpo().credit(segments)
    np.testing.assert_allclose(credit.up, segments.to_tokens(up), **EXACT)
    np.testing.assert_allclose(credit.down, segments.to_tokens(down), **EXACT)


def test_tree_grpo_on_a_flat_group_is_grpo() -> None:
    segments = group([0.0, 1.0, 1.0, 0.5])
    np.testing.assert_allclose(both(TreeGrpo(eps=1e-4).credit(segments)), both(Grpo().credit(segments)), **EXACT)


@pytest.mark.parametrize("estimator", [VinePpo(), Gigpo(), TreeGrpo()], ids=lambda e: e.kind)
def test_equal_returns_and_empty_trees_carry_no_signal(estimator: Any) -> None:
    assert not estimator.credit(group([None, None])).informative
    if estimator.kind != "vineppo":  # whose value of one state alone is no comparison
        assert not estimator.credit(group([0.3, 0.3, 0.3])).informative
