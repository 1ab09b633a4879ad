"""Worlds that do what a fork cannot copy, or go wrong in a process of their own. Imported by workers."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from branchpoint.noise import Noise
from branchpoint.sandbox import _fork
from branchpoint.world import Step, Task


class Base:
    """Answers every action by the method of that name."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.kept: list[Any] = []

    def reset(self) -> Step:
        return Step("ready")

    def step(self, action: str) -> Step:
        word, _, rest = action.partition(" ")
        return Step(str(getattr(self, f"do_{word}")(rest)))

    def close(self) -> None: ...


class Holder(Base):
    """Holds on to operating system resources."""

    def do_thread(self, _: str) -> str:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, name="busy-thread", daemon=True)
        self.thread.start()
        return "started"

    def do_join(self, _: str) -> str:
        self.stop.set()
        self.thread.join()
        return "joined"

    def do_child(self, _: str) -> str:
        self.process = subprocess.Popen(["sleep", "60"])
        return str(self.process.pid)

    def do_reap(self, _: str) -> str:
        self.process.kill()
        return str(self.process.wait())

    def do_dead(self, _: str) -> str:
        self.process = subprocess.Popen(["true"])
        time.sleep(0.2)  # it has died by now, and nobody has waited for it
        return str(self.process.pid)

    def do_run(self, code: str) -> str:
        return str(subprocess.run([sys.executable, "-c", f"raise SystemExit({code})"]).returncode)

    def do_pipe(self, _: str) -> str:
        self.kept += os.pipe()
        return "open"

    def do_socket(self, _: str) -> str:
        self.kept += socket.socketpair()
        return "open"

    def do_shared(self, _: str) -> str:
        self.kept.append(mmap.mmap(-1, 4096))
        return "mapped"

    def do_private(self, _: str) -> str:
        self.kept.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE))
        return "mapped"

    def do_sqlite(self, path: str) -> str:
        self.kept.append(sqlite3.connect(path))
        self.kept[-1].execute("create table if not exists t (x)")
        self.kept[-1].commit()
        return "open"

    def do_insert(self, value: str) -> str:
        self.kept[-1].execute("insert into t values (?)", (value,))
        return str(self.kept[-1].execute("select x from t").fetchall())

    def do_write(self, path: str) -> str:
        self.kept.append(open(path, "w"))  # noqa: SIM115 (held open on purpose)
        return "open"

    def do_drop(self, _: str) -> str:
        while self.kept:
            each = self.kept.pop()
            os.close(each) if isinstance(each, int) else each.close()
        return "dropped"

    def do_fds(self, _: str) -> str:
        names = []
        for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
        return " ".join(names)


class Files(Base):
    """Reads a file line by line, and keeps an unnamed scratch file."""

    def reset(self) -> Step:
        self.file = open(self.task.metadata["path"], buffering=1)  # noqa: SIM115 (held open on purpose)
        self.raw = os.open(self.task.metadata["path"], os.O_RDONLY)
        self.scratch = tempfile.TemporaryFile()  # noqa: SIM115
        return Step("ready")

    def do_line(self, _: str) -> str:
        return self.file.readline().strip()

    def do_raw(self, n: str) -> str:
        return os.read(self.raw, int(n)).decode()

    def do_note(self, text: str) -> str:
        self.scratch.write(text.encode())
        self.scratch.flush()
        at = self.scratch.tell()
        self.scratch.seek(0)
        content = self.scratch.read()
        self.scratch.seek(at)
        return content.decode()


class Faulty(Base):
    """Goes wrong in the ways of real environments."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.metadata.get("fail") == "make":
            raise OSError("no such game file")
        if task.metadata.get("fail") == "hang":
            time.sleep(3600)
        if task.metadata.get("fail") == "exit":
            os._exit(7)

    def reset(self) -> Step:
        if self.task.metadata.get("fail") == "reset":
            raise KeyError("goal")
        return Step("ready")

    def do_hang(self, _: str) -> str:
        time.sleep(3600)
        return ""

    def do_spin(self, _: str) -> str:
        while True:
            pass

    def do_allocate(self, megabytes: str) -> str:
        self.kept.append(np.ones(int(megabytes) << 17))
        return "allocated"

    def do_exhaust(self, _: str) -> str:
        def refuse() -> int:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        _fork.fork = refuse
        return "no more forks"

    def do_segfault(self, _: str) -> str:
        import ctypes

        return str(ctypes.string_at(0))

    def do_sysexit(self, _: str) -> str:
        raise SystemExit(4)

    def do_interrupt(self, _: str) -> str:
        raise KeyboardInterrupt

    def do_closefds(self, _: str) -> str:
        os.closerange(3, 1000)
        return "closed"

    def do_info(self, _: str) -> str:
        return "not reached"

    def do_big(self, n: str) -> str:
        return "x" * int(n)

    def do_flood(self, n: str) -> str:
        for _ in range(int(n)):
            os.write(1, b"x" * 1000 + b"\n")
            os.write(2, b"y" * 1000 + b"\n")
        return "flooded"

    def do_spawn(self, _: str) -> str:
        return str(subprocess.Popen(["sleep", "300"]).pid)

    def do_ping(self, _: str) -> str:
        return "pong"

    def step(self, action: str) -> Step:
        if action == "info":
            return Step("x", info={"bad": object()})
        if action == "numpy":
            return Step("x", reward=np.float32(0.5), info={"a": np.arange(3), "b": np.float64(2.0)})  # type: ignore
        if action == "bytes":
            return Step(b"x")  # type: ignore[arg-type]
        return super().step(action)


class Mover(Base):
    """A deterministic world that counts, and one that lies about being deterministic."""

    deterministic = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.path: list[str] = []
        self.generator = iter(range(10**9))
        self.clock = time.monotonic_ns if task.metadata.get("clock") else None
        self.deterministic = not task.metadata.get("declared", False)

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def step(self, action: str) -> Step:
        self.path.append(action)
        luck = self.noise.at("move", len(self.path)).integers(1000)
        own = self.noise.private("move").integers(1000)
        said = f"{len(self.path)} {next(self.generator)} {luck} {own} {np.random.randint(1000)}"
        return Step(f"{said} {self.clock()}" if self.clock else said)


def boom(task: Task) -> Base:
    raise RuntimeError("boom")


class Matmul(Base):
    """Multiplies matrices with torch and numpy, and runs torch's backward pass."""

    def do_mul(self, _: str) -> str:
        import torch

        a = torch.ones(50, 50) @ torch.ones(50, 50)
        return f"{float(a.sum())} {float((np.ones((50, 50)) @ np.ones((50, 50))).sum())}"

    def do_grad(self, _: str) -> str:
        import torch

        x = torch.ones(50, 50, requires_grad=True)
        torch.relu(x).sum().backward()
        assert x.grad is not None
        return str(float(x.grad.sum()))


class Lucky(Base):
    """Tells its luck from every source a world may use, and the order of a set of strings."""

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def do_random(self, _: str) -> str:
        return str(random.random())

    def do_numpy(self, _: str) -> str:
        return str(np.random.random())

    def do_event(self, key: str) -> str:
        return str(self.noise.at("event", key).random())

    def do_luck(self, _: str) -> str:
        return str(self.noise)

    def do_set(self, _: str) -> str:
        return " ".join({f"object {n}" for n in range(20)})


class Connected(Base):
    """A sum kept by a thread, as by a server at the other end of a connection, and the branch's own luck."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.total, self.draws, self.noise = 0, 0, Noise(0)
        self.deterministic = not task.metadata.get("moves_on", False)

    def reseed(self, noise: Noise) -> None:
        self.noise = noise

    def reset(self) -> Step:
        threading.Thread(target=threading.Event().wait, name="connection", daemon=True).start()
        return Step("ready")

    def do_add(self, number: str) -> str:
        self.total += int(number)
        self.draws += 1
        return f"{self.total} {self.noise.private('draw', self.draws).integers(1000)}"

    def do_clock(self, _: str) -> str:
        return str(time.perf_counter())
