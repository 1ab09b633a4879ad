"""A run that is killed again and again ends with the same bytes as one that never was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from branchpoint.config import parse
from branchpoint.learner import Learner, StepMetrics
from branchpoint.ledger import Ledger
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.store import RunFolder, read_trees
from branchpoint.testing.fakes import CounterWorld, FakePolicy
from branchpoint.train import Course, Run, RunError, train
from branchpoint.world import Step, Task

CONFIG = """
seed: 3
envs:
  - name: backoffice
    options: {requests: 1, templates: [cancel_unpaid, ticket_order], contacts: [name], described: 0.0, customers: 2,
              orders: 2, products: 3, items: 1, ids: 40, price_step: 500, fixed_summaries: 0.0, style: compact,
              menu: true, menu_size: 20, p: 0.2}
    train: {split: train, n: 12}
    eval: {split: validation, n: 3}
model: {name: small, size: {width: 32, layers: 1, heads: 2, hidden: 64}, warm_start: {episodes: 8, epochs: 1}}
sampling: {restrict: actions}
scheduler: {kind: threshold, roots: 2, width: 2, max_forks: 1}
learner: {lr: 1.0e-3, kl: 0.01, epochs: 2}
limits: {turns: 6, action_tokens: 20, context_tokens: 768}
training: {updates: 20, tasks: 2, eval_every: 7}
"""

# Imports once, then runs each attempt in a forked child, so that an attempt costs no imports. The parent never computes
# with torch. Arguments: config, then for each run its folder and delays in seconds, with commas. An attempt is killed
# after its delay, or a little after its first checkpoint if that comes sooner: so a fast machine too leaves something
# to kill. The last attempt of a run goes on to its end.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
from rich.console import Console
from branchpoint.command.train import train
from branchpoint.policy import hf, models, small
import matplotlib.backends.backend_agg, matplotlib.figure
import transformers.models.llama.modeling_llama
transformers.PreTrainedTokenizerFast

def saved(run):
    return max((p.name for p in (Path(run) / "checkpoints").glob("[0-9]*")), default="none")

def attempt(config, run, delay):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        resume = (Path(run) / "config.yaml").exists()
        code = train(Path(config), [f"run={run}"], resume, False, Console(file=open(os.devnull, "w")))
        os._exit(code)
    if delay is None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code and sys.exit(code)
    before, end = saved(run), time.monotonic() + delay
    while time.monotonic() < end and saved(run) == before:
        time.sleep(0.005)
    time.sleep(delay * 0.03)  # into the update after the one just saved
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        sys.exit("the run ended before it was killed often enough: give it more updates")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("killed", saved(run), flush=True)

config, *runs = sys.argv[1:]
for run in runs:
    folder, *delays = run.split(",")
    for delay in delays:
        attempt(config, folder, float(delay))
    attempt(config, folder, None)
"""


def drive(folder: Path, updates: int, runs: dict[str, list[float]]) -> list[str]:
    config = folder / "c.yaml"
    config.write_text(CONFIG.replace("updates: 20", f"updates: {updates}"))
    told = [",".join(map(str, [folder / name, *delays])) for name, delays in runs.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, str(config), *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    return done.stdout.splitlines()


def result(run: Path) -> dict[str, bytes]:
    files = [run / "metrics.jsonl", *sorted((run / "trees").iterdir())]
    return {p.name: p.read_bytes() for p in files}


MOMENTS = {
    "four": (10, [0.4, 1.6, 2.2, 1.1]),
    "ten": (20, [0.4, 1.1, 1.6, 2.2, 0.7, 2.9, 1.9, 3.1, 2.5, 3.7, 1.3]),
}
"""Updates of the run, and delays that walk through the start, the warm start, generation, learning and saving."""


@pytest.mark.parametrize("moments", ["four", pytest.param("ten", marks=pytest.mark.slow)])
def test_killed_at_many_moments_and_resumed_gives_the_same_bytes(tmp_path: Path, moments: str) -> None:
    updates, delays = MOMENTS[moments]
    killed = drive(tmp_path, updates, {"whole": [], "broken": delays})
    assert sum(line.startswith("killed") for line in killed) == len(delays)
    whole, broken = result(tmp_path / "whole"), result(tmp_path / "broken")
    assert list(whole) == list(broken)
    for name in whole:
        assert whole[name] == broken[name], f"{name} differs after {killed}"
    left = list((tmp_path / "broken").rglob(".*.partial"))
    assert left == []


class _Stub:
    """Stands for the learner; its memory is full at one of the updates."""

    def __init__(self, full_at: int) -> None:
        self.done, self.full_at = 0, full_at

    def step(self, batches: Any, normaliser: float) -> StepMetrics:
        self.done += 1
        if self.done == self.full_at:
            raise RuntimeError("out of memory")
        return StepMetrics()


def count(folder: Path, full_at: int = 0, broken: str = "") -> None:
    """Three updates of counting; ``broken``: the task whose world raises at its first step."""

    class World(CounterWorld):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            self.name = task.id

        def step(self, action: str) -> Step:
            if self.name == broken:
                raise OSError("no such file")
            return super().step(action)

    tasks = tuple(Task(f"count/{i}", "counter", metadata={"target": i}) for i in (1, 2, 3))
    run = Run(
        config=parse({"envs": [{"name": "counter"}], "training": {"updates": 3, "tasks": 1}, "limits": {"turns": 4}}),
        courses=(Course("counter", World, tasks[:1], tasks[1:]),),
        policy=FakePolicy(restrict=True),
        eval_policy=FakePolicy(restrict=True),
        sandbox=InProcess(),
        learner=cast(Learner, _Stub(full_at)),
        folder=RunFolder(folder),
        save=lambda path: None,
        load=lambda path: None,
        ledger=Ledger(),
    )
    asyncio.run(train(run, lambda row: None))


def test_the_trees_of_an_update_that_fails_are_kept_and_written_again(tmp_path: Path) -> None:
    """They are what explains the failure; the update itself is done once more."""
    count(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="out of memory"):
        count(tmp_path / "full", full_at=2)
    whole = result(tmp_path / "whole")
    kept = result(tmp_path / "full")
    assert list(kept) == ["metrics.jsonl", "000001.jsonl.zst", "000002.jsonl.zst"]
    assert kept["000002.jsonl.zst"] == whole["000002.jsonl.zst"]
    (tmp_path / "full" / "trees" / "000002.jsonl.zst").write_bytes(b"half")
    count(tmp_path / "full")
    assert result(tmp_path / "full") == whole
    with pytest.raises(RunError, match="no such file"):
        count(tmp_path / "broken", broken="count/1")
    (tree,) = read_trees(tmp_path / "broken" / "trees" / "000001.jsonl.zst")
    assert not tree.scored
    count(tmp_path / "broken")
    assert result(tmp_path / "broken") == whole


def _heeds_interrupts() -> None:
    """Where the suite runs in the background of a shell, Ctrl-C is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.replace("updates: 20", "updates: 500"))
    command = [sys.executable, "-m", "branchpoint.cli", "train", str(config), f"run={tmp_path / 'r'}"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=_heeds_interrupts,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("update   2"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        assert "--resume" in out
        assert "Traceback" not in err
    assert (tmp_path / "r" / "checkpoints").is_dir()


@pytest.mark.parametrize("flag", [[], ["--resume"]])
def test_a_run_folder_is_never_mixed(tmp_path: Path, flag: list[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    run = tmp_path / "r"
    run.mkdir()
    (run / "config.yaml").write_text("something else")
    command = [sys.executable, "-m", "branchpoint.cli", "train", str(config), f"run={run}", *flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "--fresh" in done.stderr
    assert (run / "config.yaml").read_text() == "something else"
