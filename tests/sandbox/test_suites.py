"""The shipped suites: what is right passes, and each fault they exist for is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sandbox_help import run

from branchpoint.noise import Noise
from branchpoint.sandbox.forkserver import ForkServer
from branchpoint.sandbox.inprocess import InProcess, LocalEnv
from branchpoint.sandbox.replay import Replay
from branchpoint.testing import (
    CoinWorld,
    CounterWorld,
    FakePolicy,
    ProbeWorld,
    Report,
    Result,
    check_env,
    check_policy,
    check_sandbox,
)
from branchpoint.testing.fakes import FakeSession
from branchpoint.world import Sandbox, Step, Task

TASK = Task("t", "tests", seed=3)
FACTORIES: dict[str, Callable[[], Sandbox]] = {
    "forkserver": lambda: ForkServer(step_timeout_s=30.0),
    "forkserver-huge-pages": lambda: ForkServer(step_timeout_s=30.0, huge_pages=True),
    "auto": InProcess,
    "deepcopy": lambda: InProcess("deepcopy"),
    "pickle": lambda: InProcess("pickle"),
    "replay": Replay,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_every_sandbox_passes(name: str) -> None:
    async def test() -> None:
        report = await check_sandbox(FACTORIES[name])
        report.assert_ok()
        skipped = {r.name for r in report.results if r.status == "skipped"}
        assert ("outlives a process that ends" in skipped) == ("forkserver" not in name)
        assert ("keeps generators" in skipped) == (name in ("auto", "deepcopy", "pickle"))

    run(test, 120)


@pytest.mark.parametrize("world", [CounterWorld, CoinWorld, ProbeWorld])
def test_shipped_worlds_pass(world: Any) -> None:
    outside = random.getstate()
    check_env(world, TASK).assert_ok()
    assert random.getstate() == outside
    check_env(
        f"branchpoint.testing.fakes:{world.__name__}", TASK, actions=("up", "coin0", "random", "numpy")
    ).assert_ok()


@pytest.mark.parametrize("restrict", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shipped_policy_passes(restrict: bool, temperature: float) -> None:
    async def test() -> None:
        policy = FakePolicy(restrict=restrict, temperature=temperature)
        (await check_policy(policy, tolerance=0.0)).assert_ok()

    run(test)


def failed(report: Report) -> set[str]:
    assert not report.ok
    with pytest.raises(AssertionError, match="failed"):
        report.assert_ok()
    return {r.name for r in report.results if r.status == "failed"}


_CLOCK = itertools.count()


class _Clocked(CounterWorld):
    def step(self, action: str) -> Step:
        return Step(f"{super().step(action).observation} at {next(_CLOCK)}")


class _Strict(CounterWorld):
    def step(self, action: str) -> Step:
        return super().step({"up": "up", "down": "down", "stop": "stop"}[action])


class _Echo(CounterWorld):
    def step(self, action: str) -> Step:
        return Step(f"you said {action}")


class _Over(CounterWorld):
    def reset(self) -> Step:
        return Step("over", done=True)


class _Paid(CounterWorld):
    def reset(self) -> Step:
        return Step("paid", 1.0)


class _Infinite(CounterWorld):
    def step(self, action: str) -> Step:
        return Step("x", float("inf"))


class _BadInfo(CounterWorld):
    def step(self, action: str) -> Step:
        return Step("x", info={"a": {1, 2}})


class _Forgets(CounterWorld):
    def get_state(self) -> tuple[int, int]:
        return 0, 0


class _Dict(CounterWorld):
    def step(self, action: str) -> Any:
        return {"observation": "x"}


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (_Clocked, {"equal luck, equal episode", "own snapshot goes on alike"}),
        (_Strict, {f"takes {a}" for a in ("''", "'   '", "'no such acti'", "'null'", '\'{"cmd": "ls\'')}),
        (_Echo, {"takes 'aaaaaaaaaaaa' (100000 characters)"}),
        (_Over, {"builds, resets and closes"}),
        (_Paid, {"builds, resets and closes"}),
        (_Infinite, {"steps have the right types"}),
        (_BadInfo, {"steps have the right types"}),
        (_Forgets, {"own snapshot goes on alike"}),
        (_Dict, {"steps have the right types", "takes ''"}),
    ],
)
def test_check_env_finds_what_is_wrong(world: Any, names: set[str]) -> None:
    actions = ("up", "down", "up", "up", "down", "up", "up", "up", "up", "up")
    report = check_env(world, TASK, actions=actions, steps=8)
    assert names <= failed(report), str(report)


def test_declared_nondeterminism_is_accepted() -> None:
    class Declared(_Clocked):
        deterministic = False

    report = check_env(Declared, TASK)
    found = {r.name: r.status for r in report.results}
    assert found["equal luck, equal episode"] == "skipped"


class _Shallow(InProcess):
    """Copies the object but not what it holds."""

    def copier(self, world: Any, fresh: Any) -> Any:
        import copy

        frozen = copy.copy(world)
        return lambda: copy.copy(frozen)


class _Same(InProcess):
    """Hands out the frozen object itself."""

    def copier(self, world: Any, fresh: Any) -> Any:
        import copy

        frozen = copy.deepcopy(world)
        return lambda: frozen


class _Deaf(InProcess):
    """Forgets to give a restored world its luck."""

    def open(self, make: Any, task: Task, noise: Noise) -> LocalEnv:
        return super().open(_deaf(make), task, noise)


def _deaf(make: Any) -> Any:
    def built(task: Task) -> Any:
        world = make(task)
        world.reseed = lambda noise: None
        return world

    return built


class _Leaky(InProcess):
    """Seeds the trainer's own generators."""

    def open(self, make: Any, task: Task, noise: Noise) -> LocalEnv:
        random.seed(noise.own)
        return super().open(make, task, noise)


class _Boastful(InProcess):
    preserves = frozenset({"closures"})


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        (_Shallow, {"siblings are independent", "the parent goes on unchanged", "restores any number of times"}),
        (_Same, {"siblings are independent", "restores any number of times"}),
        (lambda: _Deaf("deepcopy"), {"paired siblings meet one fate, independent ones their own"}),
        (_Leaky, {"the trainer's own random state is untouched"}),
        (_Boastful, {"keeps closures"}),
    ],
)
def test_check_sandbox_finds_what_is_wrong(factory: Callable[[], Sandbox], names: set[str]) -> None:
    async def test() -> None:
        state = random.getstate()
        try:
            report = await check_sandbox(factory)
        finally:
            random.setstate(state)
        assert names <= failed(report), str(report)

    run(test)


class _Session(FakeSession):
    fault = ""

    def fork(self, length: int) -> FakeSession:
        fault = self.fault
        return type(self)(self.policy, self.tokens if fault == "shared" else self.tokens[: length - (fault == "short")])

    async def act(self, observation: Any, step: Step, noise: Noise, max_tokens: int, *more: Any) -> Any:
        from dataclasses import replace

        if self.fault == "unkeyed":
            noise = Noise(0, next(self.policy.draws))  # type: ignore[attr-defined]
        if self.fault == "keyless":
            noise = Noise()
        if self.fault == "prefix":
            prefix = None
        if self.fault == "limit":
            max_tokens += 1
        action = await super().act(observation, step, noise, max_tokens, prefix)
        if self.fault == "positive":
            action = replace(action, logprobs=-action.logprobs)
        if self.fault == "nan":
            action = replace(action, entropies=action.entropies * np.nan)
        if self.fault == "uneven":
            action = replace(action, entropies=np.zeros(len(action.tokens) + 1, np.float32))
        return action


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("shared", {"a forked session leaves its parent alone"}),
        ("short", {"a fork between turns equals a recomputed context"}),
        ("unkeyed", {"equal keys give equal tokens"}),
        ("keyless", {"different keys give different tokens"}),
        ("limit", {"the token limit cuts and is told"}),
        ("positive", {"log-probabilities and entropies are possible"}),
        ("nan", {"log-probabilities and entropies are possible"}),
        ("uneven", {"lengths agree"}),
    ],
)
def test_check_policy_finds_what_is_wrong(fault: str, names: set[str]) -> None:
    class Policy(FakePolicy):
        draws = itertools.count()  # of the policy that follows no key: the same in every run of the tests

        def open(self) -> FakeSession:
            session = _Session(self, [])
            session.fault = fault
            return session

    async def test() -> None:
        _Session.fault = fault
        try:
            report = await check_policy(Policy(order=20))
        finally:
            _Session.fault = ""
        assert names <= failed(report), str(report)

    run(test)


def test_fake_policy_probabilities_are_exact() -> None:
    """Every action of a tiny policy: its log-probability by hand, and its frequency over many keys."""
    policy = FakePolicy(("a", "b"), seed=1, order=2)
    step = Step("a b a")
    observation = policy.observe(TASK, step, True)
    assert observation.tolist() == [1, 2, 1]

    def probability(tokens: tuple[int, ...]) -> float:
        context, total = observation.tolist(), 1.0
        for token in tokens:
            p = np.exp(policy.logits(context))
            total *= p[token] / p.sum()
            context = [*context, token]
        return total

    async def test() -> None:
        counts: dict[tuple[int, ...], int] = {}
        for key in range(4000):
            action = await policy.open().act(observation, step, Noise(0, key), 2)
            tokens = tuple(action.tokens.tolist())
            counts[tokens] = counts.get(tokens, 0) + 1
            assert action.logprobs.sum() == pytest.approx(np.log(probability(tokens)), abs=1e-6)
            assert action.stopped == (tokens[-1] == 0)
        actions = [(0,), *((x, y) for x in (1, 2) for y in (0, 1, 2))]
        assert sum(map(probability, actions)) == pytest.approx(1.0, abs=1e-12)
        for each in actions:
            p = probability(each)
            assert abs(counts.get(each, 0) / 4000 - p) < 4.5 * np.sqrt(p * (1 - p) / 4000)

    run(test)


def test_fake_policy_restricted() -> None:
    """A restricted policy says only what is listed; a choice with one way on has probability 1."""
    policy = FakePolicy(("go", "up", "down", "stay"), restrict=True)
    step = Step("x", actions=("go up", "go down", "stay"))

    async def test() -> None:
        seen = set()
        for key in range(60):
            action = await policy.open().act(policy.observe(TASK, step, True), step, Noise(0, key), 8)
            assert action.stopped
            assert action.text in step.actions
            seen.add(action.text)
            assert action.allowed is not None
            for ids, logprob in zip(action.allowed, action.logprobs, strict=True):
                assert ids is not None
                assert len(ids) > 1 or logprob == 0.0
        assert seen == set(step.actions)

    run(test)


def test_report_is_readable() -> None:
    report = Report("thing", (Result("a", "ok"), Result("bb", "failed", "why"), Result("c", "skipped", "not declared")))
    lines = str(report).splitlines()
    assert lines[0] == "thing: 1 ok, 1 failed, 1 skipped"
    assert lines[2] == " failed  bb  why"
    assert not report.ok
    assert Report("thing", (Result("c", "skipped"),)).ok
