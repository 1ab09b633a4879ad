"""The command line: ``branchpoint train | eval | view | probe | compare | check | envs | swe | reap``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from branchpoint import __version__
from branchpoint.command import compare  # light, like the next: what it needs is imported when it runs
from branchpoint.command import probe as probes  # light: it imports what a probe needs when it runs

# Before numpy and torch start their thread pools: at these sizes more threads bring nothing and contention is costly.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="branchpoint", description="Reinforcement learning on trees of rollouts.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train as a YAML file says")
    train.add_argument("config", type=Path)
    train.add_argument("overrides", nargs="*", metavar="key=value", help="for example training.updates=10")
    again = train.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the run in the run folder")
    again.add_argument("--fresh", action="store_true", help="start over in the run folder")

    evaluate = commands.add_parser("eval", help="evaluate a run's newest checkpoint on held-out tasks")
    evaluate.add_argument("run", type=Path, help="run folder")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value")
    evaluate.add_argument("--out", type=Path, help="also write the result as JSON")

    view = commands.add_parser("view", help="draw a rollout tree in the terminal")
    view.add_argument("place", type=Path, help="run folder, or a .jsonl.zst file of trees")
    view.add_argument("--tree", type=int, help="number of the tree in the file (default: a telling one)")
    view.add_argument("--estimator", default="tree", help="whose credit to show: tree, rloo, grpo, bpo, ... or none")

    probes.arguments(commands.add_parser("probe", help="measure variances, where to fork, a sandbox's fidelity"))

    compare.arguments(commands.add_parser("compare", help="a registered comparison: freeze, run, report"))

    check = commands.add_parser("check", help="run the shipped checkers")
    check.add_argument("what", choices=("env", "sandbox", "policy", "oracles"))
    check.add_argument("name", nargs="?", help="a built-in name, module:attribute, or for oracles a JSON file")
    check.add_argument("--image", help="sandbox shell or container: what machines start from")

    commands.add_parser("envs", help="list the environments: what is there, and what each needs")

    reap = commands.add_parser("reap", help="remove the containers and images that killed runs left behind")
    reap.add_argument("--socket", help="of the container engine (default: DOCKER_HOST, or the usual places)")
    reap.add_argument("--all", action="store_true", help="also those of runs that are alive, or on other machines")

    swe = commands.add_parser("swe", help="make repository tasks")
    make = swe.add_subparsers(dest="what", required=True, metavar="WHAT")
    inject = make.add_parser("inject", help="inject bugs into PyPI packages; keep those that their tests notice")
    inject.add_argument("--tasks", type=int, default=400, help="how many (default: 400)")
    inject.add_argument("--out", type=Path, required=True, help="a .jsonl or .jsonl.xz file")
    inject.add_argument("--repos", nargs="+", metavar="NAME", help="only these repositories (default: all)")
    inject.add_argument("--seed", type=int, default=0)
    inject.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    verify = make.add_parser("verify", help="check the Verified tasks on release sdists")
    verify.add_argument("--ids", nargs="+", metavar="ID", help="only these, with or without the release (default: all)")
    verify.add_argument("--jobs", type=int, default=1, help="tasks at a time")
    verify.add_argument("--out", type=Path, help="a .jsonl file of verdicts; a second call goes on from it")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; errors that a user can mend end in one line and status 1."""
    a, rest = parser().parse_known_args(argv)
    if any(r.startswith("-") for r in rest) or (rest and not hasattr(a, "overrides")):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # key=value behind an option
        a.overrides += rest
    sys.path.insert(0, os.getcwd())  # a user's module:attribute lies where the command is called
    # Each command imports what it needs: the heavy packages take seconds.
    from rich.console import Console

    console = Console(soft_wrap=True)
    try:
        if a.command == "train":
            from branchpoint.command.train import train

            return train(a.config, a.overrides, a.resume, a.fresh, console)
        if a.command == "eval":
            from branchpoint.command.train import evaluate

            return evaluate(a.run, a.overrides, console, a.out)
        if a.command == "view":
            from branchpoint.command.view import estimator, view

            return view(a.place, a.tree, estimator(a.estimator), console)
        if a.command == "probe":
            return probes.probe(a, console)
        if a.command == "compare":
            return compare.compare(a, console, main)
        if a.command == "envs":
            from branchpoint.command.envs import listing

            return listing(console)
        if a.command == "reap":
            from branchpoint.sandbox.container import reap

            containers, images = reap(a.socket, everything=a.all)
            console.print(f"removed {containers} containers and {images} images", highlight=False)
            return 0
        if a.command == "swe":
            from branchpoint.command.swe import inject, verify

            if a.what == "verify":
                return verify(a.ids, a.jobs, a.out, console)
            return inject(a.tasks, a.out, a.repos, a.seed, a.jobs, console)
        from branchpoint.command.check import check

        return check(a.what, a.name, console, a.image)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as e:
        cause = _cause(e)
        if not _expected(cause):
            raise
        print(f"branchpoint: {' '.join(str(cause).split())}", file=sys.stderr)
        return 1


def _cause(error: BaseException) -> BaseException:
    """The first error inside nested groups of concurrent tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _expected(error: BaseException) -> bool:
    """Errors that name their cure: our own types, and a missing extra. All else is a defect and is shown in full."""
    return type(error).__module__.startswith("branchpoint.") or isinstance(error, ModuleNotFoundError)


if __name__ == "__main__":
    sys.exit(main())
