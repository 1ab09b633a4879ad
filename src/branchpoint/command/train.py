"""``branchpoint train`` and ``branchpoint eval``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from branchpoint import config as configs
from branchpoint import train as loop
from branchpoint.command import build
from branchpoint.command.screen import Screen
from branchpoint.command.view import choose, draw
from branchpoint.config import RunConfig
from branchpoint.plot import learning_curve
from branchpoint.store import RunFolder, StoreError, read_trees, write_json


def train(path: Path, overrides: list[str], resume: bool, fresh: bool, console: Console) -> int:
    """Train as the file says. Returns the exit status: 0 when done, 130 after Ctrl-C."""
    config = configs.load(path, overrides)
    folder = RunFolder(config.run)
    screen = Screen(console, config.training.updates)
    with folder.locked():
        lessons = build.courses(config)  # before an old run is cleared away
        build.prepare(config, configs.dump(config), folder, resume, fresh)
        screen.say(describe(config))
        try:
            run = build.run(config, lessons, folder, screen.say, screen.warm_start)
            build.sign(configs.dump(config), folder)
            done = folder.checkpoints()
            with screen.bar(done[-1] if done else 0):
                asyncio.run(_train(run, screen))
        except KeyboardInterrupt:
            done = folder.checkpoints()
            last = f"the checkpoint of update {done[-1]} stands" if done else "before the first checkpoint"
            screen.say(f"stopped, {last}; go on with: branchpoint train {path} {' '.join(overrides)} --resume")
            return 130
        _close(config, folder, screen)
    return 0


async def _train(run: loop.Run, screen: Screen) -> None:
    task = asyncio.current_task()
    assert task is not None

    def report(row: Mapping[str, Any]) -> None:
        screen.update(row)
        if any(name.startswith("eval/") for name in row):
            learning_curve(run.folder.rows("metrics.jsonl"), run.folder.path / "curve.png")

    # A polite kill stops like Ctrl-C: the run is cancelled where it waits, and nothing half-written stays.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await loop.train(run, report)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await run.close()


def describe(config: RunConfig) -> str:
    """One paragraph that says what is about to happen."""
    s, t = config.scheduler, config.training
    names = ", ".join(e.name for e in config.envs)
    limited = "".join(f"\n  {e.name}: {escape(_dials(e.options))}" for e in config.envs if e.options)
    return (
        f"Training [bold]{config.model.name}[/bold] on [bold]{names}[/bold]: {t.updates} updates of {t.tasks} trees "
        f"(scheduler {s.kind}, {s.roots} roots; estimator {config.estimator.kind}; noise {config.noise}). "
        f"Run folder: {config.run}{limited}"
    )


def _dials(options: dict[str, Any]) -> str:
    """What an environment is limited to, as it is set."""
    return ", ".join(f"{k} {' '.join(map(str, v)) if isinstance(v, list | tuple) else v}" for k, v in options.items())


def _close(config: RunConfig, folder: RunFolder, screen: Screen) -> None:
    rows = folder.rows("metrics.jsonl")
    for update in range(rows[-1]["update"] if rows else 0, 0, -1):
        trees = list(read_trees(folder.trees_file(update)))
        drawn = choose(trees, None)
        if len({drawn.total_reward(b.id) for b in drawn.scored}) > 1 or update == 1:
            screen.say(f"\nA rollout tree of update {update}:")
            draw(drawn, config.estimator, screen.console)
            break
    screen.summary(rows, _ledger(folder))
    screen.say(f"learning curve: {folder.path / 'curve.png'}\nall trees: branchpoint view {folder.path}")


def _ledger(folder: RunFolder) -> dict[str, Any]:
    import json

    return json.loads((folder.path / "ledger.json").read_text(encoding="utf-8"))


def evaluate(path: Path, overrides: list[str], console: Console, out: Path | None = None) -> int:
    """Evaluate the newest checkpoint of a run folder on its held-out tasks (other ones by overrides).

    ``out``: a JSON file for the result, with the update, the numbers of tasks and the time."""
    folder = RunFolder(path)
    if not folder.started:
        raise StoreError(f"{path}: not a run folder (no config.yaml in it)")
    if not folder.checkpoints():
        raise StoreError(f"{path}: holds no complete checkpoint; train first, or go on with --resume")
    config = configs.load(path / "config.yaml", overrides)
    screen = Screen(console, 0)
    run = build.run(config, build.courses(config), folder, screen.say, screen.warm_start, learns=False)
    result = asyncio.run(_evaluate(run))
    for course in run.courses:
        total, failed = len(course.eval) * config.training.eval_repeats, result.get(f"eval_failed/{course.name}", 0)
        note = f" ({failed} more failed)" if failed else ""
        screen.say(f"{course.name}: {result[f'eval/{course.name}']:.1%} of {total - failed} rollouts succeed{note}")
    if out is not None:
        tasks = {f"tasks/{c.name}": len(c.eval) for c in run.courses}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(out, result | tasks | {"update": folder.checkpoints()[-1], "date": date})
    return 0


async def _evaluate(run: loop.Run) -> dict[str, Any]:
    try:
        return await loop.evaluate(run, run.ledger)
    finally:
        await run.close()
