"""Event-keyed randomness: equal events meet equal fates when paired, independent ones when not; equal marginals."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from branchpoint.noise import Noise, digest


def test_equal_keys_give_equal_draws_and_order_does_not_matter() -> None:
    events = [("pay", "O1", i) for i in range(20)]
    forward = {e: Noise(7).at(*e).random() for e in events}
    backward = {e: Noise(7).at(*e).random() for e in reversed(events)}
    assert forward == backward
    assert len(set(forward.values())) == 20


@pytest.mark.parametrize(("a", "b"), [(("a", "b"), ("ab",)), ((1,), ("1",)), (("a", None), ("a",)), ((b"x",), ("x",))])
def test_different_keys_never_collide_by_spelling(a: tuple, b: tuple) -> None:
    assert digest(0, *a) != digest(0, *b)


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from branchpoint.noise import digest; print(digest(3, 'tool', 5, None))"
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONHASHSEED": seed}
        )
        assert int(run.stdout) == digest(3, "tool", 5, None)


def test_numpy_integers_are_integers_and_floats_are_refused() -> None:
    assert digest(0, np.int64(4)) == digest(0, 4)
    with pytest.raises(TypeError, match="float"):
        digest(0, 0.5)  # type: ignore[arg-type]


def test_paired_branches_share_luck_but_nothing_private() -> None:
    task = Noise(5, 5)
    a, b = task.branch("paired", 0), task.branch("paired", 1)
    assert a.at("x").random() == b.at("x").random()
    assert a.private("x").random() != b.private("x").random()


def test_independent_branches_share_nothing() -> None:
    task = Noise(5, 5)
    a, b = task.branch("independent", 0), task.branch("independent", 1)
    assert a.at("x").random() != b.at("x").random()
    assert a.private("x").random() != b.private("x").random()


def test_the_clean_arm_has_no_chance_events() -> None:
    noise = Noise(1).branch("clean", 3)
    assert not any(noise.happens(1.0, "event", i) for i in range(100))


@pytest.mark.parametrize("keys", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_marginals_are_equal_in_both_arms(keys: int) -> None:
    """Chi-square over many keys in each arm: ten equal bins, 9 degrees of freedom, 99.9 % quantile 27.88."""
    for arm in ("paired", "independent"):
        draws = [Noise(1, i).branch(arm, i % 7).at("tool", i).random() for i in range(keys)]
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert ((counts - keys / 10) ** 2 / (keys / 10)).sum() < 27.88


def test_independent_arm_decorrelates_and_paired_arm_correlates_fully() -> None:
    fates = {
        arm: np.array([[Noise(s).branch(arm, b).happens(0.3, "e") for b in range(2)] for s in range(4000)], float)
        for arm in ("paired", "independent")
    }
    assert (fates["paired"][:, 0] == fates["paired"][:, 1]).all()
    assert abs(np.corrcoef(fates["independent"].T)[0, 1]) < 4 / np.sqrt(4000)
    for arm, column in itertools.product(fates, (0, 1)):
        assert abs(fates[arm][:, column].mean() - 0.3) < 4 * np.sqrt(0.21 / 4000)
