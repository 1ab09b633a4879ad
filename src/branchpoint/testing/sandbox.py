"""The conformance suite of sandboxes, see :mod:`branchpoint.testing`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from branchpoint.noise import Noise
from branchpoint.testing.fakes import ProbeWorld
from branchpoint.testing.report import Checks, Report, expect
from branchpoint.world import (
    BranchFailure,
    EnvironmentFailure,
    GraderFailure,
    Sandbox,
    SandboxFailure,
    Snapshot,
    Task,
    settle,
)


async def check_sandbox(factory: Callable[[], Sandbox], *, depth: int = 12) -> Report:
    """Whether a sandbox keeps the contract of :class:`~branchpoint.world.Sandbox`, for worlds it did not choose.

    What a back-end cannot keep it leaves out of its ``preserves`` (a set of ``generators``, ``closures``, ``globals``,
    ``isolation``), and the suite skips it. Needs a running asyncio loop.

    Args:
        factory: makes a sandbox, e.g. the class itself.
        depth: how long a chain of snapshots of restored snapshots to try.
    """
    sandbox = factory()
    checks = Checks(f"sandbox {type(sandbox).__name__}")
    suite = _SandboxSuite(sandbox, depth)
    try:
        for name, check in suite.all():
            await checks.run_async(name, check)
        checks.run("the trainer's own random state is untouched", suite.own_random)
    finally:
        await settle(sandbox.close())
    return checks.report()


class _SandboxSuite:
    """The checks of one sandbox, all on :class:`~branchpoint.testing.fakes.ProbeWorld`."""

    def __init__(self, sandbox: Sandbox, depth: int) -> None:
        self.sandbox = sandbox
        self.depth = depth
        self.preserves: frozenset[str] = getattr(sandbox, "preserves", frozenset())
        self.noise = Noise(11, 12)
        self.random = random.getstate(), np.random.get_state()

    def all(self) -> list[tuple[str, Callable[[], Awaitable[str | None]]]]:
        declared = [
            ("keeps generators", self.keeps("generators", "next", ["1", "4"])),
            ("keeps closures", self.keeps("closures", "call", ["2", "3"])),
            ("keeps module globals apart", self.keeps_globals),
            ("outlives a process that ends", self.outlives),
        ]
        return [
            ("siblings are independent", self.siblings),
            ("the parent goes on unchanged", self.parent),
            ("restores any number of times", self.many),
            (f"restores at depth {self.depth}", self.deep),
            ("snapshots before reset and after the end", self.edges),
            ("calls out of order are refused", self.order),
            ("snapshot ids are unique", self.ids),
            ("a discarded snapshot leaves its branches alive", self.discarded),
            ("siblings share no random state", self.random_state),
            ("equal luck gives equal draws", self.equal_luck),
            ("paired siblings meet one fate, independent ones their own", self.pairing),
            ("failures are typed and end one branch only", self.failures),
            ("long and foreign text passes unchanged", self.text),
            ("siblings act at the same time", self.together),
            *declared,
        ]

    @asynccontextmanager
    async def env(self, *actions: str, make: Any = ProbeWorld, **metadata: Any) -> AsyncIterator[Any]:
        """An environment after reset and some actions."""
        task = Task("probe", "branchpoint.testing.fakes:ProbeWorld", seed=5, metadata=metadata)
        env = await settle(self.sandbox.open(make, task, self.noise))
        try:
            await settle(env.reset())
            for action in actions:
                await self.say(env, action)
            yield env
        finally:
            await settle(env.close())

    async def say(self, env: Any, action: str) -> str:
        return (await settle(env.step(action))).observation

    async def fork(self, snapshot: Snapshot, key: int, *actions: str) -> list[str]:
        """Plays actions in a restored environment, and closes it."""
        env = await settle(snapshot.restore(self.noise.branch("paired", key)))
        try:
            return [await self.say(env, a) for a in actions]
        finally:
            await settle(env.close())

    async def siblings(self) -> None:
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            first = await settle(snapshot.restore(self.noise.branch("paired", 0)))
            second = await settle(snapshot.restore(self.noise.branch("paired", 1)))
            got = [await self.say(first, "add b"), await self.say(second, "add c"), await self.say(first, "add d")]
            await settle(first.close())
            got.append(await self.say(second, "add e"))
            await settle(second.close())
        right = ["a b", "a c", "a b d", "a c e"]
        expect(got == [_listed(r) for r in right], f"lists and dicts of siblings mix: {got}")

    async def parent(self) -> None:
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            await self.fork(snapshot, 0, "add b")
            got = await self.say(env, "add c")
            late = await self.fork(snapshot, 1, "add d")
        expect(got == _listed("a c"), f"after a sibling's step the parent holds {got}")
        expect(late == [_listed("a d")], f"after the parent's step the snapshot holds {late}")

    async def many(self) -> None:
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            for n in range(20):
                got = await self.fork(snapshot, n, f"add {n}")
                expect(got == [_listed(f"a {n}")], f"restore {n} gave {got}")

    async def deep(self) -> None:
        async with self.env() as env:
            snapshot = await settle(env.snapshot())
            said = ""
            for n in range(self.depth):
                branch = await settle(snapshot.restore(self.noise.child(n)))
                said = f"{said} {n}"
                got = await self.say(branch, f"add {n}")
                expect(got == _listed(said), f"at depth {n + 1} the world holds {got}")
                snapshot = await settle(branch.snapshot())
                await settle(branch.close())

    async def edges(self) -> None:
        task = Task("probe", "branchpoint.testing.fakes:ProbeWorld")
        env = await settle(self.sandbox.open(ProbeWorld, task, self.noise))
        snapshot = await settle(env.snapshot())
        fresh = await settle(snapshot.restore(self.noise))
        expect((await settle(fresh.reset())).observation == "ready", "a snapshot before reset cannot be reset")
        expect((await settle(fresh.step("end"))).done, "the end is not told")
        over = await settle((await settle(fresh.snapshot())).restore(self.noise))
        await _refused(lambda: over.step("add a"), "a restored finished episode takes a step")
        for each in (env, fresh, over):
            await settle(each.close())

    async def order(self) -> None:
        async with self.env() as env:
            await _refused(lambda: env.reset(), "a second reset is taken")
            await self.say(env, "end")
            await _refused(lambda: env.step("add a"), "a step after the end is taken")
        await _refused(lambda: env.step("add a"), "a closed environment takes a step")
        await settle(env.close())

    async def ids(self) -> None:
        async with self.env() as env:
            ids = {(await settle(env.snapshot())).id for _ in range(5)}
        expect(len(ids) == 5 and all(ids), f"five snapshots have the ids {sorted(ids)}")

    async def discarded(self) -> None:
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            branch = await settle(snapshot.restore(self.noise))
            await settle(snapshot.discard())
            await settle(snapshot.discard())
            got = await self.say(branch, "add b")
            await settle(branch.close())
            expect(got == _listed("a b"), f"after discard a branch holds {got}")
            try:
                await settle(snapshot.restore(self.noise))
            except SandboxFailure:
                return
            raise AssertionError("a discarded snapshot was restored")

    async def random_state(self) -> None:
        async with self.env("random", "numpy") as env:
            snapshot = await settle(env.snapshot())
            draws = [await self.fork(snapshot, n, "random", "numpy") for n in range(4)]
            draws.append([await self.say(env, "random"), await self.say(env, "numpy")])
        for i, name in enumerate(("random", "numpy.random")):
            expect(len({d[i] for d in draws}) == 5, f"siblings draw the same from {name}: {[d[i] for d in draws]}")

    async def equal_luck(self) -> None:
        actions = ("random", "numpy", "luck", "event x")
        async with self.env() as env:
            snapshot = await settle(env.snapshot())
            first, second = [await self.fork(snapshot, 3, *actions) for _ in range(2)]
        opened = []
        for _ in range(2):
            async with self.env() as env:
                opened.append([await self.say(env, a) for a in actions])
        expect(first == second, f"two restores with one luck: {first} and {second}")
        expect(opened[0] == opened[1], f"two environments opened with one luck: {opened}")

    async def pairing(self) -> None:
        async with self.env() as env:
            snapshot = await settle(env.snapshot())
            fates: dict[str, list[str]] = {}
            for arm in ("paired", "independent"):
                for n in range(4):
                    branch = await settle(snapshot.restore(self.noise.branch(arm, n)))
                    for _ in range(n):
                        await self.say(branch, "event other")
                    fates.setdefault(arm, []).append(await self.say(branch, "event x"))
                    await settle(branch.close())
        expect(len(set(fates["paired"])) == 1, f"paired siblings meet {fates['paired']}")
        expect(len(set(fates["independent"])) == 4, f"independent siblings meet {fates['independent']}")

    async def failures(self) -> None:
        right = {"raise": EnvironmentFailure, "none": EnvironmentFailure, "nan": GraderFailure}
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            await self._fails(snapshot, right)
            got = await self.fork(snapshot, 9, "print", "add b")
        expect(got == ["printed", _listed("a b")], f"after failures and prints a sibling holds {got}")

    async def outlives(self) -> str | None:
        if "isolation" not in self.preserves:
            return "not declared"
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            await self._fails(snapshot, {"exit": SandboxFailure, "kill": SandboxFailure})
            got = await self.fork(snapshot, 9, "add b")
        expect(got == [_listed("a b")], f"after dead siblings a branch holds {got}")
        return None

    async def _fails(self, snapshot: Snapshot, right: dict[str, type[BranchFailure]]) -> None:
        for action, kind in right.items():
            branch = await settle(snapshot.restore(self.noise))
            try:
                await settle(branch.step(action))
            except BranchFailure as error:
                expect(type(error) is kind, f"{action} gave {type(error).__name__} ({error}); expected {kind.__name__}")
                expect(str(error) != "", f"{action} gave no message")
            else:
                raise AssertionError(f"{action} raised nothing; expected {kind.__name__}")
            finally:
                await settle(branch.close())

    async def text(self) -> None:
        async with self.env() as env:
            got = [await self.say(env, a) for a in ("a" * 100_000, "猫は🐈‍⬛\x00\n\u202e", "")]
        expect(got == [f"100000:{'a' * 20}", "8:猫は🐈‍⬛\x00\n\u202e", "0:"], f"text came back as {got!r:.200}")

    async def together(self) -> None:
        async with self.env("add a") as env:
            snapshot = await settle(env.snapshot())
            got = await asyncio.gather(*(self.fork(snapshot, n, f"add {n}") for n in range(8)))
        expect(got == [[_listed(f"a {n}")] for n in range(8)], f"eight branches at once hold {got}")

    def keeps(self, what: str, action: str, right: list[str]) -> Callable[[], Awaitable[str | None]]:
        async def check() -> str | None:
            if what not in self.preserves:
                return "not declared"
            async with self.env(action, live=True) as env:
                snapshot = await settle(env.snapshot())
                for n in range(2):
                    got = await self.fork(snapshot, n, action, action)
                    expect(got == right, f"restore {n} goes on with {got}; expected {right}")
            return None

        return check

    async def keeps_globals(self) -> str | None:
        if "globals" not in self.preserves:
            return "not declared"
        async with self.env("global a") as env:
            snapshot = await settle(env.snapshot())
            got = [await self.fork(snapshot, n, f"global {n}") for n in range(2)]
        expect(got == [["['a', '0']"], ["['a', '1']"]], f"a module's list in two siblings: {got}")
        return None

    def own_random(self) -> None:
        expect(random.getstate() == self.random[0], "random's state has changed")
        same = all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), self.random[1], strict=True))  # type: ignore[arg-type]
        expect(same, "numpy.random's state has changed")


def _listed(words: str) -> str:
    items = words.split()
    return f"{items} { ({w: items.count(w) for w in items}) }"


async def _refused(call: Any, message: str) -> None:
    try:
        await settle(call() if callable(call) else call)
    except RuntimeError:
        return
    raise AssertionError(message)
