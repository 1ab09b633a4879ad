"""Generation on a CPU: sampled tokens a CPU-second of the in-process sampler, beside ``transformers`` generate.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 \\
        python benchmarks/generate.py --out benchmarks/baselines/generate.json

Arms, random weights, temperature 1, float32, one thread, interleaved, medians over repeats:
``generate``: transformers, batch 8, 64 tokens of prompt and 448 new ones. ``engine_8``: the same in the sampler.
``engine_64``, ``engine_256``: that many live branches with 288 tokens of context (the mean of 64 to 512) and 32 new
ones each. ``siblings``: 8 forks of one prefix of 512 tokens, 64 new tokens each, prefix included in the time.
``small``: a policy of about a million parameters, 64 live branches, 300 tokens of context, 32 new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from branchpoint.noise import Noise
from branchpoint.policy.hf import HFPolicy
from branchpoint.world import Step, Task

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "heads": (4, 4),
    },
    "11M": {"vocab_size": 512, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "heads": (5, 5)},
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "heads": (9, 3),
        "tie_word_embeddings": True,
    },
}
NONE = np.zeros(0, np.int32)


def build(size: str) -> Any:
    """A Llama of that size with random weights."""
    shape = dict(SIZES[size])
    heads, kv = shape.pop("heads")
    torch.manual_seed(0)
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=2048, eos_token_id=None, **shape
    )
    return LlamaForCausalLM(config).eval()


class Open:
    """A codec that never stops an action: the stop id lies beyond what is sampled."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        self.vocabulary = model.config.vocab_size
        self.stop_ids = (self.vocabulary,)

    def observe(self, task: Task, step: Step, first: bool) -> np.ndarray:
        return NONE

    def text(self, tokens: Any) -> str:
        return ""

    def encode(self, text: str) -> np.ndarray:
        return NONE


def prompt(key: int, length: int) -> np.ndarray:
    return Noise(0).at("prompt", key).integers(0, 500, length).astype(np.int32)


async def engine(policy: HFPolicy, branches: int, context: int, new: int, warm: bool) -> tuple[int, float]:
    """Tokens and CPU-seconds. ``warm``: the context is read before the clock starts."""
    sessions = [policy.open() for _ in range(branches)]
    texts = [prompt(k, context) for k in range(branches)]
    if warm:
        await asyncio.gather(*(s.act(t, Step(""), Noise(0, 1), 1) for s, t in zip(sessions, texts, strict=True)))
        texts = [prompt(k, 1) for k in range(branches)]
    start = time.process_time()
    work: list[Awaitable[Any]] = [
        s.act(t, Step(""), Noise(0, k), new) for k, (s, t) in enumerate(zip(sessions, texts, strict=True))
    ]
    await asyncio.gather(*work)
    seconds = time.process_time() - start
    for s in sessions:
        s.close()
    return branches * new, seconds


async def siblings(policy: HFPolicy, n: int, prefix: int, new: int) -> tuple[int, float]:
    """Tokens and CPU-seconds, reading the prefix included."""
    start = time.process_time()
    root = policy.open()
    await root.act(prompt(0, prefix), Step(""), Noise(0, 99), 1)
    forks = [root.fork(prefix) for _ in range(n)]
    await asyncio.gather(*(f.act(NONE, Step(""), Noise(0, k), new) for k, f in enumerate(forks)))
    seconds = time.process_time() - start
    for s in (root, *forks):
        s.close()
    return n * new, seconds


def generate(model: Any, batch: int, context: int, new: int) -> tuple[int, float]:
    """Tokens and CPU-seconds of ``model.generate``."""
    row = torch.from_numpy(np.stack([prompt(k, context) for k in range(batch)])).long()
    start = time.process_time()
    with torch.inference_mode():
        model.generate(
            row, attention_mask=torch.ones_like(row), do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0
        )
    return batch * new, time.process_time() - start


def arms(size: str) -> dict[str, Callable[[], tuple[int, float]]]:
    model, small = build(size), build("small")
    policy, light = HFPolicy(model, Open(model)), HFPolicy(small, Open(small))
    return {
        "generate": lambda: generate(model, 8, 64, 448),
        "engine_8": lambda: asyncio.run(engine(policy, 8, 64, 448, False)),
        "siblings": lambda: asyncio.run(siblings(policy, 8, 512, 64)),
        "engine_64": lambda: asyncio.run(engine(policy, 64, 288, 32, True)),
        "engine_256": lambda: asyncio.run(engine(policy, 256, 288, 32, True)),
        "small": lambda: asyncio.run(engine(light, 64, 300, 32, True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["11M", "135M"], default="11M")
    parser.add_argument("--arms", nargs="+", default=None, help="only these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    todo = {k: v for k, v in arms(args.size).items() if args.arms is None or k in args.arms}
    rates: dict[str, list[float]] = {name: [] for name in todo}
    load = [os.getloadavg()[0]]
    for _ in range(args.repeats):
        for name, arm in todo.items():
            tokens, seconds = arm()
            rates[name].append(tokens / seconds)
            load.append(os.getloadavg()[0])
            print(f"{name:12s} {tokens / seconds:8.0f} tokens/CPU-s   load {load[-1]:.1f}", flush=True)
    report = {
        "size": args.size,
        "tokens_per_cpu_second": {name: round(statistics.median(r), 1) for name, r in rates.items()},
        "runs": {name: [round(x, 1) for x in r] for name, r in rates.items()},
        "repeats": args.repeats,
        "load": [round(min(load), 1), round(max(load), 1)],
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
