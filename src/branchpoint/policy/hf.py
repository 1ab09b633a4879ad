"""The in-process policy: any causal language model with standard attention, sampled exactly as it is trained.

The weights are the learner's own, so there is nothing to synchronise, and recorded log-probabilities are those of the
very distribution that was sampled. A model's ``generation_config`` is never read: nothing warps the logits but what
:class:`Sampling` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy.chat import Codec
from branchpoint.policy.restrict import Actions, Grammars
from branchpoint.policy.sampler import Context, Engine, Request, Restriction, Rule
from branchpoint.session import Action, Begun
from branchpoint.tree import Ints
from branchpoint.world import PolicyFailure, Step, Task


class HFPolicy:
    """A policy on a transformers causal language model; implements :class:`branchpoint.session.Policy`.

    Args:
        model: an ``AutoModelForCausalLM`` (or peft model) with standard attention. Shared with the learner.
        codec: the words around the tokens; with ``restrict="grammar"`` it must have a ``tokenizer``.
        sampling: how tokens are drawn.
        context: tokens a session can hold; the model's own limit if None.

    Raises ValueError for a codec that does not fit the model, or a model whose attention is not standard.
    """

    def __init__(self, model: Any, codec: Codec, sampling: Sampling | None = None, context: int | None = None) -> None:
        self.codec, self.sampling = codec, sampling or Sampling()
        config = model.config.get_text_config()
        self.context = context or int(config.max_position_embeddings)
        odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if odd:
            raise ValueError(
                f"the in-process sampler needs full attention in every layer; this model has {sorted(odd)}"
            )
        if codec.vocabulary > config.vocab_size or not (codec.stop_ids or codec.stop_strings):
            raise ValueError(
                f"codec: {codec.vocabulary} tokens for a model of {config.vocab_size}, stop_ids {codec.stop_ids}; "
                "it must come from the model's tokenizer and be able to end an action"
            )
        s = self.sampling
        rule = Rule(frozenset(codec.stop_ids), codec.vocabulary, s.temperature, s.top_p, s.greedy)
        self.engine = Engine(model, rule)
        self._restrict = self._restriction()

    def open(self) -> HFSession:
        """A session with an empty context."""
        return HFSession(self, Context(self.engine.store))

    def observe(self, task: Task, step: Step, first: bool) -> Ints:
        """The tokens that show a step, by the codec."""
        return self.codec.observe(task, step, first)

    def close(self) -> None:
        """Fails what still runs and frees the caches. Sessions of a closed policy raise PolicyFailure."""
        self.engine.close()

    def restriction(self, step: Step, prefix: list[int]) -> Restriction | None:
        """The restriction of a step's action after the tokens ``prefix``, or None."""
        if self._restrict is None:
            return None
        try:
            state: Restriction | None = self._restrict(step)
            if state is not None:
                for token in prefix:
                    state.advance(token)
        except ValueError as error:
            raise PolicyFailure(str(error)) from error
        return state

    def _restriction(self) -> Callable[[Step], Any] | None:
        kind = self.sampling.restrict
        if kind == "none":
            return None
        if not self.codec.stop_ids:
            raise ValueError(
                f"sampling.restrict {kind!r} needs a codec with a stop token, this one has stop strings only"
            )
        stop = self.codec.stop_ids[0]
        if kind == "actions":
            actions = Actions(self.codec.encode, stop)
            return lambda step: actions.start(step.actions) if step.actions else None
        grammars = Grammars(getattr(self.codec, "tokenizer", None), stop, self.codec.vocabulary)
        return lambda step: grammars.start(step.grammar) if step.grammar else None


class HFSession:
    """A session of :class:`HFPolicy`; implements :class:`branchpoint.session.Session`."""

    def __init__(self, policy: HFPolicy, context: Context) -> None:
        self._policy, self._context, self._open = policy, context, True

    @property
    def length(self) -> int:
        """The tokens in the context."""
        return len(self._context.tokens)

    async def act(
        self,
        observation: Ints,
        step: Step,
        noise: Noise,
        max_tokens: int,
        prefix: Ints | None = None,
        begun: Begun | None = None,
    ) -> Action:
        """See :meth:`branchpoint.session.Session.act`.

        The draws come from ``noise.private("token", position)``, where position is that of the first new token.
        """
        if not self._open:
            raise PolicyFailure("this session is closed")
        before = [] if prefix is None else [int(i) for i in prefix]
        context, room = self._context, self._policy.context - self.length - len(observation)
        if room < 1:
            raise PolicyFailure(
                f"the context is full before the action: {self.length + len(observation)} tokens, "
                f"and the policy holds {self._policy.context}"
            )
        if max_tokens <= len(before):
            raise ValueError(f"max_tokens is {max_tokens} and the prefix has {len(before)} tokens already")
        if before and [*context.tokens[-len(before) :], *map(int, observation)][-len(before) :] != before:
            raise ValueError("prefix must be the last tokens of the context")
        restriction = self._policy.restriction(step, before)
        context.tokens += map(int, observation)
        if not context.tokens:
            raise PolicyFailure("the observation is empty: the model has nothing to condition on")
        context.cached = min(context.cached, len(context.tokens) - 1)  # the last token's logits are needed
        limit = min(max_tokens - len(before), room)
        request = Request(
            context,
            noise.private("token", len(context.tokens)).random(limit),
            limit,
            asyncio.get_running_loop().create_future(),
            restriction,
            self._ended(before),
            begun,
        )
        try:
            await self._policy.engine.run(request)
        finally:
            request.done.cancel()
        return self._action(request, before)

    def fork(self, length: int) -> HFSession:
        """See :meth:`branchpoint.session.Session.fork`. The new session writes to a slot of its own; what it shares
        is read where it is, except for a few rows that are copied when it first writes."""
        if not self._open:
            raise PolicyFailure("this session is closed")
        return HFSession(self._policy, self._context.fork(length))

    def close(self) -> None:
        """Gives the memory back; a second call does nothing."""
        self._open = False
        self._context.release()

    def _ended(self, before: list[int]) -> Callable[[list[int]], bool] | None:
        """Whether the newest token completes a stop string, which may span tokens (of one byte at least)."""
        codec: Any = self._policy.codec
        strings: tuple[str, ...] = codec.stop_strings
        if not strings:
            return None
        window = 4 * max(map(len, strings))

        def ended(tokens: list[int]) -> bool:
            tail = codec.tokenizer.decode((before + tokens)[-window:], skip_special_tokens=False)
            return any(s in tail for s in strings)

        return ended

    def _action(self, request: Request, before: list[int]) -> Action:
        kept = tuple(request.allowed)
        return Action(
            tokens=np.array(request.tokens, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            raw_logprobs=np.array(request.raw_logprobs, np.float32),
            entropies=np.array(request.entropies, np.float32),
            text=self._policy.codec.text(before + request.tokens),
            stopped=request.stopped,
            allowed=kept if any(k is not None for k in kept) else None,
        )
