"""Growing trees: shapes, contexts, keys, failures; with a policy whose probabilities are known exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from branchpoint.advantage import Rloo, Tree
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.rollout import Grower, Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import Fixed, Flat, Threshold, TopEntropy
from branchpoint.store import dump_tree, load_tree
from branchpoint.testing.fakes import CoinWorld, CounterWorld, FakePolicy, FakeSession
from branchpoint.tree import RolloutTree, Segments
from branchpoint.world import GraderFailure, PolicyFailure, SandboxFailure, SnapshotUnsupported, Step, Task, UserError

TASK = Task("count", "counter", seed=5, metadata={"target": 3, "limit": 8})


def grow(
    scheduler: Any,
    make: Callable[[Task], Any] = CounterWorld,
    task: Task = TASK,
    *,
    sandbox: Any = None,
    seed: int = 0,
    arm: Any = "independent",
    restrict: bool = True,
    order: int = 3,
    **limits: Any,
) -> tuple[RolloutTree, Ledger]:
    ledger = Ledger()
    policy = FakePolicy(restrict=restrict, seed=1, order=order)
    grower = Grower(policy, sandbox or InProcess(), scheduler, Limits(**limits), arm, ledger)
    return asyncio.run(grower.grow(make, task, Noise(seed, seed))), ledger


SCHEDULERS = [
    Flat(roots=5),
    Fixed(roots=3, width=3, at=(0.5,), expected=6),
    Fixed(roots=2, width=2, at=(0.25, 0.5), expected=6, nested=True),
    Threshold(roots=2, width=2, max_forks=2, threshold=0.5, boundary="token"),
    TopEntropy(roots=2, width=3, max_forks=2, spacing=2),
    TopEntropy(roots=1, width=3, max_forks=3, spacing=1, boundary="token"),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: f"{s.kind}-{s.roots}")
@pytest.mark.parametrize("seed", range(5))
def test_every_recorded_number_is_what_the_policy_says_of_that_context(scheduler: Any, seed: int) -> None:
    """The whole context of every path is scored again by hand, with a policy that looks far back."""
    policy = FakePolicy(restrict=False, seed=1, order=50)
    tree, _ = grow(scheduler, seed=seed, restrict=False, order=50, action_tokens=4, turns=8)
    s = Segments.of(tree)
    assert s.leaf.sum() == len(tree.scored) == len(tree.branches)
    for leaf in np.flatnonzero(s.leaf):
        chain, at = [], int(leaf)
        while at >= 0:
            chain.insert(0, at)
            at = int(s.parent[at])
        index = np.concatenate([np.arange(s.start[e], s.start[e + 1]) for e in chain])
        tokens = [int(t) for t in s.tokens[index]]
        for i, n in enumerate(index):
            if s.sampled[n]:
                logits = policy.logits(tokens[:i])
                logp = logits - np.log(np.exp(logits).sum())
                assert s.logprobs[n] == np.float32(logp[tokens[i]])
                assert s.entropies[n] == pytest.approx(-(np.exp(logp) * logp).sum(), abs=1e-6)


def test_the_shape_of_fixed_designs() -> None:
    tree, ledger = grow(Fixed(roots=3, width=4, at=(0.5,), expected=4, nested=False), turns=6, seed=2)
    kappa = Segments.of(tree).kappa
    assert kappa[0] == 3
    assert set(kappa[1:]) <= {0, 1, 4}
    long = [b for b in tree.branches if b.first_turn == 0 and len(b.turns) > 2]
    assert (kappa == 4).sum() == len(long) > 0
    assert ledger.returns == len(tree.branches)
    assert ledger.restores == len(tree.branches) - 1
    assert ledger.snapshots == 1 + len(long)
    assert ledger.env_steps == sum(len(b.turns) for b in tree.branches)
    assert ledger.generated_tokens == sum(len(t.action) for b in tree.branches for t in b.turns)


def test_the_world_of_a_sibling_is_the_world_at_the_fork() -> None:
    tree, _ = grow(Fixed(roots=2, width=3, at=(0.5,), expected=4), turns=8, seed=4)
    for b in tree.branches:
        chain, at = [b], b
        while at.fork is not None:
            at = tree.branches[at.fork.branch]
            chain.insert(0, at)
        count = 0
        for i, part in enumerate(chain):
            until = chain[i + 1].fork.turn if i + 1 < len(chain) else 10**9  # type: ignore[union-attr]
            for k, t in enumerate(part.turns):
                if part.first_turn + k < until:
                    count += {"up": 1, "down": -1}.get(t.text, 0)
                    assert t.info.get("count", count) == count


def test_equal_seeds_give_equal_trees_whatever_the_timing() -> None:
    """Environments that answer late, in different orders, change nothing; different seeds change everything."""

    class Slow(InProcess):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.random = np.random.default_rng(seed)

        async def open(self, make: Any, task: Task, noise: Noise) -> Any:
            return _Late(await _of(super().open(make, task, noise)), self.random)

    for scheduler in SCHEDULERS:
        trees = {dump_tree(grow(scheduler, sandbox=Slow(i), seed=7)[0]) for i in range(3)}
        trees.add(dump_tree(grow(scheduler, seed=7)[0]))
        assert len(trees) == 1
        assert dump_tree(grow(scheduler, seed=8)[0]) not in trees


async def _of(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


class _Late:
    """An environment or snapshot that answers after a random while."""

    def __init__(self, inner: Any, random: np.random.Generator) -> None:
        self.inner, self.random = inner, random
        self.supports_snapshot = True

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def late(*args: Any) -> Any:
            await asyncio.sleep(float(self.random.random()) * 0.002)
            result = await _of(method(*args))
            return _Late(result, self.random) if name in ("snapshot", "restore") else result

        return late


def test_siblings_differ_and_share_luck_only_when_paired() -> None:
    task = Task("coins", "coin", seed=1, metadata={"coins": 1, "flips": 6})
    for arm, expected in (("paired", 1), ("independent", 2)):
        lucks = set()
        for seed in range(6):
            tree, _ = grow(Flat(roots=6), CoinWorld, task, seed=seed, arm=arm)
            by_seed = {tuple(t.reward for t in b.turns) for b in tree.branches}
            lucks.add(min(len(by_seed), 2))
        assert max(lucks) == expected
    tree, _ = grow(Flat(roots=8))
    assert len({tuple(t.text for t in b.turns) for b in tree.branches}) > 1


def test_a_lookahead_scheduler_keeps_few_snapshots_and_frees_all() -> None:
    class Counting(InProcess):
        live = most = 0

        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            return _Counted(super().open(make, task, noise), self)

    sandbox = Counting()
    tree, ledger = grow(TopEntropy(roots=1, width=2, max_forks=2, spacing=1), sandbox=sandbox, turns=8, seed=3)
    assert sum(b.fork is not None for b in tree.branches) == 2
    assert ledger.snapshots > 2
    assert Counting.most <= 3, "two candidates and the one that may replace one of them"
    assert Counting.live == 0


class _Counted:
    def __init__(self, inner: Any, counter: Any) -> None:
        self.inner, self.counter, self.supports_snapshot = inner, counter, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def snapshot(self) -> Any:
        kind = type(self.counter)
        kind.live += 1
        kind.most = max(kind.most, kind.live)
        return _CountedSnapshot(self.inner.snapshot(), self.counter)


class _CountedSnapshot:
    def __init__(self, inner: Any, counter: Any) -> None:
        self.inner, self.counter = inner, counter

    def restore(self, noise: Noise) -> Any:
        return _Counted(self.inner.restore(noise), self.counter)

    def discard(self) -> None:
        type(self.counter).live -= 1
        self.inner.discard()


FAULTS = [TimeoutError("late"), SandboxFailure("worker 4 killed"), ValueError("bug"), GraderFailure("reward is nan")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: type(f).__name__)
def test_one_failed_sibling_costs_nothing_but_itself(fault: Exception) -> None:
    """KNOWN FAULTS 18 and 2: rewards 1, 0, failed, 0.5 give leave-one-out 0.75, -0.75, -, 0; the failure is no zero."""

    class Faulty:
        """Ends at once, with the reward of its branch."""

        def __init__(self, task: Task) -> None:
            self.noise = Noise()

        def reseed(self, noise: Noise) -> None:
            self.noise = noise

        def reset(self) -> Step:
            return Step("go", actions=("up", "down", "stop"))

        def step(self, action: str) -> Step:
            reward = rewards[self.noise.own]
            if reward is None:
                raise fault
            return Step("end", reward, done=True)

        def get_state(self) -> int:
            return 0

        def set_state(self, state: int) -> None: ...

        def close(self) -> None: ...

    task_noise = Noise(0, 0)
    keys = [(), (0, 0, 0), (0, 0, 1), (0, 0, 2)]
    rewards = dict(zip((task_noise.branch("independent", *k).own for k in keys), [1.0, 0.0, None, 0.5], strict=True))
    tree, ledger = grow(Flat(roots=4), Faulty, retries=1)
    assert [b.stop for b in tree.branches] == ["done", "done", "failed", "done"]
    failure = tree.branches[2].failure
    assert failure is not None
    kinds = {TimeoutError: "environment", SandboxFailure: "sandbox", ValueError: "environment", GraderFailure: "grader"}
    assert failure.kind == kinds[type(fault)]
    assert ledger.retried_branches == (failure.kind == "sandbox")
    assert ledger.discarded_branches == 1
    s = Segments.of(tree)
    credit = Rloo().credit(s)
    signed = (credit.up + credit.down)[s.sampled]
    share = credit.share[s.sampled]
    by_branch = {int(b): signed[i] / share[i] for i, b in enumerate(np.repeat(s.branch, np.diff(s.start))[s.sampled])}
    assert by_branch == pytest.approx({0: 0.75, 1: -0.75, 3: 0.0}, abs=1e-12)


def test_everything_failing_is_a_tree_without_a_score() -> None:
    def broken(task: Task) -> Any:
        raise RuntimeError("no such game")

    tree, _ = grow(Flat(roots=4), broken)
    assert [b.stop for b in tree.branches] == ["failed"]
    assert "no such game" in tree.branches[0].failure.message  # type: ignore[union-attr]
    assert not Rloo().credit(Segments.of(tree)).informative


def test_a_retry_repeats_the_branch_and_selects_nothing() -> None:
    """A worker that dies the first time it is asked: the tree equals the one grown without the accident."""

    class Once(InProcess):
        died = False

        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            if not self.died:
                self.died = True
                raise SandboxFailure("worker died")
            return super().open(make, task, noise)

    again, ledger = grow(SCHEDULERS[1], sandbox=Once(), seed=9)
    assert ledger.retried_branches == 1
    assert dump_tree(again) == dump_tree(grow(SCHEDULERS[1], seed=9)[0])


def test_a_slow_environment_does_not_stall_the_others() -> None:
    """One environment answers only after another episode is over: were they in step, this would never end."""
    finished = asyncio.Event()

    class Waits(InProcess):
        count = 0

        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            env = super().open(make, task, noise)
            self.count += 1
            return _Waiting(env, finished, first=self.count == 1)

    async def both() -> None:
        grower = Grower(FakePolicy(restrict=True), Waits(), Flat(roots=1), Limits(turns=5), "independent", Ledger())
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(grower.grow(CounterWorld, TASK, Noise(1)))
            group.create_task(grower.grow(CounterWorld, TASK, Noise(2)))

    asyncio.run(both())
    assert finished.is_set()


class _Waiting:
    supports_snapshot = True

    def __init__(self, inner: Any, finished: asyncio.Event, first: bool) -> None:
        self.inner, self.finished, self.first = inner, finished, first

    def reset(self) -> Step:
        return self.inner.reset()

    async def step(self, action: str) -> Step:
        if self.first:
            await self.finished.wait()
        return self.inner.step(action)

    def close(self) -> None:
        if not self.first:
            self.finished.set()
        self.inner.close()


def test_limits_cut_and_say_so() -> None:
    assert {b.stop for b in grow(Flat(roots=3), turns=2, restrict=False)[0].branches} <= {"turns", "done"}
    cut = grow(Flat(roots=3), context_tokens=12, turns=50, action_tokens=4, restrict=False)[0]
    assert "length" in {b.stop for b in cut.branches}
    long = grow(Flat(roots=2), action_tokens=1, restrict=False, seed=1)[0]
    assert not all(t.stopped for b in long.branches for t in b.turns)
    full = grow(Flat(roots=2), context_tokens=8, task=Task("t", "r", metadata={}), restrict=False)[0]
    assert all(b.stop in ("length", "done") for b in full.branches)


def test_an_unforkable_environment_still_gives_a_flat_group_and_refuses_a_tree() -> None:
    class Plain(InProcess):
        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            env = super().open(make, task, noise)
            env.supports_snapshot = False
            return env

    tree, ledger = grow(Flat(roots=4), sandbox=Plain())
    assert len(tree.scored) == 4
    assert ledger.snapshots == ledger.restores == 0
    with pytest.raises(ExceptionGroup) as error:
        grow(Fixed(roots=2, width=2, at=(0.5,), expected=2), sandbox=Plain())
    assert error.group_contains(UserError, match="cannot be snapshotted")


def test_a_fork_that_cannot_be_made_is_left_out_and_counted() -> None:
    """The state at turn 2 refuses to be frozen: the rollouts go on, without that fork."""

    class Refusing(InProcess):
        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            return _Refusing(super().open(make, task, noise))

    scheduler = Fixed(roots=2, width=3, at=(0.5,), expected=4, nested=False)
    tree, ledger = grow(scheduler, sandbox=Refusing(), turns=6, seed=2)
    assert not [b for b in tree.branches if b.failure]
    assert ledger.forks_refused == sum(b.first_turn == 0 and len(b.turns) > 2 for b in tree.branches) > 0
    assert len(tree.branches) == 2


class _Refusing:
    supports_snapshot = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.played = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, action: str) -> Step:
        self.played += 1
        return self.inner.step(action)

    def snapshot(self) -> Any:
        if self.played == 2:
            raise SnapshotUnsupported("a thread is running")
        return _RefusingSnapshot(self.inner.snapshot())


class _RefusingSnapshot:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def restore(self, noise: Noise) -> Any:
        return _Refusing(self.inner.restore(noise))

    def discard(self) -> None:
        self.inner.discard()


def test_the_first_root_is_retried_too_and_the_group_is_made_once() -> None:
    class Dies(InProcess):
        count = 0

        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            self.count += 1
            return _Dying(super().open(make, task, noise)) if self.count == 1 else super().open(make, task, noise)

    again, ledger = grow(Flat(roots=3), sandbox=Dies(), seed=9)
    assert ledger.retried_branches == 1
    assert len(again.branches) == 3
    assert dump_tree(again) == dump_tree(grow(Flat(roots=3), seed=9)[0])


class _Dying(_Refusing):
    def step(self, action: str) -> Step:
        raise SandboxFailure("worker died")

    def snapshot(self) -> Any:
        return self.inner.snapshot()


def test_a_root_that_cannot_be_frozen_at_once_is_retried_with_its_group() -> None:
    class Full(InProcess):
        count = 0

        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            self.count += 1
            return _Full(super().open(make, task, noise)) if self.count == 1 else super().open(make, task, noise)

    again, ledger = grow(Flat(roots=3), sandbox=Full(), seed=9)
    assert ledger.retried_branches == 1
    assert dump_tree(again) == dump_tree(grow(Flat(roots=3), seed=9)[0])


class _Full(_Refusing):
    def snapshot(self) -> Any:
        raise SandboxFailure("no memory for a copy")


class _Tracked(FakePolicy):
    """Actions that take a while once they have begun; counts how many are at work at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.acting, self.most = 0, 0

    def open(self) -> Any:
        return _TrackedSession(self, [])


class _Endless:
    def __init__(self, task: Task) -> None: ...

    def reset(self) -> Step:
        return self.step("")

    def step(self, action: str) -> Step:
        return Step("count", actions=("up", "down"))

    def close(self) -> None: ...


class _TrackedSession(FakeSession):
    async def act(self, *given: Any) -> Any:
        self.policy.acting += 1
        self.policy.most = max(self.policy.most, self.policy.acting)
        action = await super().act(*given)
        for _ in range(20):
            await asyncio.sleep(0)
        self.policy.acting -= 1
        return action

    def fork(self, length: int) -> Any:
        return _TrackedSession(self.policy, self.tokens[:length])


def test_siblings_of_a_whole_action_sample_beside_it() -> None:
    """The root group, and a fork that is decided before its turn, cost no turn of waiting."""
    for scheduler, width in ((Flat(roots=5), 5), (Fixed(roots=1, width=6, at=(0.5,), expected=4), 6)):
        policy = _Tracked(restrict=True, seed=1)
        grower = Grower(policy, InProcess(), scheduler, Limits(turns=3), "independent", Ledger())
        asyncio.run(grower.grow(_Endless, TASK, Noise(4, 4)))
        assert policy.most == width


def test_an_action_that_takes_too_long_fails_its_branch() -> None:
    class Hangs(FakePolicy):
        def open(self) -> Any:
            return _Hanging(self, [])

    grower = Grower(Hangs(), InProcess(), Flat(roots=2), Limits(act_seconds=0.05), "independent", Ledger())
    tree = asyncio.run(grower.grow(CounterWorld, TASK, Noise(1)))
    assert {b.failure.kind for b in tree.branches if b.failure} == {"policy"}
    assert all(b.failure and "limits.act_seconds" in b.failure.message for b in tree.branches)


class _Hanging(FakeSession):
    async def act(self, *given: Any) -> Any:
        await asyncio.sleep(3600)

    def fork(self, length: int) -> Any:
        return _Hanging(self.policy, self.tokens[:length])


def test_a_single_root_forked_at_its_first_token_is_a_group_of_forks() -> None:
    tree, _ = grow(Fixed(roots=1, width=3, at=(0.0,), start=True, expected=4, nested=True), turns=4)
    assert [b.fork.node for b in tree.branches[1:]] == [(0, 0, 0), (0, 0, 0)]  # type: ignore[union-attr]
    tree, _ = grow(Threshold(roots=1, width=3, threshold=0.0, max_forks=1, start=True, nested=False), turns=4)
    assert len(tree.branches) == 3


class _Breaking(FakePolicy):
    """Its engine fails once, in the first action that answers a step of which ``when`` is true, after the siblings of
    that action have left. ``silent``: it does not say when an action begins."""

    def __init__(self, when: Callable[[Step], bool] | None = None, silent: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.when, self.silent = when, silent

    def open(self) -> Any:
        return _BreakingSession(self, [])


class _BreakingSession(FakeSession):
    async def act(
        self, observation: Any, step: Step, noise: Noise, max_tokens: int, prefix: Any = None, begun: Any = None
    ) -> Any:
        policy: Any = self.policy
        action = await super().act(observation, step, noise, max_tokens, prefix, None if policy.silent else begun)
        for _ in range(4):  # the siblings leave
            await asyncio.sleep(0)
        if policy.when is not None and policy.when(step):
            policy.when = None
            raise PolicyFailure("the model failed: OutOfMemoryError")
        return action

    def fork(self, length: int) -> Any:
        return _BreakingSession(self.policy, self.tokens[:length])


def grow_with(
    policy: Any, scheduler: Any, make: Any = CounterWorld, sandbox: Any = None, **limits: Any
) -> tuple[RolloutTree, Ledger]:
    ledger = Ledger()
    grower = Grower(policy, sandbox or InProcess(), scheduler, Limits(turns=8, **limits), "independent", ledger)
    return asyncio.run(grower.grow(make, TASK, Noise(1, 1))), ledger


def shapes(tree: RolloutTree) -> list[tuple[Any, list[str]]]:
    return [(b.fork, [t.text for t in b.turns]) for b in tree.branches]


@pytest.mark.parametrize("at", [0, 1])
def test_siblings_outlive_a_branch_whose_action_fails_after_they_left(at: int) -> None:
    """The model runs out of memory in the very action whose siblings have left: they hang on a turn without one."""
    scheduler = Flat(roots=4) if at == 0 else Fixed(roots=1, at=(0.1,), width=3, expected=10, adapt=False)
    first = "count to 3"
    policy = _Breaking(lambda step: (step.observation == first) == (at == 0), restrict=True)
    tree, ledger = grow_with(policy, scheduler)
    whole, _ = grow_with(_Breaking(restrict=True), scheduler)
    assert [b.stop == "failed" for b in tree.branches] == [True] + [False] * (len(tree.branches) - 1)
    assert shapes(tree)[1:] == shapes(whole)[1:]
    left = tree.branches[0].turns[at]
    assert len(tree.branches[0].turns) == at + 1
    assert len(left.action) == 0
    assert left.observation.tolist() == whole.branches[0].turns[at].observation.tolist()
    assert dump_tree(load_tree(dump_tree(tree))) == dump_tree(tree)
    segments = Segments.of(tree)
    assert segments.leaf.sum() == len(tree.branches) - 1
    assert np.isfinite(Tree().credit(segments).up).all()
    sampled = sum(len(t.action) for b in tree.branches for t in b.turns)
    lost = len(whole.branches[0].turns[at].action)
    assert ledger.generated_tokens == sampled + lost, "what the failed action sampled is spent"


class _Fragile(InProcess):
    """The world that is opened first dies at its first step. ``scarce``: no second one can be had."""

    def __init__(self, scarce: bool = False) -> None:
        super().__init__()
        self.opened, self.scarce = 0, scarce

    def open(self, make: Any, task: Task, noise: Noise) -> Any:
        self.opened += 1
        if self.scarce and self.opened > 1:
            raise SandboxFailure("no process can be had")
        env = super().open(make, task, noise)
        return _Dying(env) if self.opened == 1 else env


def test_siblings_outlive_a_root_that_cannot_be_opened_again() -> None:
    tree, ledger = grow_with(FakePolicy(restrict=True), Flat(roots=3), sandbox=_Fragile(scarce=True))
    assert [b.stop == "failed" for b in tree.branches] == [True, False, False]
    assert "no process can be had" in tree.branches[0].failure.message  # type: ignore[union-attr]
    assert ledger.retried_branches == 2
    assert Segments.of(tree).leaf.sum() == 2


@pytest.mark.parametrize("scheduler", [Flat(roots=3), Threshold(roots=1, width=3, threshold=-1.0, start=True)])
def test_a_retried_root_makes_its_group_once(scheduler: Any) -> None:
    tree, ledger = grow_with(FakePolicy(restrict=True), scheduler, sandbox=_Fragile())
    whole, without = grow_with(FakePolicy(restrict=True), scheduler)
    assert ledger.retried_branches == 1
    assert dump_tree(tree) == dump_tree(whole)
    assert ledger.snapshots == without.snapshots


def test_a_retried_root_that_is_shown_something_else_is_left_out() -> None:
    """Its siblings saw the first observation; theirs is the tree."""
    seen = iter(range(100))

    class Moody(CounterWorld):
        def reset(self) -> Step:
            return Step(f"hello {next(seen)}", actions=super().reset().actions)

    tree, _ = grow_with(FakePolicy(restrict=True), Flat(roots=3), Moody, _Fragile())
    assert [b.stop == "failed" for b in tree.branches] == [True, False, False]
    assert "another first observation" in tree.branches[0].failure.message  # type: ignore[union-attr]
    assert tree.branches[0].turns[0].shown == "hello 0"
    lone, ledger = grow_with(FakePolicy(restrict=True), Flat(roots=1), Moody, _Fragile())
    assert ledger.retried_branches == 1
    assert not lone.branches[0].failure, "nobody else saw what the first attempt was shown"


def test_a_restore_may_take_as_long_as_a_start() -> None:
    class Slow(InProcess):
        def open(self, make: Any, task: Task, noise: Noise) -> Any:
            return _SlowRestore(super().open(make, task, noise))

    tree, _ = grow_with(FakePolicy(restrict=True), Flat(roots=2), sandbox=Slow(), step_seconds=0.1, start_seconds=60)
    assert not [b.failure for b in tree.branches if b.failure]
    tree, _ = grow_with(FakePolicy(restrict=True), Flat(roots=2), sandbox=Slow(), step_seconds=0.1, start_seconds=0.2)
    assert "restore took over 0.2 s (limits.start_seconds)" in tree.branches[1].failure.message  # type: ignore[union-attr]


class _SlowRestore(_Refusing):
    def snapshot(self) -> Any:
        return _SlowSnapshot(self.inner.snapshot())


class _SlowSnapshot(_RefusingSnapshot):
    async def restore(self, noise: Noise) -> Any:
        await asyncio.sleep(0.5)
        return self.inner.restore(noise)


def test_an_observation_that_cannot_be_shown_fails_its_branch_alone() -> None:
    class Strict(FakePolicy):
        def observe(self, task: Task, step: Step, first: bool) -> Any:
            if step.observation == "count -1":
                raise ValueError("the template knows no minus")
            return super().observe(task, step, first)

    tree, _ = grow_with(Strict(restrict=True), Flat(roots=8))
    failed = [b for b in tree.branches if b.failure]
    assert 0 < len(failed) < 8
    for b in failed:
        assert b.failure.kind == "policy"  # type: ignore[union-attr]
        assert "cannot be shown: ValueError: the template knows no minus" in b.failure.message  # type: ignore[union-attr]
        assert b.turns[-1].info == {"count": -1}
    assert not [b for b in tree.scored for t in b.turns if t.shown == "count -1"]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: f"{s.kind}-{s.roots}")
def test_a_policy_that_does_not_say_when_an_action_begins_grows_the_same_tree(scheduler: Any) -> None:
    silent, _ = grow_with(_Breaking(silent=True, restrict=True), scheduler)
    assert dump_tree(silent) == dump_tree(grow_with(_Breaking(restrict=True), scheduler)[0])
    assert len(silent.branches) > 1
