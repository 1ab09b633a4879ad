"""The conformance suite of policies, see :mod:`branchpoint.testing`."""

from __future__ import annotations

import numpy as np

from branchpoint.noise import Noise
from branchpoint.session import Action, Policy, Session
from branchpoint.testing.report import Checks, Report, expect
from branchpoint.tree import Floats, Ints
from branchpoint.world import Step, Task

_NOTHING = np.zeros(0, np.int32)


async def check_policy(
    policy: Policy,
    task: Task | None = None,
    steps: tuple[Step, Step] | None = None,
    *,
    max_tokens: int = 16,
    tolerance: float = 1e-3,
) -> Report:
    """Whether the sessions of a policy keep the contract of :class:`~branchpoint.session.Session`.

    Args:
        task, steps: what the policy is shown: the first observation, and the answer to its first action.
        max_tokens: the limit of each action.
        tolerance: how far log-probabilities of a forked and a recomputed context may differ (a cache changes the order
            of sums; 0 for exact arithmetic).
    """
    task = task or Task("policy-check", "branchpoint.testing.fakes:CounterWorld")
    suite = _PolicySuite(policy, task, steps or _STEPS, max_tokens, tolerance)
    checks = Checks(f"policy {type(policy).__name__}")
    await checks.run_async("lengths agree", suite.lengths)
    await checks.run_async("log-probabilities and entropies are possible", suite.possible)
    await checks.run_async("equal keys give equal tokens", suite.keyed)
    await checks.run_async("different keys give different tokens", suite.varied)
    await checks.run_async("a fork between turns equals a recomputed context", suite.fork_turn)
    await checks.run_async("a fork inside an action equals a recomputed context", suite.fork_token)
    await checks.run_async("an action tells when it has begun, and can be forked there", suite.begun)
    await checks.run_async("a forked session leaves its parent alone", suite.parent)
    await checks.run_async("the token limit cuts and is told", suite.limit)
    return checks.report()


_STEPS = (
    Step("count to 3", actions=("up", "down", "stop")),
    Step("count 1", actions=("up", "down", "stop")),
)


class _PolicySuite:
    def __init__(self, policy: Policy, task: Task, steps: tuple[Step, Step], max_tokens: int, tolerance: float) -> None:
        self.policy = policy
        self.steps = steps
        self.max_tokens = max_tokens
        self.tolerance = tolerance
        self.first = np.asarray(policy.observe(task, steps[0], True), np.int32)
        self.second = np.asarray(policy.observe(task, steps[1], False), np.int32)

    async def begin(self, key: int) -> tuple[Session, Action]:
        session = self.policy.open()
        return session, await self.act(session, self.first, 0, key)

    async def act(self, session: Session, observation: Ints, at: int, key: int, prefix: Ints | None = None) -> Action:
        """One action after the step ``at``, its luck named by ``key``."""
        return await session.act(observation, self.steps[at], Noise(0, key), self.max_tokens, prefix)

    async def lengths(self) -> None:
        session = self.policy.open()
        expect(session.length == 0, f"a new session has length {session.length}")
        expect(len(self.first) > 0, "the first observation has no tokens")
        count = 0
        for at, observation in enumerate((self.first, self.second)):
            action = await self.act(session, observation, at, at)
            count += len(observation) + len(action.tokens)
            expect(session.length == count, f"after turn {at} the session has {session.length} tokens, not {count}")
            _same_lengths(action)
        session.close()

    async def possible(self) -> None:
        for key in range(8):
            session, action = await self.begin(key)
            session.close()
            for name in ("logprobs", "raw_logprobs"):
                _possible(name, getattr(action, name))
            _possible("entropies", -action.entropies)

    async def keyed(self) -> None:
        (a, one), (b, two) = await self.begin(5), await self.begin(5)
        a.close()
        b.close()
        _equal(one, two, self.tolerance, "two sessions with one key")

    async def varied(self) -> None:
        drawn = set()
        for key in range(16):
            session, action = await self.begin(key)
            session.close()
            drawn.add(tuple(action.tokens.tolist()))
        expect(len(drawn) > 1, "16 keys gave one and the same action; is the noise used?")

    async def fork_turn(self) -> None:
        session, action = await self.begin(1)
        forked = session.fork(session.length)
        expect(forked.length == session.length, f"forked at {session.length}, the session has length {forked.length}")
        fresh = self.policy.open()
        whole = np.concatenate([self.first, action.tokens, self.second])
        for key in (2, 3):
            one = await self.act(forked.fork(forked.length), self.second, 1, key)
            two = await self.act(fresh.fork(0), whole, 1, key)
            _equal(one, two, self.tolerance, "forked and recomputed")
        for each in (session, forked, fresh):
            each.close()

    async def begun(self) -> None:
        session = self.policy.open()
        told: list[float] = []
        forks: list[Session] = []

        def begin(entropy: float) -> None:
            told.append(entropy)
            forks.append(session.fork(len(self.first)))

        action = await session.act(self.first, self.steps[0], Noise(0, 3), self.max_tokens, None, begin)
        expect(len(told) == 1, f"begun was called {len(told)} times, not once")
        gap = abs(float(np.float32(told[0]) - action.entropies[0]))
        expect(gap <= self.tolerance, f"begun told an entropy that differs by {gap:.2e} from the action's first")
        again = await self.act(forks[0], _NOTHING, 0, 3)
        _equal(action, again, self.tolerance, "an action and a fork made when it had begun")
        for each in (session, *forks):
            each.close()

    async def fork_token(self) -> None:
        session, action = await self.begin(1)
        for key in range(2, 40):  # an action long enough to be cut
            if len(action.tokens) > 1:
                break
            session.close()
            session, action = await self.begin(key)
        expect(len(action.tokens) > 1, "no action of more than one token was sampled; give steps with longer ones")
        cut = len(action.tokens) // 2
        prefix = action.tokens[:cut]
        forked = session.fork(len(self.first) + cut)
        expect(forked.length == len(self.first) + cut, f"the forked session has length {forked.length}")
        fresh = self.policy.open()
        one = await self.act(forked, _NOTHING, 0, 7, prefix)
        two = await self.act(fresh, np.concatenate([self.first, prefix]), 0, 7, prefix)
        _equal(one, two, self.tolerance, "forked inside an action and recomputed")
        expect(len(prefix) + len(one.tokens) <= self.max_tokens, "the prefix does not count for max_tokens")
        for each in (session, forked, fresh):
            each.close()

    async def parent(self) -> None:
        session, _ = await self.begin(1)
        before = session.length
        witness = session.fork(before)
        forked = session.fork(len(self.first))
        await self.act(forked, _NOTHING, 0, 4)
        expect(session.length == before, f"the parent's length went from {before} to {session.length}")
        one = await self.act(session, self.second, 1, 5)
        two = await self.act(witness, self.second, 1, 5)
        _equal(one, two, self.tolerance, "the parent after a fork's step and a witness")
        for each in (session, witness, forked):
            each.close()

    async def limit(self) -> None:
        for key in range(8):
            session = self.policy.open()
            action = await session.act(self.first, self.steps[0], Noise(0, key), 1)
            session.close()
            expect(len(action.tokens) == 1, f"max_tokens=1 gave {len(action.tokens)} tokens")


def _same_lengths(action: Action) -> None:
    sizes = {name: len(getattr(action, name)) for name in ("tokens", "logprobs", "raw_logprobs", "entropies")}
    if action.allowed is not None:
        sizes["allowed"] = len(action.allowed)
    expect(len(set(sizes.values())) == 1, f"an action's arrays differ in length: {sizes}")
    for token, ids in zip(action.tokens, action.allowed or (), strict=False):
        expect(ids is None or token in ids, f"token {token} was sampled but is not among the allowed {ids}")


def _possible(name: str, values: Floats) -> None:
    expect(bool(np.all(np.isfinite(values))), f"{name} are not finite: {values}")
    expect(bool(np.all(values <= 1e-6)), f"{name} have the wrong sign: {values}")


def _equal(one: Action, two: Action, tolerance: float, what: str) -> None:
    expect(
        np.array_equal(one.tokens, two.tokens) and one.text == two.text,
        f"{what}: tokens {one.tokens.tolist()} ({one.text!r}) and {two.tokens.tolist()} ({two.text!r})",
    )
    for name in ("logprobs", "raw_logprobs", "entropies"):
        a, b = getattr(one, name), getattr(two, name)
        gap = float(np.max(np.abs(a - b), initial=0.0))
        expect(gap <= tolerance, f"{what}: {name} differ by {gap:.2e}, more than {tolerance:.0e}")
