"""Warm start: supervised learning on an expert's transcripts, as the policy would have seen and said them.

A transcript becomes one row of tokens through the same codec that the policy uses. Tokens of actions weigh 1, tokens of
observations less (predicting what the world says teaches the small model its words). Where a step lists its admissible
actions, an action's log-likelihood may be taken over the tokens that these allow, the distribution that a restricted
policy samples from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from branchpoint.loss import distribution, token_logprobs
from branchpoint.noise import Noise
from branchpoint.policy.chat import Codec
from branchpoint.policy.restrict import Actions
from branchpoint.tree import Ints
from branchpoint.world import Step, Task, Transcript

if TYPE_CHECKING:
    from branchpoint.config import WarmStart

Report = Callable[[Mapping[str, float]], None]


class TranscriptError(ValueError):
    """A transcript that cannot be imitated; the message names the task and the turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One transcript as tokens. ``allowed``: for an index, the ids that the expert's token was one of."""

    tokens: Ints  # [T]
    action: np.ndarray  # [T] bool, said by the expert (stop tokens included)
    allowed: Mapping[int, Ints]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """What held-out rows say of a model. Nats a token; ``turns`` is the share of turns in which the model's most likely
    token is the expert's all the way (among the allowed ones where these are known)."""

    action: float
    observation: float
    turns: float
    tokens: int


def texts(transcripts: Iterable[Transcript]) -> Iterator[str]:
    """Every text of the transcripts, the actions that were not taken included: what a tokenizer is trained on."""
    for task, turns in transcripts:
        yield from (m.content for m in task.prompt if m.role != "system")
        for step, action in turns:
            yield from (step.observation, action, *step.actions)


def to_rows(codec: Codec, transcripts: Iterable[Transcript], restrict: bool = True) -> list[Row]:
    """One row a transcript. ``restrict``: note the allowed tokens where a step lists its actions.

    With ``restrict`` a transcript ends before the first action that its step does not list: a restricted policy could
    never have gone that way.

    Raises:
        TranscriptError: an empty transcript, a first action that its step does not list, or a codec without a stop
            token.
    """
    if not codec.stop_ids:
        raise TranscriptError("the codec ends actions with strings only; imitation needs one with a stop token")
    menus = Actions(codec.encode, codec.stop_ids[0]) if restrict else None
    return [_row(codec, task, turns, menus) for task, turns in transcripts]


def imitate(
    model: Any,
    rows: Sequence[Row],
    vocabulary: int,
    settings: WarmStart,
    *,
    seed: int = 0,
    report: Report | None = None,
) -> float:
    """Trains the model in place; returns the mean loss of the last epoch.

    AdamW with a short linear warm-up and a cosine to zero. The order is keyed by ``seed``: equal inputs give equal
    weights. ``report`` gets step, steps, epoch, loss and lr after every batch. ``vocabulary``: the codec's.

    Raises:
        TranscriptError: no rows, or a row longer than the model's context.
        FloatingPointError: the loss is not finite.
    """
    _check(model, rows)
    plans = [_plan(rows, settings.batch_tokens, Noise(seed).at("imitate", e)) for e in range(settings.epochs)]
    steps = sum(map(len, plans))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    step, mean = 0, math.nan
    was_training = model.training
    model.train()
    for epoch, plan in enumerate(plans):
        losses = []
        for members in plan:
            optimiser.param_groups[0]["lr"] = lr = settings.lr * _schedule(step, steps)
            loss = _loss(model, [rows[i] for i in members], vocabulary, settings.observation_weight)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"imitation loss is {losses[-1]} at step {step}: lower warm_start.lr")
            optimiser.step()
            step += 1
            if report is not None:
                report({"step": step, "steps": steps, "epoch": epoch + 1, "loss": losses[-1], "lr": lr})
        mean = float(np.mean(losses))
    model.train(was_training)
    return mean


@torch.no_grad()
def score(model: Any, rows: Sequence[Row], vocabulary: int, batch_tokens: int = 4096) -> Score:
    """The model's likelihood of rows it was not trained on."""
    _check(model, rows)
    nll = {True: 0.0, False: 0.0}
    count = {True: 0, False: 0}
    turns = right = 0
    for members in _fill(sorted(range(len(rows)), key=lambda i: len(rows[i])), rows, batch_tokens):
        batch = [rows[i] for i in members]
        tokens, action, logprobs = _predict(model, batch, vocabulary)
        losses = -token_logprobs(logprobs, tokens)
        best = (logprobs.argmax(-1) == tokens).cpu().numpy()
        for kind in (True, False):
            nll[kind] += float(losses[action == kind].sum())
            count[kind] += int((action == kind).sum())
        edges = np.cumsum([0] + [len(r) - 1 for r in batch])
        for row, lo, hi in zip(batch, edges[:-1], edges[1:], strict=True):
            for said in _spans(row.action[1:]):
                turns += 1
                right += bool(best[lo:hi][said].all())
    return Score(
        action=nll[True] / max(1, count[True]),
        observation=nll[False] / max(1, count[False]),
        turns=right / max(1, turns),
        tokens=count[True] + count[False],
    )


def _row(codec: Codec, task: Task, turns: Sequence[tuple[Step, str]], menus: Actions | None) -> Row:
    if not turns:
        raise TranscriptError(f"transcript of task {task.id!r} holds no action")
    tokens: list[int] = []
    action: list[bool] = []
    allowed: dict[int, Ints] = {}
    for i, (step, text) in enumerate(turns):
        seen = codec.observe(task, step, i == 0).tolist()
        said = [*codec.encode(text).tolist(), codec.stop_ids[0]]
        if menus is not None and step.actions:
            if text not in step.actions and i > 0:
                break
            if text not in step.actions:
                raise TranscriptError(f"task {task.id!r}: the first action {text!r} is not among the step's actions")
            choice = menus.start(step.actions)
            for at, token in enumerate(said, len(tokens) + len(seen)):
                allowed[at] = choice.allowed()
                choice.advance(token)
        tokens += [*seen, *said]
        action += [False] * len(seen) + [True] * len(said)
    return Row(np.array(tokens, np.int32), np.array(action), allowed)


def _check(model: Any, rows: Sequence[Row]) -> None:
    longest = max(map(len, rows), default=0)
    if longest < 2:
        raise TranscriptError("there is nothing to imitate: no transcripts")
    context = getattr(model.config, "max_position_embeddings", None) or longest
    if longest > context:
        raise TranscriptError(f"a transcript has {longest} tokens, the model's context holds {context}: drop or cut it")


def _plan(rows: Sequence[Row], batch_tokens: int, draw: np.random.Generator) -> list[list[int]]:
    """An epoch: rows in random order, those of similar length together within stretches of eight batches."""
    order = draw.permutation(len(rows))
    stretch = max(1, round(8 * batch_tokens / np.mean([len(r) for r in rows])))
    batches: list[list[int]] = []
    for lo in range(0, len(order), stretch):
        part = sorted(order[lo : lo + stretch].tolist(), key=lambda i: len(rows[i]))
        batches += _fill(part, rows, batch_tokens)
    return [batches[i] for i in draw.permutation(len(batches))]


def _fill(order: Sequence[int], rows: Sequence[Row], batch_tokens: int) -> list[list[int]]:
    """Rows in order of length, in batches of at most ``batch_tokens`` with padding (a longer row stands alone)."""
    batches: list[list[int]] = []
    for i in order:
        if not batches or (len(batches[-1]) + 1) * len(rows[i]) > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def _schedule(step: int, steps: int) -> float:
    warm = max(1, steps // 30)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _loss(model: Any, batch: Sequence[Row], vocabulary: int, observation_weight: float) -> Tensor:
    tokens, action, logprobs = _predict(model, batch, vocabulary)
    weight = torch.where(action, 1.0, observation_weight * torch.ones_like(logprobs[:, 0]))
    return -(weight * token_logprobs(logprobs, tokens)).sum() / weight.sum()


def _predict(model: Any, batch: Sequence[Row], vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [n], whether the expert said them [n] and log-probabilities [n, V] of every token that another precedes.

    Rows are padded on the right: causal attention never lets a real token see the padding, which is dropped here.
    """
    width = max(map(len, batch))
    padded = np.zeros((len(batch), width), np.int64)
    real = np.zeros((len(batch), width), bool)
    for b, row in enumerate(batch):
        padded[b, : len(row)], real[b, : len(row)] = row.tokens, True
    device = next(model.parameters()).device
    logits = model(input_ids=torch.from_numpy(padded).to(device), use_cache=False).logits
    keep = torch.from_numpy(real[:, 1:]).to(device)
    tokens = torch.from_numpy(np.concatenate([r.tokens[1:] for r in batch]).astype(np.int64)).to(device)
    action = torch.from_numpy(np.concatenate([r.action[1:] for r in batch])).to(device)
    return tokens, action, distribution(logits[:, :-1][keep], allowed=_pairs(batch, device), vocabulary=vocabulary)


def _pairs(batch: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """(prediction, id) for every allowed id of every restricted token of the batch."""
    places, ids, start = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for row in batch:
        for at, choices in row.allowed.items():
            places.append(np.full(len(choices), start + at - 1))
            ids.append(choices.astype(np.int64))
        start += len(row) - 1
    return torch.from_numpy(np.concatenate(places)).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _spans(action: np.ndarray) -> list[slice]:
    """The stretches of True: the turns of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], action.astype(np.int8), [0]])))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
