"""Runs the benchmarks one after the other, each in a process of its own, on one thread.

python -m benchmarks --list
python -m benchmarks --only generate pack
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # The big temporary tensors of a step stay with the process, instead of being faulted in again at every step.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483648",
}


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder, the baseline it writes, and how many minutes it may take."""

    script: str
    baseline: str
    minutes: int
    options: tuple[str, ...] = ()


BENCHMARKS = {
    "pack": Benchmark("pack.py", "pack.json", 60),
    "generate": Benchmark("generate.py", "generate.json", 60),
    "fork": Benchmark("fork.py", "fork.json", 60),
    "shell": Benchmark("shell.py", "shell.json", 60),
    "alfworld": Benchmark("alfworld_branches.py", "alfworld.json", 60),
    "alfworld-speed": Benchmark("alfworld_speed.py", "alfworld_speed.json", 60),
    "environments": Benchmark("environments.py", "environments.json", 30),
    "webshop": Benchmark("webshop.py", "webshop.json", 60),
    "textworld": Benchmark("textworld_games.py", "textworld.json", 180, ("--cache", "build/textworld-games")),
    "trl": Benchmark("trl_update.py", "trl_update.json", 120),
    "trl-4": Benchmark("trl_update.py", "trl_update_4_groups.json", 120, ("--groups", "4")),
    "generate-135M": Benchmark("generate.py", "generate_135M.json", 60, ("--size", "135M")),
}


def run(name: str) -> str:
    """Runs one benchmark; returns how it ended."""
    b = BENCHMARKS[name]
    print(f"== {name}: {b.script}", flush=True)
    start = time.monotonic()
    command = [sys.executable, HERE / b.script, *b.options, "--out", HERE / "baselines" / b.baseline]
    try:
        code = subprocess.run(command, env=os.environ | ENVIRONMENT, timeout=60 * b.minutes).returncode
    except subprocess.TimeoutExpired:
        return f"not done within {b.minutes} minutes"
    return f"{'done' if code == 0 else f'failed with exit code {code}'} after {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--list", action="store_true", help="say what there is and what each writes")
    args = parser.parse_args()
    if args.list:
        for name, b in BENCHMARKS.items():
            print(f"{name:14s} {b.script:22s} baselines/{b.baseline}")
        return 0
    ends = {name: run(name) for name in args.only}
    for name, end in ends.items():
        print(f"{name:14s} {end}")
    return int(any(not end.startswith("done") for end in ends.values()))


if __name__ == "__main__":
    raise SystemExit(main())
