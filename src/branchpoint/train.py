"""The training loop: Task -> grow -> RolloutTree -> Segments -> Credit -> PackedBatch -> step. One update is one page.

Everything random is keyed by the run's seed and the update, task, branch and turn it belongs to; nothing is carried
from one update to the next but the weights, the optimiser, the scheduler's lagged numbers and the ledger. That is what
makes a resumed run continue byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from branchpoint import register
from branchpoint.advantage import Credit, Ppo, steered
from branchpoint.config import RunConfig
from branchpoint.credit import Targets
from branchpoint.learner import Learner
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise, Pairing, arm_of, digest
from branchpoint.pack import pack, unpack
from branchpoint.rollout import Grower
from branchpoint.scheduler import Flat, Scheduler
from branchpoint.session import Policy
from branchpoint.store import RunFolder, write_json, write_lines, write_trees
from branchpoint.tree import Array, Branch, RolloutTree, Segments
from branchpoint.world import Make, Sandbox, Task, settle


class RunError(Exception):
    """The run cannot go on; one line with the first cause."""


Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Course:
    """One environment of a run: how to build it, and its training and evaluation tasks."""

    name: str
    make: Make
    train: tuple[Task, ...]
    eval: tuple[Task, ...]
    share: float = 1.0


@dataclass(slots=True)
class Run:
    """The parts of a run. ``save`` writes the model in Hugging Face layout and the learner's state into a folder;
    ``load`` reads the learner's state back. ``ledger`` holds what building the parts has cost (the warm start)."""

    config: RunConfig
    courses: tuple[Course, ...]
    policy: Policy
    eval_policy: Policy
    sandbox: Sandbox
    learner: Learner
    folder: RunFolder
    save: Callable[[Path], None]
    load: Callable[[Path], None]
    ledger: Ledger

    async def close(self) -> None:
        """Ends the sandbox and the policies, with all that they hold."""
        try:
            await settle(self.sandbox.close())
        finally:
            for policy in (self.policy, self.eval_policy):  # may be one: closing twice does nothing
                policy.close()


async def train(run: Run, report: Report) -> None:
    """Train to the last update, from the newest checkpoint if there is one.

    ``report`` gets one mapping an update: metrics, the evaluation if there was one, seconds and tokens a second.
    Raises RunError when every rollout of an update fails.
    """
    config, ledger = run.config, run.ledger
    scheduler, first = _resume(run, ledger)
    noise, training, spent = Noise(config.seed, config.seed), config.training, _spent(run)
    for update in range(first, training.updates + 1):
        if update and training.ends(update - 1, spent):
            break
        before = spent
        clock = Ledger(**ledger.as_dict())  # type: ignore[arg-type]
        row: dict[str, Any] = {"update": update}
        with ledger.clock("wall_seconds"):
            if update > 0:
                grower = Grower(run.policy, run.sandbox, scheduler, config.limits, "independent", ledger)
                picks = pick(run.courses, config.training.tasks, update, noise)
                trees = await collect(grower, picks, noise, update, config.noise)
                write_trees(run.folder.trees_file(update), trees)  # first: they explain whatever goes wrong now
                _require_scores(trees, f"update {update}")
                lessons = judge(run.learner, config, trees, ledger, scheduler.gammas)
                write_lines(run.folder.register_file(update), register.groups(trees, lessons.pairs, config, update))
                row |= learn(run.learner, config, trees, lessons, ledger) | scheduler.metrics()
                scheduler = scheduler.update(trees)
            if training.budget is not None:
                column = training.budget.column
                spent += getattr(ledger, column) - getattr(clock, column)
                row["spent"] = spent
            if training.evaluates(update, before, spent):
                row |= await evaluate(run, ledger)
        _record(run, update, row, ledger, clock, scheduler)
        seconds = ledger.wall_seconds - clock.wall_seconds
        tokens = ledger.generated_tokens - clock.generated_tokens
        report(row | {"seconds": seconds, "tokens_per_second": tokens / seconds})


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a batch of trees teaches: the credit of each and, with a critic, what that learns."""

    pairs: tuple[tuple[Segments, Credit], ...]
    targets: Targets | None = None


def judge(
    learner: Learner,
    config: RunConfig,
    trees: Sequence[RolloutTree],
    ledger: Ledger,
    gammas: tuple[float, ...] = (),
) -> Lessons:
    """The credit of a batch, by the estimator and, where it needs one, the critic as it was while sampling.

    ``gammas``: those that the scheduler planned with the forks (empty: the estimator's own).
    """
    segments, estimator = [Segments.of(t) for t in trees], steered(config.estimator, gammas)
    if not isinstance(estimator, Ppo):
        return Lessons(tuple((s, estimator.credit(s)) for s in segments))
    with ledger.clock("learning_seconds"):
        values = _values(learner, segments, config.learner.token_budget)
    both = list(zip(segments, values, strict=True))
    targets = Targets.join([estimator.targets(s, v) for s, v in both])
    return Lessons(tuple((s, estimator.credit(s, v)) for s, v in both), targets)


def _values(learner: Learner, segments: Sequence[Segments], token_budget: int) -> list[Array]:
    """Of every tree, [N] the critic's value before each sampled token."""
    even = [
        (s, Credit(np.zeros(len(s.tokens)), np.zeros(len(s.tokens)), s.sampled.astype(np.float64))) for s in segments
    ]
    rows = pack(even, token_budget)
    sizes = [len(s.tokens) for s in segments]
    return np.split(unpack(rows, learner.values(rows), sum(sizes)), np.cumsum(sizes)[:-1])


def learn(
    learner: Learner, config: RunConfig, trees: Sequence[RolloutTree], lessons: Lessons, ledger: Ledger
) -> dict[str, Any]:
    """One update of the weights from one batch of trees: packing and gradient steps. Returns the metrics."""
    settings, pairs, targets = config.learner, lessons.pairs, lessons.targets
    # Without a signal there is nothing to learn but the pull of the KL penalty, where that is wanted, and values.
    always = targets is not None or (settings.kl > 0 and settings.kl_without_signal)
    weighed = [(s, c) for s, c in pairs if c.informative or always]
    critic = {} if targets is None else {"targets": targets}
    with ledger.clock("learning_seconds"):
        # A constant of the design: one root group a task, whatever this batch's trees look like.
        metrics = learner.step(pack(weighed, settings.token_budget), normaliser=config.training.tasks, **critic)
    ledger.batches += 1
    ledger.trained_packed += sum(len(s.tokens) for s, _ in weighed)
    ledger.trained_flat += sum(flat_tokens(s) for s, _ in weighed)
    explained = {} if targets is None else {"explained_variance": targets.explained_variance}
    return rollout_metrics(trees, pairs) | asdict(metrics) | explained


async def collect(
    grower: Grower, picks: Sequence[tuple[Course, Task]], noise: Noise, update: int, pairing: Pairing
) -> list[RolloutTree]:
    """All trees of an update, grown together, in the order of the tasks. ``pairing``: how they meet luck."""
    async with asyncio.TaskGroup() as group:
        jobs = [
            group.create_task(
                grower.grow(
                    c.make,
                    t,
                    noise.child("update", update, i, t.id),
                    f"{update:06d}/{i:04d}",
                    arm_of(pairing, update, i),
                )
            )
            for i, (c, t) in enumerate(picks)
        ]
    return [job.result() for job in jobs]


def pick(courses: Sequence[Course], count: int, update: int, noise: Noise) -> list[tuple[Course, Task]]:
    """The tasks of an update (counted from 1): each environment gets its share, and walks through its tasks in an order
    that is shuffled afresh each time round."""
    bounds = np.round(np.cumsum([0.0] + [c.share for c in courses]) / sum(c.share for c in courses) * count).astype(int)
    picks = []
    for course, number in zip(courses, np.diff(bounds), strict=True):
        for at in range((update - 1) * number, update * number):
            turn, place = divmod(at, len(course.train))
            order = noise.at("tasks", course.name, turn).permutation(len(course.train))
            picks.append((course, course.train[order[place]]))
    return picks


async def evaluate(run: Run, ledger: Ledger) -> dict[str, Any]:
    """True success on the evaluation tasks. Luck and draws are a function of (task, repeat): distinct across tasks,
    equal at every checkpoint, in every arm and for every seed of a run. The costs are booked like all others.

    Rollouts that failed have no outcome; they are counted beside. Raises RunError when none has one.
    """
    repeats = run.config.training.eval_repeats
    grower = Grower(run.eval_policy, run.sandbox, Flat(roots=1), run.config.limits, "independent", ledger)
    out: dict[str, Any] = {}
    for course in run.courses:
        picks = [(course, t) for t in course.eval for _ in range(repeats)]
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(grower.grow(c.make, t, evaluation_noise(t, i % repeats)))
                for i, (c, t) in enumerate(picks)
            ]
        trees = [job.result() for job in jobs]
        _require_scores(trees, f"evaluation on {course.name}")
        done = [success(b) for t in trees for b in t.scored]
        out[f"eval/{course.name}"] = float(np.mean(done))
        if len(done) < len(picks):
            out[f"eval_failed/{course.name}"] = len(picks) - len(done)
    return out


def evaluation_noise(task: Task, repeat: int) -> Noise:
    """The noise of one evaluation rollout."""
    key = digest(task.seed, "evaluation", task.id, repeat)
    return Noise(key, key)


def _require_scores(trees: Sequence[RolloutTree], where: str) -> None:
    failures = [b.failure for t in trees for b in t.branches if b.failure is not None]
    if failures and not any(t.scored for t in trees):
        raise RunError(
            f"{where}: all {len(failures)} rollouts failed; the first, {failures[0].kind}: {failures[0].message}"
        )


def success(branch: Branch) -> float:
    """The true outcome where the environment reports one, else whether the last reward was positive."""
    last = branch.turns[-1]
    return float(last.info.get("success", last.reward > 0))


def rollout_metrics(trees: Sequence[RolloutTree], pairs: Sequence[tuple[Segments, Credit]]) -> dict[str, Any]:
    scored = [b for t in trees for b in t.scored if b.trained]
    sampled = np.concatenate([s.entropies[s.sampled] for s, _ in pairs] or [np.zeros(0)])
    failures = [b.failure.kind for t in trees for b in t.branches if b.failure is not None]
    return {
        "score": _mean([t.total_reward(b.id) for t in trees for b in t.scored if b.trained]),
        "success": _mean([success(b) for b in scored]),
        "entropy": _mean(sampled),
        "informative": _mean([c.informative for _, c in pairs]),
        "branches": len(scored),
        "turns": _mean([b.first_turn + len(b.turns) for b in scored]),
        "cut": _mean([b.stop in ("turns", "length") for b in scored]),
        "shared": 1 - sum(len(s.tokens) for s, _ in pairs) / max(1, sum(flat_tokens(s) for s, _ in pairs)),
        **{f"failed/{kind}": failures.count(kind) for kind in sorted(set(failures))},
    }


def flat_tokens(segments: Segments) -> int:
    """The tokens of all root-to-leaf paths, shared ones counted once a leaf."""
    leaves = segments.sum_up(segments.leaf.astype(np.float64))
    return int((leaves * np.diff(segments.start)).sum())


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _resume(run: Run, ledger: Ledger) -> tuple[Scheduler, int]:
    """The scheduler and the first update to do: those after the newest checkpoint, if there is one."""
    done = run.folder.checkpoints()
    if not done:
        run.folder.rewind(-1)
        return run.config.scheduler, 0
    state = run.folder.load_state(done[-1])
    run.load(run.folder.checkpoint(done[-1]))
    run.folder.rewind(done[-1])
    ledger.restore(state["ledger"])
    return run.config.scheduler.model_validate(state["scheduler"]), done[-1] + 1


def _spent(run: Run) -> int:
    """What the updates so far have cost in the budget's column."""
    rows = run.folder.rows("metrics.jsonl")
    return int(rows[-1].get("spent", 0)) if rows else 0


def _record(run: Run, update: int, row: dict[str, Any], ledger: Ledger, before: Ledger, scheduler: Scheduler) -> None:
    clocks = {k: v - getattr(before, k) for k, v in ledger.as_dict().items() if k.endswith("_seconds")}
    run.folder.append("metrics.jsonl", row | ledger.counts())
    run.folder.append("timings.jsonl", {"update": update} | clocks)
    write_json(run.folder.path / "ledger.json", ledger.as_dict())
    training = run.config.training
    marked = training.budget is not None and any(name.startswith("eval/") for name in row)
    if update % training.checkpoint_every == 0 or training.ends(update, row.get("spent", 0)) or marked:
        state = {"update": update, "scheduler": scheduler.model_dump(mode="json"), "ledger": ledger.as_dict()}
        run.folder.save_checkpoint(update, run.save, state, training.keep_checkpoints)
