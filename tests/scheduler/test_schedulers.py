"""Schedulers: what they may look at, what they keep, where they fork."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from branchpoint.noise import Noise
from branchpoint.scheduler import (
    EquallySpaced,
    Fixed,
    Flat,
    LowestEntropy,
    Random,
    Scheduler,
    Threshold,
    TopEntropy,
    Uniform,
)
from branchpoint.tree import Branch, Floats, Fork, RolloutTree, Turn
from branchpoint.watch import Point, Start
from branchpoint.world import Failure, Task

ADAPTER: TypeAdapter[Scheduler] = TypeAdapter(Scheduler)
Episode = list[Floats]


def episode(rng: np.random.Generator, turns: int, longest: int = 6) -> Episode:
    return [rng.random(int(rng.integers(1, longest + 1))).astype(np.float32) for _ in range(turns)]


def turns(*values: list[float]) -> Episode:
    return [np.array(v, np.float32) for v in values]


def play(scheduler: Any, own: Episode, noise: Noise | None = None, **start: int) -> tuple[list[Point], list[Point]]:
    """The points made on the way and those made at the end."""
    watch = scheduler.watch(noise or Noise(1, 2), Start(**start))
    now: list[Point] = []
    for turn, entropies in enumerate(own, start.get("turn", 0)):
        if len(entropies) and not (turn == start.get("turn") and start.get("token")):
            now += watch.meet(turn, float(entropies[0]))
        now += watch.see(turn, entropies)
    return now, list(watch.finish())


def predictable(boundary: str) -> list[Any]:
    common: dict[str, Any] = {"boundary": boundary, "nested": True}
    return [
        Flat(),
        Fixed(at=(0.2, 0.5, 0.9), expected=7, **common),
        Fixed(at=(0.3, 0.6), expected=20, unit="token", **common),
        Threshold(threshold=0.6, max_forks=3, spacing=2, **common),
        Random(probability=0.4, max_forks=3, **common),
        EquallySpaced(every=3, unit="token", max_forks=3, **common),
        EquallySpaced(every=2, max_forks=3, **common),
    ]


@pytest.mark.parametrize("boundary", ["turn", "token"])
@pytest.mark.parametrize("seed", range(20))
def test_a_predictable_choice_does_not_depend_on_what_comes_later(boundary: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = episode(rng, int(rng.integers(2, 9)))
    cut = int(rng.integers(len(own)))
    within = int(rng.integers(len(own[cut])))
    tail = rng.random(int(rng.integers(0, 5))).astype(np.float32)
    changed = [*own[:cut], np.concatenate([own[cut][: within + 1], tail]), *episode(rng, int(rng.integers(0, 6)))]
    for scheduler in predictable(boundary):
        assert scheduler.predictable
        (a, none), (b, nothing) = play(scheduler, own), play(scheduler, changed)
        assert none == nothing == []
        upto = (cut, within)
        assert [p for p in a if p[:2] <= upto] == [p for p in b if p[:2] <= upto]
        assert all(p.propensity is not None and 0 < p.propensity <= 1 for p in a + b)


def test_a_look_ahead_choice_does() -> None:
    """The same test as above must be able to fail."""
    short, long = turns([0.5], [0.6], [0.1]), turns([0.5], [0.6], [0.9])
    for scheduler in (TopEntropy(spacing=0), LowestEntropy(spacing=0)):
        assert not scheduler.predictable
        assert play(scheduler, short)[1] != play(scheduler, long)[1]
        assert play(scheduler, long)[1][0].propensity is None
    assert not Uniform().predictable


@pytest.mark.parametrize("boundary", ["turn", "token"])
@pytest.mark.parametrize("cls", [TopEntropy, LowestEntropy, Uniform])
@pytest.mark.parametrize("spacing", [0, 3, 10])
def test_look_ahead_keeps_few_and_keeps_its_distance(cls: Any, boundary: Any, spacing: int) -> None:
    for seed in range(15):
        rng = np.random.default_rng(seed)
        own = episode(rng, 12)
        scheduler = cls(max_forks=3, spacing=spacing, boundary=boundary)
        watch = scheduler.watch(Noise(seed))
        at = np.cumsum([0, *map(len, own)])
        for i, h in enumerate(own):
            assert watch.see(i, h) == ()
            assert len(watch.keeps()) <= 3
            assert max(watch.keeps(), default=0) <= i
        last = watch.keeps()
        points = watch.finish()
        assert 1 <= len(points) <= 3
        assert {p.turn for p in points} <= last
        where = [at[p.turn] + p.token for p in points]
        assert all(b - a >= max(spacing, 1) for a, b in pairwise(where))
        assert (0, 0) not in [p[:2] for p in points]


@pytest.mark.parametrize("seed", range(10))
def test_without_spacing_the_best_are_exactly_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = [np.round(h, 1) for h in episode(rng, 10)]  # rounded: ties
    flat = [(-float(h), t, k) for t, row in enumerate(own) for k, h in enumerate(row) if (t, k) > (0, 0)]
    for m in (1, 3, 200):
        expected = sorted((t, k) for _, t, k in sorted(flat)[:m])
        points = play(TopEntropy(max_forks=m, spacing=0, boundary="token"), own)[1]
        assert [p[:2] for p in points] == expected
        low = sorted((t, k) for _, t, k in sorted((-h, t, k) for h, t, k in flat)[:m])
        assert [p[:2] for p in play(LowestEntropy(max_forks=m, spacing=0, boundary="token"), own)[1]] == low


def test_spacing_prefers_the_higher_of_two_neighbours() -> None:
    own = turns([0.1] * 4, [0.5] * 4, [0.7] * 4, [0.6] * 4, [0.2] * 4)
    points = play(TopEntropy(max_forks=2, spacing=8), own)[1]
    assert [p.turn for p in points] == [2, 4]


def test_entropy_of_a_turn_by_name() -> None:
    own = turns([0.0], [0.9, 0.0, 0.0], [0.5, 0.5, 0.5], [0.1, 0.1, 1.0])
    picks = {
        of: play(TopEntropy(spacing=0, entropy=of), own)[1][0].turn
        for of in ("first_token", "action_mean", "max_token")
    }
    assert picks == {"first_token": 1, "action_mean": 2, "max_token": 3}


def test_fixed_times_in_turns_and_tokens() -> None:
    own = turns([0.0] * 5, [0.0] * 5, [0.0] * 5, [0.0] * 5)
    now, later = play(Fixed(at=(0.25, 0.5), width=(2, 3), expected=4), own)
    assert now == [Point(1, 0, 2, 1.0), Point(2, 0, 3, 1.0)]
    assert later == []
    at = Fixed(at=(0.3, 0.6), unit="token", expected=20)  # 6 and 12 tokens
    assert [p[:2] for p in play(at, own)[0]] == [(2, 0), (3, 0)]
    assert [p[:2] for p in play(at.model_copy(update={"boundary": "token"}), own)[0]] == [(1, 1), (2, 2)]
    together = Fixed(at=(0.3, 0.35), width=(2, 3), unit="token", expected=20)  # 6 and 7: one boundary
    assert play(together, own)[0] == [Point(2, 0, 2, 1.0)]
    assert [p[:2] for p in play(Fixed(at=(0.5, 1.0), expected=6), own)[0]] == [(3, 0)]  # shorter than expected


def test_a_sibling_goes_on_from_its_fork() -> None:
    """Path coordinates: what the parent passed is not forked again; a mid-action start keeps its token numbers."""
    rest = turns([0.0] * 3, [0.0] * 5, [0.0] * 5)  # the parent's turn 1 from token 2 on, then turns 2 and 3
    start = {"depth": 1, "turn": 1, "token": 2, "tokens": 7}
    at = Fixed(at=(0.35, 0.45, 0.7), width=(2, 3, 4), unit="token", expected=20, boundary="token")  # 7, 9, 14
    assert [p[:3] for p in play(at, rest, **start)[0]] == [(1, 4, 3), (2, 4, 4)]
    turn_wise = Fixed(at=(0.25, 0.5, 0.75), expected=4)
    assert [p[:2] for p in play(turn_wise, rest, **start)[0]] == [(2, 0), (3, 0)]
    high = turns([0.9, 0.8, 0.1], [0.1] * 5, [0.7] + [0.1] * 4)
    eager = Threshold(threshold=0.5, max_forks=5, boundary="token", nested=True)
    assert [p[:2] for p in play(eager, high, **start)[0]] == [(1, 3), (3, 0)]
    assert [p[:2] for p in play(eager.model_copy(update={"spacing": 2}), high, **start)[0]] == [(3, 0)]
    best = TopEntropy(max_forks=1, spacing=0, boundary="token", nested=True)
    assert [p[:2] for p in play(best, high, **start)[1]] == [(1, 3)]
    assert [p[:2] for p in play(best.model_copy(update={"spacing": 2}), high, **start)[1]] == [(3, 0)]
    every = EquallySpaced(every=4, unit="token", max_forks=9, boundary="token", nested=True)
    assert [p[:2] for p in play(every, rest, **start)[0]] == [(1, 3), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    "scheduler", [Threshold(threshold=0.0, max_forks=9), Fixed(nested=False), TopEntropy(spacing=0)]
)
def test_siblings_do_not_fork_unless_told(scheduler: Any) -> None:
    own = turns(*[[0.5]] * 12)
    assert sum(map(len, play(scheduler, own))) > 0
    assert play(scheduler, own, depth=1, turn=1, tokens=1) == ([], [])


def test_the_first_token_is_a_candidate_only_when_told() -> None:
    own = turns([0.9], [0.1])
    for scheduler in (Threshold(roots=1, threshold=0.5, start=True), TopEntropy(roots=1, spacing=0, start=True)):
        now, later = play(scheduler, own)
        assert [p[:2] for p in now + later] == [(0, 0)]
        assert (0, 0) not in [p[:2] for part in play(scheduler.model_copy(update={"start": False}), own) for p in part]
    assert [p[:2] for p in play(Fixed(roots=1, at=(0.0, 0.5), expected=2, start=True), own)[0]] == [(0, 0), (1, 0)]


def test_more_forks_than_the_episode_has_places() -> None:
    own = turns([0.5], [0.5], [0.5])
    assert len(play(TopEntropy(max_forks=50, spacing=0), own)[1]) == 2
    assert len(play(Threshold(threshold=0.1, max_forks=50), own)[0]) == 2
    assert play(TopEntropy(max_forks=2), turns([0.5]))[1] == []
    assert play(TopEntropy(max_forks=2), [])[1] == []


def test_coins_are_keyed_and_fair() -> None:
    scheduler = Random(probability=0.25, max_forks=10_000)
    own = turns(*[[0.5]] * 2001)
    a = play(scheduler, own, Noise(1, 5))[0]
    assert a == play(scheduler, own, Noise(9, 5))[0]  # the world's luck plays no part
    assert a != play(scheduler, own, Noise(1, 6))[0]
    assert a != play(scheduler, own, Noise(1, 5).child("other"))[0]
    assert abs(len(a) - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)
    assert {p.propensity for p in a} == {0.25}


def test_uniform_is_uniform() -> None:
    own = turns(*[[0.5]] * 6)
    counts = np.zeros(6)
    for i in range(1000):
        for p in play(Uniform(max_forks=2, spacing=0), own, Noise(0, i))[1]:
            counts[p.turn] += 1
    assert counts[0] == 0
    assert np.all(np.abs(counts[1:] - 400) < 5 * np.sqrt(1000 * 0.4 * 0.6))


def finished(own: Episode, fork: Fork | None, i: int, failed: bool = False) -> Branch:
    made = [Turn(np.zeros(0, np.int32), np.zeros(len(h), np.int32), h, h, h) for h in own]
    failure = Failure("environment", "gone") if failed else None
    return Branch(i, fork, tuple(made), "failed" if failed else "done", failure)


def batch() -> list[RolloutTree]:
    first = turns([0.1, 0.2], [0.3, 0.4], [0.5, 0.6])
    return [
        RolloutTree(
            Task("t", "r"),
            (
                finished(first, None, 0),
                finished(turns([0.1, 9.0]), Fork(0, 0, 0, 1.0), 1),
                finished(turns([0.3, 0.9], [0.7]), Fork(0, 1, 0, 1.0), 2),
                finished(turns([8.0], [8.0], [8.0]), Fork(0, 0, 0, 1.0), 3, failed=True),
            ),
        )
    ]


def test_the_threshold_lags() -> None:
    scheduler = Threshold(quantile=0.5, max_forks=4)
    assert play(scheduler, turns([9.0], [9.0]))[0] == []  # nothing seen yet, nothing to compare with
    after = scheduler.update(batch())
    assert after.threshold == pytest.approx(np.median([0.1, 0.3, 0.5, 0.7]))  # repeated first tokens count once
    assert scheduler.threshold is None
    tokens = Threshold(quantile=1.0, boundary="token").update(batch())
    assert tokens.threshold == pytest.approx(9.0)
    assert after.update([]) == after
    fixed = Threshold(threshold=0.3, quantile=None)
    assert fixed.update(batch()) == fixed


def test_the_expected_length_lags() -> None:
    assert Fixed(expected=50).update(batch()).expected == 2.0  # root rollouts of 3 turns and 1; the failed one is out
    assert Fixed(expected=50, unit="token").update(batch()).expected == 4.0
    assert Fixed(expected=50, adapt=False).update(batch()).expected == 50
    assert Fixed(expected=50).update([]).expected == 50
    assert Flat().update(batch()) == Flat()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"kind": "top_entropy", "width": 1}, "use kind: flat"),
        ({"kind": "fixed", "at": [0.5], "width": 1, "expected": 4}, "use kind: flat"),
        ({"kind": "fixed", "at": [0.5, 0.5]}, "must increase"),
        ({"kind": "fixed", "at": [0.3, 0.5], "width": [2]}, "1 widths for 2 positions"),
        ({"kind": "fixed", "at": [0.0]}, "root group"),
        ({"kind": "fixed", "at": []}, "at"),
        ({"kind": "threshold", "quantile": None}, "give a number of nats"),
        ({"kind": "threshold", "entropy": "action_mean"}, "entropy"),
        ({"kind": "threshold", "start": True}, "roots = 1"),
        ({"kind": "top_entropy", "max_forks": 0}, "max_forks"),
        ({"kind": "top_entropy", "boundary": "token", "entropy": "max_token"}, "entropy"),
        ({"kind": "random", "probability": 0.0}, "probability"),
        ({"kind": "flat", "roots": 0}, "roots"),
        ({"kind": "flat", "width": 2}, "width"),
    ],
)
def test_wrong_options_are_named(raw: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ADAPTER.validate_python(raw)


def test_a_scheduler_is_its_own_configuration() -> None:
    for scheduler in [*predictable("token"), TopEntropy(), LowestEntropy(), Uniform(), Threshold().update(batch())]:
        assert ADAPTER.validate_json(ADAPTER.dump_json(scheduler)) == scheduler
