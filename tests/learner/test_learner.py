"""The learner against one-row-a-leaf oracles, in float64."""

from __future__ import annotations

import copy

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

from branchpoint.learner import Learner, LearnerConfig
from branchpoint.pack import pack, unpack
from branchpoint.tree import Credit, Segments

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
            ratio = torch.exp(row_logprobs(model, segments, path, temperature)[own] - torch.tensor(segments.logprobs[path])[own])
            a = advantages[leaf] / len(advantages)
            loss = loss - torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a).sum() / 5.0
            clipped += int(((ratio < 1 - low) | (ratio > 1 + high)).sum())
    assert clipped > 20
    loss.backward()
    want = gradients(model)
    model.zero_grad()
    learner = Learner(model, LearnerConfig(temperature=temperature, clip_low=low, clip_high=high, kernel=kernel))
    metrics = learner.gradient(pack(pairs, BIG), normaliser=5.0)
    assert metrics.loss == pytest.approx(float(loss), abs=1e-10)
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
