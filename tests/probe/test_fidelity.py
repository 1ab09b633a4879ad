"""The fidelity probe: its statistics against exact enumeration, and worlds that keep and break the contract."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import fidelity_kit as kit
import numpy as np
import pytest

from branchpoint.noise import Noise
from branchpoint.probe.fidelity import (
    Fidelity,
    Finding,
    Siblings,
    backbone_test,
    cross_talk,
    cross_talk_test,
    gamma,
    session_test,
)
from branchpoint.probe.restore import Played, Question, mismatch
from branchpoint.probe.trace import ProbeError
from branchpoint.testing import FakePolicy
from branchpoint.tree import Array
from branchpoint.world import Step, Task

SESSIONS = np.array([0, 0, 1, 1])
RUNS = 200


def leaking() -> Iterator[tuple[float, Array]]:
    """Two states h, a hidden variable z of each session that moves the reward, and an action worth 1/2: every outcome
    of two siblings in each of two sessions, with its probability."""
    base, delta = (0.2, 0.7), (0.4, 0.1)
    for h, z in itertools.product(range(2), itertools.product(range(2), repeat=2)):
        p = (0.6, 0.4)[h] * np.prod([0.3 if one else 0.7 for one in z]) / 16
        for a in itertools.product(range(2), repeat=4):
            yield float(p), np.array([base[h] + delta[h] * z[s] + 0.5 * a[i] for i, s in enumerate(SESSIONS)])


def test_gamma_is_exactly_unbiased_where_the_session_variance_is_not() -> None:
    found = within = 0.0
    for p, returns in leaking():
        found += p * gamma(Siblings(returns, np.zeros((4, 1)), SESSIONS))[0]
        within += p * np.mean([np.var(returns[s == SESSIONS], ddof=1) for s in range(2)])
    assert found == pytest.approx(0.021, abs=1e-12)
    assert within == pytest.approx(0.0835 - 0.021, abs=1e-12), "the leak makes siblings look better than they are"


@pytest.mark.parametrize(("effect", "leak", "expected"), [(0.3, 0.0, -0.075), (0.0, 0.7, 0.0)])
def test_cross_talk_is_exactly_unbiased(effect: float, leak: float, expected: float) -> None:
    """Sibling 1's action lowers the return of sibling 2: seen, and in its direction. A shared leak is no cross-talk."""
    total = np.zeros((2, 1))
    for a in itertools.product((0, 1), repeat=4):
        for z in itertools.product((0, 1), repeat=2):
            returns = np.array([a[i] - effect * a[i - 1] * (i % 2) + leak * z[SESSIONS[i]] for i in range(4)])
            total += cross_talk(Siblings(returns, np.array(a)[:, None] - 0.5, SESSIONS))[0] / 64
    assert total[:, 0] == pytest.approx([expected, 0.0], abs=1e-12)


def test_the_statistics_agree_with_sums_over_pairs() -> None:
    rng = np.random.default_rng(0)
    session = np.array([0, 0, 0, 1, 1, 2])
    siblings = Siblings(rng.normal(size=6), rng.normal(size=(6, 3)), session)
    order = siblings.shuffled(5, Noise(1))
    for k in range(5):
        r, s = siblings.returns[order[k]], siblings.scores[order[k]]
        pairs = list(itertools.permutations(range(6), 2))
        same = [(i, j) for i, j in pairs if session[i] == session[j]]
        apart = [(i, j) for i, j in pairs if session[i] != session[j]]
        expected = np.mean([r[i] * r[j] for i, j in same]) - np.mean([r[i] * r[j] for i, j in apart])
        assert gamma(siblings, order)[k] == pytest.approx(expected)
        across = np.mean([s[i] * r[j] for i, j in apart], axis=0)
        ahead = np.mean([s[i] * r[j] for i, j in same if i < j], axis=0) - across
        behind = np.mean([s[i] * r[j] for i, j in same if i > j], axis=0) - across
        np.testing.assert_allclose(cross_talk(siblings, order)[k], [ahead, behind], atol=1e-12)


def test_p_values_are_level_and_see_what_is_there() -> None:
    """Under the null they are at most uniform; a shift of the session, of the backbone, or by a sibling's action gives
    small ones."""
    rng = np.random.default_rng(1)
    low = Counter[str]()
    for k in range(120):
        noise = Noise(k)
        null = [Siblings(rng.normal(size=6), rng.normal(size=(6, 2)), np.repeat([0, 1], 3)) for _ in range(5)]
        low["sessions"] += session_test(null, 99, noise).p <= 0.1
        low["talk"] += cross_talk_test(null, 99, noise).p <= 0.1
        low["backbone"] += backbone_test([(rng.normal(), rng.normal(size=3)) for _ in range(5)], 99, noise).p <= 0.1
    assert all(2 <= n <= 24 for n in low.values()), low
    shifted, talked = [], []
    for _ in range(12):
        r, s = rng.normal(size=8), rng.normal(size=(8, 2))
        session = np.repeat([0, 1], 4)
        shifted.append(Siblings(r + 2 * session, s, session))
        others = np.array([s[(session == session[i]) & (np.arange(8) != i), 0].mean() for i in range(8)])
        talked.append(Siblings(r + 3 * others, s, session))
    assert session_test(shifted, 199, Noise(2)).p == 0.005
    assert cross_talk_test(talked, 199, Noise(3)).p == 0.005
    assert backbone_test([(rng.normal() + 2, rng.normal(size=4)) for _ in range(12)], 199, Noise(4)).p <= 0.01


def test_holm() -> None:
    def found(*p: float) -> tuple[str, ...]:
        return Fidelity({str(i): Finding(0.0, x) for i, x in enumerate(p)}, 1, (), 0.0, 1, 2, 0, 0.05).caught

    assert found(0.02, 0.02, 0.02) == ()
    assert found(0.01, 0.5, 0.024) == ("0", "2")
    assert found(0.01, 0.2, 0.3) == ("0",)


@pytest.mark.parametrize("world", kit.FAITHFUL, ids=lambda w: w.__name__)
def test_faithful_worlds_pass(world: type) -> None:
    found = kit.ask(world, seed=3, prompts=3, siblings=3)
    assert found.caught == ()
    assert found.replays == 3 * 2 * (1 + 3)
    assert (found.snapshots, found.siblings, found.failed) == (6, 36, 0)
    assert (found.luck > 0) == (world is not kit.Sure)


@pytest.mark.parametrize("fault", kit.FAULTY)
def test_unfaithful_worlds_are_caught(fault: str) -> None:
    found = kit.ask(kit.FAULTY[fault], seed=3, prompts=3, siblings=3)
    assert "replay" in found.caught
    assert any("turn" in d and "reward" in d for d in found.differences)


def test_a_leaked_random_state_shows_in_the_returns_too() -> None:
    found = kit.ask(kit.Leaked, seed=1, prompts=6, permutations=499)
    assert "sessions" in found.caught
    assert found.tests["sessions"].estimate > 0.05
    assert found.luck == 0.0, "the luck that a branch is given makes no difference"


def test_what_a_living_sibling_takes_is_cross_talk() -> None:
    found = kit.ask(kit.Stolen, seed=2, prompts=12, siblings=3)
    assert "cross-talk" in found.caught


class Broken(kit.Faithful):
    def step(self, action: str) -> Step:
        raise RuntimeError("no service")


class Fixed(kit.Sure):
    def reward(self, action: str, turn: int) -> float:
        return 1.0


class Frozen(kit.Faithful):
    """Cannot be copied by any means."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.lock = (x for x in ())


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ProbeError, match=r"an episode to fork from failed: environment: .*no service"):
        kit.ask(Broken, 0, prompts=1)
    with pytest.raises(ProbeError, match=r"no snapshot could be restored in two sessions: .*cannot be copied"):
        kit.ask(Frozen, 0, prompts=1)
    assert "all siblings of a snapshot scored alike" in kit.ask(Fixed, 0, prompts=1).remarks[0]
    with pytest.raises(ProbeError, match="fewer than 2 sessions"):
        Siblings(np.zeros(3), np.zeros((3, 1)), np.zeros(3, np.int64))
    with pytest.raises(ProbeError, match="siblings: a session needs at least 2"):
        Question(FakePolicy(), kit.InProcess, [], siblings=1)
    with pytest.raises(ProbeError, match="at least one task"):
        Question(FakePolicy(), kit.InProcess, [])


def test_differences_are_described() -> None:
    def played(*answers: Step) -> Played:
        return Played(None, Noise(), Step("start"), ["go"] * len(answers), list(answers))  # type: ignore[arg-type]

    one = played(Step("a"), Step("b", 1.0))
    assert mismatch(one, played(Step("a", info={"seen": 1}), Step("b", 1.0))) == ""
    assert mismatch(one, played(Step("a"), Step("b", 0.5))) == "reward after action 2 ('go') was 1.0, then 0.5"
    assert mismatch(one, played(Step("a"))) == "the episode took 2 turns, then 1"
    assert mismatch(one, played(Step("a"), Step("c")), turns=1) == ""


@pytest.mark.slow
@pytest.mark.parametrize("world", [*kit.FAITHFUL, *kit.FAULTY.values()], ids=lambda w: w.__name__)
def test_error_rates(world: type) -> None:
    """Over 200 runs, small ones: at most one in twenty false alarms (and three standard errors), every fault found."""
    caught: Counter[str] = Counter()
    for seed in range(RUNS):
        found = kit.ask(world, seed, prompts=2, siblings=3, permutations=99)
        caught.update({*found.caught, *(["any"] if found.caught else [])})
    print(f"\n{world.__name__}: {dict(caught)} of {RUNS}", flush=True)
    if world in kit.FAITHFUL:
        assert caught["any"] <= RUNS * (0.05 + 3 * np.sqrt(0.05 * 0.95 / RUNS))
        assert caught["replay"] == 0
    else:
        assert caught["any"] >= 0.99 * RUNS
