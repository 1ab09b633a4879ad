"""Tree-packed training against one padded row a leaf: forward and backward of an 11M-parameter Llama on a CPU.

The tree: one main rollout and three forks at each of four depths, 13 leaves of equal length (so the padded batch wastes
nothing). Loss: one random advantage a leaf times the log-probability of every token after the shared prompt. ``padded``
is the stock transformers model with ``sdpa`` attention on all rows at once; ``segments`` is one packed row. Both give
the same gradient, which is checked. Times are CPU seconds of one thread, arms interleaved, medians over repeats.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 \\
        python benchmarks/pack.py --lengths 512 2048 --shared 0.5 0.8 --repeats 5 3 --out benchmarks/baselines/pack.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from branchpoint.kernel import attached, chains, head, hidden_states
from branchpoint.loss import read
from branchpoint.pack import PackedBatch

LEVELS, FORKS = 4, 3
LEAVES = 1 + LEVELS * FORKS


def model_11m() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


def tree(length: int, shared: float) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """A packed row, its leaves' rows [13, length] as indices into it, and the leaves' advantages [13].

    Fork depths are equally spaced at the end of the main rollout such that the shared part of all tokens is ``shared``.
    """
    raw = LEAVES * length
    step = (raw * (1 - shared) - length) / (FORKS * LEVELS * (LEVELS + 1) / 2)
    depths = [length - round(step * k) for k in range(LEVELS, 0, -1)]
    end, position, predictor, leaves = [], [], [], []
    path: list[int] = []

    def grow(start: int, level: int) -> None:
        """Depth-first: the trunk up to the next fork, its three forks, then the rest of the trunk."""
        stop = depths[level] if level < LEVELS else length
        mine = []
        for d in range(start, stop):
            mine.append(_append(position, predictor, end, path, d))
        if level < LEVELS:
            for _ in range(FORKS):
                keep = len(path)
                for d in range(stop, length):
                    _append(position, predictor, end, path, d)
                leaves.append(list(path))
                _close(end, path, keep)
            grow(stop, level + 1)
        else:
            leaves.append(list(path))

    grow(0, 0)
    _close(end, path, 0)
    rows = np.array(leaves)
    rng = np.random.default_rng(0)
    advantage = rng.normal(size=LEAVES)
    n = len(position)
    up, down = np.zeros(n), np.zeros(n)
    for row, a in zip(rows, advantage, strict=True):
        up[row[1:]] += max(a, 0)
        down[row[1:]] += min(a, 0)
    sampled = np.array(predictor) >= 0
    batch = PackedBatch(
        tokens=rng.integers(512, size=n),
        position=np.array(position),
        subtree_end=np.array(end),
        predictor=np.array(predictor),
        source=np.arange(n),
        sampled=sampled,
        informative=np.ones(n, bool),
        old_logprobs=np.zeros(n),
        up=up,
        down=down,
        share=sampled.astype(float),
        allowed_start=np.zeros(n + 1, np.int64),
        allowed_ids=np.zeros(0, np.int64),
    )
    return batch, rows, advantage


def _append(position: list[int], predictor: list[int], end: list[int], path: list[int], depth: int) -> int:
    position.append(depth)
    predictor.append(path[-1] if path else -1)
    end.append(-1)
    path.append(len(end) - 1)
    return path[-1]


def _close(end: list[int], path: list[int], keep: int) -> None:
    for t in path[keep:]:
        end[t] = len(end)
    del path[keep:]


def packed_pass(model: nn.Module, batch: PackedBatch) -> Callable[[], float]:
    weight = torch.tensor(batch.up + batch.down, dtype=torch.float32)
    where = np.flatnonzero(batch.weighed)

    def run() -> float:
        with attached(model, "segments"):
            hidden = hidden_states(model, batch, "segments")[torch.tensor(batch.predictor[where])]
            logprobs, _ = read(head(model), hidden, torch.tensor(batch.tokens[where]))
            loss = -(logprobs * weight[torch.tensor(where)]).sum()
            loss.backward()
        return float(loss.detach())

    return run


def padded_pass(
    model: nn.Module, batch: PackedBatch, rows: np.ndarray, advantage: np.ndarray, micro: int
) -> Callable[[], float]:
    """``micro``: rows per forward; the fastest choice is the fair opponent."""
    ids = torch.tensor(batch.tokens[rows])
    weight = torch.tensor(advantage, dtype=torch.float32)[:, None]

    def run() -> float:
        total = 0.0
        for lo in range(0, len(ids), micro):
            own = ids[lo : lo + micro]
            logits = model(input_ids=own, attention_mask=torch.ones_like(own), use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, own[:, 1:, None])[..., 0]
            loss = -(logprobs * weight[lo : lo + micro]).sum()
            loss.backward()
            total += float(loss.detach())
        return total

    return run


def measure(
    model: nn.Module, passes: dict[str, Callable[[], float]], repeats: int
) -> tuple[dict[str, list[float]], float]:
    """CPU seconds of every pass, interleaved, and the largest gradient difference relative to the largest gradient."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    grads: dict[str, torch.Tensor] = {}
    for i in range(repeats + 1):  # the first round warms up
        for name, run in passes.items():
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            run()
            if i:
                seconds[name].append(time.process_time() - start)
            if i == 0:
                grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    first = grads["padded"]
    return seconds, float((grads["segments"] - first).abs().max() / first.abs().max())


def flops_limit(model: nn.Module, batch: PackedBatch, length: int) -> float:
    """The speed-up that equal flops a second would give: attention over deep tokens is not shared like the rest."""
    c = model.config
    linear = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    pair = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    packed = len(batch) * linear + pair * float((batch.position + 1).sum())
    padded = LEAVES * (length * linear + pair * length * (length + 1) / 2)
    return padded / packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--shared", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--repeats", type=int, nargs="+", default=[5], help="one number, or one a length")
    parser.add_argument(
        "--micro", type=int, nargs="+", default=[13, 1], help="rows per padded forward; the best counts"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = model_11m()
    repeats = arguments.repeats * (len(arguments.lengths) if len(arguments.repeats) == 1 else 1)
    cases = []
    for length, count in zip(arguments.lengths, repeats, strict=True):
        for shared in arguments.shared:
            cases.append(one_case(model, length, shared, count, arguments.micro))
            print(json.dumps(cases[-1]), flush=True)
    record = {
        "what": "forward + backward, CPU seconds of one thread, medians",
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "environment": {
            k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
        },
        "tolerance": {"of_limit": 0.1, "gradient_error": 1e-5},
        "cases": cases,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


def one_case(model: nn.Module, length: int, shared: float, repeats: int, micros: list[int]) -> dict[str, object]:
    batch, rows, advantage = tree(length, shared)
    passes = {"segments": packed_pass(model, batch)}
    for k, micro in enumerate(micros):
        passes["padded" if k == 0 else f"padded_{micro}"] = padded_pass(model, batch, rows, advantage, micro)
    seconds, error = measure(model, passes, repeats)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in median.items() if name != "segments")
    limit = LEAVES * length / len(batch)
    return {
        "length": length,
        "raw_tokens": LEAVES * length,
        "packed_tokens": len(batch),
        "shared": round(1 - 1 / limit, 4),
        "chains": len(chains(batch.subtree_end)),
        "repeats": repeats,
        "seconds": {name: round(value, 3) for name, value in median.items()},
        "spread": {name: round(max(v) / min(v), 3) for name, v in seconds.items()},
        "speedup": round(median["padded"] / median["segments"], 3),
        "speedup_over_best_micro_batch": round(best / median["segments"], 3),
        "limit": round(limit, 3),
        "flops_limit": round(flops_limit(model, batch, length), 3),
        "of_limit": round(median["padded"] / median["segments"] / limit, 3),
        "gradient_error": error,
    }


if __name__ == "__main__":
    main()
