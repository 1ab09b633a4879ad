"""The attention kernels against the dense mask, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_helpers import SHAPE, case, tiny
from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig, MistralConfig, Qwen2Config

from branchpoint import kernel
from branchpoint.kernel import UnsupportedModel, attached, chains, gathered_attention, hidden_states, visible
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.pack import pack


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tree_attention_is_attention_under_the_dense_mask(key_heads, dtype):
    rng = np.random.default_rng(0)
    (batch,) = pack([case(rng)[:2], case(rng)[:2]], 10_000)
    n, plan = len(batch), chains(batch.subtree_end)
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, n, 8, dtype=dtype, requires_grad=True) for h in (4, key_heads, key_heads)]
    weight = torch.randn(1, 4, n, 8, dtype=dtype)
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(4 // key_heads, 1) for x in (k, v))
    seen = torch.tensor(visible(batch.subtree_end))
    table = torch.softmax((q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf), -1)
    dense = table @ v
    want = torch.autograd.grad((dense * weight).sum(), inputs)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for attend in (kernel._TreeAttention.apply, gathered_attention):
        out = attend(*inputs, plan, 0.3)
        assert torch.allclose(out.double(), dense, rtol=tolerance, atol=tolerance)
        got = torch.autograd.grad((out * weight).sum(), inputs)
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_chains_are_runs_of_equal_subtree_end():
    end = np.array([9, 9, 5, 4, 5, 9, 9, 9, 9, 12, 12, 12])
    plan = [(c.start, c.stop, c.below) for c in chains(end)]
    assert plan == [(0, 2, 9), (2, 3, 5), (3, 4, 4), (4, 5, 5), (5, 9, 9), (9, 12, 12)]
    assert chains(np.zeros(0, int)) == ()


def test_bfloat16_autocast_stays_close_and_trains_float32_weights():
    rng = np.random.default_rng(1)
    rows = pack([case(rng)[:2]], 10_000)
    results = []
    for bf16 in (False, True):
        model = tiny(exact=False)
        learner = Learner(model, LearnerConfig(bf16=bf16))
        results.append(learner.logprobs(rows[0]))
        metrics = learner.step(rows, 4.0)
        assert metrics.updates == 1
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert results[1].dtype == torch.float32
    assert 0 < float((results[0] - results[1]).abs().max()) < 0.3


def test_the_model_is_left_as_it_was():
    model = tiny()
    with attached(model, "segments"):
        assert model.config._attn_implementation == "branchpoint_segments"
    assert model.config._attn_implementation == "sdpa"


def refused(config, kernel_name: str = "segments", **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **more), LearnerConfig(kernel=kernel_name)


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (MistralConfig(**SHAPE, sliding_window=4), "Mistral", "sliding"),
        (Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1), "Qwen2", "sliding"),
        (Gemma2Config(**SHAPE, head_dim=4, sliding_window=4), "Gemma2", "sliding"),
        (MambaConfig(vocab_size=19, hidden_size=16, state_size=4, num_hidden_layers=1), "Mamba", "linear_attention"),
    ],
)
def test_models_with_windows_or_state_are_refused_by_name(config, name, reason):
    model, learner_config = refused(config)
    with pytest.raises(UnsupportedModel, match=rf"{name}.*({reason}).*kernel 'flat'"):
        Learner(model, learner_config)


def test_flat_trains_a_model_with_state():
    model, config = refused(MambaConfig(vocab_size=19, hidden_size=16, state_size=4, num_hidden_layers=1), "flat")
    rows = pack([case(np.random.default_rng(0))[:2]], 10_000)
    learner = Learner(model, config)
    assert learner.step(rows, 4.0).updates == 1


def test_a_model_that_scales_its_logits_is_refused():
    class Scaled(type(tiny())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    model = tiny()
    model.__class__ = Scaled
    with pytest.raises(UnsupportedModel, match="logits are not lm_head"):
        Learner(model, LearnerConfig())


def test_flex_needs_cuda():
    with pytest.raises(ValueError, match="kernel 'flex' needs a CUDA device"):
        Learner(tiny(), LearnerConfig(kernel="flex"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_and_segments_agree_with_flat_on_cuda():
    (batch,) = pack([case(np.random.default_rng(0))[:2]], 10_000)
    model = tiny(exact=False).cuda()
    out = {}
    for name in ("flat", "segments", "flex"):
        with attached(model, name):
            out[name] = hidden_states(model, batch, name)
    assert torch.allclose(out["segments"], out["flat"], atol=1e-4)
    assert torch.allclose(out["flex"], out["flat"], atol=1e-4)
