"""The learner against one-row-a-leaf oracles, in float64."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from learner_helpers import (
    CONFIGS,
    case,
    gradients,
    largest_difference,
    leaf_credit,
    paths,
    random_advantages,
    random_tree,
    row_logprobs,
    tiny,
    with_old_logprobs,
)

from branchpoint.advantage import Credit
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.pack import pack, unpack
from branchpoint.tree import Segments

BIG = 10_000


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("kernel", ["segments", "flat"])
def test_packed_loss_and_gradient_equal_ppo_on_every_leaf_by_itself(kind, kernel):
    rng = np.random.default_rng(1)
    model, temperature, low, high = tiny(kind), 0.7, 0.2, 0.28
    pairs, loss, clipped = [], torch.zeros((), dtype=torch.float64), 0
    for _ in range(2):
        segments = with_old_logprobs(model, Segments.of(random_tree(rng, 7, restricted=True)), rng, temperature, 0.3)
        advantages = random_advantages(rng, segments)
        pairs.append((segments, leaf_credit(segments, advantages)))
        for leaf, path in paths(segments):
            own = torch.tensor(segments.sampled[path])
            ratio = torch.exp(
                row_logprobs(model, segments, path, temperature)[own] - torch.tensor(segments.logprobs[path])[own]
            )
            a = advantages[leaf] / len(advantages)
            loss = loss - torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a).sum() / 5.0
            clipped += int(((ratio < 1 - low) | (ratio > 1 + high)).sum())
    assert clipped > 20
    loss.backward()
    want = gradients(model)
    model.zero_grad()
    learner = Learner(model, LearnerConfig(temperature=temperature, clip_low=low, clip_high=high, kernel=kernel))
    metrics = learner.gradient(pack(pairs, BIG), normaliser=5.0)
    assert metrics.loss == pytest.approx(float(loss.detach()), abs=1e-10)
    assert metrics.clip_share > 0.05
    assert largest_difference(gradients(model), want) < 1e-10


def test_averaging_signed_advantages_is_not_the_same_once_ratios_clip():
    rng = np.random.default_rng(2)
    model = tiny()
    segments = with_old_logprobs(model, Segments.of(random_tree(rng, 7)), rng, 1.0, 0.5)
    credit = leaf_credit(segments, random_advantages(rng, segments))
    net = credit.up + credit.down
    averaged = Credit(np.maximum(net, 0), np.minimum(net, 0), credit.share)
    learner = Learner(model, LearnerConfig())
    learner.gradient(pack([(segments, credit)], BIG), 1.0)
    right = gradients(model)
    learner.gradient(pack([(segments, averaged)], BIG), 1.0)
    assert largest_difference(gradients(model), right) > 1e-3


def informative_case(rng: np.random.Generator, model: torch.nn.Module, spread: float = 0.3, **kind):
    segments = with_old_logprobs(model, Segments.of(random_tree(rng, 6, **kind)), rng, 1.0, spread)
    return segments, leaf_credit(segments, random_advantages(rng, segments))


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_neither_split_nor_order_of_rows_changes_the_gradient(kl):
    rng = np.random.default_rng(3)
    model, reference = tiny(), tiny(seed=5)
    pairs = [informative_case(rng, model, restricted=True) for _ in range(3)]
    learner = Learner(model, LearnerConfig(kl=kl), reference)
    whole = learner.gradient(pack(pairs, BIG), 7.0)
    want = gradients(model)
    longest = max(len(p) for s, _ in pairs for _, p in paths(s))
    for budget in (longest, longest + 9, 90):
        batches = pack(pairs, budget)
        assert len(batches) > 1
        for rows in (batches, batches[::-1]):
            metrics = learner.gradient(rows, 7.0)
            assert largest_difference(gradients(model), want) < 1e-10
            for name in ("loss", "kl", "policy_entropy", "clip_share", "ratio", "drift", "grad_norm"):
                assert getattr(metrics, name) == pytest.approx(getattr(whole, name), abs=1e-10)


def test_the_loss_is_divided_by_the_constant_and_nothing_else():
    # known fault 5a: ten tokens, two of loss 1 and eight of loss 3, normaliser 10
    model = tiny()
    rng = np.random.default_rng(0)
    segments = with_old_logprobs(model, Segments.of(random_tree(rng, 1, scale=8)), rng, 1.0, 0.0)
    sampled = np.flatnonzero(segments.sampled)[:10]
    assert len(sampled) == 10
    down = np.zeros(len(segments.tokens))
    down[sampled[:2]], down[sampled[2:]] = -1.0, -3.0
    credit = Credit(np.zeros_like(down), down, (down < 0).astype(float))
    learner = Learner(model, LearnerConfig())
    assert learner.gradient(pack([(segments, credit)], BIG), 10.0).loss == pytest.approx(2.6, abs=1e-5)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="normaliser is"):
            learner.gradient([], bad)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_nothing_to_learn_changes_nothing_and_is_counted(kl):
    # known fault 5c: every row masked
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    segments = Segments.of(random_tree(np.random.default_rng(0), 4))
    zero = np.zeros(len(segments.tokens))
    masked = Credit(zero, zero, zero)
    learner = Learner(model, LearnerConfig(kl=kl, weight_decay=0.1, epochs=3), tiny(seed=1) if kl else None)
    for rows in ([], pack([(segments, masked)], BIG, prune=False)):
        metrics = learner.step(rows, 4.0)
        assert (metrics.loss, metrics.kl, metrics.grad_norm) == (0.0, 0.0, 0.0)
        assert (metrics.empty, metrics.updates, metrics.nonfinite) == (1, 0, 0)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    model = tiny()
    rng = np.random.default_rng(0)
    segments, credit = informative_case(rng, model)
    before = copy.deepcopy(model.state_dict())
    learner = Learner(model, LearnerConfig(epochs=2))
    huge = Credit(credit.up * 1e308, credit.down * 1e308, credit.share)
    metrics = learner.step(pack([(segments, huge)], BIG), 1e-6)
    assert (metrics.nonfinite, metrics.updates) == (2, 0)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert learner.step(pack([(segments, credit)], BIG), 4.0).updates == 2


def test_penalty_alone_pulls_towards_the_reference_and_can_be_switched_off():
    model, reference = tiny(), tiny(seed=1)
    segments = Segments.of(random_tree(np.random.default_rng(0), 4))
    zero = np.zeros(len(segments.tokens))
    rows = pack([(segments, Credit(zero, zero, segments.sampled.astype(float)))], BIG)
    off = Learner(copy.deepcopy(model), LearnerConfig(kl=0.5, kl_without_signal=False), reference)
    assert off.step(rows, 4.0).empty == 1
    learner = Learner(model, LearnerConfig(kl=0.5, lr=3e-3, epochs=1), reference)
    distance = [learner.step(rows, 4.0).kl for _ in range(6)]
    assert distance == sorted(distance, reverse=True)
    assert distance[-1] < 0.9 * distance[0]


@pytest.mark.parametrize("kernel", ["segments", "flat"])
def test_trees_of_a_row_do_not_see_each_other(kernel):
    rng = np.random.default_rng(4)
    pairs = [case(rng)[:2] for _ in range(2)]
    (batch,) = pack(pairs, BIG)
    learner = Learner(tiny(), LearnerConfig(kernel=kernel))
    split = len(pairs[0][0].tokens)
    tokens = batch.tokens.copy()
    tokens[:split] = (tokens[:split] + 1) % 19
    changed = learner.logprobs(_with(batch, tokens=tokens), everywhere=True)
    base = learner.logprobs(batch, everywhere=True)
    assert torch.equal(changed[split:], base[split:])
    assert not torch.equal(changed[:split], base[:split])
    tokens = batch.tokens.copy()
    tokens[split:] = (tokens[split:] + 1) % 19
    assert torch.equal(learner.logprobs(_with(batch, tokens=tokens), everywhere=True)[:split], base[:split])


def _with(batch, **changes):
    return dataclasses.replace(batch, **changes)


def test_branch_tokens_ignore_their_sibling():
    rng = np.random.default_rng(6)
    segments, credit, _ = case(rng)
    (batch,) = pack([(segments, credit)], BIG)
    learner = Learner(tiny(), LearnerConfig())
    base = learner.logprobs(batch, everywhere=True)
    for t in (int(batch.subtree_end.argmin()), len(batch) // 2):
        tokens = batch.tokens.copy()
        tokens[t] = (tokens[t] + 1) % 19
        outside = np.ones(len(batch), bool)
        outside[t : batch.subtree_end[t]] = False
        got = learner.logprobs(_with(batch, tokens=tokens), everywhere=True)
        assert torch.equal(got[outside], base[outside])


def test_logprobs_equal_the_rows_and_zero_updates_give_ratio_one():
    rng = np.random.default_rng(7)
    model = tiny()
    segments = with_old_logprobs(model, Segments.of(random_tree(rng, 6, restricted=True)), rng, 0.7, 0.0)
    learner = Learner(model, LearnerConfig(temperature=0.7))
    credit = leaf_credit(segments, random_advantages(rng, segments))
    rows = pack([(segments, credit)], BIG)
    got = unpack(rows, [learner.logprobs(b) for b in rows], len(segments.tokens))
    assert np.abs(got - segments.logprobs).max() < 1e-6
    metrics = learner.gradient(rows, 1.0)
    assert metrics.drift < 1e-5
    assert metrics.ratio == pytest.approx(1, abs=1e-6)


def test_checkpointing_does_not_change_the_gradient_and_leaves_the_model_as_it_was():
    rng = np.random.default_rng(8)
    model = tiny()
    model.train()
    rows = pack([informative_case(rng, model)], BIG)
    results = []
    for on in (False, True):
        learner = Learner(model, LearnerConfig(gradient_checkpointing=on))
        calls = []
        hook = model.model.layers[0].self_attn.register_forward_hook(lambda *a, calls=calls: calls.append(1))
        learner.gradient(rows, 2.0)
        hook.remove()
        results.append((gradients(model), len(calls)))
    assert largest_difference(results[0][0], results[1][0]) == 0
    assert (results[0][1], results[1][1]) == (1, 2)
    assert model.training
    assert not model.is_activation_checkpointing
    assert model.config._attn_implementation == "sdpa"


def lora(dropout: float = 0.0):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    model = peft.get_peft_model(tiny(), config).double()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model


def test_the_reference_of_an_adapter_is_the_model_without_it():
    rng = np.random.default_rng(9)
    model = lora(dropout=0.5)
    rows = pack([informative_case(rng, tiny())], BIG)
    learner = Learner(model, LearnerConfig(kl=0.5))
    explicit = Learner(model, LearnerConfig(kl=0.5), reference=tiny())
    assert learner.reference is None
    first = learner.gradient(rows, 2.0)
    grads = gradients(model)
    want = explicit.gradient(rows, 2.0)
    assert first == want
    assert first.kl > 0.01
    assert largest_difference(grads, gradients(model)) == 0
    assert all("lora" in n for n in grads)


def test_without_a_given_reference_full_training_keeps_a_frozen_copy():
    rng = np.random.default_rng(10)
    model = tiny()
    rows = pack([informative_case(rng, model, spread=0.0)], BIG)
    learner = Learner(model, LearnerConfig(kl=0.1, lr=1e-2))
    assert Learner(model, LearnerConfig()).reference is None
    kls = [learner.step(rows, 2.0).kl for _ in range(3)]
    assert kls[0] == pytest.approx(0, abs=1e-12)
    assert kls[2] > 1e-6
    assert not any(p.requires_grad for p in learner.reference.parameters())


def test_resumed_training_is_bit_identical():
    def rows_at(i: int):
        return pack([informative_case(np.random.default_rng(20 + i), tiny())], 60)

    config = LearnerConfig(lr=1e-2, warmup_steps=4, weight_decay=0.1, epochs=2, max_grad_norm=0.5)
    straight = Learner(tiny(), config)
    log = [straight.step(rows_at(i), 2.0) for i in range(4)]
    broken = Learner(tiny(), config)
    assert [broken.step(rows_at(i), 2.0) for i in range(2)] == log[:2]
    saved = copy.deepcopy((broken.model.state_dict(), broken.state_dict()))
    resumed = Learner(tiny(seed=3), config)
    resumed.model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [resumed.step(rows_at(i), 2.0) for i in range(2, 4)] == log[2:]
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [m.lr for m in log] == pytest.approx([1e-2 * 1.5 / 4, 1e-2 * 3.5 / 4, 1e-2, 1e-2])
