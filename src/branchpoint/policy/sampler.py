"""The sampling engine: continuous batching over all live sessions, on the learner's own module.

An engine step feeds every waiting session its new tokens, all in one row, and draws a token for those that have none
left to feed. Where a restriction leaves one id, nothing is drawn: a run of such tokens is appended at once and fed
together, so that it costs one step. A session whose environment is slow is simply not in the row; one that comes back
joins at the next step.
The engine is an asyncio task that exists only while something waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from branchpoint.policy import kvcache
from branchpoint.policy.draw import Drawn, draw
from branchpoint.policy.lean import lean
from branchpoint.policy.models import require
from branchpoint.tree import Array, Ints
from branchpoint.world import PolicyFailure


class Restriction(Protocol):
    """The state of a restricted action: which ids may come next."""

    def allowed(self) -> Ints:
        """Sorted ids, at least one."""
        ...

    def advance(self, token: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot of the store and how many contexts read it. ``spoilt``: it may hold values that are not finite."""

    index: int
    users: int = 1
    spoilt: bool = False


@dataclass(slots=True, eq=False)
class Context:
    """The tokens of a session and the rows of keys and values that are computed for them.

    A forked context reads the rows of those it came from (``shared``: slot and number of rows) and writes what follows
    to a slot of its own, which it takes when it first writes.
    """

    store: kvcache.KVStore
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    shared: tuple[tuple[_Slot, int], ...] = ()
    slot: _Slot | None = None

    def fork(self, length: int) -> Context:
        """A context that shares the first ``length`` tokens.

        Its last token counts as not computed, whatever the parent has done since: so the row of an action's last token
        is always computed together with the observation that follows, and results do not depend on timing.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"fork at token {length} of a session of {len(self.tokens)}")
        known = max(0, length - 1)
        if known > self.cached:
            raise ValueError(f"fork at token {length}, but the engine has read only {self.cached} tokens so far")
        shared, left = [], known
        own = () if self.slot is None else ((self.slot, known),)
        for slot, rows in (*self.shared, *own):
            if left:
                shared.append((slot, min(rows, left)))
                slot.users += 1
                left -= shared[-1][1]
        return Context(self.store, self.tokens[:length], known, tuple(shared))

    def chunk(self, length: int) -> kvcache.Chunk:
        """The next ``length`` tokens to compute; there is room for them."""
        slot = self.slot or self._take()
        return kvcache.Chunk(slot.index, self.cached, length, tuple((s.index, n) for s, n in self.shared))

    def _take(self) -> _Slot:
        """A slot to write to. Copies what is not worth, or not good, to be read elsewhere (see kvcache)."""
        self.slot = own = _Slot(self.store.take())
        few = len(self.shared)
        while few and (few > kvcache.PARTS or self.shared[few - 1][1] < kvcache.SHARE):
            few -= 1
        row, copied = 0, self.shared[few:]
        self.store.reserve(sum(n for _, n in copied))
        for slot, rows in copied:
            self.store.copy(slot.index, own.index, rows, row)
            row += rows
            self._leave(slot)
        self.shared = self.shared[:few]
        return own

    def spoil(self) -> None:
        """Says that what was computed is not finite."""
        if self.slot is not None:
            self.slot.spoilt = True

    def release(self) -> None:
        """Gives the rows back; a second call does nothing."""
        for slot in (*(s for s, _ in self.shared), *([self.slot] if self.slot else [])):
            self._leave(slot)
        self.shared, self.slot = (), None

    def _leave(self, slot: _Slot) -> None:
        slot.users -= 1
        if slot.users == 0:
            self.store.give(slot.index, slot.spoilt)


@dataclass(slots=True, eq=False)
class Request:
    """An action being sampled. ``limit`` new tokens at most, one uniform each.

    ``begun`` is told the entropy of the first token once the context before it has been read.
    ``open``: the ids that may come next, None for all. ``over``: the last token is there; the request is done when
    ``raw_logprobs``, which needs the model, has caught up with ``tokens``.
    """

    context: Context
    uniforms: Array
    limit: int
    done: asyncio.Future[None]
    restriction: Restriction | None = None
    ended: Callable[[list[int]], bool] | None = None
    begun: Callable[[float], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    allowed: list[Ints | None] = field(default_factory=list)
    stopped: bool = False
    open: Ints | None = None
    over: bool = False

    def append(self, token: int, logprob: float, entropy: float, kept: Ints | None, stops: frozenset[int]) -> None:
        """One more token, drawn or forced. Raises what the codec or the restriction raises."""
        self.context.tokens.append(token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.allowed.append(kept)
        self.stopped = token in stops or (self.ended is not None and self.ended(self.tokens))
        self.over = self.stopped or len(self.tokens) == self.limit
        if self.restriction is not None and not self.over:
            self.restriction.advance(token)

    def force(self, stops: frozenset[int]) -> None:
        """Appends tokens while there is no choice. Raises what the codec or the restriction raises."""
        while self.restriction is not None and not self.over:
            self.open = self.restriction.allowed()
            if len(self.open) != 1:
                return
            self.append(int(self.open[0]), 0.0, 0.0, self.open, stops)


_Due = tuple[Request, int]
"""A request and the index in its action of a token that the model has been read for: drawn next, or forced before."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How tokens are drawn: see :func:`branchpoint.policy.draw.draw`. Ids from ``vocabulary`` on are never drawn."""

    stop_ids: frozenset[int]
    vocabulary: int
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """The model in eval mode with the sampler's attention; as it was before afterwards."""
    config, before, training = model.config, model.config._attn_implementation, model.training
    if training:
        model.eval()
    config._attn_implementation = kvcache.NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        if training:
            model.train()


class Engine:
    """Runs requests. ``chunk``: tokens of one session in a step; ``budget``: tokens of all long chunks in a step.

    Bounds neither who joins nor when, and changes no result: chunks start where the session's own history says.
    """

    def __init__(self, model: Any, rule: Rule, chunk: int = 256, budget: int = 2048) -> None:
        require("transformers").AttentionInterface.register(kvcache.NAME, kvcache.attend)
        self.model, self.rule, self.chunk, self.budget = model, rule, chunk, budget
        self.store = kvcache.KVStore(model.device, model.dtype)
        self.lean = lean(model)
        self.steps = 0
        self._waiting: list[Request] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self, request: Request) -> None:
        """Samples the whole action. Raises PolicyFailure when the engine cannot."""
        if self._closed:
            raise PolicyFailure("the policy is closed")
        self._advance(request)
        self._waiting.append(request)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._pump())
        await request.done

    def close(self) -> None:
        """Fails what is still running and frees the memory of the store."""
        self._closed = True
        for request in self._waiting:
            self._fail(request, "the policy was closed while it sampled")
        self._waiting = []
        self.store.layers.clear()

    async def _pump(self) -> None:
        await asyncio.sleep(0)  # those who were woken together come back together
        while self._waiting:
            self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """One forward pass over everything that waits. Never raises: failures go to the requests they concern."""
        self._waiting = [r for r in self._waiting if not r.done.done()]
        if not self._waiting:
            return
        self.steps += 1
        try:
            with torch.inference_mode():
                due, logits = self._ready(*self._forward(self._batch()))
                if due:
                    self._emit(due, self._draw(due, logits))
        except Exception as error:  # no request is to blame more than another; the next ones may well succeed
            for request in self._waiting:
                self._fail(request, f"the model failed: {type(error).__name__}: {error}", error)

    def _batch(self) -> list[tuple[kvcache.Chunk, Request]]:
        """The chunks of this step in the order of the plan. The first long chunk always fits."""
        batch: list[tuple[kvcache.Chunk, Request]] = []
        spent = 0
        for request in self._waiting:
            context = request.context
            n = min(self.chunk, len(context.tokens) - context.cached - request.over)  # nothing follows the last token
            if n > 1:
                if spent and spent + n > self.budget:
                    continue
                spent += n
            chunk = context.chunk(n)
            self.store.reserve(chunk.row + n)
            batch += [(c, request) for c in kvcache.cut(chunk)]
        batch.sort(key=lambda item: kvcache.order(item[0]))
        return batch

    def _forward(self, batch: Sequence[tuple[kvcache.Chunk, Request]]) -> tuple[list[_Due], torch.Tensor]:
        """Feeds the batch; returns the tokens that the model now has its say on, and their logits [n, V]."""
        tokens: list[int] = []
        due: list[_Due] = []
        rows: list[int] = []
        for c, request in batch:
            known = request.context.tokens
            action = len(known) - len(request.tokens)
            for at in range(max(c.start, action + len(request.raw_logprobs) - 1), c.start + c.length):
                due.append((request, at + 1 - action))
                rows.append(len(tokens) + at - c.start)
            tokens += known[c.start : c.start + c.length]
        plan = kvcache.plan(self.store, [c for c, _ in batch])
        real, device = len(tokens), self.store.device
        padding = max(0, kvcache.MIN_ROWS - real)
        positions = torch.nn.functional.pad(plan.positions, (0, padding))
        keep = rows + rows[:1] * (kvcache.MIN_ROWS - len(rows)) if rows else [0]
        row = torch.tensor(tokens + [0] * padding, device=device)
        logits = self._logits(row, positions, torch.tensor(keep, device=device), plan)
        logits = logits[: len(rows), : self.rule.vocabulary]
        for c, request in batch:
            request.context.cached += c.length
        return due, logits

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, plan: kvcache.Plan
    ) -> torch.Tensor:
        """[k, V] after the rows ``keep`` of the T tokens."""
        with switched(self.model):
            if self.lean is not None and self.lean.usable:
                return self.lean.logits(tokens, positions, keep, plan)
            return self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                kv_plan=plan,
            ).logits[0]

    def _ready(self, due: list[_Due], logits: torch.Tensor) -> tuple[list[_Due], torch.Tensor]:
        """What is due to requests that go on; those without finite logits fail alone."""
        finite = torch.isfinite(logits.amax(-1)).tolist()
        for (request, _), good in zip(due, finite, strict=True):
            if not good:
                request.context.spoil()
                self._fail(request, "the model's logits are not finite: its weights may have diverged")
        rows = [i for i, (request, _) in enumerate(due) if not request.done.done()]
        return [due[i] for i in rows], logits if len(rows) == len(due) else logits[rows]

    def _draw(self, due: list[_Due], logits: torch.Tensor) -> Drawn:
        """A draw where a token is missing; where one was forced, the same of its set of one."""
        uniforms = np.array([r.uniforms[k] for r, k in due])
        allowed = [r.allowed[k] if k < len(r.tokens) else r.open for r, k in due]
        rule = self.rule
        return draw(logits, uniforms, allowed, rule.temperature, rule.top_p, rule.greedy)

    def _emit(self, due: list[_Due], drawn: Drawn) -> None:
        """Appends the drawn tokens, and ends the requests that are through."""
        for i, (request, k) in enumerate(due):
            if k == 0:
                self._begin(request, drawn.entropies[i])
            request.raw_logprobs.append(drawn.raw_logprobs[i])
            if k == len(request.tokens):
                self._advance(request, drawn, i)
            if request.over and len(request.raw_logprobs) == len(request.tokens) and not request.done.done():
                request.done.set_result(None)

    def _begin(self, request: Request, entropy: float) -> None:
        try:  # of its owner, who fails alone
            if request.begun is not None:
                request.begun(entropy)
        except Exception as error:
            self._fail(request, f"{type(error).__name__}: {error}", error)

    def _advance(self, request: Request, drawn: Drawn | None = None, i: int = 0) -> None:
        """The drawn token, if any, and those that follow without a choice."""
        stops = self.rule.stop_ids
        try:  # a codec and a grammar are user code: they fail their own session only
            if drawn is not None:
                request.append(drawn.tokens[i], drawn.logprobs[i], drawn.entropies[i], drawn.kept[i], stops)
            request.force(stops)
        except Exception as error:
            self._fail(request, f"{type(error).__name__}: {error}", error)

    @staticmethod
    def _fail(request: Request, message: str, cause: BaseException | None = None) -> None:
        if not request.done.done():
            failure = PolicyFailure(message)
            failure.__cause__ = cause
            request.done.set_exception(failure)
