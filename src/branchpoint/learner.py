"""The model and its optimiser: log-probabilities, gradients and steps on packed rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from branchpoint import kernel as kernels
from branchpoint import loss as losses
from branchpoint.credit import Targets
from branchpoint.critic import Critic, regression
from branchpoint.kernel import Kernel
from branchpoint.meter import StepMetrics, Sums, average, changed
from branchpoint.pack import PackedBatch


class LearnerConfig(BaseModel):
    """The optimiser and the objective. The defaults suit a small model; lower ``lr`` for large ones.

    ``kl_without_signal``: whether a tree whose rollouts all scored alike still gets the gradient of the KL penalty.
    True is what the penalised objective says; False trains on nothing but trees with a signal.
    ``vocabulary``: the number of ids that exist, when the model's embedding is padded beyond them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(default=3e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices only")
    warmup_steps: int = Field(
        default=0, ge=0, description="updates until the full learning rate; linear, constant after"
    )
    max_grad_norm: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, ge=1, description="passes over the same rows, one update each")
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)
    kl: float = Field(default=0.0, ge=0, description="coefficient of the penalty towards the frozen reference")
    kl_without_signal: bool = True
    temperature: float = Field(default=1.0, gt=0, description="that of the sampler")
    vocabulary: int | None = Field(default=None, ge=1)
    token_budget: int = Field(default=8192, ge=1, description="tokens of a packed row")
    kernel: Kernel = "segments"
    gradient_checkpointing: bool = False
    bf16: bool = Field(default=False, description="the learner autocasts to bfloat16; the sampler does not")


Where = npt.NDArray[np.int64]
"""[m] indices of tokens in a row."""


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """The weighed tokens of a row as tensors on the model's device: [m] each."""

    where: Where  # indices in the row
    logprobs: Tensor
    entropy: Tensor  # without gradient
    values: Tensor | None  # of the critic, if there is one


class Learner:
    """A causal language model that learns from packed rows.

    ``model``: a transformers causal language model, or peft's wrapper of one; only parameters that require a gradient
    are trained. ``reference``: what the KL penalty pulls towards; by default the adapter switched off for a peft model,
    a frozen copy of the model as it is now otherwise, and nothing while ``config.kl`` is 0. Dropout is off while
    learning, because the sampler has none and importance ratios would be noise. ``critic``: learns beside the policy,
    with the same optimiser, from the targets given to :meth:`step`.

    Raises UnsupportedModel when the chosen kernel cannot reproduce the model's attention.
    """

    def __init__(
        self, model: nn.Module, config: LearnerConfig, reference: nn.Module | None = None, critic: Critic | None = None
    ) -> None:
        self.config, self.model, self.critic = config, cast(Any, model), critic
        self._base: Any = _unwrapped(model)
        self.device = next(model.parameters()).device
        with self._evaluating(self._base):
            kernels.check_model(self._base, config.kernel)
        self.reference = reference
        if config.kl > 0 and reference is None and self._base is model:
            self.reference = copy.deepcopy(model)
        if self.reference is not None:
            self.reference.requires_grad_(False)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient; nothing can be trained")
        self.parameters += [] if critic is None else list(critic.parameters())
        self.optimizer = self._adamw()
        self.updates = 0

    # --- the five things a loop calls ---------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, everywhere: bool = False) -> Tensor:
        """[T] the log-probability of every sampled token under the sampling distribution, 0 elsewhere (float32, or
        float64 for a float64 model). ``everywhere``: of every token that has a predictor, observations too."""
        where = np.flatnonzero((batch.predictor >= 0) & (batch.sampled | everywhere))
        with self._running(self._base):
            scored = self._score(self._base, batch, where)
        out = scored.logprobs.new_zeros(len(batch))
        out[torch.tensor(where, device=self.device)] = scored.logprobs
        return out

    @torch.no_grad()
    def values(self, batches: Sequence[PackedBatch]) -> list[npt.NDArray[np.float64]]:
        """Of every row, [T] the critic's value of the state before each sampled token, 0 elsewhere.

        Raises ValueError without a critic."""
        if self.critic is None:
            raise ValueError("this learner has no critic; give it one, or an estimator that needs none")
        out = []
        with self._running(self._base):
            for batch in batches:
                where = np.flatnonzero((batch.predictor >= 0) & batch.sampled)
                row = np.zeros(len(batch))
                row[where] = self.critic(self._hidden(self._base, batch, where)).double().cpu().numpy()
                out.append(row)
        return out

    def gradient(
        self, batches: Sequence[PackedBatch], normaliser: float, targets: Targets | None = None
    ) -> StepMetrics:
        """Leave in ``.grad`` the gradient of the loss of all rows; no update, no clipping of the norm.

        The loss is ``(surrogate + kl * sum(share * k3) + critic) / normaliser``; ``targets``: what the critic learns,
        over the tokens of the trees that were packed, concatenated. ``normaliser`` is a constant of the design, so
        neither the split into rows nor their order changes the gradient.
        """
        self._check(normaliser)
        return self._pass(batches, normaliser, self._reference_logprobs(batches), targets)[0]

    def step(self, batches: Sequence[PackedBatch], normaliser: float, targets: Targets | None = None) -> StepMetrics:
        """``config.epochs`` updates on the same rows, each with the gradient of :meth:`gradient`, its norm clipped.

        An update is skipped, and counted, when nothing weighs in any row or when the gradient is not finite; weights
        and optimiser state are then as before.
        """
        self._check(normaliser)
        reference = self._reference_logprobs(batches)
        history: list[StepMetrics] = []
        for _ in range(self.config.epochs):
            metrics, informed = self._pass(batches, normaliser, reference, targets)
            outcome = self._update(metrics.grad_norm) if informed else {"empty": 1}
            history.append(changed(metrics, **outcome))
            if not informed:
                break
        self.optimizer.zero_grad(set_to_none=True)
        return average(history)

    # --- exact resume -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Optimiser moments, the schedule's place and the critic. The weights are the model's own ``state_dict``."""
        critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates} | critic

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where :meth:`state_dict` was taken (the model's weights loaded by the caller).

        Raises ValueError for the state of a learner with a critic where this has none, or the reverse."""
        if ("critic" in state) != (self.critic is not None):
            raise ValueError(f"the state {'has' if 'critic' in state else 'lacks'} a critic, unlike this estimator")
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pass(
        self,
        batches: Sequence[PackedBatch],
        normaliser: float,
        reference: list[Tensor | None],
        targets: Targets | None,
    ) -> tuple[StepMetrics, bool]:
        """One forward and backward over all rows; whether there was anything to learn."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        informed = False
        with self._running(self._base):
            for batch, ref in zip(batches, reference, strict=True):
                where = np.flatnonzero(batch.weighed)
                if len(where) == 0:
                    continue
                learns = self._learns(batch) or targets is not None
                informed |= learns
                with nullcontext() if learns else torch.no_grad():
                    scored = self._score(self._base, batch, where)
                    loss = self._loss(batch, scored, ref, normaliser, sums)
                    loss = loss + self._value_loss(batch, scored, targets, normaliser, sums)
                if learns:
                    loss.backward()
        return sums.metrics(self._norm(), self._rate(), sum(map(len, batches))), informed

    def _learns(self, batch: PackedBatch) -> bool:
        return bool(np.any(batch.up) or np.any(batch.down) or (self.config.kl > 0 and np.any(self._kl_weight(batch))))

    def _kl_weight(self, batch: PackedBatch) -> npt.NDArray[np.float64]:
        return batch.share if self.config.kl_without_signal else batch.share * batch.informative

    def _loss(
        self, batch: PackedBatch, scored: _Scored, reference: Tensor | None, normaliser: float, sums: Sums
    ) -> Tensor:
        c, new, where = self.config, scored.logprobs, scored.where
        old, up, down, share = (
            self._tensor(x[where], new) for x in (batch.old_logprobs, batch.up, batch.down, batch.share)
        )
        policy = losses.clipped_surrogate(new, old, up, down, c.clip_low, c.clip_high) / normaliser
        penalty = new.new_zeros(())
        with torch.no_grad():
            sums.share += float(share.sum())
            sums.policy_loss += float(policy)
            sums.policy_entropy += float((share * scored.entropy).sum())
            sums.ratio += float((share * torch.exp(new - old)).sum())
            sums.clip_share += float((share * losses.clipped(new, old, up, down, c.clip_low, c.clip_high)).sum())
            sums.drift = max(sums.drift, float((new - old).abs().max()))
        if reference is not None:
            k3 = losses.k3(new, reference)
            penalty = c.kl * (self._tensor(self._kl_weight(batch)[where], new) * k3).sum() / normaliser
            sums.kl += float((share * k3.detach()).sum())
        sums.loss += float((policy + penalty).detach())
        return policy + penalty

    def _value_loss(
        self, batch: PackedBatch, scored: _Scored, targets: Targets | None, normaliser: float, sums: Sums
    ) -> Tensor:
        """The critic's part of the loss of a row."""
        if self.critic is None or targets is None or scored.values is None:
            return scored.logprobs.new_zeros(())
        at = batch.source[scored.where]
        value, weight = (self._tensor(x[at], scored.values) for x in (targets.value, targets.weight))
        loss = regression(scored.values, value, weight) / normaliser
        sums.value_loss += float(loss.detach())
        sums.loss += self.critic.coefficient * float(loss.detach())
        return self.critic.coefficient * loss

    def _hidden(self, model: Any, batch: PackedBatch, where: Where) -> Tensor:
        """[m, H] the hidden states that predict the tokens ``where``."""
        hidden = kernels.hidden_states(model, batch, self.config.kernel)
        return hidden[torch.tensor(batch.predictor[where], device=self.device)]

    def _score(self, model: Any, batch: PackedBatch, where: Where) -> _Scored:
        """Log-probabilities of the tokens ``where``; the logits of no other token are ever computed."""
        c = self.config
        hidden = self._hidden(model, batch, where)
        logprobs, entropy = losses.read(
            kernels.head(model),
            hidden,
            torch.tensor(batch.tokens[where], device=self.device),
            c.temperature,
            batch.allowed_sets(where),
            c.vocabulary,
        )
        values = self.critic(hidden) if self.critic is not None and model is self._base else None
        return _Scored(where, logprobs, entropy, values)

    @torch.no_grad()
    def _reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        """[m] a row at its weighed tokens, under the reference; None for each row when there is no penalty."""
        if self.config.kl == 0:
            return [None] * len(batches)
        model: Any = self._base if self.reference is None else _unwrapped(self.reference)
        off = self.model.disable_adapter() if self.reference is None else nullcontext()
        with off, self._running(model):
            return [self._score(model, batch, np.flatnonzero(batch.weighed)).logprobs for batch in batches]

    def _update(self, norm: float) -> dict[str, int]:
        """Clip the norm and step; or, when the gradient is not finite, leave everything as it is."""
        if not math.isfinite(norm):
            return {"nonfinite": 1}
        if norm > self.config.max_grad_norm:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.mul_(self.config.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate() if group["own_lr"] is None else group["own_lr"] * self._warm()
        self.optimizer.step()
        self.updates += 1
        return {"updates": 1}

    def _rate(self) -> float:
        """The learning rate of the next update."""
        return self.config.lr * self._warm()

    def _warm(self) -> float:
        return min(1.0, (self.updates + 1) / max(1, self.config.warmup_steps))

    def _norm(self) -> float:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return (
            float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))) if grads else 0.0
        )

    def _adamw(self) -> torch.optim.AdamW:
        heads = [] if self.critic is None else list(self.critic.parameters())
        own = [p for p in self.parameters if not any(p is h for h in heads)]
        decayed, others = [p for p in own if p.ndim >= 2], [p for p in own if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay, "own_lr": None},
            {"params": others, "weight_decay": 0.0, "own_lr": None},
            {"params": heads, "weight_decay": 0.0, "own_lr": self.critic.lr if self.critic else None},
        ]
        used = [g for g in groups if g["params"]]
        return torch.optim.AdamW(used, lr=self.config.lr, betas=self.config.betas)

    @contextmanager
    def _running(self, model: Any) -> Iterator[None]:
        """Everything that a forward and its backward need: kernel, precision, checkpointing, no dropout."""
        precision = torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else nullcontext()
        with self._evaluating(model), kernels.attached(model, self.config.kernel), precision:
            yield

    @contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """Evaluation mode (no dropout), and gradient checkpointing where asked for; all as before afterwards."""
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        on = self.config.gradient_checkpointing and torch.is_grad_enabled()
        layers = [(m, m.gradient_checkpointing) for m in model.modules() if on and hasattr(m, "gradient_checkpointing")]
        try:
            for layer, _ in layers:  # a layer checkpoints only in training mode; its parts stay in evaluation mode
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
                layer.gradient_checkpointing = layer.training = True
            yield
        finally:
            for layer, before in layers:
                layer.gradient_checkpointing = before
            for m, mode in modes:
                m.training = mode

    def _tensor(self, values: npt.NDArray[Any], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def _check(self, normaliser: float) -> None:
        if not (math.isfinite(normaliser) and normaliser > 0):
            raise ValueError(
                f"normaliser is {normaliser}; give a positive constant of the design, e.g. rollouts x length"
            )


def _unwrapped(model: nn.Module) -> Any:
    """The transformers model inside a peft wrapper, adapters in place; the model itself otherwise."""
    settings: Any = getattr(model, "peft_config", None)
    if not hasattr(model, "get_base_model") or settings is None:
        return model
    if any(getattr(s, "is_prompt_learning", False) for s in settings.values()):
        raise ValueError("prompt tuning adds tokens that a packed row has no place for; use LoRA or another adapter")
    return model.get_base_model()  # pyright: ignore
