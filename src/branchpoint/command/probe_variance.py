"""``branchpoint probe variance | plan``: where the return varies, and what that says about where to fork."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from branchpoint.command.bench import Bench


def variance_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of both."""
    parser.add_argument("--roots", type=int, default=3, metavar="N", help="of each prompt (default: 3)")
    parser.add_argument("--schedules", type=int, default=2, metavar="N", help="of luck, at each quarter (default: 2)")
    parser.add_argument("--rollouts", type=int, default=2, metavar="N", help="under each schedule (default: 2)")
    parser.add_argument("--level", type=float, default=0.9, help="of the intervals (default: 0.9)")


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``plan``."""
    variance_arguments(parser)
    parser.add_argument(
        "--budget", type=float, metavar="N", help="of a group, in full rollouts (default: the run's roots, at least 4)"
    )
    parser.add_argument("--gradients", type=Path, metavar="JSON", help="a result of probe gradient to show beside")


def variance(a: argparse.Namespace, console: Console) -> int:
    """Measure where the variance lies; print it and write the result."""
    from branchpoint.command.bench import bench
    from branchpoint.probe.words import variance_text

    with bench(a, console) as at:
        result = at.play(_measured(a, at))
        file = at.write("variance", result)
    console.print(variance_text(result), highlight=False, markup=False)
    console.print(f"{file}", highlight=False)
    return 0


def plan(a: argparse.Namespace, console: Console) -> int:
    """Measure, plan, and say it in words; write the result and a page."""
    from branchpoint.command.bench import bench
    from branchpoint.probe.report import page
    from branchpoint.probe.words import plan_text, variance_text
    from branchpoint.store import write_text

    gradients = _gradients(a.gradients)
    with bench(a, console) as at:
        result = at.play(_planned(a, at))
        file = at.write("plan", result | {"gradients": gradients})
        write_text(file.with_suffix(".html"), page(result, gradients))
    console.print(variance_text(result), highlight=False, markup=False)
    console.print(plan_text(result), highlight=False, markup=False)
    console.print(f"{file}\n{file.with_suffix('.html')}", highlight=False)
    return 0


async def _measured(a: argparse.Namespace, at: Bench) -> dict[str, Any]:
    from branchpoint.noise import Noise
    from branchpoint.probe.gradient import pilot
    from branchpoint.probe.quarters import Ask, measure
    from branchpoint.probe.words import summary

    ask, prompts = Ask(a.roots, a.schedules, a.rollouts), at.prompts(a.prompts)
    noise = Noise(a.seed, a.seed).child("variance")
    earlier = at.earlier() or await pilot(at.run, prompts, noise)
    found = await measure(at.run, prompts, earlier, ask, noise, at.say)
    return summary(found) | {"prompts": [t.id for _, t in prompts], "roots": a.roots, "seed": a.seed}


async def _planned(a: argparse.Namespace, at: Bench) -> dict[str, Any]:
    from branchpoint.probe.trace import ProbeError
    from branchpoint.probe.words import planned

    scheduler = at.run.config.scheduler
    budget = a.budget or max(4.0, getattr(scheduler, "budget", float(scheduler.roots)))
    if budget < 4:
        raise ProbeError(f"--budget: {budget:g} rollouts are too few for a fork to pay; at least 4")
    result = await _measured(a, at)
    return result | planned(result, budget)


def _gradients(file: Path | None) -> dict[str, Any] | None:
    import json

    from branchpoint.probe.trace import ProbeError

    if file is None:
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found["designs"], list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise ProbeError(f"--gradients: {file} is no result of probe gradient") from None
    return found
