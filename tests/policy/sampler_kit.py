"""Tiny models with random weights, a codec without words, and the oracle: one full forward pass."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy.hf import HFPolicy, HFSession
from branchpoint.session import Action
from branchpoint.world import Step

T = TypeVar("T")
FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}
NONE = np.zeros(0, np.int32)


class Numbers:
    """A codec whose words are the ids themselves; an action's text is letters, one a token."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, vocabulary: int, stop: int) -> None:
        self.vocabulary, self.stop_ids = vocabulary, (stop,)

    def observe(self, task: Any, step: Step, first: bool) -> np.ndarray:
        return self.encode(step.observation)

    def text(self, tokens: Any) -> str:
        return "".join(chr(97 + int(t)) for t in tokens if int(t) not in self.stop_ids)

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) - 97 for c in text], np.int32)


def model(family: str = "llama", vocab: int = 60, sharpness: float = 2.0, seed: int = 0, **sizes: Any) -> Any:
    """A two-layer model; logits have a standard deviation of about ``sharpness``."""
    cls, config, extra = FAMILIES[family]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 700,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = cls(config(vocab_size=vocab, **(shape | extra | sizes))).eval()
        torch.nn.init.normal_(made.lm_head.weight, std=sharpness / 8.0)
        for name, parameter in made.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    return made


def policy(made: Any, sampling: Sampling | None = None, stop: int | None = None, vocabulary: int = 0) -> HFPolicy:
    vocab = made.config.vocab_size
    return HFPolicy(made, Numbers(vocabulary or vocab, vocab - 1 if stop is None else stop), sampling)


def ids(*seed: int, length: int, vocab: int = 50) -> np.ndarray:
    return Noise(1).at("ids", *seed).integers(0, vocab, length).astype(np.int32)


def run(work: Awaitable[T], seconds: float = 60.0) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


def act(session: HFSession, observation: np.ndarray, key: int, limit: int = 12, **more: Any) -> Awaitable[Action]:
    return session.act(observation, more.pop("step", Step("")), Noise(0, key), limit, **more)


def teacher(made: Any, context: np.ndarray, actions: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[a, V] float64 log-probabilities before each of ``actions``, by the model's own full forward pass."""
    row = np.concatenate([context, actions])[None].astype(np.int64)
    with torch.no_grad():
        logits = made(input_ids=torch.from_numpy(row), use_cache=False).logits[0, len(context) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).numpy()


def chosen(logprobs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return logprobs[np.arange(len(tokens)), tokens]


def same(a: Action, b: Action) -> bool:
    """Bit for bit."""
    names = ("tokens", "logprobs", "raw_logprobs", "entropies")
    return a.text == b.text and all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in names)
