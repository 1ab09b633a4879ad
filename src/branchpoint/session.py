"""The policy seam: what growing a tree asks of whatever chooses the actions.

A policy hands out *sessions*: growing token contexts that can be forked at any earlier token (a key/value cache is
shared, not recomputed). Tokens go in, tokens come out; text is made from tokens once, to be played, and is never
encoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from branchpoint.noise import Noise
from branchpoint.tree import Allowed, Floats, Ints
from branchpoint.world import Step, Task


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """What a policy sampled: only the new tokens (after a prefix given by a fork), one entry each in every array.

    ``text`` is the whole action, prefix included. ``stopped`` is False when the token limit cut it.
    """

    tokens: Ints
    logprobs: Floats
    raw_logprobs: Floats
    entropies: Floats
    text: str
    stopped: bool = True
    allowed: Allowed | None = None


Begun = Callable[[float], None]


class Session(Protocol):
    """One growing context: observation, action, observation, ... One owner; ``length`` counts its tokens."""

    @property
    def length(self) -> int: ...

    async def act(
        self,
        observation: Ints,
        step: Step,
        noise: Noise,
        max_tokens: int,
        prefix: Ints | None = None,
        begun: Begun | None = None,
    ) -> Action:
        """Append ``observation``, then sample an action and append it.

        ``step`` is what ``observation`` shows: a restricted policy samples only its ``actions``, or what its
        ``grammar`` matches.
        ``noise.private()`` drives the sampling, so equal keys give equal tokens whatever else is in the batch.
        ``prefix``: the action tokens already in the context, when the session was forked in the middle of an action;
        they count for the restriction, the text and ``max_tokens``.
        ``begun`` is called once, with the entropy (nats) of the first new token, when the observation has been read
        and, if the engine can, before that token is sampled: from then on the session can be forked where the action
        starts.
        Raises PolicyFailure when the engine fails or the context is full before the first token.
        """
        ...

    def fork(self, length: int) -> Session:
        """A session that shares the first ``length`` tokens; both go on independently."""
        ...

    def close(self) -> None: ...


class Policy(Protocol):
    """Sessions, and the words around the tokens."""

    def open(self) -> Session: ...

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The tokens that show a step to the model. ``first``: with the task's prompt; else as the answer to an action,
        starting with whatever the chat format puts after the sampled tokens of the previous action."""
        ...

    def close(self) -> None:
        """Free what the sessions hold; none can act any more. A second call does nothing."""
        ...
