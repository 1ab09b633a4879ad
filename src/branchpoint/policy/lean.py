"""The sampler's forward pass through the usual decoders, without what only generality needs.

With few rows a step costs as much in bookkeeping (masks, layouts, keyword arguments, decorators) as in arithmetic.
Llama, Qwen2 and Qwen3 share one block, so that is written out here; projections and the MLP are still the model's own
modules, adapters included. Any other model, or one with hooks on a module that is passed over, runs its own forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from branchpoint.policy import kvcache

_FAMILIES = ("Llama", "Qwen2", "Qwen3")


class Lean:
    """The blocks of a model, written out. Made by :func:`lean`; valid while the model's modules stay where they are."""

    def __init__(self, causal: Any, passed: tuple[Any, ...]) -> None:
        self._causal, self._passed = causal, passed

    @property
    def usable(self) -> bool:
        """Whether nobody listens to a module that :meth:`logits` passes over."""
        return not any(m._forward_hooks or m._forward_pre_hooks for m in self._passed)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, plan: kvcache.Plan
    ) -> torch.Tensor:
        """[k, V] of the rows ``keep`` [k], for tokens and positions [T] that travel as ``plan`` says."""
        model = self._causal.model
        h = model.embed_tokens(tokens)
        cos, sin = (x[0, :, None] for x in model.rotary_emb(h[None], positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)  # the sign of the rotation, once for all layers
        for layer in model.layers:
            h = h + _attention(layer.self_attn, _normed(layer.input_layernorm, h), cos, sin, plan)
            h = h + layer.mlp(_normed(layer.post_attention_layernorm, h))
        return self._causal.lm_head(_normed(model.norm, h[keep]))


def lean(model: Any) -> Lean | None:
    """The lean pass of a causal language model or peft model, or None where only the model's own forward will do."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if causal is not model and getattr(model.active_peft_config, "is_prompt_learning", True):
        return None
    for family in _FAMILIES:
        if _is(causal, family, "ForCausalLM") and _is(causal.model, family, "Model"):
            layers = list(causal.model.layers)
            attention = [x.self_attn for x in layers]
            norms = [m for x in layers for m in (x.input_layernorm, x.post_attention_layernorm)]
            norms += [m for x in attention for m in (getattr(x, "q_norm", None), getattr(x, "k_norm", None)) if m]
            parts = {"DecoderLayer": layers, "Attention": attention, "RMSNorm": [*norms, causal.model.norm]}
            if not all(_is(m, family, kind) for kind, modules in parts.items() for m in modules):
                return None
            return Lean(causal, (model, causal, causal.model, *(m for modules in parts.values() for m in modules)))
    return None


def _is(module: Any, family: str, kind: str) -> bool:
    """Whether this is exactly that class of transformers, not one that looks like it."""
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    return type(module).__name__ == family + kind and type(module).__module__ == home


def _normed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm in one call, the same to the bit. In lower precision the module rounds in between, so there it runs."""
    if x.dtype != torch.float32:
        return m(x)
    return F.rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)


def _attention(m: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: kvcache.Plan) -> torch.Tensor:
    rows, d = len(x), m.head_dim
    q, k, v = (project(x).view(rows, -1, d) for project in (m.q_proj, m.k_proj, m.v_proj))
    if hasattr(m, "q_norm"):
        q, k = _normed(m.q_norm, q), _normed(m.k_norm, k)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    return m.o_proj(kvcache.mix(plan, m.layer_idx, q, k, v, m.scaling).view(rows, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, heads, d]; ``sin`` carries the sign of the half that is swapped in."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
