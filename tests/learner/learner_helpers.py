"""Random rollout trees, tiny float64 models, and the row-wise oracle that knows nothing of packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from branchpoint.advantage import Credit
from branchpoint.tree import Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Task

VOCAB = 19
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_theta=100.0),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
}


def tiny(kind: str = "llama", seed: int = 0, exact: bool = True) -> nn.Module:
    """A tiny model with lively weights; ``exact``: float64 throughout, RMSNorm included (transformers' is float32)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    for p in model.parameters():
        if p.ndim >= 2:
            nn.init.normal_(p, std=0.3)
    if exact:
        model.double()
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _exact_norm.__get__(module)
    return model.eval()


def _exact_norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def random_tree(rng: np.random.Generator, branches: int = 6, restricted: bool = False, scale: int = 4) -> RolloutTree:
    """Several levels of forks, at turn boundaries and in the middle of actions, roots included."""
    made: list[Branch] = []
    for i in range(branches):
        fork = None if i == 0 else _random_fork(rng, made)
        first = 0 if fork is None else fork.token
        turns = []
        for k in range(int(rng.integers(1, 4))):
            observed = 0 if fork is not None and k == 0 else int(rng.integers(1, scale + 1))
            turns.append(_random_turn(rng, observed, int(rng.integers(1, scale + 2)), restricted, last=first))
        made.append(Branch(i, fork, tuple(turns), "done"))
    return RolloutTree(Task("t", "r"), tuple(made))


def _random_fork(rng: np.random.Generator, made: list[Branch]) -> Fork:
    while True:
        parent = made[int(rng.integers(len(made)))]
        turn = parent.first_turn + int(rng.integers(len(parent.turns)))
        token = int(rng.integers(parent.width(turn)))
        if parent.fork is None or (turn, token) > (parent.fork.turn, parent.fork.token):
            return Fork(parent.id, turn, token, 1.0)
        if parent.id and rng.random() < 0.5:
            continue


def _random_turn(rng: np.random.Generator, observed: int, acted: int, restricted: bool, last: int) -> Turn:
    action = rng.integers(VOCAB, size=acted)
    allowed = None
    if restricted:
        allowed = tuple(
            np.unique(np.append(rng.choice(VOCAB, 4, replace=False), a)) if rng.random() < 0.6 else None for a in action
        )
    return Turn(
        observation=rng.integers(VOCAB, size=observed),
        action=action,
        logprobs=np.full(acted, -1.0),
        raw_logprobs=np.full(acted, -1.0),
        entropies=np.zeros(acted),
        allowed=allowed,
    )


def paths(segments: Segments) -> Iterator[tuple[int, np.ndarray]]:
    """(leaf segment, indices of the tokens from the root to it)."""
    for s in np.flatnonzero(segments.leaf):
        chain, at = [], int(s)
        while at >= 0:
            chain.append(np.arange(segments.start[at], segments.start[at + 1]))
            at = int(segments.parent[at])
        yield int(s), np.concatenate(chain[::-1])


def leaf_credit(segments: Segments, advantage: dict[int, float]) -> Credit:
    """Each leaf has one advantage and weight 1 / leaves; the sums over the leaves below a token, by brute force."""
    n = len(segments.tokens)
    up, down, share = np.zeros(n), np.zeros(n), np.zeros(n)
    for leaf, path in paths(segments):
        mine = path[segments.sampled[path]]
        up[mine] += max(advantage[leaf], 0) / len(advantage)
        down[mine] += min(advantage[leaf], 0) / len(advantage)
        share[mine] += 1 / len(advantage)
    return Credit(up, down, share)


def random_advantages(rng: np.random.Generator, segments: Segments) -> dict[int, float]:
    return {int(s): float(rng.normal()) for s in np.flatnonzero(segments.leaf)}


def case(
    rng: np.random.Generator, restricted: bool = False, branches: int = 6
) -> tuple[Segments, Credit, dict[int, float]]:
    segments = Segments.of(random_tree(rng, branches, restricted))
    advantages = random_advantages(rng, segments)
    return segments, leaf_credit(segments, advantages), advantages


def row_logprobs(model: nn.Module, segments: Segments, path: np.ndarray, temperature: float) -> Tensor:
    """[len(path)] one leaf by itself through the stock model, tempered and restricted; 0 for the first token."""
    logits = model(input_ids=torch.tensor(segments.tokens[path], dtype=torch.long)[None]).logits[0] / temperature
    out = [logits.new_zeros(())]
    for k, t in enumerate(path[1:], start=1):
        allowed = segments.allowed.get(int(t)) if segments.sampled[t] else None
        ids = np.arange(VOCAB) if allowed is None else allowed
        kept = logits[k - 1][torch.tensor(ids, dtype=torch.long)]
        out.append(logits[k - 1, int(segments.tokens[t])] - torch.logsumexp(kept, 0))
    return torch.stack(out)


def with_old_logprobs(
    model: nn.Module, segments: Segments, rng: np.random.Generator, temperature: float, spread: float
):
    """The same tree, sampled by a policy whose log-probabilities differ from the model's by about ``spread``."""
    old = np.zeros(len(segments.tokens), np.float32)
    with torch.no_grad():
        for _, path in paths(segments):
            old[path] = row_logprobs(model, segments, path, temperature).numpy()
    old = np.minimum(old + spread * rng.normal(size=len(old)), 0) * segments.sampled
    return dataclasses.replace(segments, logprobs=old.astype(np.float32))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    assert a
    return max(float((a[n] - b[n]).abs().max()) for n in a)
