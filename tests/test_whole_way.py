"""The whole way on a real model: what was sampled in a tree is what the learner scores, and learning changes it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from branchpoint.advantage import Bpo, Grpo, Rloo, Tree
from branchpoint.config import Sampling
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.pack import pack
from branchpoint.policy import small
from branchpoint.policy.chat import PlainCodec
from branchpoint.policy.hf import HFPolicy
from branchpoint.rollout import Grower, Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import Fixed, Flat, Threshold, TopEntropy
from branchpoint.testing import CounterWorld
from branchpoint.tree import RolloutTree, Segments
from branchpoint.world import Task

TASK = Task("count", "counter", seed=5, metadata={"target": 2, "limit": 8})
TOKENIZER = small.train_tokenizer(["count to 2 up down stop count 1 stopped unknown -1 0 3"] * 3)


def parts(sampling: Sampling, **learner: Any) -> tuple[Any, Learner]:
    model = small.build(TOKENIZER, small.Sizes(width=32, layers=2, heads=2, hidden=48, context=256), seed=1)
    codec = PlainCodec(TOKENIZER)
    settings = {"temperature": sampling.temperature, "vocabulary": codec.vocabulary, "token_budget": 2048} | learner
    return HFPolicy(model, codec, sampling), Learner(model, LearnerConfig(**settings))


def trees(policy: Any, scheduler: Any, count: int = 2, seed: int = 0) -> list[RolloutTree]:
    limits = Limits(turns=6, action_tokens=6, context_tokens=256)

    async def grow() -> list[RolloutTree]:
        grower = Grower(policy, InProcess(), scheduler, limits, "independent", Ledger())
        jobs = (grower.grow(CounterWorld, TASK, Noise(seed, seed).child("tree", i)) for i in range(count))
        return list(await asyncio.gather(*jobs))

    return asyncio.run(grow())


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(restrict="actions"),
    Sampling(restrict="actions", temperature=1.3, top_p=0.95),
]
DESIGNS = [
    (Flat(roots=4), Rloo()),
    (Flat(roots=4), Grpo()),
    (Fixed(roots=2, width=2, at=(0.3, 0.6), expected=5, nested=True), Tree()),
    (Threshold(roots=2, width=3, threshold=0.1, max_forks=2, boundary="token"), Tree()),
    (TopEntropy(roots=2, width=2, max_forks=2, spacing=1, boundary="token"), Bpo()),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.restrict}-{s.temperature}-{s.top_p}")
@pytest.mark.parametrize(("scheduler", "estimator"), DESIGNS, ids=lambda x: x.kind)
def test_the_ratio_is_one_before_the_first_update(sampling: Sampling, scheduler: Any, estimator: Any) -> None:
    policy, learner = parts(sampling, lr=0.0)
    segments = [Segments.of(t) for t in trees(policy, scheduler)]
    batches = pack([(s, estimator.credit(s)) for s in segments], 2048)
    metrics = learner.step(batches, normaliser=2)
    assert metrics.drift < 1e-4
    assert metrics.clip_share == 0
    if metrics.updates:
        assert metrics.ratio == pytest.approx(1.0, abs=1e-4)
    scored = [learner.logprobs(b).numpy() for b in batches]
    for batch, new in zip(batches, scored, strict=True):
        np.testing.assert_allclose(new[batch.sampled], batch.old_logprobs[batch.sampled], atol=1e-4)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(restrict="actions", temperature=0.7)], ids=lambda s: s.restrict
)
def test_with_bf16_the_ratio_is_one_but_for_the_rounding_of_bfloat16(sampling: Sampling) -> None:
    """The learner autocasts and the sampler does not: an error of 2^-8 a product, and no clipping from it."""
    policy, learner = parts(sampling, lr=0.0, bf16=True)
    with torch.no_grad():  # logits as wide as those of a trained model
        for p in learner.parameters:
            p.mul_(3 if p.ndim == 2 else 1)
    segments = [Segments.of(t) for t in trees(policy, Flat(roots=4))]
    metrics = learner.step(pack([(s, Rloo().credit(s)) for s in segments], 2048), normaliser=2)
    assert 1e-5 < metrics.drift < 0.05
    assert metrics.ratio == pytest.approx(1.0, abs=0.005)
    assert metrics.clip_share == 0


def test_a_few_updates_on_trees_raise_the_return() -> None:
    """Counting to two, restricted to the three actions: from chance to mostly right in a handful of updates."""
    policy, learner = parts(Sampling(restrict="actions"), lr=1e-2, epochs=2)
    scheduler = Fixed(roots=4, width=2, at=(0.5,), expected=4)
    scores = []
    for update in range(14):
        grown = trees(policy, scheduler, count=4, seed=update)
        scores.append(np.mean([t.total_reward(b.id) for t in grown for b in t.scored]))
        pairs = [(s, Tree().credit(s)) for s in map(Segments.of, grown)]
        learner.step(pack(pairs, 2048), normaliser=4)
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.3
