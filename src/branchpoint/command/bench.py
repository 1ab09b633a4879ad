"""What every probe works on: a run's checkpoint, or the model that a config makes, with everything around it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from branchpoint import config as configs
from branchpoint.command import build
from branchpoint.command.screen import Screen
from branchpoint.config import RunConfig
from branchpoint.noise import Noise
from branchpoint.policy.small import Sizes
from branchpoint.probe.trace import ProbeError
from branchpoint.scheduler import Scheduler
from branchpoint.store import RunFolder, StoreError, read_trees, write_json
from branchpoint.train import Course, Run, pick
from branchpoint.tree import RolloutTree
from branchpoint.world import Task


@dataclass(frozen=True, slots=True)
class Bench:
    """A model at rest with everything around it. ``update``: of the checkpoint; None for a model that a config made."""

    run: Run
    update: int | None
    say: Callable[[str], None]

    def prompts(self, count: int) -> list[tuple[Course, Task]]:
        """The first tasks of the shuffled training split, each environment its share. Raises ProbeError."""
        least = len(self.run.courses)
        if count < least:
            raise ProbeError(f"--prompts: {count} is less than one for each of {least} environments")
        picks = pick(self.run.courses, count, 1, Noise(self.run.config.seed))
        if len({(course.name, task.id) for course, task in picks}) < count:
            raise ProbeError(f"--prompts: fewer than {count} training tasks; widen envs.N.train, or ask for fewer")
        return picks

    def scheduler(self) -> Scheduler:
        """The run's scheduler with all that it had learnt at the checkpoint."""
        own = self.run.config.scheduler
        return own if self.update is None else own.model_validate(self.run.folder.load_state(self.update)["scheduler"])

    def earlier(self) -> list[RolloutTree]:
        """The trees of the update that made the checkpoint: what a scheduler may learn from. Empty when there are
        none."""
        file = self.run.folder.trees_file(self.update or 0)
        return list(read_trees(file)) if file.exists() else []

    def play(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """What ``work`` returns; the sandbox and the policies are closed afterwards, whatever comes of it."""

        async def and_close() -> dict[str, Any]:
            try:
                return await work
            finally:
                await self.run.close()

        return asyncio.run(and_close())

    def write(self, name: str, result: dict[str, Any]) -> Path:
        """The result as JSON in the run's folder, in one step; returns the file."""
        at = "" if self.update is None else f"-{self.update:06d}"
        file = self.run.folder.path / "probe" / f"{name}{at}.json"
        write_json(file, {"checkpoint": self.update, "versions": build.versions()} | result)
        return file


@contextmanager
def bench(a: argparse.Namespace, console: Console) -> Iterator[Bench]:
    """The parts of a run at one checkpoint, its folder locked; :meth:`Bench.play` closes them. Raises StoreError or
    ProbeError for a folder that holds none, and ConfigError."""
    screen = Screen(console, 0)
    if a.place.is_dir() or not a.place.suffix:
        config, folder, update = _checkpoint(a.place, a.checkpoint, a.overrides)
    else:
        config = configs.load(a.place, a.overrides)
        folder, update = _unused(RunFolder(config.run)), None
    with folder.locked():
        run = build.run(config, build.courses(config), folder, screen.say, screen.warm_start, learns=False)
        _same_shape(config, run.learner.model)
        yield Bench(run, update, screen.say)


def _checkpoint(place: Path, update: int | None, overrides: list[str]) -> tuple[RunConfig, RunFolder, int]:
    """Config, folder and update of a run's checkpoint."""

    class Then(RunFolder):
        """The folder as it was when the checkpoint was the newest."""

        def checkpoints(self) -> list[int]:
            return [u for u in super().checkpoints() if u <= chosen]

    folder = RunFolder(place)
    if not folder.started:
        raise StoreError(f"{place}: not a run folder (no config.yaml in it); give a run folder or a .yaml file")
    done = folder.checkpoints()
    if not done:
        raise StoreError(f"{place}: half-written, it holds no complete checkpoint; go on with train --resume")
    chosen = done[-1] if update is None else update
    if chosen not in done:
        raise StoreError(f"{place}: holds no checkpoint of update {chosen}; it holds {', '.join(map(str, done))}")
    folder.load_state(chosen)  # raises where it was cut short
    return configs.load(place / "config.yaml", overrides), Then(place), chosen


def _unused(folder: RunFolder) -> RunFolder:

    if folder.started or folder.checkpoints():
        raise StoreError(f"{folder.path} holds a run: give that folder, or another one with run=...")
    return folder


def _same_shape(config: RunConfig, model: Any) -> None:
    """Raises ProbeError when the checkpoint is a model of another shape than the config says."""

    adapter = hasattr(model, "peft_config")
    if adapter != (config.model.lora is not None):
        held, asked = ("an adapter", "none") if adapter else ("a whole model", "an adapter (model.lora)")
        raise ProbeError(f"checkpoint of another architecture: it holds {held}, the config asks for {asked}")
    if config.model.name != "small":
        return
    sizes, found = Sizes(**config.model.size), model.config
    fields = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
              "hidden": "intermediate_size"}  # fmt: skip
    for name, theirs in fields.items():
        if getattr(found, theirs, None) != getattr(sizes, name):
            raise ProbeError(
                f"checkpoint of another architecture: {found.model_type} with {theirs} = "
                f"{getattr(found, theirs, None)}, the config says model.size.{name} = {getattr(sizes, name)}"
            )
