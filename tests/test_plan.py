"""The planner against exact numbers: eleven families of processes, and designs enumerated by a recursion of moments."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

import plan_kit
from branchpoint import plan
from branchpoint.lagged import Evidence, Verdict, squared_scores, usable
from branchpoint.noise import Noise
from branchpoint.plan import Plan, PlanError, Profile
from branchpoint.planned import Planned
from branchpoint.tree import RolloutTree, Segments
from branchpoint.watch import Start

STEPS = 64.0
NAMES = sorted(plan_kit.FAMILIES)
ALL_RIGHT = "all 8 right (p=.85)"


@pytest.fixture(scope="module")
def families() -> dict[str, plan_kit.Family]:
    return {name: plan_kit.Family(entry) for name, entry in plan_kit.FAMILIES.items()}


def profile(family: plan_kit.Family, parts: int) -> Profile:
    _, returns, scores = family.increments()

    def grouped(x: np.ndarray) -> tuple[float, ...]:
        return tuple(map(float, x.reshape(parts, -1).sum(axis=1)))

    return Profile(grouped(np.ones(family.horizon)), grouped(scores), grouped(returns))


def exact(family: plan_kit.Family, made: Plan) -> float:
    """The exact trace of a plan over that of the flat group, at equal steps."""
    times = [round(a * family.horizon) for a in made.at]
    found, _ = family.trace(plan_kit.forks(times, made.widths, made.gamma), steps=STEPS)
    return found / family.trace({}, steps=STEPS)[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_designs_is_reproduced(name: str, families: dict[str, plan_kit.Family]) -> None:
    family, entry = families[name], plan_kit.FAMILIES[name]
    noise, returns, _ = family.increments()
    np.testing.assert_allclose(noise, entry["v_profile"], atol=1e-11)
    np.testing.assert_allclose(returns, entry["delta2_profile"], atol=1e-11)
    m = family.moments({})
    assert m.u == pytest.approx(entry["J"], abs=1e-12)
    assert m.x @ m.x == pytest.approx(entry["grad_sqnorm"], abs=1e-12)
    for key, wanted in entry["designs"].items():
        found = re.fullmatch(r"t=\[(.*)\] K=\[(.*)\] B=(\d+) (root|mix0.5)", key)
        assert found
        times, widths = ([int(x) for x in found[i].split(",") if x] for i in (1, 2))
        forks = plan_kit.forks(times, widths, [0.5] * len(times))
        trace, steps = family.trace(forks, roots=int(found[3]))
        assert trace == pytest.approx(wanted["trcov"], abs=1e-12)
        assert steps == wanted["steps"]


def test_plans_from_quarters_beat_the_flat_group_and_never_lose_once_watched(
    families: dict[str, plan_kit.Family],
) -> None:
    found = {n: exact(f, plan.choose(profile(f, 4), STEPS / 8)) for n, f in families.items()}
    assert math.exp(np.mean(np.log(list(found.values())))) == pytest.approx(0.6961, abs=5e-4)
    assert max(found, key=lambda n: found[n]) == ALL_RIGHT
    watched = [min(1.0, ratio) for ratio in found.values()]  # the monitor sends what loses back to the flat group
    assert math.exp(np.mean(np.log(watched))) <= 0.72
    assert max(watched) <= 1.0
    assert [n for n in found if found[n] > 1.0] == [ALL_RIGHT]


@pytest.mark.parametrize(
    ("name", "at", "widths", "ratio"),
    [
        ("early decides", (1 / 8,), (2,), 0.239),
        ("late decides", (7 / 8,), (8,), 0.370),
        ("uniform decisions", (1 / 8, 4 / 8), (2, 2), 0.855),
        ("noise late", (7 / 8,), (6,), 0.407),
        ("noise early", (1 / 8,), (2,), 0.390),
        ("early decides+noise late", (1 / 8, 7 / 8), (2, 4), 0.432),
        ("late decides+noise early", (1 / 8, 7 / 8), (2, 2), 0.430),
        (">=6 of 8 (p=.65)", (2 / 8, 6 / 8), (2, 2), 0.852),
        (">=6 of 8 + flip .3", (3 / 8, 7 / 8), (2, 3), 0.720),
        (ALL_RIGHT, (1 / 8, 5 / 8), (2, 2), 1.288),
    ],
)
def test_plans_from_the_whole_profile_are_those_of_the_published_table(
    name: str, at: tuple[float, ...], widths: tuple[int, ...], ratio: float, families: dict[str, plan_kit.Family]
) -> None:
    made = plan.choose(profile(families[name], 8), STEPS / 8, depth=2)
    assert (made.at, made.widths) == (at, widths)
    if name != ALL_RIGHT:  # the (2,6)(2,2) of the "all right" row ties to the third digit
        assert exact(families[name], made) == pytest.approx(ratio, abs=6e-4)


@pytest.mark.parametrize(
    ("name", "bound"), [("late decides", 0.241), ("noise late", 0.262), ("noise early", 1.0), (ALL_RIGHT, 0.967)]
)
def test_the_ideal_allocation_has_the_published_bound(
    name: str, bound: float, families: dict[str, plan_kit.Family]
) -> None:
    copies, ratio = plan.ideal(families[name].increments()[0])
    assert ratio == pytest.approx(bound, abs=6e-4)
    assert all(a <= b for a, b in pairwise(copies))


def closed_form(x: float, k: int, rho: float) -> float:
    """Gamma(x, K, rho): one fork, many roots."""
    late = (1 - x) / k * (1 - rho) * (1 + rho / (1 - rho + rho * (k - 1)))
    return (x + k * (1 - x)) * (x * (rho + (1 - rho) / k) + late)


def one_fork(x: float, k: int, rho: float) -> float:
    return plan.predict(Profile((x, 1 - x), (x, 1 - x), (rho, 1 - rho)), 1e9, (1,), (k,)).gain


def test_one_fork_and_many_roots_have_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        x, rho = rng.uniform(0.02, 0.98, 2)
        k = int(rng.integers(2, 9))
        assert one_fork(x, k, rho) == pytest.approx(closed_form(x, k, rho), rel=1e-6)
        assert one_fork(x, 2, rho) <= 1 + 1e-6, "two children never lose"
    assert one_fork(0.5, 2, 0.5) == pytest.approx(27 / 32)
    assert one_fork(0.75, 3, 1.0) == pytest.approx(1.125), "three can"
    assert one_fork(2 / 3, 4, 1.0) == pytest.approx(4 / 3)
    assert plan.ideal(np.arange(1.0, 2001.0))[1] == pytest.approx(8 / 9, abs=1e-3)  # v_t ~ t


def errors(w: tuple[float, ...], k: tuple[int, ...], roots: float, gammas: np.ndarray) -> float:
    """The trace for any gammas: the variance of each child's value plus that of the baseline it is compared with."""
    q2, q1 = w[2], w[1] + w[2] / k[1]
    q0 = w[0] + q1 / k[0]
    e0 = q0 / (roots - 1)
    e1 = (1 - gammas[0]) ** 2 * (e0 + w[0]) + gammas[0] ** 2 * q1 / (k[0] - 1)
    e2 = (1 - gammas[1]) ** 2 * (e1 + w[1]) + gammas[1] ** 2 * q2 / (k[1] - 1)
    return (q0 + e0) / roots + (q1 + e1) / (roots * k[0]) + (q2 + e2) / (roots * k[0] * k[1])


def test_the_gammas_are_the_best_ones() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        w = tuple(rng.uniform(0.1, 2.0, 3))
        k = tuple(int(x) for x in rng.integers(2, 5, 2))
        roots = float(rng.integers(2, 9))
        found, gammas = plan.trace(Profile((1.0,) * 3, (1.0,) * 3, w), k, roots)
        assert found == pytest.approx(errors(w, k, roots, np.array(gammas)), rel=1e-12)
        for _ in range(20):
            other = np.clip(gammas + rng.normal(0, 0.1, 2), 0, 1)
            assert found <= errors(w, k, roots, other) + 1e-12


def test_flat_is_always_on_the_menu_and_wins_ties_within_the_margin() -> None:
    early = Profile((1.0,) * 4, (1.0,) * 4, (0.2, 0.3, 0.25, 0.25))
    made = plan.menu(early, 8.0, depth=2)
    assert [p for p in made if not p.at] == [plan.predict(early, 8.0)]
    best = made[0]
    assert plan.choose(early, 8.0, margin=1 - best.gain - 1e-9) == plan.choose(early, 8.0, margin=0.0)
    assert plan.choose(early, 8.0, margin=1 - best.gain + 1e-3).at == ()
    alike = Profile((1.0,) * 4, (1.0,) * 4, (0.0,) * 4)
    assert not alike.informative
    assert plan.choose(alike, 8.0).at == ()


def test_whole_plans_stay_within_the_budget() -> None:
    for budget in (4, 5, 8, 13):
        for made in plan.menu(Profile((3.0, 2.0, 2.0, 1.0), (1.0,) * 4, (0.1, 0.2, 0.3, 0.4)), budget, 2, whole=True):
            assert made.roots == int(made.roots) >= 2
            assert made.cost <= 8.0 * budget + 1e-9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Profile((1.0,), (1.0, 1.0), (1.0,)), "one number for each part"),
        (lambda: Profile((1.0,), (math.nan,), (1.0,)), "score holds"),
        (lambda: Profile((0.0,), (1.0,), (1.0,)), "costs nothing"),
        (lambda: Profile((1.0,) * 2, (1.0,) * 2, (0.0,) * 2).explained, "all returns are alike"),
        (lambda: plan.predict(Profile((1.0,), (1.0,), (1.0,)), 1.0), "roots"),
        (lambda: plan.predict(Profile((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 2.0, (1,), (4,), whole=True), "two roots"),
        (lambda: plan.predict(Profile((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 8.0, (2,), (2,)), "do not increase"),
        (lambda: plan.ideal([0.0, 0.0]), "there is none"),
        (lambda: Evidence().profile(), "no earlier tree"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(call: object, words: str) -> None:
    with pytest.raises(PlanError, match=words) as raised:
        call()  # type: ignore[operator]
    assert "\n" not in str(raised.value)


def test_isotonic_regression_is_the_closest_sequence() -> None:
    assert plan.isotonic([3.0, 1.0, 2.0]).tolist() == [2.0, 2.0, 2.0]
    assert plan.isotonic([1.0, 3.0, 2.0], [1.0, 3.0, 1.0]).tolist() == [1.0, 2.75, 2.75]
    rng = np.random.default_rng(2)
    for _ in range(20):
        y, w = rng.normal(size=6), rng.uniform(0.5, 2.0, 6)
        best = plan.isotonic(y, w)
        for _ in range(50):
            other = np.sort(best + rng.normal(0, 0.2, 6))
            assert np.sum(w * (y - best) ** 2) <= np.sum(w * (y - other) ** 2) + 1e-12


# --- what is learned from trees -----------------------------------------------------------------------------------


def test_the_measured_profile_is_unbiased(families: dict[str, plan_kit.Family]) -> None:
    """Averages over many trees, forked at one boundary after the other, against the exact profile."""
    family, rng = families[">=6 of 8 + flip .3"], np.random.default_rng(0)
    evidence = Evidence()
    for k in (1, 2, 3):
        evidence = evidence.add([plan_kit.grown(family, 3, {2 * k: 2}, rng) for _ in range(120)], [k], 8.0, "turn", 1.0)
    wanted = profile(family, 4)
    left = np.array([*evidence.within, 0.0]) / np.array([*evidence.known, 1.0])
    np.testing.assert_allclose(left[:4], np.cumsum(wanted.variance[::-1])[::-1], atol=0.025)
    np.testing.assert_allclose(evidence.profile().score, wanted.score, rtol=0.06)
    assert evidence.profile().cost == pytest.approx((2.0,) * 4)
    assert evidence.length == pytest.approx(8.0)


def test_the_monitor_sees_the_one_family_whose_plan_loses(families: dict[str, plan_kit.Family]) -> None:
    for name, loses in ((ALL_RIGHT, True), ("late decides", False)):
        family, rng = families[name], np.random.default_rng(3)
        made = plan.choose(profile(family, 4), 8.0, whole=True)
        widths = {round(a * 8): k for a, k in zip(made.at, made.widths, strict=True)}
        trees = [plan_kit.grown(family, int(made.roots), widths, rng) for _ in range(120)]
        verdict = Verdict().add(trees, made.gamma, "turn", 1.0)
        assert verdict.lost(8) is loses
        assert verdict.won(8) is not loses


def test_squared_scores_are_exact_where_the_other_choices_are_equally_likely(
    families: dict[str, plan_kit.Family],
) -> None:
    tree = plan_kit.grown(families[">=6 of 8 (p=.65)"], 4, {4: 3}, np.random.default_rng(0))
    s = Segments.of(tree)
    p = np.exp(s.logprobs.astype(float))
    np.testing.assert_allclose(squared_scores(s)[s.sampled], (2 * (1 - p) ** 2)[s.sampled], rtol=1e-5)
    assert not squared_scores(s)[~s.sampled].any()


def test_boundaries_of_short_episodes() -> None:
    assert usable(8.0) == (1, 2, 3)
    assert usable(3.0) == (1, 2)  # at turns 1, 2 and 2
    assert usable(1.0) == ()


# --- the scheduler ------------------------------------------------------------------------------------------------


def batch(family: plan_kit.Family, scheduler: Planned, rng: np.random.Generator, count: int) -> list[RolloutTree]:
    widths = {round(a * scheduler.expected): k for a, k in zip(scheduler.state.at, scheduler.state.width, strict=True)}
    return [plan_kit.grown(family, scheduler.roots, widths, rng) for _ in range(count)]


def reasons(family: plan_kit.Family, batches: int, count: int, seed: int) -> list[Planned]:
    """The schedulers of so many batches. Each goes through JSON on the way, as in a checkpoint."""
    rng, out = np.random.default_rng(seed), [Planned(roots=8, expected=8.0, refresh=50)]
    for _ in range(batches):
        again = Planned.model_validate(json.loads(json.dumps(out[-1].model_dump(mode="json"))))
        assert again == out[-1]
        out.append(again.update(batch(family, again, rng, count)))
    return out


def test_it_measures_then_plans_and_keeps_what_wins(families: dict[str, plan_kit.Family]) -> None:
    made = reasons(families["late decides"], 6, 12, 0)
    assert [s.state.at for s in made[:3]] == [(0.5,), (0.25,), (0.75,)]
    assert [s.state.why for s in made] == ["measure"] * 3 + ["plan"] * 4
    assert all(s.state.at[-1] == 0.75 for s in made[3:])
    assert all(s.state.width[-1] > 2 for s in made[3:])
    assert made[-1].gammas == made[-1].state.gamma
    ratio = made[-1].metrics()["plan/measured"]
    assert ratio is not None
    assert ratio < 0.8


def test_it_falls_back_to_the_flat_group_where_the_plan_loses(families: dict[str, plan_kit.Family]) -> None:
    made = reasons(families[ALL_RIGHT], 10, 16, 1)
    why = [s.state.why for s in made]
    assert "pause" in why
    rest = made[why.index("pause")]
    assert (rest.state.at, rest.roots) == ((), 8)
    before = made[why.index("pause") - 1]
    assert before.state.at != ()


def test_the_group_stays_flat_where_all_returns_are_alike(families: dict[str, plan_kit.Family]) -> None:
    entry = dict(plan_kit.FAMILIES["late decides"])
    entry["trans"] = [[[[p, 0.0, n] for p, _, n in outs] for outs in acts] for acts in entry["trans"]]
    made = reasons(plan_kit.Family(entry), 4, 8, 2)[-1]
    assert (made.state.why, made.state.at, made.roots) == ("alike", (), 8)


def test_failed_and_missing_trees_teach_nothing() -> None:
    before = Planned(roots=8)
    after = before.update([])
    assert after.state.evidence == before.state.evidence
    assert after.state.why == "measure"


def test_the_watch_forks_where_the_design_says() -> None:
    scheduler = Planned(roots=8, expected=8.0)
    watch = scheduler.watch(Noise(0))
    assert [p.turn for t in range(8) for p in watch.meet(t, 0.5)] == [4]
    later = scheduler.watch(Noise(0), Start(4, 0, 4, 1))
    assert not [p for t in range(4, 8) for p in later.meet(t, 0.5)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"roots": 3}, "greater than or equal to 4"),
        ({"budget": 8, "least": 20}, "memory"),
        ({"depth": 3}, "depth"),
        ({"budget": "many"}, "budget"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Planned(**fields)  # type: ignore[arg-type]
