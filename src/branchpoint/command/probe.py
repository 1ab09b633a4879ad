"""``branchpoint probe gradient | fidelity``: measurements on a run's checkpoint, or on the model that a config makes.

Each measurement is a :class:`Probe` in ``PROBES``; the modules that do the work are imported when they run. Results go
as JSON into the folder ``probe`` of the run.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from rich.console import Console

    from branchpoint.train import Course, Run
    from branchpoint.tree import RolloutTree
    from branchpoint.world import Task


@dataclass(frozen=True, slots=True)
class Probe:
    """One sub-command: its line of help, its own arguments, and what runs it (returns the exit status)."""

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of ``branchpoint probe``."""
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, probe in PROBES.items():
        own = kinds.add_parser(name, help=probe.summary)
        own.add_argument("place", type=Path, metavar="RUN_OR_CONFIG", help="a run folder, or a YAML file")
        own.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
        own.add_argument("--checkpoint", type=int, metavar="N", help="of update N (default: the newest)")
        own.add_argument("--prompts", type=int, default=8, metavar="N", help="training tasks to use (default: 8)")
        own.add_argument("--seed", type=int, default=0, help="of the probe's own rollouts (default: 0)")
        probe.arguments(own)


def probe(a: argparse.Namespace, console: Console) -> int:
    """Run the sub-command; returns the exit status."""
    return PROBES[a.what].run(a, console)


# --- what every probe needs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """A model at rest with everything around it. ``update``: of the checkpoint; None for a model that a config made."""

    run: Run
    update: int | None
    say: Callable[[str], None]

    def prompts(self, count: int) -> list[tuple[Course, Task]]:
        """The first tasks of the shuffled training split, each environment its share. Raises ProbeError."""
        from branchpoint.noise import Noise
        from branchpoint.probe.trace import ProbeError
        from branchpoint.train import pick

        least = len(self.run.courses)
        if count < least:
            raise ProbeError(f"--prompts: {count} is less than one for each of {least} environments")
        picks = pick(self.run.courses, count, 1, Noise(self.run.config.seed))
        if len({(course.name, task.id) for course, task in picks}) < count:
            raise ProbeError(f"--prompts: fewer than {count} training tasks; widen envs.N.train, or ask for fewer")
        return picks

    def earlier(self) -> list[RolloutTree]:
        """The trees of the update that made the checkpoint: what a scheduler may learn from. Empty when there are
        none."""
        from branchpoint.store import read_trees

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
        from branchpoint.command.build import versions
        from branchpoint.store import write_json

        at = "" if self.update is None else f"-{self.update:06d}"
        file = self.run.folder.path / "probe" / f"{name}{at}.json"
        write_json(file, {"checkpoint": self.update, "versions": versions()} | result)
        return file


@contextmanager
def bench(a: argparse.Namespace, console: Console) -> Iterator[Bench]:
    """The parts of a run at one checkpoint, its folder locked; :meth:`Bench.play` closes them. Raises StoreError or
    ProbeError for a folder that holds none, and ConfigError."""
    from branchpoint import config as configs
    from branchpoint.command import build
    from branchpoint.command.screen import Screen
    from branchpoint.store import RunFolder

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


def _checkpoint(place: Path, update: int | None, overrides: list[str]) -> tuple[Any, Any, int]:
    """Config, folder and update of a run's checkpoint."""
    from branchpoint import config as configs
    from branchpoint.store import RunFolder, StoreError

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
    folder.load_state(chosen)
    return configs.load(place / "config.yaml", overrides), Then(place), chosen


def _unused(folder: Any) -> Any:
    from branchpoint.store import StoreError

    if folder.started or folder.checkpoints():
        raise StoreError(f"{folder.path} holds a run: give that folder, or another one with run=...")
    return folder


def _same_shape(config: Any, model: Any) -> None:
    """Raises ProbeError when the checkpoint is a model of another shape than the config says."""
    from branchpoint.policy.small import Sizes
    from branchpoint.probe.trace import ProbeError

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


# --- gradient -----------------------------------------------------------------------------------------------------


def _gradient_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--designs", nargs="+", default=["flat", "run"], metavar="DESIGN",
        help="KIND[:field=value,...][@ARM], e.g. flat:roots=8 fixed:at=[0.5],width=2@paired run (default: flat run)",
    )  # fmt: skip
    parser.add_argument("--groups", type=int, default=16, metavar="N", help="of each prompt in each design (16)")
    parser.add_argument("--column", default="env_steps", help="ledger column of equal cost (default: env_steps)")
    parser.add_argument("--level", type=float, default=0.9, help="of the intervals (default: 0.9)")


def gradient(a: argparse.Namespace, console: Console) -> int:
    """Measure the gradient's variance in every design; print a table and write the result."""
    with bench(a, console) as at:
        result = at.play(_gradient(a, at))
        file = at.write("gradient", result)
    console.print(gradient_table(result), highlight=False)
    console.print(f"{file}", highlight=False)
    return 0


async def _gradient(a: argparse.Namespace, at: Bench) -> dict[str, Any]:
    """Schedulers that learn from earlier trees do so first: from the run's last ones, else from a few grown flat."""
    from branchpoint.noise import Noise
    from branchpoint.probe import gradient as probe
    from branchpoint.probe.design import Design

    config, noise = at.run.config, Noise(a.seed, a.seed).child("probe")
    own = Design("run", config.scheduler, config.estimator, config.noise)
    designs, prompts = [Design.parse(text, own) for text in a.designs], tuple(at.prompts(a.prompts))
    probe.Plan(tuple(designs), prompts, a.groups, a.column, a.level)  # refused before anything is grown
    earlier = at.earlier() or await probe.pilot(at.run, prompts, noise)
    plan = probe.Plan(tuple(d.after(earlier) for d in designs), prompts, a.groups, a.column, a.level)
    found = await probe.measure(at.run, plan, noise, at.run.folder.path / "probe", at.say)
    return probe.summary(found) | {"seed": a.seed}


def gradient_table(result: dict[str, Any]) -> Any:
    """What a person reads: traces, costs, and the ratio to the first design at equal cost."""
    from rich.table import Table

    level = f"{result['level']:.0%}"
    table = Table(
        title=f"Gradient: {result['groups']} groups of each of {len(result['prompts'])} prompts", expand=False
    )
    for name in ("design", "trace", result["column"], f"at equal cost, {level}", "|E g|²", "with a signal"):
        table.add_column(name, justify="left" if name == "design" else "right")
    ratios = {r["design"]: r["at_equal_cost"] for r in result["ratios"]}
    for d in result["designs"]:
        trace = d["trace"]
        against = ratios.get(d["name"])
        table.add_row(
            d["name"],
            "-" if trace is None else f"{trace['value']:.3g} ({trace['low']:.3g} to {trace['high']:.3g})",
            f"{d['cost']:.1f}",
            "1" if d["name"] not in ratios
            else "-" if against is None
            else f"{against['value']:.2f} ({against['low']:.2f} to {against['high']:.2f})",
            f"{d['squared_mean']:.3g}",
            f"{d['informative']:.0%}",
        )  # fmt: skip
    remarks = [f"{d['name']}: {r}" for d in result["designs"] for r in d["remarks"]]
    table.caption = "\n".join(remarks) or None
    return table


PROBES: dict[str, Probe] = {
    "gradient": Probe("the variance of the gradient in several designs, at equal cost", _gradient_arguments, gradient),
}
