"""``branchpoint probe gradient | fidelity | variance | plan``, on a run's checkpoint or the model that a config makes.

Each measurement is a :class:`Probe` in ``PROBES``; the modules that do the work are imported when they run. Results go
as JSON into the folder ``probe`` of the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchpoint.command import probe_variance as of_variance

if TYPE_CHECKING:
    from rich.console import Console

    from branchpoint.command.bench import Bench


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
    from branchpoint.command.bench import bench

    with bench(a, console) as at:
        result = at.play(_gradient(a, at))
        file = at.write("gradient", result)
    console.print(gradient_table(result), highlight=False)
    console.print(f"{file}", highlight=False)
    return 0


async def _gradient(a: argparse.Namespace, at: Bench) -> dict[str, Any]:
    """Schedulers that learn from earlier trees do so first: from the run's last ones, else from a few grown flat."""
    from branchpoint.noise import Noise, arm_of
    from branchpoint.probe import gradient as probe
    from branchpoint.probe.design import Design

    config, noise = at.run.config, Noise(a.seed, a.seed).child("probe")
    learnt = at.update is not None
    own = Design("run", at.scheduler(), config.estimator, arm_of(config.noise, 1, 0), learnt)
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
    table.add_column("design", overflow="fold")
    for name in ("trace", result["column"], f"at equal cost, {level}", "|E g|²", "signal"):
        table.add_column(name, justify="right")
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


# --- fidelity -----------------------------------------------------------------------------------------------------


def _fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--siblings", type=int, default=4, metavar="N", help="restored in each session (default: 4)")
    parser.add_argument("--permutations", type=int, default=999, metavar="N", help="of each test (default: 999)")
    parser.add_argument("--level", type=float, default=0.05, help="of the tests together (default: 0.05)")


def fidelity(a: argparse.Namespace, console: Console) -> int:
    """Test the run's environments in its sandbox; 0 when no test found anything, else 1."""
    from branchpoint.command.bench import bench

    with bench(a, console) as at:
        result = at.play(_fidelity(a, at))
        file = at.write("fidelity", result)
    console.print(fidelity_text(result), highlight=False, markup=False)
    console.print(f"{file}", highlight=False)
    return 1 if result["caught"] else 0


async def _fidelity(a: argparse.Namespace, at: Bench) -> dict[str, Any]:
    from branchpoint.command import build
    from branchpoint.noise import Noise
    from branchpoint.probe.fidelity import fidelity
    from branchpoint.probe.restore import Question

    prompts = at.prompts(a.prompts)
    question = Question(
        at.run.policy,
        lambda: build.sandbox(at.run.config, at.say),
        [(course.make, task) for course, task in prompts],
        at.run.config.limits,
        a.siblings,
    )
    found = await fidelity(question, Noise(a.seed, a.seed).child("fidelity"), a.level, a.permutations, at.say)
    return found.as_dict() | {"prompts": [t.id for _, t in prompts], "seed": a.seed}


def fidelity_text(result: dict[str, Any]) -> str:
    """What a person reads: each test, and what it found."""
    names = {"sessions": "leaks within a session", "backbone": "backbone against siblings", "cross-talk": "cross-talk"}
    differ = len(result["differences"])
    lines = [
        f"{result['siblings']} siblings of {result['snapshots']} snapshots in two sessions each",
        f"replay: {differ} of {result['replays']} were answered differently",
        *(f"  {line}" for line in result["differences"][:3]),
        *(f"{names[n]}: {t['estimate']:+.3g}, p = {t['p']:.3g}" for n, t in result["tests"].items()),
        f"luck after the snapshot, same actions: variance {result['luck']:.3g}",
        *result["remarks"],
    ]
    if result["failed"]:
        lines.append(f"{result['failed']} rollouts failed; their sessions are left out")
    caught = ", ".join(result["caught"])
    return "\n".join([*lines, f"not faithful: {caught}" if caught else "faithful as far as these tests see"])


PROBES: dict[str, Probe] = {
    "gradient": Probe("the variance of the gradient in several designs, at equal cost", _gradient_arguments, gradient),
    "fidelity": Probe(
        "whether restored snapshots are worlds of their own, equal to the frozen one", _fidelity_arguments, fidelity
    ),
    "variance": Probe("where the return's variance lies", of_variance.variance_arguments, of_variance.variance),
    "plan": Probe("where to fork: the predicted gain of each design", of_variance.plan_arguments, of_variance.plan),
}
"""What can be measured, by name."""
