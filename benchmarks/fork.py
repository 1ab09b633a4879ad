"""Snapshot and restore by process fork, against deepcopy and pickle of the same heap in the same run.

    python benchmarks/fork.py [--heaps 1,50,500] [--depths 1,32,64,256] [--siblings 64] [--repeat 5] [--out FILE]

A heap is a list of tuples of small integers and strings (the kind that is worst for copies), or, in a second column,
one numpy array. Times are wall-clock medians, milliseconds. ``snapshot`` and ``restore`` are one fork each, complete;
``round trip`` is both; ``bare`` is what the kernel alone takes for one: libc's fork of a process with that heap and
this package's modules, until the child's first byte; ``cpu`` the processor time that trainer and workers spend in a
round trip, which is what an idle machine would need at most, whatever the load now. Written as JSON to
benchmarks/baselines/fork.json with the load of the machine, since the figures depend on it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import pickle
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from branchpoint.noise import Noise
from branchpoint.sandbox import _fork
from branchpoint.sandbox._template import HUGE_PAGES
from branchpoint.sandbox.forkserver import ForkEnv, ForkServer, ForkSnapshot
from branchpoint.world import Task
from heap_world import HeapWorld

TARGETS_MS = {1: 1.5, 50: 2.5, 500: 10.0}


def ms(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p10": round(ordered[len(ordered) // 10] * 1e3, 3),
        "n": len(ordered),
    }


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    took = time.perf_counter() - start
    del result
    return took


async def opened(server: ForkServer, megabytes: int, kind: str) -> ForkEnv:
    env = await server.open(HeapWorld, Task("heap", "", metadata={"megabytes": megabytes, "kind": kind}), Noise())
    await env.reset()
    await (await env.snapshot()).discard()  # the first one also freezes the collector
    return env


async def round_trips(env: ForkEnv, repeat: int) -> dict[str, Any]:
    snapshots, restores, both, cpu, steps, ends = [], [], [], [], [], []
    for n in range(repeat):
        start, start_cpu = time.perf_counter(), time.process_time() + _cpu_seconds(env.worker.pid)
        snapshot = await env.snapshot()
        middle = time.perf_counter()
        branch = await snapshot.restore(Noise(n))
        end = time.perf_counter()
        spent = time.process_time() + sum(map(_cpu_seconds, (e.worker.pid for e in (env, snapshot, branch))))
        cpu.append(spent - start_cpu)
        snapshots.append(middle - start)
        restores.append(end - middle)
        both.append(end - start)
        await branch.step("x")
        start = time.perf_counter()
        await branch.step("x")
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        await branch.close()
        await snapshot.discard()
        ends.append(time.perf_counter() - start)
    named = {
        "snapshot": snapshots,
        "restore": restores,
        "round_trip": both,
        "cpu": cpu,
        "step": steps,
        "close_and_discard": ends,
    }
    return {name: ms(samples) for name, samples in named.items()}


async def siblings(env: ForkEnv, count: int) -> dict[str, float]:
    """Restores so many at once, all live together, and steps each."""
    snapshot = await env.snapshot()
    branches: list[ForkEnv] = []

    async def one(n: int) -> None:
        branches.append(await snapshot.restore(Noise(n)))

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for n in range(count):
            group.start_soon(one, n)
    restored = time.perf_counter() - start
    private = sum(map(_private_bytes, (b.worker.pid for b in branches))) / count
    for branch in branches:
        await branch.close()
    await snapshot.discard()
    return {"restore_all_ms": round(restored * 1e3, 1), "private_mb_each": round(private / 2**20, 2)}


def _cpu_seconds(pid: int) -> float:
    """The processor time of a process so far, exact to the nanosecond where the kernel keeps it."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


async def depths(server: ForkServer, env: ForkEnv, wanted: list[int], repeat: int) -> dict[str, Any]:
    """Round trips on a chain of snapshots of restored snapshots, at the given numbers of levels, all alive."""
    out: dict[str, Any] = {}
    chain: list[ForkSnapshot] = [await env.snapshot()]
    for level in range(1, max(wanted) + 1):
        branch = await chain[-1].restore(Noise(level))
        if level in wanted:
            out[str(level)] = (await round_trips(branch, repeat))["round_trip"] | {"forks_deep": branch.worker.depth}
        chain.append(await branch.snapshot())
        await branch.close()
    for snapshot in chain:
        await snapshot.discard()
    return out | {"rebases": server.counters.rebases}


def bare(megabytes: int, kind: str, huge: bool, repeat: int) -> dict[str, float]:
    """Forks of a process that holds the heap and does nothing else."""
    environment = HUGE_PAGES if huge else {}
    command = [sys.executable, __file__, "--bare", f"{megabytes},{kind},{repeat}"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=600
    )
    return json.loads(done.stdout)


def bare_forks(megabytes: int, kind: str, repeat: int) -> dict[str, float]:
    world = HeapWorld(Task("heap", "", metadata={"megabytes": megabytes, "kind": kind}))
    gc.collect()
    gc.freeze()
    ours, theirs = socket.socketpair()
    samples = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        pid = _fork.fork()
        if pid == 0:
            theirs.send(b"x")
            os._exit(0)
        ours.recv(1)
        samples.append(time.perf_counter() - start)
        os.waitpid(pid, 0)
    del world
    return ms(samples[1:])


def copies(megabytes: int, kind: str, repeat: int) -> dict[str, Any]:
    world = HeapWorld(Task("heap", "", metadata={"megabytes": megabytes, "kind": kind}))
    blob = pickle.dumps(world)
    return {
        "deepcopy": ms([timed(lambda: copy.deepcopy(world)) for _ in range(repeat)]),
        "pickle_dumps": ms([timed(lambda: pickle.dumps(world)) for _ in range(repeat)]),
        "pickle_loads": ms([timed(lambda: pickle.loads(blob)) for _ in range(repeat)]),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    heaps = [int(h) for h in args.heaps.split(",")]
    result: dict[str, Any] = {
        "machine": {
            "cpus": os.cpu_count(),
            "usable_cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        },
        "targets_ms": {str(h): TARGETS_MS.get(h) for h in heaps},
        "fork": {},
        "copy": {},
    }
    for name, huge in (("plain", False), ("huge_pages", True)):
        async with ForkServer(huge_pages=huge, step_timeout_s=120.0) as server:
            for megabytes in heaps:
                for kind in ("objects", "array"):
                    env = await opened(server, megabytes, kind)
                    found = await round_trips(env, args.repeat if megabytes > 50 else 10 * args.repeat)
                    found["bare"] = bare(megabytes, kind, huge, args.repeat if megabytes > 50 else 10 * args.repeat)
                    if kind == "objects":
                        found["siblings"] = await siblings(env, args.siblings)
                    if kind == "objects" and megabytes == heaps[0] and not huge:
                        found["depth"] = await depths(
                            server, env, [int(d) for d in args.depths.split(",")], args.repeat
                        )
                    await env.close()
                    result["fork"][f"{name}/{kind}/{megabytes}"] = found
    for megabytes in heaps:
        if megabytes > args.copy_limit:
            continue
        for kind in ("objects", "array"):
            result["copy"][f"{kind}/{megabytes}"] = copies(megabytes, kind, args.repeat if megabytes <= 50 else 1)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'heap':<24}{'snapshot':>9}{'restore':>9}{'target':>8}{'bare':>8}{'round trip':>11}{'step':>8}{'cpu':>8}"
        f"{'deepcopy':>11}{'dump+load':>11}"
    ]
    for name, found in result["fork"].items():
        _, kind, megabytes = name.split("/")
        other = result["copy"].get(f"{kind}/{megabytes}")
        deep = other["deepcopy"]["p50"] if other else float("nan")
        pickled = other["pickle_dumps"]["p50"] + other["pickle_loads"]["p50"] if other else float("nan")
        lines.append(
            f"{name + ' MB':<24}{found['snapshot']['p50']:>9.2f}{found['restore']['p50']:>9.2f}"
            f"{result['targets_ms'][megabytes] or 0:>8.1f}{found['bare']['p50']:>8.2f}"
            f"{found['round_trip']['p50']:>11.2f}{found['step']['p50']:>8.3f}{found['cpu']['p50']:>8.2f}{deep:>11.1f}{pickled:>11.1f}"
        )
    for name, found in result["fork"].items():
        if "siblings" in found:
            lines.append(f"{name} MB, siblings at once: {found['siblings']}")
        if "depth" in found:
            lines.append(f"{name} MB, by depth: {found['depth']}")
    return "\n".join([*lines, f"machine: {result['machine']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heaps", default="1,50,500")
    parser.add_argument("--depths", default="1,32,64,256")
    parser.add_argument("--siblings", type=int, default=64)
    parser.add_argument("--copy-limit", type=int, default=500, help="largest heap in MB to deepcopy and pickle")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "baselines" / "fork.json")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        megabytes, kind, repeat = args.bare.split(",")
        print(json.dumps(bare_forks(int(megabytes), kind, int(repeat))))
        return
    result = anyio.run(measure, args)
    print(table(result))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
