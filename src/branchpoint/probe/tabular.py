"""Tabular decision processes with a softmax policy: small enough that everything about them is known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from branchpoint.tree import Array


class MalformedOracle(ValueError):
    """A file of oracles that does not hold what it should; the message says where."""


class Outcome(NamedTuple):
    """One step: from a state by an action to a reward and the next state (-1: the end)."""

    state: int
    action: int
    reward: float
    after: int


@dataclass(frozen=True, eq=False)
class Mdp:
    """A finite-horizon process and its policy.

    ``trans[s][a]`` lists (probability, reward, next state), -1 being the end; ``pi[s]`` are the policy's
    probabilities; states with equal ``block`` share their logits, which are the parameters.
    """

    trans: tuple[tuple[tuple[tuple[float, float, int], ...], ...], ...]
    pi: tuple[tuple[float, ...], ...]
    block: tuple[int, ...]
    start: int = 0

    @staticmethod
    def parse(raw: Any, name: str) -> Mdp:
        """An Mdp from its JSON form. Raises MalformedOracle naming the field."""
        for field in ("trans", "pi", "block", "s0"):
            if not isinstance(raw, Mapping) or field not in raw:
                raise MalformedOracle(f"mdps.{name}: field {field!r} is missing")
        try:
            trans = tuple(
                tuple(tuple((float(p), float(r), int(n)) for p, r, n in action) for action in state)
                for state in raw["trans"]
            )
            pi = tuple(tuple(map(float, row)) for row in raw["pi"])
            mdp = Mdp(trans, pi, tuple(map(int, raw["block"])), int(raw["s0"]))
        except (TypeError, ValueError) as e:
            raise MalformedOracle(f"mdps.{name}: {e}") from e
        mdp._check(name)
        return mdp

    def _check(self, name: str) -> None:
        n = len(self.trans)
        if len(self.pi) != n or len(self.block) != n or not 0 <= self.start < n:
            raise MalformedOracle(f"mdps.{name}: trans, pi and block must have one entry for each state, s0 be one")
        sizes: dict[int, int] = {}
        for s, (actions, row) in enumerate(zip(self.trans, self.pi, strict=True)):
            if len(actions) != len(row) or sizes.setdefault(self.block[s], len(row)) != len(row):
                raise MalformedOracle(f"mdps.{name}: state {s}: as many actions as probabilities, equal in a block")
            for what, total in [
                ("pi", sum(row)),
                *((f"trans[{a}]", sum(o[0] for o in x)) for a, x in enumerate(actions)),
            ]:
                if not abs(total - 1.0) < 1e-9:
                    raise MalformedOracle(f"mdps.{name}: state {s}: {what} sums to {total}, not 1")
            if any(not -1 <= o[2] < n for x in actions for o in x):
                raise MalformedOracle(f"mdps.{name}: state {s}: a next state is outside -1..{n - 1}")
        self._acyclic(name)

    def _acyclic(self, name: str) -> None:
        depth = self._depths()
        if depth is None:
            raise MalformedOracle(f"mdps.{name}: a state can be reached from itself; episodes must be finite")

    def _depths(self) -> tuple[int, ...] | None:
        """The longest episode from each state, or None when some episode never ends."""
        n = len(self.trans)
        depth = [0] * n
        for _ in range(n + 1):
            new = [1 + max((depth[o[2]] for x in acts for o in x if o[2] >= 0), default=0) for acts in self.trans]
            if new == depth:
                return tuple(depth)
            depth = new
        return None

    @cached_property
    def horizon(self) -> int:
        """The longest episode, in steps."""
        depths = self._depths()
        assert depths is not None, "checked when parsed"
        return depths[self.start]

    @cached_property
    def actions(self) -> int:
        return max(map(len, self.pi))

    def entropy(self, state: int) -> float:
        """Of the policy, in nats."""
        return -sum(p * float(np.log(p)) for p in self.pi[state] if p > 0)

    def outcomes(self, state: int) -> Iterator[tuple[float, Outcome]]:
        """What can happen in one step, with its probability."""
        for a, (p, results) in enumerate(zip(self.pi[state], self.trans[state], strict=True)):
            for q, reward, after in results:
                if p * q > 0:
                    yield p * q, Outcome(state, a, reward, after)

    def episodes(self, state: int) -> Iterator[tuple[float, tuple[Outcome, ...]]]:
        """All episodes from a state, with their probability."""
        for p, first in self.outcomes(state):
            if first.after < 0:
                yield p, (first,)
                continue
            for q, rest in self.episodes(first.after):
                yield p * q, (first, *rest)

    def token(self, state: int, action: int) -> int:
        """The token that stands for an action of a state."""
        return state * self.actions + action

    @cached_property
    def scores(self) -> Array:
        """[tokens, parameters] the gradient of log pi of every action: e_a - pi in the block of the state."""
        blocks = sorted(set(self.block))
        sizes = [len(self.pi[self.block.index(b)]) for b in blocks]
        at = dict(zip(blocks, np.concatenate([[0], np.cumsum(sizes)])[:-1], strict=True))
        scores = np.zeros((len(self.pi) * self.actions, sum(sizes)))
        for s, row in enumerate(self.pi):
            k = int(at[self.block[s]])
            for a in range(len(row)):
                scores[self.token(s, a), k : k + len(row)] = -np.array(row)
                scores[self.token(s, a), k + a] += 1.0
        return scores

    @cached_property
    def value(self) -> tuple[float, ...]:
        """V of every state."""
        return tuple(m for m, _ in self._moments)

    @cached_property
    def variance(self) -> tuple[float, ...]:
        """The variance of the return-to-go of every state."""
        return tuple(m2 - m * m for m, m2 in self._moments)

    @cached_property
    def _moments(self) -> tuple[tuple[float, float], ...]:
        known: dict[int, tuple[float, float]] = {-1: (0.0, 0.0)}

        def of(state: int) -> tuple[float, float]:
            if state not in known:
                first = second = 0.0
                for p, o in self.outcomes(state):
                    m, m2 = of(o.after)
                    first += p * (o.reward + m)
                    second += p * (o.reward**2 + 2 * o.reward * m + m2)
                known[state] = (first, second)
            return known[state]

        return tuple(of(s) for s in range(len(self.pi)))

    def q(self, state: int, action: int) -> float:
        """Q of a state and action."""
        return sum(p * (r + (self.value[n] if n >= 0 else 0.0)) for p, r, n in self.trans[state][action])

    def visits(self) -> list[Array]:
        """For every time step, [states] the probability of being there."""
        now = np.zeros(len(self.pi))
        now[self.start] = 1.0
        out = []
        while now.any():
            out.append(now)
            then = np.zeros_like(now)
            for s in np.flatnonzero(now):
                for p, o in self.outcomes(int(s)):
                    if o.after >= 0:
                        then[o.after] += now[s] * p
            now = then
        return out

    @property
    def mean_return(self) -> float:
        """J, the expected return."""
        return self.value[self.start]

    @cached_property
    def gradient(self) -> Array:
        """[parameters] the gradient of J, by the policy gradient theorem over the visits: sum d(s) pi(a|s) Q(s,a) S."""
        weights = np.zeros(len(self.scores))
        for s, d in enumerate(np.sum(self.visits(), axis=0)):
            for a, p in enumerate(self.pi[s]):
                weights[self.token(s, a)] = d * p * self.q(s, a)
        return weights @ self.scores


def vector(raw: Any, where: str) -> Array:
    """A JSON list of numbers. Raises MalformedOracle."""
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise MalformedOracle(f"{where}: expected a list of numbers, found {raw!r}")
    try:
        return np.array(raw, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise MalformedOracle(f"{where}: {e}") from e
