"""Exact attention over a packed row of trees, behind one interface: :func:`hidden_states`.

``segments``: key-stationary. A maximal chain of the trees (a run of equal ``subtree_end``) is seen by itself, causally,
and in full by everything below it; depth-first order makes both the chain and what is below it contiguous slices. So
one causal and one rectangular call a chain, each exact in flops, merged by their log-sum-exps: no mask, no gathering.
``flat``: one row a leaf through the model as it is; the oracle, and right for models with state other than attention.
``flex``: FlexAttention with a block mask, CUDA only (torch has no backward for it on a CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from branchpoint.pack import PackedBatch

Kernel = Literal["segments", "flat", "flex"]
_NAME = "branchpoint_segments"
_REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "sinks")


class UnsupportedModel(ValueError):
    """The model attends in a way that the kernel does not reproduce; the message says which kernel does."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens ``[start, stop)`` that follow each other; ``[stop, below)`` is everything that descends from them."""

    start: int
    stop: int
    below: int


def chains(subtree_end: np.ndarray) -> tuple[Chain, ...]:
    """The maximal chains of a row, depth-first, from ``subtree_end`` [T] alone: its runs of equal values."""
    if len(subtree_end) == 0:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(subtree_end)) + 1).tolist(), len(subtree_end)]
    return tuple(Chain(a, b, int(subtree_end[a])) for a, b in pairwise(edges))


def visible(subtree_end: np.ndarray) -> np.ndarray:
    """[T, T] bool, the definition: token i sees token j iff ``j <= i < subtree_end[j]``."""
    i = np.arange(len(subtree_end))
    return (i[None, :] <= i[:, None]) & (i[:, None] < subtree_end[None, :])


def hidden_states(model: nn.Module, batch: PackedBatch, kernel: Kernel) -> Tensor:
    """[T, H] the last hidden state of every token of a row, as if each had been computed on its own path.

    ``model`` is a transformers causal language model without wrapper. Call inside :func:`attached`, and go backward
    inside it too (gradient checkpointing runs the attention again).
    """
    device = next(model.parameters()).device
    if kernel == "flat":
        return _flat(model, batch, device)
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor(batch.tokens, device=device)[None],
        "position_ids": torch.tensor(batch.position, device=device)[None],
        "use_cache": False,
    }
    if kernel == "flex":
        return _decoder(model)(**inputs, attention_mask=_block_mask(batch, device)).last_hidden_state[0]
    return _decoder(model)(**inputs, tree_chains=chains(batch.subtree_end)).last_hidden_state[0]


@contextmanager
def attached(model: nn.Module, kernel: Kernel) -> Iterator[None]:
    """The model computes attention with this kernel inside, and as before afterwards (a sampler may share it)."""
    config: Any = model.config
    before = config._attn_implementation
    wanted = {"segments": _NAME, "flat": before, "flex": "flex_attention"}[kernel]
    if kernel == "segments":
        _register()
    try:
        _switch(model, wanted)
        yield
    finally:
        _switch(model, before)


def check_model(model: nn.Module, kernel: Kernel) -> None:
    """Refuse what a kernel would compute wrongly.

    Raises UnsupportedModel for windows, recurrent or linear layers, soft-capped or biased attention, attention
    dropout, encoder-decoders, and models whose output is not ``lm_head(hidden)``; ValueError for flex without CUDA.
    Ends with a small tree through the kernel and through ``flat``, which must agree.
    """
    config: Any = model.config
    name = f"{type(model).__name__} ({config.model_type})"
    if kernel == "flex" and next(model.parameters()).device.type != "cuda":
        raise ValueError("kernel 'flex' needs a CUDA device (FlexAttention has no CPU backward); use kernel 'segments'")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only causal language models can be trained")
    if kernel != "flat":
        reason = _obstacle(model, config)
        if reason:
            raise UnsupportedModel(f"{name} {reason}; kernel {kernel!r} cannot reproduce it, use kernel 'flat'")
    _probe(model, kernel, name)


def _obstacle(model: nn.Module, config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}
    if kinds:
        return f"has layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"attends in a sliding window of {config.sliding_window} tokens"
    if getattr(model, "_is_stateful", False):
        return "keeps state other than attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention logits"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return "adds a position bias to its attention"
    if not getattr(model, "_supports_attention_backend", False):
        return "does not take its attention from transformers' AttentionInterface"
    return None


@torch.no_grad()
def _probe(model: nn.Module, kernel: Kernel, name: str) -> None:
    """Run a fork of 5 + 2 x 3 tokens; catch by result what no attribute of the config shows."""
    end = np.array([11] * 5 + [8] * 3 + [11] * 3)
    n, zero, none = len(end), np.zeros(len(end)), np.zeros(len(end), bool)
    probe = PackedBatch(
        tokens=np.arange(n) % model.get_input_embeddings().num_embeddings,  # pyright: ignore
        position=np.array([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7]),
        subtree_end=end,
        predictor=np.array([-1, 0, 1, 2, 3, 4, 5, 6, 4, 8, 9]),
        source=np.arange(n),
        sampled=none,
        informative=none,
        old_logprobs=zero,
        up=zero,
        down=zero,
        share=zero,
        allowed_start=np.zeros(n + 1, np.int64),
        allowed_ids=np.zeros(0, np.int64),
    )
    with attached(model, "flat"):
        exact = hidden_states(model, probe, "flat")
        row = torch.tensor(probe.tokens[None, :8], device=exact.device)
        logits = model(input_ids=row, use_cache=False).logits[0].float()
    _agree(head(model)(exact[:8]).float(), logits, f"{name}: its logits are not lm_head(hidden states)")
    if kernel != "flat":
        with attached(model, kernel):
            packed = hidden_states(model, probe, kernel)
        _agree(packed.float(), exact.float(), f"{name}: kernel {kernel!r} disagrees with 'flat'; use kernel 'flat'")


def _agree(got: Tensor, want: Tensor, message: str) -> None:
    low = torch.finfo(torch.bfloat16).eps if want.abs().max() == 0 else want.abs().max()
    error = float((got - want).abs().max() / low)
    if not error < 5e-2:
        raise UnsupportedModel(f"{message} (relative error {error:.1e})")


def head(model: nn.Module) -> nn.Module:
    """What turns hidden states into logits."""
    return model.get_output_embeddings()  # pyright: ignore


def _decoder(model: nn.Module) -> nn.Module:
    return model.get_decoder()  # pyright: ignore


def _switch(model: nn.Module, implementation: str) -> None:
    """Set the attention implementation of a model and all its parts, without transformers' checks of the name."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = implementation


# --- flat -----------------------------------------------------------------------------------------------------------


def _flat(model: nn.Module, batch: PackedBatch, device: torch.device) -> Tensor:
    """One right-padded row a leaf. Causality keeps padding out, so no mask is needed; of a token that several leaves
    share the first leaf's copy is used, whose gradient is that of the token."""
    leaves = np.flatnonzero(batch.subtree_end == np.arange(len(batch)) + 1)
    depth = int(batch.position.max(initial=-1)) + 1
    rows = np.zeros((len(leaves), depth), np.int64)
    where = np.full((len(batch), 2), -1)
    for k, leaf in enumerate(leaves):
        t = int(leaf)
        while t >= 0:
            rows[k, batch.position[t]] = batch.tokens[t]
            if where[t, 0] < 0:
                where[t] = k, batch.position[t]
            t = int(batch.predictor[t])
    positions = torch.arange(depth, device=device)[None].expand(len(leaves), -1)
    out = _decoder(model)(input_ids=torch.tensor(rows, device=device), position_ids=positions, use_cache=False)
    row, column = torch.tensor(where, device=device).T
    return out.last_hidden_state[row, column]


# --- flex -----------------------------------------------------------------------------------------------------------


def _block_mask(batch: PackedBatch, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    n = len(batch)
    return create_block_mask(
        tree_mask(torch.tensor(batch.subtree_end, device=device)), 1, None, n, n, device=str(device)
    )


def tree_mask(subtree_end: Tensor) -> Any:
    """The mask function of identity 1 for FlexAttention."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < subtree_end[j])

    return sees


# --- segments -------------------------------------------------------------------------------------------------------


def _register() -> None:
    """Make ``segments`` known to transformers. No mask function is registered, so no mask is ever built."""
    try:
        from transformers import AttentionInterface
    except ImportError as e:
        raise ImportError('training needs transformers: pip install "branchpoint[train]"') from e
    AttentionInterface.register(_NAME, _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' AttentionInterface asks: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]."""
    for name in _REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name} to its attention; use kernel 'flat'")
    if kwargs.get("sliding_window") and kwargs["sliding_window"] < query.shape[2]:
        raise UnsupportedModel(f"{type(module).__name__} attends in a sliding window; use kernel 'flat'")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    key, value = key.to(query.dtype), value.to(query.dtype)
    plan: tuple[Chain, ...] = kwargs["tree_chains"]
    if kind == "cpu":
        out = _TreeAttention.apply(query, key, value, plan, scale)
    else:
        out = gathered_attention(query, key, value, plan, scale)
    return out.transpose(1, 2).contiguous(), None


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, plan: tuple[Chain, ...], scale: float) -> Tensor:
    """[1, H, T, D] the plain form, on any device: per chain, one call over the gathered keys of its whole path."""
    out, path = [], []
    for chain in plan:
        path = [c for c in path if chain.start < c.below] + [chain]
        seen = torch.cat([torch.arange(c.start, c.stop, device=query.device) for c in path])
        n, m = chain.stop - chain.start, len(seen)
        mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
        groups = query.shape[1] // key.shape[1]
        k, v = (x[:, :, seen].repeat_interleave(groups, 1) for x in (key, value))
        q = query[:, :, chain.start : chain.stop]
        out.append(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(out, 2)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TreeAttention(torch.autograd.Function):
    """softmax(scale q k^T) v over a row of trees, exact, on a CPU. Blocks are calls of torch's own flash kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: tuple[Chain, ...], scale: float) -> Tensor:
        q, k, v = _grouped(query, key, value)
        out = q.new_empty(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        total = out.new_empty(q.shape[:-1])
        for c in plan:
            own = slice(c.start, c.stop)
            out[..., own, :], total[..., own] = _forward(
                q[..., own, :], k[..., own, :], v[..., own, :], 0.0, True, scale=scale
            )
        for c in plan:
            if c.stop < c.below:
                own, below = slice(c.start, c.stop), slice(c.stop, c.below)
                part, lse = _forward(q[..., below, :], k[..., own, :], v[..., own, :], 0.0, False, scale=scale)
                # softmax over the union of two key sets: weigh each by its share of the summed exponentials
                weight = torch.sigmoid(lse - total[..., below])[..., None]
                out[..., below, :].lerp_(part.to(out.dtype), weight)
                total[..., below] = torch.logaddexp(total[..., below], lse)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, total)
        ctx.plan, ctx.scale, ctx.key_shape = plan, scale, key.shape
        return result.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        g = grads[0].reshape(q.shape).to(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=total.dtype) for x in (q, k, v))
        for c in ctx.plan:
            own, below = slice(c.start, c.stop), slice(c.stop, c.below)
            for rows, causal in ((own, True), (below, False)):
                if rows.start == rows.stop:
                    continue
                # with the merged output and log-sum-exp the kernel's backward gives this block's part of the gradient
                parts = _backward(
                    g[..., rows, :], q[..., rows, :], k[..., own, :], v[..., own, :], out[..., rows, :],
                    total[..., rows], 0.0, causal, scale=ctx.scale,
                )  # fmt: skip
                dq[..., rows, :] += parts[0]
                dk[..., own, :] += parts[1]
                dv[..., own, :] += parts[2]
        shape = ctx.key_shape
        dq = dq.to(q.dtype).reshape(shape[0], -1, *shape[2:])
        dk, dv = (x.to(k.dtype).sum(1).reshape(shape) for x in (dk, dv))
        return dq, dk, dv, None, None


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[G, H / G, T, D] each: query heads by the key head they share; keys and values expanded without a copy."""
    groups, (t, d) = key.shape[1], key.shape[2:]
    q = query.reshape(groups, -1, t, d)
    k, v = (x.reshape(groups, 1, t, d).expand(-1, q.shape[1], -1, -1) for x in (key, value))
    return q, k, v
