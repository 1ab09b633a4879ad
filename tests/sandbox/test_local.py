"""The sandboxes that run in the trainer's process: copies of objects, and repetition."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import sandbox_worlds as worlds

from branchpoint.noise import Noise
from branchpoint.sandbox.inprocess import InProcess, Method
from branchpoint.sandbox.replay import Replay
from branchpoint.testing.fakes import CoinWorld, CounterWorld, ProbeWorld
from branchpoint.world import EnvironmentFailure, GraderFailure, SandboxFailure, SnapshotUnsupported, Step, Task

NOISE = Noise(1, 2)
TASK = Task("t", "tests", seed=4)


class Stateful:
    """Copies by get_state only: it holds a generator, and notes how it was built."""

    built = 0

    def __init__(self, task: Task) -> None:
        Stateful.built += 1
        self.live = (n for n in range(10))
        self.path: list[str] = []

    def reset(self) -> Step:
        return Step("ready")

    def step(self, action: str) -> Step:
        self.path.append(action)
        return Step(" ".join(self.path))

    def get_state(self) -> list[str]:
        return self.path  # the live list: the sandbox must not keep it

    def set_state(self, state: list[str]) -> None:
        self.path = state

    def close(self) -> None: ...


class PickleOnly(CounterWorld):
    """Refuses to be deep-copied, as objects of some native libraries do."""

    get_state = property()  # type: ignore[assignment]  # an attribute that cannot be read: as if it were not there

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be deep-copied")

    def __reduce__(self) -> Any:
        return _rebuild, (self.target, self.count)


def _rebuild(target: int, count: int) -> PickleOnly:
    world = PickleOnly(Task("t", "", metadata={"target": target}))
    world.count = count
    return world


@pytest.mark.parametrize("method", ["auto", "state"])
def test_own_state_is_set_on_a_fresh_world_and_never_shared(method: Method) -> None:
    env = InProcess(method).open(Stateful, TASK, NOISE)
    env.reset()
    env.step("a")
    snapshot = env.snapshot()
    env.step("b")
    built = Stateful.built
    first, second = snapshot.restore(NOISE), snapshot.restore(NOISE)
    assert Stateful.built == built + 2
    assert [first.step("c").observation, first.step("d").observation] == ["a c", "a c d"]
    assert second.step("e").observation == "a e"
    assert env.step("f").observation == "a b f"
    assert snapshot.restore(NOISE).step("g").observation == "a g"


def test_auto_takes_the_first_method_that_works() -> None:
    class Nothing(PickleOnly):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    env = InProcess().open(PickleOnly, TASK, NOISE)
    env.reset()
    env.step("up")
    assert env.snapshot().restore(NOISE).step("up").observation == "count 2"
    bad = InProcess().open(Nothing, TASK, NOISE)
    bad.reset()
    with pytest.raises(SnapshotUnsupported) as caught:
        bad.snapshot()
    message = str(caught.value)
    for reason in (
        "state: ",
        "deepcopy: TypeError: cannot be deep-copied",
        "pickle: TypeError",
        "forkserver or replay",
    ):
        assert reason in message


@pytest.mark.parametrize("method", ["state", "deepcopy", "pickle"])
def test_a_method_that_does_not_work_is_named(method: Method) -> None:
    env = InProcess(method).open(ProbeWorld, Task("t", "", metadata={"live": True}), NOISE)
    env.reset()
    with pytest.raises(SnapshotUnsupported, match=rf"ProbeWorld cannot be copied \({method}: "):
        env.snapshot()


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match="method is 'copy'"):
        InProcess("copy")  # type: ignore[arg-type]


@pytest.mark.parametrize("sandbox", [InProcess("deepcopy"), Replay()], ids=["inprocess", "replay"])
def test_global_generators_belong_to_one_branch_each(sandbox: InProcess | Replay) -> None:
    """Interleaved branches draw what each would draw alone, and the trainer's own draws are unchanged."""
    random.seed(1)
    np.random.seed(1)
    right = [random.random(), np.random.random(), random.random(), np.random.random()]
    random.seed(1)
    np.random.seed(1)
    env = sandbox.open(ProbeWorld, TASK, NOISE)
    env.reset()
    snapshot = env.snapshot()
    luck = [NOISE.branch("paired", n) for n in range(3)]
    alone = [[b.step("random").observation, b.step("random").observation] for b in map(snapshot.restore, luck)]
    branches = [snapshot.restore(n) for n in luck]
    got = [random.random(), np.random.random()]
    mixed = list(zip(*([b.step("random").observation for b in branches] for _ in range(2)), strict=True))
    got += [random.random(), np.random.random()]
    assert [list(m) for m in mixed] == alone
    assert len({m[0] for m in mixed}) == 3
    assert got == right


@pytest.mark.parametrize("sandbox", [InProcess(), Replay()], ids=["inprocess", "replay"])
def test_failures_are_typed(sandbox: InProcess | Replay) -> None:
    for action, kind in (("raise", EnvironmentFailure), ("nan", GraderFailure), ("none", EnvironmentFailure)):
        env = sandbox.open(ProbeWorld, TASK, NOISE)
        env.reset()
        with pytest.raises(kind):
            env.step(action)
        with pytest.raises(RuntimeError, match="has failed"):
            env.step("random")
        with pytest.raises(RuntimeError, match="has failed"):
            env.snapshot()
    with pytest.raises(EnvironmentFailure, match="RuntimeError while building the environment: boom"):
        sandbox.open("sandbox_worlds:boom", TASK, NOISE)
    with pytest.raises(TypeError, match="action is int; expected str"):
        sandbox.open(ProbeWorld, TASK, NOISE).step(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("sandbox", [InProcess(), Replay()], ids=["inprocess", "replay"])
def test_discarded(sandbox: InProcess | Replay) -> None:
    env = sandbox.open(CounterWorld, TASK, NOISE)
    env.reset()
    snapshot = env.snapshot()
    snapshot.discard()
    snapshot.discard()
    with pytest.raises(SandboxFailure, match="was discarded"):
        snapshot.restore(NOISE)


def test_interrupts_are_not_swallowed() -> None:
    for sandbox in (InProcess(), Replay()):
        env = sandbox.open(worlds.Faulty, TASK, NOISE)
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step("interrupt")


class Drifting:
    """Answers differently from the third step on when it is built again."""

    built = 0

    def __init__(self, task: Task) -> None:
        Drifting.built += 1
        self.field, self.at = task.metadata["field"], task.metadata["at"]
        self.again = Drifting.built > 1
        self.n = 0

    def _answer(self) -> Step:
        off = self.again and self.n == self.at
        self.n += 1
        if self.field == "reward":
            return Step("same", float(off))
        if self.field == "actions":
            return Step("same", actions=("a", "b") if off else ("a",))
        return Step("other" if off else "same")

    def reset(self) -> Step:
        return self._answer()

    def step(self, action: str) -> Step:
        return self._answer()

    def close(self) -> None: ...


@pytest.mark.parametrize("field", ["observation", "reward", "actions"])
@pytest.mark.parametrize(("at", "where"), [(0, "at reset"), (3, r"at step 3 \('act2'\)")])
def test_replay_says_where_a_world_diverges(field: str, at: int, where: str) -> None:
    Drifting.built = 0
    env = Replay().open(Drifting, Task("t", "", metadata={"field": field, "at": at}), NOISE)
    env.reset()
    for n in range(5):
        env.step(f"act{n}")
    with pytest.raises(SnapshotUnsupported, match=rf"{where} {field} was"):
        env.snapshot().restore(NOISE)


def test_replay_refuses_a_declared_world() -> None:
    env = Replay().open(worlds.Mover, Task("t", "", metadata={"declared": True}), NOISE)
    env.reset()
    with pytest.raises(SnapshotUnsupported, match="declares deterministic = False"):
        env.snapshot()


def test_replay_repeats_changes_of_luck() -> None:
    """A snapshot of a restored branch replays each stretch under the luck it had."""
    env = Replay().open(CoinWorld, Task("t", "", metadata={"flips": 100}), NOISE)
    env.reset()
    right = [env.step("coin0").observation for _ in range(10)]
    for n in range(4):
        env = env.snapshot().restore(NOISE.branch("independent", n))
        right += [env.step("coin0").observation for _ in range(10)]
    seeds = [NOISE, *(NOISE.branch("independent", n) for n in range(4))]
    by_hand = ["heads" if seeds[n // 10].happens(0.5, "flip", "coin0", n) else "tails" for n in range(50)]
    assert right == by_hand
    env.snapshot().restore(NOISE)
