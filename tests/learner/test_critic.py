"""The critic: values and value loss of packed rows against every path by itself, exact resume, and that it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import random_tree, tiny

from branchpoint.advantage import Credit, Ppo
from branchpoint.credit import Targets
from branchpoint.critic import Critic
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.pack import pack, unpack
from branchpoint.tree import Array, Segments


def learner(seed: int = 0, **settings: Any) -> Learner:
    model = tiny(seed=seed)
    critic = Critic(model, coefficient=0.7)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, 16, dtype=torch.float64)[None])
        critic.head.bias.fill_(0.3)
    return Learner(model, LearnerConfig(**settings), critic=critic)


def rewarded(seed: int, branches: int = 6) -> Segments:
    rng = np.random.default_rng(seed)
    segments = Segments.of(random_tree(rng, branches))
    return dataclasses.replace(segments, reward=rng.normal(size=len(segments.reward)))


def even(s: Segments) -> Credit:
    return Credit(np.zeros(len(s.tokens)), np.zeros(len(s.tokens)), s.sampled.astype(float))


def by_paths(made: Learner, segments: Segments) -> dict[int, torch.Tensor]:
    """Of every sampled token, V from the one row that leads to it, without packing."""
    assert made.critic is not None
    out: dict[int, torch.Tensor] = {}
    for leaf in np.flatnonzero(segments.leaf):
        path = [int(leaf)]
        while path[-1]:
            path.append(int(segments.parent[path[-1]]))
        at = np.concatenate([np.arange(segments.start[s], segments.start[s + 1]) for s in path[::-1]])
        ids = torch.tensor(segments.tokens[at].astype(np.int64))[None]
        hidden = made.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        for place, token in enumerate(at.tolist()):
            if segments.sampled[token] and token not in out:
                out[token] = made.critic.head(hidden[place - 1]).squeeze(-1)
    return out


@pytest.mark.parametrize("budget", [4096, 48])
def test_values_of_packed_rows_are_those_of_every_path_by_itself(budget: int) -> None:
    made = learner()
    trees = [Segments.of(random_tree(np.random.default_rng(i))) for i in range(3)]
    rows = pack([(s, even(s)) for s in trees], budget)
    values = unpack(rows, made.values(rows), sum(len(s.tokens) for s in trees))
    offset = 0
    for s in trees:
        for token, v in by_paths(made, s).items():
            assert values[offset + token] == pytest.approx(float(v.detach()), abs=1e-10)
        offset += len(s.tokens)


@pytest.mark.parametrize("budget", [4096, 48])
def test_gradient_is_that_of_the_policy_plus_the_squared_error_of_every_token_once(budget: int) -> None:
    rng = np.random.default_rng(2)
    segments = Segments.of(random_tree(rng))
    weight = segments.sampled * rng.uniform(0.1, 1.0, size=len(segments.tokens))
    value = rng.normal(size=len(segments.tokens))
    targets = Targets(value=value, weight=weight, observed=value, predicted=value)
    credit = Credit(segments.to_tokens(np.full(len(segments.parent), 0.4)), np.zeros(len(weight)), even(segments).share)
    rows = pack([(segments, credit)], budget)

    made, alone = learner(), learner()
    metrics = made.gradient(rows, 3.0, targets)
    policy = alone.gradient(rows, 3.0)
    error = torch.stack([0.5 * weight[t] * (v - value[t]) ** 2 for t, v in by_paths(alone, segments).items()]).sum()
    assert metrics.value_loss == pytest.approx(float(error.detach()) / 3.0, abs=1e-10)
    assert metrics.loss == pytest.approx(policy.loss + 0.7 * float(error.detach()) / 3.0, abs=1e-10)
    (0.7 * error / 3.0).backward()  # on top of the policy's
    for mine, theirs in zip(made.parameters, alone.parameters, strict=True):
        expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, expected, rtol=0, atol=1e-10)


def lesson(made: Learner, segments: Segments, estimator: Ppo) -> tuple[Any, Targets]:
    rows = pack([(segments, even(segments))], 4096)
    values: Array = unpack(rows, made.values(rows), len(segments.tokens))
    return pack([(segments, estimator.credit(segments, values))], 4096), estimator.targets(segments, values)


def test_resumed_training_with_a_critic_is_bit_identical() -> None:
    segments, estimator = rewarded(4), Ppo(unit="token", value_lr=0.01)
    whole, broken = learner(lr=1e-3), learner(lr=1e-3)
    for _ in range(2):
        whole.step(*_args(lesson(whole, segments, estimator)))
    broken.step(*_args(lesson(broken, segments, estimator)))
    resumed = learner(seed=1, lr=1e-3)
    resumed.model.load_state_dict(broken.model.state_dict())
    resumed.load_state_dict(broken.state_dict())
    resumed.step(*_args(lesson(resumed, segments, estimator)))
    for a, b in zip(whole.parameters, resumed.parameters, strict=True):
        assert torch.equal(a, b)


def _args(lesson: tuple[Any, Targets]) -> tuple[Any, float, Targets]:
    return lesson[0], 1.0, lesson[1]


def test_a_state_with_a_critic_fits_no_learner_without_one_and_the_reverse() -> None:
    plain = Learner(tiny(), LearnerConfig())
    with pytest.raises(ValueError, match="has a critic"):
        plain.load_state_dict(learner().state_dict())
    with pytest.raises(ValueError, match="lacks a critic"):
        learner().load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="no critic"):
        plain.values([])


def test_the_head_has_its_own_learning_rate() -> None:
    """With the model's at 0 only the head moves."""
    model = tiny()
    made = Learner(model, LearnerConfig(lr=0.0), critic=Critic(model, 0.5, lr=0.1))
    before = [p.detach().clone() for p in made.parameters]
    made.step(*_args(lesson(made, rewarded(4), Ppo())))
    moved = [not torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True)]
    assert moved[-2:] == [True, True]
    assert not any(moved[:-2])


def test_it_learns_to_explain_the_returns() -> None:
    segments = rewarded(6, branches=4)
    model = tiny()
    made = Learner(model, LearnerConfig(lr=1e-2, clip_low=1.0), critic=Critic(model))
    estimator = Ppo(lam=1.0, unit="token")
    explained = []
    for _ in range(40):
        rows, targets = lesson(made, segments, estimator)
        explained.append(targets.explained_variance)
        made.step(rows, 1.0, targets)
    assert explained[0] == pytest.approx(0.0)
    assert explained[-1] is not None
    assert explained[-1] > 0.7


def test_explained_variance_by_hand() -> None:
    y, v, w = np.array([1.0, 3.0, 9.0, 7.0]), np.array([2.0, 2.0, 0.0, 7.0]), np.array([1.0, 1.0, 0.0, 2.0])
    targets = Targets(value=y, weight=w, observed=y, predicted=v)
    left = (1 * 1.0 + 1 * 1.0 + 0.0) / 4  # errors -1, 1, 0, 0: mean 0
    spread = (1 * 3.5**2 + 1 * 1.5**2 + 2 * 2.5**2) / 4  # around 4.5
    assert targets.explained_variance == pytest.approx(1 - left / spread)
    flat = Targets(value=y, weight=w, observed=np.full(4, 2.0), predicted=v)
    assert flat.explained_variance is None
    assert Targets.join([]).explained_variance is None
