"""The variance of the gradient at a frozen checkpoint, for one design of rollout trees or several at equal cost.

A *group* is one tree of one prompt. Its gradient is the learner's own, over the trainable parameters: what ``train``
would compute from that tree alone, without an update and without the KL penalty. Groups of a prompt are independent, so
the trace of their covariance is estimated from inner products alone (:mod:`branchpoint.probe.trace`); the rows
themselves lie on disk, one at a time is in memory, and the Gram matrix is taken in float64 over blocks of columns.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchpoint.advantage import Estimator
from branchpoint.learner import Learner
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.pack import pack
from branchpoint.probe import trace as stats
from branchpoint.probe.design import Design
from branchpoint.probe.trace import Interval, ProbeError
from branchpoint.rollout import Grower
from branchpoint.scheduler import Flat
from branchpoint.train import Course, Run, flat_tokens
from branchpoint.tree import Array, RolloutTree, Segments
from branchpoint.world import Task

Say = Callable[[str], None]
BLOCK_BYTES = 1 << 28
"""Memory for a block of columns while the Gram matrix is taken."""
ENOUGH = 32
"""Groups from which an interval holds what it promises (below, a rare kind of group is not seen)."""


class Rows:
    """[count, parameters] gradients in a file: float32, or float64 when the model is. Closing removes the file."""

    def __init__(self, path: Path, count: int, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters, self.path = parameters, path
        exact = any(p.dtype == torch.float64 for p in parameters)
        dtype = np.dtype(np.float64 if exact else np.float32)
        size = sum(p.numel() for p in parameters)
        path.parent.mkdir(parents=True, exist_ok=True)
        needed, free = count * size * dtype.itemsize, shutil.disk_usage(path.parent).free
        if needed > free:
            raise ProbeError(
                f"{count} gradients of {size:,} parameters need {needed / 1e9:.1f} GB in {path.parent}, "
                f"which has {free / 1e9:.1f}; take fewer groups, prompts or designs, or another disk"
            )
        self.values = np.memmap(path, dtype, "w+", shape=(count, size))

    def store(self, row: int) -> float:
        """Write ``.grad`` of all parameters as a row, one parameter at a time; returns its norm."""
        at, square = 0, 0.0
        for p in self.parameters:
            if p.grad is not None:
                own = self.values[row, at : at + p.numel()]
                kind = torch.float64 if own.dtype == np.float64 else torch.float32
                own[:] = p.grad.detach().reshape(-1).to("cpu", kind).numpy()
                square += float(np.sum(np.square(own, dtype=np.float64)))
            at += p.numel()
        self.values.flush()
        return math.sqrt(square)

    def gram(self) -> Array:
        """[count, count] the inner products of the rows, in float64, over blocks of columns."""
        count, size = self.values.shape
        out = np.zeros((count, count))
        step = max(1, BLOCK_BYTES // (8 * count))
        for at in range(0, size, step):
            block = np.asarray(self.values[:, at : at + step], np.float64)
            out += block @ block.T
            del block  # before the next one is read
        return out

    def close(self) -> None:
        """Remove the file."""
        del self.values
        self.path.unlink(missing_ok=True)


@contextmanager
def rows_on_disk(path: Path, count: int, parameters: Sequence[torch.Tensor]) -> Iterator[Rows]:
    """Rows that are gone afterwards. Raises ProbeError when the disk cannot hold them."""
    rows = Rows(path, count, parameters)
    try:
        yield rows
    finally:
        rows.close()


def group_gradient(learner: Learner, estimator: Estimator, tree: RolloutTree, ledger: Ledger) -> bool:
    """Leave the gradient of one group in ``.grad`` of the learner's parameters; the cost is booked.

    False, and no gradient, when nothing in the group tells one action from another. The sign is that of the loss.
    Raises ProbeError when no rollout has a score, the estimator refuses the tree, or the gradient is not finite.
    """
    segments = Segments.of(tree)
    if not len(segments.parent):
        failure = next(b.failure for b in tree.branches if b.failure is not None)
        raise ProbeError(
            f"task {tree.task.id}: no rollout of a group has a score; the first failed, {failure.kind}: "
            f"{failure.message}"
        )
    try:
        credit = estimator.credit(segments)
    except ValueError as e:  # what the estimator needs and the probe does not have, in its own words
        raise ProbeError(f"task {tree.task.id}: {e}") from e
    if not credit.informative:
        learner.optimizer.zero_grad(set_to_none=True)
        return False
    with ledger.clock("learning_seconds"):
        metrics = learner.gradient(pack([(segments, credit)], learner.config.token_budget), normaliser=1.0)
    ledger.batches += 1
    ledger.trained_packed += len(segments.tokens)
    ledger.trained_flat += flat_tokens(segments)
    if not math.isfinite(metrics.grad_norm):
        raise ProbeError(f"task {tree.task.id}: the gradient of a group is {metrics.grad_norm}; check the checkpoint")
    return True


def contrast(returns: Sequence[float]) -> float:
    """The mean of (R_i - R_j)^2 over the pairs of a group: 2 Var(R) (1 - lambda) for paired rollouts, where lambda is
    the share of luck, and 2 Var(R) for independent ones. NaN for fewer than two."""
    return 2 * float(np.var(returns, ddof=1)) if len(returns) > 1 else math.nan


def root_returns(tree: RolloutTree) -> list[float]:
    """The returns of the trained roots' own rollouts."""
    roots = [b for b in tree.scored if b.fork is None or b.fork.node == (0, 0, 0)]
    return [tree.total_reward(b.id) for b in roots if b.trained]


@dataclass(frozen=True, slots=True)
class Group:
    """What is kept of a group beside its gradient."""

    design: int
    prompt: int
    informative: bool
    returns: tuple[float, ...]  # of its roots
    branches: int
    failed: int
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: ``groups`` of every prompt in every design, compared at equal cost in ``column`` of the
    ledger; intervals at ``level``."""

    designs: tuple[Design, ...]
    prompts: tuple[tuple[Course, Task], ...]
    groups: int = 32
    column: str = "env_steps"
    level: float = 0.9

    def __post_init__(self) -> None:
        names = [d.name for d in self.designs]
        if not names or len(set(names)) < len(names):
            raise ProbeError("designs: give at least one, and each once")
        if self.column not in Ledger().as_dict():
            raise ProbeError(f"column: the ledger has no {self.column!r}; columns: {', '.join(Ledger().as_dict())}")
        if not 0 < self.level < 1:
            raise ProbeError(f"level: {self.level} is not between 0 and 1")
        if self.groups < 2 or (self.groups == 2 and len(self.prompts) < 3):
            raise ProbeError("groups: a trace with an interval needs 3 groups of each prompt, or 2 of 3 prompts")

    @property
    def size(self) -> int:
        """The number of groups over all designs and prompts."""
        return len(self.designs) * len(self.prompts) * self.groups

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(design, prompt, first row) of every block of ``groups`` rows, in order."""
        for d in range(len(self.designs)):
            for p in range(len(self.prompts)):
                yield d, p, (d * len(self.prompts) + p) * self.groups


@dataclass(frozen=True, eq=False)
class Measured:
    """All groups of a plan in the order of the rows, and the Gram matrix of their gradients."""

    plan: Plan
    groups: tuple[Group, ...]
    gram: Array = field(repr=False)
    parameters: int = 0


async def measure(run: Run, plan: Plan, noise: Noise, folder: Path, say: Say) -> Measured:
    """Grow every group with the run's policy at its present weights and take its gradient.

    ``noise`` keys everything, design by design, so that what one measures does not depend on the others. ``folder``
    holds the rows meanwhile. Raises ProbeError.
    """
    live = asyncio.Semaphore(run.config.limits.live)
    groups: list[Group] = []
    with rows_on_disk(folder / ".gradients.partial", plan.size, run.learner.parameters) as rows:
        for d, p, first in plan.places():
            design, (course, task) = plan.designs[d], plan.prompts[p]
            keys = [noise.child("gradient", design.name, task.id, i) for i in range(plan.groups)]
            # Seconds are each group's own only when it grows alone.
            at_once = 1 if plan.column.endswith("_seconds") else plan.groups
            for at in range(0, plan.groups, at_once):
                grown = await _grow(run, design, course, task, keys[at : at + at_once], live)
                for i, (tree, ledger) in enumerate(grown, first + at):
                    informative = group_gradient(run.learner, design.estimator, tree, ledger)
                    if informative:
                        rows.store(i)
                    groups.append(_group(d, p, informative, tree, ledger))
            say(f"{design.name}: prompt {p + 1} of {len(plan.prompts)}, {plan.groups} groups")
        run.learner.optimizer.zero_grad(set_to_none=True)
        if not any(g.informative for g in groups):
            _refuse_silence(groups)
        return Measured(plan, tuple(groups), rows.gram(), rows.values.shape[1])


async def pilot(run: Run, prompts: Sequence[tuple[Course, Task]], noise: Noise) -> list[RolloutTree]:
    """A flat group of each prompt, for schedulers that need to have seen some; not measured."""
    grower = Grower(run.policy, run.sandbox, Flat(roots=2), run.config.limits, "independent", Ledger())
    async with asyncio.TaskGroup() as tasks:
        jobs = [
            tasks.create_task(grower.grow(c.make, t, noise.child("pilot", i, t.id))) for i, (c, t) in enumerate(prompts)
        ]
    return [job.result() for job in jobs]


async def _grow(
    run: Run, design: Design, course: Course, task: Task, keys: Sequence[Noise], live: asyncio.Semaphore
) -> list[tuple[RolloutTree, Ledger]]:
    """One tree a key, together, each with a ledger of its own."""
    growers = [Grower(run.policy, run.sandbox, design.scheduler, run.config.limits, design.arm, Ledger()) for _ in keys]
    for grower in growers:
        grower.live = live
    async with asyncio.TaskGroup() as tasks:
        jobs = [tasks.create_task(g.grow(course.make, task, key)) for g, key in zip(growers, keys, strict=True)]
    return [(job.result(), g.ledger) for job, g in zip(jobs, growers, strict=True)]


def _group(design: int, prompt: int, informative: bool, tree: RolloutTree, ledger: Ledger) -> Group:
    failed = sum(b.failure is not None for b in tree.branches)
    ledger.wall_seconds = ledger.generation_seconds + ledger.environment_seconds + ledger.learning_seconds
    returns = tuple(root_returns(tree))
    return Group(design, prompt, informative, returns, len(tree.branches), failed, ledger)


def _refuse_silence(groups: Sequence[Group]) -> None:
    """Say what is missing when no group tells one action from another."""
    seen = sorted({r for g in groups for r in g.returns})
    what = f"scored {seen[0]:g}" if len(seen) == 1 else "scored alike within its group"
    raise ProbeError(
        f"all {len(groups)} groups are without a signal: every rollout {what}, so no gradient can be measured; choose "
        "tasks that the policy sometimes solves and sometimes fails (envs.N.train), more prompts, or more roots"
    )


def summary(found: Measured) -> dict[str, Any]:
    """The figures of every design, and of each against the first, as JSON values.

    A trace at equal cost is T times the mean cost of a group in the plan's column: the trace of a mean over groups that
    together cost one unit. ``ratios`` are of those, with the interval of two independent estimates; ``gap`` is the
    unbiased |E g - E g'|^2 between two designs (0 for two unbiased estimators), ``cosine`` that of their means.
    """
    plan = found.plan
    costs = np.array([float(getattr(g.ledger, plan.column)) for g in found.groups])
    own = [_Design(found, d, costs) for d in range(len(plan.designs))]
    return {
        "probe": "gradient",
        "column": plan.column,
        "level": plan.level,
        "parameters": found.parameters,
        "prompts": [t.id for _, t in plan.prompts],
        "groups": plan.groups,
        "designs": [d.as_dict() for d in own],
        "ratios": [d.against(own[0]) for d in own[1:]],
    }


class _Design:
    """The rows of one design."""

    def __init__(self, found: Measured, index: int, costs: Array) -> None:
        self.found, self.plan, self.design = found, found.plan, found.plan.designs[index]
        self.at = np.flatnonzero([g.design == index for g in found.groups])
        self.groups = [found.groups[i] for i in self.at]
        self.prompts = np.array([g.prompt for g in self.groups], np.int64)
        self.gram, self.costs = found.gram[np.ix_(self.at, self.at)], costs[self.at]
        self.trace = stats.within(self.gram, self.prompts)
        self.at_cost = stats.within(self.gram, self.prompts, self.costs)
        self.square = stats.mean_square(self.gram, self.prompts)

    def as_dict(self) -> dict[str, Any]:
        groups = self.groups
        contrasts = [c for g in groups if not math.isnan(c := contrast(g.returns))]
        spent = [g.ledger.as_dict() for g in groups]
        return self.design.as_dict() | {
            "trace": _interval(self.trace.interval(self.plan.level)),
            "squared_mean": self.square,
            "between_prompts": stats.between(self.gram, self.prompts),
            "trace_at_cost": _interval(self.at_cost.interval(self.plan.level)),
            "cost": float(np.mean(self.costs)),
            "ledger": {name: float(np.mean([s[name] for s in spent])) for name in spent[0]},
            "score": _mean([r for g in groups for r in g.returns]),
            "contrast": _mean(contrasts),
            "informative": float(np.mean([g.informative for g in groups])),
            "branches": float(np.mean([g.branches for g in groups])),
            "failed": sum(g.failed for g in groups),
            "remarks": list(self.remarks()),
        }

    def remarks(self) -> Iterator[str]:
        """What keeps the figures from saying more."""
        yield from self.design.remarks
        with_signal = sum(g.informative for g in self.groups)
        if not self.trace.value > 0:
            yield "no group has a gradient (all rollouts of a group scored alike): the trace is 0 and has no interval"
        elif with_signal < ENOUGH:
            yield f"{with_signal} groups with a signal: below {ENOUGH} the interval is often too short"
        if len(self.plan.prompts) == 1:
            yield "one prompt only: the variance between prompts is unknown; give 2 or more"
        if failed := sum(g.failed for g in self.groups):
            yield f"{failed} rollouts failed and are left out; if failing depends on the actions, the mean is biased"

    def against(self, base: _Design) -> dict[str, Any]:
        """This design over ``base``."""
        cross = self.found.gram[np.ix_(self.at, base.at)]
        product = stats.inner(cross, self.prompts, base.prompts)
        norms = self.square * base.square
        return {
            "design": self.design.name,
            "to": base.design.name,
            "at_equal_cost": _interval(stats.ratio(self.at_cost, base.at_cost, self.plan.level)),
            "per_group": _interval(stats.ratio(self.trace, base.trace, self.plan.level)),
            "gap": self.square + base.square - 2 * product,
            "cosine": product / math.sqrt(norms) if self.square > 0 and base.square > 0 else None,
        }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}
