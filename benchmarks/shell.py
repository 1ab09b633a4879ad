"""Snapshots of the shell sandbox, against container commits, copies, reflinks and btrfs snapshots in the same run.

    python benchmarks/shell.py [--depths 1,8,64,300] [--sizes 5,500] [--siblings 64] [--repeat 100] [--out FILE]

Milliseconds. ``snapshot + restore``: freeze and thaw after a file has changed, which is not counted. ``fresh``: a new
sandbox that runs ``bash -c true`` and is gone, without the state of a shell. ``command``: what ``machine.run("true")``
takes, with the state of the shell restored and saved. ``bash``: ``bash -c true`` without a sandbox. ``depth`` counts
snapshots; a machine puts one layer in place of many small ones, so the layers that are mounted are told beside it.
The peers copy a tree of the same size, once, as a snapshot of them would. Needs root for the peers that mount.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from branchpoint.sandbox import _shell_link as link
from branchpoint.sandbox.machine import Image
from branchpoint.sandbox.shell import Limits, ShellMachines
from report import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sandbox"))
TARGETS_MS = {"snapshot + restore": 5.0, "fresh": 8.0}


def ms(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 2),
        "p95": round(ordered[int(len(ordered) * 0.95)] * 1e3, 2),
        "p10": round(ordered[len(ordered) // 10] * 1e3, 2),
        "n": len(ordered),
    }


def timed(call: Callable[[], Any], before: Callable[[], Any] = lambda: None, repeat: int = 1) -> list[float]:
    """Seconds of each call; what happens before it does not count."""
    out = []
    for _ in range(repeat):
        before()
        start = time.perf_counter()
        call()
        out.append(time.perf_counter() - start)
    return out


def fresh(machine: Any) -> None:
    """A sandbox of a machine's layers that runs ``bash -c true``."""
    order = machine._order() | machine._launch() | {"command": ["/usr/bin/bash", "-c", "true"]}
    told, _ = link.Running(machine._machines.link, order, b"", b"", (1 << 12, 1 << 12)).wait(20)
    assert told["code"] == 0, told


def chain(box: ShellMachines, depth: int) -> Any:
    """A machine behind so many snapshots, each with a changed file."""
    machine = box.start(Image())
    for n in range(depth):
        machine.write(f"/tmp/layers/{n}", b"%d" % n)
        frozen = machine.freeze()
        machine.close()
        machine = frozen.thaw()
        frozen.discard()
    return machine


def depths(box: ShellMachines, wanted: list[int], repeat: int) -> dict[str, Any]:
    return {str(depth): at_depth(chain(box, depth), repeat) for depth in wanted}


def at_depth(machine: Any, repeat: int) -> dict[str, Any]:
    holder = [machine]
    count = iter(range(1 << 30))

    def change() -> None:
        holder[0].write("/tmp/changed", b"%d" % next(count))

    def both() -> None:
        frozen = holder[0].freeze()
        holder[0].close()
        holder[0] = frozen.thaw()
        frozen.discard()

    fresh(machine)
    rows = {
        "fresh": ms(timed(lambda: fresh(machine), repeat=repeat)),
        "command": ms(timed(lambda: machine.run("true"), repeat=repeat)),
        "layers": len(machine._state.layers),
        "snapshot + restore": ms(timed(both, change, repeat)),
    }
    holder[0].close()
    return rows


def sizes(box: ShellMachines, wanted: list[int], repeat: int) -> dict[str, Any]:
    """Snapshots of machines that have written so many MB since the last one, or have them in older layers."""
    out: dict[str, Any] = {}
    for size in wanted:
        machine = box.start(Image())
        written, old = [], []
        for _ in range(max(5, repeat // 10)):
            machine.run(f"head -c {size}M /dev/urandom | split -b 100k -a 4 - /tmp/data", seconds=120)
            start = time.perf_counter()
            frozen = machine.freeze()
            sibling = frozen.thaw()
            written.append(time.perf_counter() - start)
            sibling.run("true")
            sibling.write("/tmp/x", b"1")
            start = time.perf_counter()
            again = sibling.freeze()
            other = again.thaw()
            old.append(time.perf_counter() - start)
            for last in (sibling, other, machine):
                last.close()
            frozen.discard()
            again.discard()
            machine = box.start(Image())
        out[f"{size} MB"] = {"written since": ms(written), "in older layers": ms(old)}
        machine.close()
    return out


def fan_out(box: ShellMachines, siblings: int, repeat: int) -> dict[str, Any]:
    """So many siblings of one snapshot, each running a command, two at a time as there are processors."""
    machine = chain(box, 8)
    machine.run("echo 1 > /tmp/a")
    frozen = machine.freeze()
    seconds, memory = [], []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in range(repeat):
            free = available()
            start = time.perf_counter()
            made = [frozen.thaw() for _ in range(siblings)]
            list(pool.map(lambda m: fresh(m), made))
            seconds.append(time.perf_counter() - start)
            memory.append((free - available()) / siblings)
            for sibling in made:
                sibling.close()
    return {
        "siblings": siblings,
        "all ms": ms(seconds),
        "memory each, kB": round(statistics.median(memory) / 1024, 1),
    }


def bash() -> None:
    subprocess.run(["bash", "-c", "true"], check=True)


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


# Peers


@contextmanager
def loop(kind: str, megabytes: int) -> Iterator[Path]:
    """A file system of a kind on a file, mounted. Raises RuntimeError where there is none."""
    maker = shutil.which(f"mkfs.{kind}")
    if maker is None or os.getuid():
        raise RuntimeError(f"no mkfs.{kind}" if maker is None else "not root")
    with tempfile.TemporaryDirectory() as folder:
        disk, place = Path(folder, "disk"), Path(folder, "place")
        place.mkdir()
        with disk.open("wb") as file:
            file.truncate(megabytes << 20)
        quiet = {"check": True, "capture_output": True, "timeout": 60}
        subprocess.run([maker, str(disk)], **quiet)
        subprocess.run(["mount", "-o", "loop", str(disk), str(place)], **quiet)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], timeout=60, check=False)


def tree(place: Path, megabytes: int) -> None:
    """Files of 100 kB."""
    place.mkdir(parents=True)
    for n in range(megabytes * 10):
        (place / f"{n}").write_bytes(os.urandom(100_000))


def copies(megabytes: int, repeat: int) -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield "cp -a", copied(Path(folder), megabytes, repeat, ["cp", "-a"])
    with loop("xfs", 8 * megabytes + 400) as place:
        yield "cp -a --reflink, xfs", copied(place, megabytes, repeat, ["cp", "-a", "--reflink=always"])
    with loop("btrfs", 8 * megabytes + 400) as place:
        subprocess.run(
            ["btrfs", "subvolume", "create", str(place / "sub")], check=True, capture_output=True, timeout=60
        )
        tree(place / "sub" / "t", megabytes)
        count = iter(range(1 << 30))

        def snapshot() -> None:
            command = ["btrfs", "subvolume", "snapshot", str(place / "sub"), str(place / f"s{next(count)}")]
            subprocess.run(command, check=True, capture_output=True, timeout=120)

        def change() -> None:
            (place / "sub" / "t" / "0").write_bytes(os.urandom(100_000))

        yield "btrfs snapshot", ms(timed(snapshot, change, repeat))


def copied(place: Path, megabytes: int, repeat: int, command: list[str]) -> dict[str, float]:
    tree(place / "t", megabytes)

    def copy() -> None:
        subprocess.run([*command, str(place / "t"), str(place / "c")], check=True, timeout=300)

    return ms(timed(copy, lambda: shutil.rmtree(place / "c", ignore_errors=True), repeat))


def containers(repeat: int) -> dict[str, Any]:
    """Commit and run on the engine that the tests use."""
    import container_kit

    from branchpoint.sandbox.container import ContainerMachines

    with container_kit.engine() as socket, tempfile.TemporaryDirectory() as folder:
        box = ContainerMachines(socket)
        try:
            holder = [box.start(Image(base=str(container_kit.rootfs(Path(folder, "root.tar")))))]

            def both() -> None:
                frozen = holder[0].freeze()
                holder[0] = frozen.thaw()

            def change() -> None:
                holder[0].run("echo $RANDOM > /tmp/a")

            found = {"snapshot + restore": ms(timed(both, change, repeat))}
            return found | {"command": ms(timed(lambda: holder[0].run("true"), repeat=repeat))}
        finally:
            box.close()


def peers(wanted: list[int], repeat: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for size in wanted:
        out[f"{size} MB"] = rows = {}
        try:
            for name, row in copies(size, max(3, repeat // (5 if size < 100 else 20))):
                rows[name] = row
        except RuntimeError as error:
            rows["not measured"] = str(error)
    try:
        out["container, few files"] = containers(max(5, repeat // 10))
    except (pytest.skip.Exception, ImportError) as error:
        out["container, few files"] = f"not measured: {error}"
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 64, 300])
    parser.add_argument("--sizes", type=lambda t: [int(n) for n in t.split(",")], default=[5, 500])
    parser.add_argument("--siblings", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    box = ShellMachines(limits=Limits(disk_bytes=2 << 30, memory_bytes=1 << 30))
    try:
        result = {
            "targets, ms": TARGETS_MS,
            "bash": ms(timed(bash, repeat=args.repeat)),
            "depth": depths(box, args.depths, args.repeat),
            "size": sizes(box, args.sizes, args.repeat),
            "fan-out": fan_out(box, args.siblings, max(3, args.repeat // 20)),
        }
    finally:
        box.close()
    result["bash afterwards"] = ms(
        timed(lambda: subprocess.run(["bash", "-c", "true"], check=True), repeat=args.repeat)
    )
    result["peers"] = peers(args.sizes, args.repeat)
    report(result, args.out)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
