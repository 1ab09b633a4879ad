"""One update against TRL's GRPOTrainer: CPU-seconds on the same model, task shape, leaves x length and machine.

    python benchmarks/trl_update.py --cache ~/.cache/branchpoint-trl --out benchmarks/baselines/trl_update.json

An update: ``--groups`` groups (trees) of 8 rollouts of 64 prompt tokens and 4 turns of 96 sampled and 16 observation
tokens (512 in all), an 11M Llama with random weights in float32, one thread, generation, credit, forward, backward and
AdamW. Arms:
``rollout_func`` and ``environment_factory``: TRL 1.16 (``trl_side.py``) in a virtual environment that is made in
``--cache`` (about 1.5 GB); the latter calls its tool 4 times, and its prompt is longer by the schema of the tool.
``flat``: 8 independent rollouts here. ``tree``: as many leaves of the same length, one rollout forked 8-fold after its
second turn, so that half of the leaves' tokens are shared.

With more groups both sides sample in larger batches, as training does.

Arms take turns; the first round warms up and is not counted. Only one arm computes at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from branchpoint.advantage import Grpo, Tree
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.pack import pack
from branchpoint.policy.hf import HFPolicy
from branchpoint.rollout import Grower, Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import Fixed, Flat
from branchpoint.train import flat_tokens
from branchpoint.tree import RolloutTree, Segments
from branchpoint.world import Step, Task
from peer import Peer, install

# torch first, so that the CPU build at hand is taken.
PINS = (("torch==2.13.0",), ("trl==1.16.0", "peft", "psutil"))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483648",
}
SHAPE: dict[str, Any] = {
    "groups": 1,
    "leaves": 8,
    "turns": 4,
    "action": 96,
    "observation": 16,
    "prompt": 64,
    "model": {
        "vocab_size": 512,
        "hidden_size": 320,
        "intermediate_size": 896,
        "num_hidden_layers": 8,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": 2048,
    },
}
TARGETS = {
    "rollout_func / flat": 1.5,
    "environment_factory / flat": 3.0,
    "rollout_func / tree": 3.0,
}


@dataclass(frozen=True)
class Update:
    """What one update took and did. ``sampled``: tokens that the policy drew; ``forwarded``: tokens that the learner
    read, padding left out; ``changed``: the largest change of a weight."""

    seconds: float
    sampled: int
    forwarded: int
    changed: float


class Trl:
    """TRL in a process of its own."""

    def __init__(self, python: Path, mode: str, rounds: int, cache: Path) -> None:
        given = json.dumps(SHAPE | {"steps": rounds})
        environment = ENVIRONMENT | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        self.peer = Peer(python, "trl_side.py", mode, given, log=cache / f"{mode}.log", environment=environment)

    def update(self) -> Update:
        said = self.peer.ask()
        forwarded = SHAPE["groups"] * SHAPE["leaves"] * (said["prompt"] + said["completion"])
        return Update(said["seconds"], said["sampled"], forwarded, said["changed"])

    def close(self) -> None:
        self.peer.close()


class Desk:
    """Shows the same few words after every action; the score is luck, so that there is something to learn."""

    def __init__(self, task: Task) -> None:
        self.turn = 0

    def reset(self) -> Step:
        return Step("")

    def step(self, action: str) -> Step:
        self.turn += 1
        done = self.turn == SHAPE["turns"]
        luck = float(Noise(0).at("score", action).random())
        return Step("", luck if done else 0.0, done=done)

    def close(self) -> None: ...


class Bytes:
    """Random observations of the right length; the stop id lies beyond what the model can say."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.vocabulary = SHAPE["model"]["vocab_size"]
        self.stop_ids = (self.vocabulary,)
        self._random = Noise(0).at("observations")

    def observe(self, task: Task, step: Step, first: bool) -> np.ndarray:
        length = SHAPE["prompt"] if first else SHAPE["observation"]
        return self._random.integers(0, 256, length).astype(np.int32)

    def text(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))

    def encode(self, text: str) -> np.ndarray:
        return np.zeros(0, np.int32)


class Ours:
    """Model, policy and learner; one update a call."""

    def __init__(self, tree: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE["model"], eos_token_id=None)).eval()
        self.policy = HFPolicy(self.model, Bytes())
        self.learner = Learner(self.model, LearnerConfig(lr=3e-4))
        turns, leaves = SHAPE["turns"], SHAPE["leaves"]
        self.scheduler = (
            Fixed(roots=1, at=(0.5,), width=leaves, expected=turns, adapt=False, nested=False)
            if tree
            else Flat(roots=leaves)
        )
        self.estimator = Tree() if tree else Grpo()
        length = SHAPE["prompt"] + turns * (SHAPE["action"] + SHAPE["observation"])
        self.limits = Limits(turns=turns, action_tokens=SHAPE["action"], context_tokens=length)
        self.updates, self.shared = 0, 0.0

    def update(self) -> Update:
        before = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        ledger, noise = Ledger(), Noise(self.updates, self.updates)
        grower = Grower(self.policy, InProcess(), self.scheduler, self.limits, "independent", ledger)
        start = time.process_time()
        trees = asyncio.run(self._grow(grower, noise))
        pairs = [(s, self.estimator.credit(s)) for s in map(Segments.of, trees)]
        rows = pack(pairs, self.learner.config.token_budget)
        self.learner.step(rows, normaliser=SHAPE["groups"])
        seconds = time.process_time() - start
        after = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        for tree, (segments, _) in zip(trees, pairs, strict=True):
            self._check(tree, segments)
        self.updates += 1
        self.shared = 1 - sum(len(s.tokens) for s, _ in pairs) / sum(flat_tokens(s) for s, _ in pairs)
        forwarded = sum(map(len, rows))
        return Update(seconds, ledger.generated_tokens, forwarded, float((after - before).abs().max()))

    async def _grow(self, grower: Grower, noise: Noise) -> list[RolloutTree]:
        jobs = [grower.grow(Desk, Task(f"desk{i}", "desk"), noise.child(i)) for i in range(SHAPE["groups"])]
        return list(await asyncio.gather(*jobs))

    def _check(self, tree: RolloutTree, segments: Segments) -> None:
        failed = [b.failure for b in tree.branches if b.failure is not None]
        # The last action is followed by no observation, as nothing comes after it.
        expected = SHAPE["leaves"] * (self.limits.context_tokens - SHAPE["observation"])
        if failed or flat_tokens(segments) != expected:
            raise SystemExit(f"{flat_tokens(segments)} tokens on all paths, expected {expected}; failures: {failed}")

    def close(self) -> None:
        self.policy.close()


def report(runs: dict[str, list[Update]], sides: Mapping[str, Trl | Ours]) -> dict[str, Any]:
    versions = next((s.peer.versions for s in sides.values() if isinstance(s, Trl)), {})
    seconds = {k: statistics.median(u.seconds for u in v) for k, v in runs.items()}

    def ratio(name: str) -> float | None:
        over, under = name.split(" / ")
        return round(seconds[over] / seconds[under], 2) if over in seconds and under in seconds else None

    ratios = {name: ratio(name) for name in TARGETS}
    return {
        "what": "one update, CPU seconds of one thread, medians",
        "cpu_seconds": {k: round(v, 2) for k, v in seconds.items()},
        "runs": {k: [round(u.seconds, 2) for u in v] for k, v in runs.items()},
        "ratios": ratios,
        "targets": TARGETS,
        "met": {k: v is not None and v >= TARGETS[k] for k, v in ratios.items()},
        "sampled_tokens": {k: v[-1].sampled for k, v in runs.items()},
        "forwarded_tokens": {k: v[-1].forwarded for k, v in runs.items()},
        "largest_weight_change": {k: min(u.changed for u in v) for k, v in runs.items()},
        "shared": {k: round(s.shared, 4) for k, s in sides.items() if isinstance(s, Ours)},
        "shape": SHAPE,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": {"peer": versions, "torch": torch.__version__, "transformers": transformers.__version__},
        "environment": {k: os.environ.get(k) for k in ENVIRONMENT},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "branchpoint-trl")
    every = ["rollout_func", "environment_factory", "flat", "tree"]
    parser.add_argument("--arms", nargs="+", choices=every, default=every)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if any(
        os.environ.get(k) != v for k, v in ENVIRONMENT.items()
    ):  # read when a process starts; the same for both sides
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], os.environ | ENVIRONMENT)
    torch.set_num_threads(1)
    SHAPE["groups"] = args.groups
    peers = {a: a for a in args.arms if a in ("rollout_func", "environment_factory")}
    python = install(args.cache, PINS, 1.5) if peers else Path(sys.executable)
    sides: dict[str, Trl | Ours] = {}
    result = ""
    try:
        for a in args.arms:
            sides[a] = Trl(python, a, args.repeats + 2, args.cache) if a in peers else Ours(tree=a == "tree")
        for runs in measure({a: s.update for a, s in sides.items()}, args.repeats):
            result = json.dumps(report(runs, sides), indent=2)
            if args.out:  # after every round: a long benchmark that is cut short has still measured something
                args.out.write_text(result + "\n")
        print(result)
    finally:
        for side in sides.values():
            side.close()


def measure(arms: dict[str, Callable[[], Update]], repeats: int) -> Iterator[dict[str, list[Update]]]:
    """The updates so far, after each round that counts."""
    runs: dict[str, list[Update]] = {a: [] for a in arms}
    for i in range(repeats + 1):
        for name, update in arms.items():
            done = update()
            print(f"{name:20s} {done.seconds:7.2f} CPU-s  {done.sampled} sampled, {done.forwarded} read", flush=True)
            if done.changed == 0:
                raise SystemExit(f"{name}: the update changed no weight")
            if i:
                runs[name].append(done)
        if i:
            yield runs


if __name__ == "__main__":
    main()
