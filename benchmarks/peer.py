"""A peer library in a virtual environment and process of its own, asked a line at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def install(cache: Path, pins: Sequence[Sequence[str]], gigabytes: float, remove: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment with these packages (a pip call for each group), made if it is not there."""
    python = cache / "bin" / "python"
    if not (cache / "ready").exists():
        print(f"making a virtual environment with {pins[-1][0]} in {cache} (about {gigabytes} GB)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", cache], check=True, timeout=300)
        for group in pins:
            subprocess.run([python, "-m", "pip", "install", "-q", *group], check=True, timeout=1800)
        if remove:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *remove], check=True, timeout=300)
        (cache / "ready").touch()
    return python


class Peer:
    """A script of this folder under another Python. It says JSON lines: its versions first, then an answer a line."""

    def __init__(self, python: Path, script: str, *arguments: str, log: Path, environment: Mapping[str, str]) -> None:
        own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, Path(__file__).with_name(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=own | dict(environment),
        )
        self.log = log
        self.versions = self._read()

    def ask(self, line: str = "") -> dict[str, Any]:
        """The answer to a line. Ends the benchmark, with the peer's last words, when there is none."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            words = "\n".join(self.log.read_text().splitlines()[-15:])
            raise SystemExit(f"{self.process.args[1]} ended early:\n{words}")  # type: ignore[index]
        return json.loads(line)
