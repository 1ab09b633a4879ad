"""Small worlds and a small policy that keep the contracts of the seams: for tests, examples and one's own checks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from branchpoint.noise import Noise, digest
from branchpoint.session import Action, Begun
from branchpoint.tree import Array, Ints
from branchpoint.world import PolicyFailure, Step, Task


class CounterWorld:
    """Count up to a target: ``up`` and ``down`` change the count, ``stop`` ends the episode.

    The reward, at the end only, is 1 at the target and falls by 1/target for each unit of distance, never below 0.
    ``task.metadata``: ``target`` (3), ``limit`` of steps (12).
    """

    def __init__(self, task: Task) -> None:
        self.target = int(task.metadata.get("target", 3))
        self.limit = int(task.metadata.get("limit", 12))
        self.count = self.steps = 0

    def reset(self) -> Step:
        return self._step(f"count to {self.target}")

    def step(self, action: str) -> Step:
        self.steps += 1
        if action in ("up", "down"):
            self.count += 1 if action == "up" else -1
            return self._step(f"count {self.count}")
        if action == "stop":
            reward = max(0.0, 1.0 - abs(self.count - self.target) / self.target)
            return Step(f"stopped {self.count}", reward, done=True, info={"success": self.count == self.target})
        return self._step("unknown")

    def _step(self, observation: str) -> Step:
        cut = self.steps >= self.limit
        return Step(observation, truncated=cut, actions=("up", "down", "stop"), info={"count": self.count})

    def get_state(self) -> tuple[int, int]:
        return self.count, self.steps

    def set_state(self, state: tuple[int, int]) -> None:
        self.count, self.steps = state

    def close(self) -> None: ...


class CoinWorld:
    """Flip one of several coins at each step: the reward is 1 for heads. Its luck is keyed by event.

    The n-th flip of a coin meets the same fate in all branches that share a noise seed, however many other coins were
    flipped in between. ``task.metadata``: ``coins`` (2), ``flips`` (4), ``heads`` the probability (0.5).
    """

    def __init__(self, task: Task) -> None:
        self.coins = tuple(f"coin{i}" for i in range(int(task.metadata.get("coins", 2))))
        self.flips = int(task.metadata.get("flips", 4))
        self.heads = float(task.metadata.get("heads", 0.5))
        self.counts = dict.fromkeys(self.coins, 0)
        self.noise = Noise(task.seed)

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def reset(self) -> Step:
        return Step("choose a coin", actions=self.coins)

    def step(self, action: str) -> Step:
        if action not in self.counts:
            return Step("no such coin", actions=self.coins)
        n = self.counts[action]
        self.counts[action] += 1
        heads = self.noise.happens(self.heads, "flip", action, n)
        done = sum(self.counts.values()) >= self.flips
        return Step("heads" if heads else "tails", float(heads), done=done, actions=() if done else self.coins)

    def close(self) -> None: ...


_SEEN: list[str] = []


class ProbeWorld:
    """A world that does on request what real ones do by accident. The conformance suite is made of these requests.

    State: ``add x`` (list and dict), ``next`` (a generator), ``call`` (a closure), ``global x`` (a module's list).
    Luck: ``random``, ``numpy`` (the global generators), ``event k`` (keyed), ``luck`` (the seeds held).
    Faults: ``raise``, ``nan``, ``none``, ``print``, ``exit``, ``kill``, ``hang``. ``end`` ends the episode;
    anything else is echoed, shortened. Without ``task.metadata["live"]`` it has no generator or closure, so it can be
    copied by deepcopy.
    """

    def __init__(self, task: Task) -> None:
        self.items: list[str] = []
        self.counts: dict[str, int] = {}
        self.noise = Noise(task.seed)
        live = task.metadata.get("live", False)
        self.generator: Iterator[int] | None = (n * n for n in range(10**9)) if live else None
        self.closure: Any = _counter() if live else None

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def reset(self) -> Step:
        return Step("ready")

    def step(self, action: str) -> Step:
        word, _, rest = action.partition(" ")
        if word == "end":
            return Step("ended", 1.0, done=True)
        if word in ("raise", "nan", "none", "print", "exit", "kill", "hang"):
            return _fault(word)
        return Step(str(self._answer(word, rest)))

    def _answer(self, word: str, rest: str) -> Any:
        if word == "add":
            self.items.append(rest)
            self.counts[rest] = self.counts.get(rest, 0) + 1
            return f"{self.items} {self.counts}"
        if word == "next":
            return next(self.generator) if self.generator else None
        if word == "call":
            return self.closure() if self.closure else None
        if word == "global":
            _SEEN.append(rest)
            return _SEEN
        if word == "random":
            return random.random()
        if word == "numpy":
            return np.random.random()
        if word == "event":
            return self.noise.at("event", rest).random()
        if word == "luck":
            return self.noise
        return f"{len(word) + len(rest)}:{(word + rest)[:20]}"

    def close(self) -> None: ...


def _counter() -> Any:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


def _fault(word: str) -> Any:
    if word == "raise":
        raise ValueError("raised on request")
    if word == "exit":
        os._exit(3)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        time.sleep(3600)
    if word == "print":
        print("noise on stdout", flush=True)
        return Step("printed")
    return Step("unscored", float("nan")) if word == "nan" else None


class FakePolicy:
    """A policy over a tiny vocabulary of words whose probabilities are known exactly.

    The logits of the next token are drawn once and for all from a hash of ``seed`` and the last ``order`` tokens, so
    any context can be scored by hand with :meth:`logits`. Token 0 ends an action; words are joined by spaces; a word of
    an observation that is not in the vocabulary is shown as some token of it.

    Args:
        words: the vocabulary after the end token; default: the actions of the shipped worlds.
        restrict: sample only actions that the step lists.
        temperature: of sampling; ``raw_logprobs`` stay those at temperature 1.
    """

    def __init__(
        self,
        words: Sequence[str] = ("up", "down", "stop", "coin0", "coin1"),
        *,
        seed: int = 0,
        order: int = 3,
        restrict: bool = False,
        temperature: float = 1.0,
        context: int = 100_000,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        self.vocabulary = ("<end>", *words)
        self.seed = seed
        self.order = order
        self.restrict = restrict
        self.temperature = temperature
        self.context = context
        self._ids = {word: i for i, word in enumerate(self.vocabulary)}
        self._logits: dict[tuple[int, ...], Array] = {}

    def open(self) -> FakeSession:
        return FakeSession(self, [])

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The words of the step, the task's prompt before the first; an end token goes before later ones."""
        texts = [*(m.content for m in task.prompt), step.observation] if first else [step.observation]
        tokens = [self.token(word) for text in texts for word in text.split()]
        return np.array(tokens if first else [0, *tokens], np.int32)

    def token(self, word: str) -> int:
        return self._ids.get(word, 1 + digest(0, "word", word) % (len(self.vocabulary) - 1))

    def encode(self, action: str) -> tuple[int, ...]:
        """The tokens of an action, end included. Raises PolicyFailure for a word outside the vocabulary."""
        words = action.split()
        missing = [w for w in words if w not in self._ids]
        if missing:
            raise PolicyFailure(f"FakePolicy cannot say {missing[0]!r}; give it words={sorted(set(words))}")
        return (*(self._ids[w] for w in words), 0)

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(self.vocabulary[t] for t in tokens if t != 0)

    def logits(self, context: Sequence[int]) -> Array:
        """[V] the logits after a context, float64."""
        key = tuple(int(t) for t in context[-self.order :])
        if key not in self._logits:
            generator = np.random.Generator(np.random.Philox(key=digest(self.seed, "logits", *key)))
            self._logits[key] = generator.normal(size=len(self.vocabulary))
        return self._logits[key]

    def close(self) -> None: ...


class FakeSession:
    """A growing context of a :class:`FakePolicy`."""

    def __init__(self, policy: FakePolicy, tokens: list[int]) -> None:
        self.policy = policy
        self.tokens = tokens
        self.length = len(tokens)

    async def act(
        self,
        observation: Ints,
        step: Step,
        noise: Noise,
        max_tokens: int,
        prefix: Ints | None = None,
        begun: Begun | None = None,
    ) -> Action:
        """Samples an action token by token; token i of the action is drawn by ``noise.private("token", i)``."""
        policy = self.policy
        said = [] if prefix is None else [int(t) for t in prefix]
        given = len(said)
        if self.length + len(observation) >= policy.context:
            raise PolicyFailure(f"the context of {policy.context} tokens is full")
        for token in observation:
            self._append(int(token))
        rows: list[tuple[float, float, float]] = []
        allowed: list[Ints | None] = []
        choices = [policy.encode(a) for a in step.actions] if policy.restrict else []
        while len(said) < max_tokens and not (said and said[-1] == 0) and self.length < policy.context:
            ids = _continuations(choices, said) if choices else None
            token, row = _draw(policy, self.tokens, ids, noise.private("token", len(said)).random())
            if begun is not None and not rows:
                begun(row[2])
            said.append(token)
            self._append(token)
            rows.append(row)
            allowed.append(ids)
        columns = np.array(rows, np.float32).reshape(-1, 3)
        return Action(
            np.array(said[given:], np.int32),
            columns[:, 0],
            columns[:, 1],
            columns[:, 2],
            policy.text(said),
            bool(said) and said[-1] == 0,
            tuple(allowed) if choices else None,
        )

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.length += 1

    def fork(self, length: int) -> FakeSession:
        if not 0 <= length <= self.length:
            raise ValueError(f"fork at token {length} of a context of {self.length}")
        return FakeSession(self.policy, self.tokens[:length])

    def close(self) -> None: ...


def _continuations(choices: list[tuple[int, ...]], said: list[int]) -> Ints:
    """The tokens that go on towards one of the listed actions."""
    n = len(said)
    after = sorted({c[n] for c in choices if len(c) > n and list(c[:n]) == said})
    if not after:
        raise PolicyFailure("the prefix leads to none of the step's actions")
    return np.array(after, np.int32)


def _draw(
    policy: FakePolicy, context: list[int], ids: Ints | None, uniform: float
) -> tuple[int, tuple[float, float, float]]:
    """A token by inversion, with its log-probability, raw log-probability and the entropy of the distribution."""
    logits = policy.logits(context)
    raw = logits - np.log(np.sum(np.exp(logits)))
    tokens = np.arange(len(logits)) if ids is None else ids
    cut = logits[tokens] / policy.temperature
    logp = cut - np.log(np.sum(np.exp(cut)))
    p = np.exp(logp)
    i = min(int(np.searchsorted(np.cumsum(p), uniform, side="right")), len(p) - 1)
    return int(tokens[i]), (float(logp[i]), float(raw[tokens[i]]), float(-np.sum(p * logp)))
