"""Growing what the variance probe needs: every root forked at each quarter, under luck that siblings share in part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from branchpoint.lagged import PARTS, Evidence, boundaries, squared_scores, usable
from branchpoint.ledger import Ledger
from branchpoint.noise import Arm, Key, Noise
from branchpoint.plan import PlanError, Profile
from branchpoint.probe import variance as stats
from branchpoint.probe.trace import Estimate, ProbeError
from branchpoint.probe.variance import Components, Leaf, Share
from branchpoint.rollout import Grower
from branchpoint.scheduler import Fixed
from branchpoint.train import Course, Run
from branchpoint.tree import Array, Branch, RolloutTree, Segments
from branchpoint.world import BranchFailure, Task, settle

Prompts = Sequence[tuple[Course, Task]]


@dataclass(frozen=True, slots=True)
class Schedules(Noise):
    """Luck for forks: every ``each`` fresh siblings of a node share a schedule, drawn anew at every node. Roots and the
    branch that goes on have luck of their own, and so has every branch's policy."""

    each: int = 2

    def branch(self, arm: Arm, *key: Key) -> Noise:
        """The noise of one branch; ``key`` ends with turn, token and number of the sibling."""
        own = self.child("branch", *key)
        if not key or key[-3:-1] == (0, 0):
            return own
        *node, number = key
        assert isinstance(number, int)
        return Noise(self.child("schedule", *node, number // self.each).seed, own.own, self.clean)


@dataclass(frozen=True, slots=True)
class Ask:
    """How much to grow: ``roots`` of each prompt, and at each quarter ``schedules`` with ``rollouts`` each, besides the
    root's own continuation. ``replays``: schedules under which the roots' actions are played again."""

    roots: int = 3
    schedules: int = 2
    rollouts: int = 2
    replays: int = 4

    def __post_init__(self) -> None:
        for name, least in (("roots", 2), ("schedules", 2), ("rollouts", 2), ("replays", 2)):
            if getattr(self, name) < least:
                raise ProbeError(f"--{name}: {getattr(self, name)}; at least {least} are needed")


@dataclass(frozen=True, slots=True)
class Quarter:
    """What was found at one boundary: ``at`` of the episode, turn ``turn``. ``missing``: roots without a fork there."""

    at: float
    turn: int
    components: Components
    luck: Share | None
    missing: int


@dataclass(frozen=True, slots=True)
class Found:
    """All that the probe found. ``profile`` is None where there is nothing to plan from; ``remarks`` say why."""

    quarters: tuple[Quarter, ...]
    profile: Profile | None
    length: float
    spurious: dict[str, stats.Spurious | None] | None
    flips: tuple[float, float] | None
    pairing: float | None
    rollouts: int
    failed: int
    env_steps: int
    remarks: tuple[str, ...]


async def measure(
    run: Run, prompts: Prompts, earlier: Sequence[RolloutTree], ask: Ask, noise: Noise, say: Callable[[str], None]
) -> Found:
    """Grow one tree for each prompt and take it apart. ``earlier`` trees say how long an episode is.

    Raises ProbeError where an episode is too short to fork, or nothing has a score.
    """
    length = _length(earlier)
    cuts = usable(length)
    if not cuts:
        raise ProbeError(f"episodes of {length:g} turns have no quarter to fork at; the flat group is all there is")
    trees, ledger = await _grown(run, prompts, cuts, length, ask, noise)
    scored = sum(len(t.scored) for t in trees)
    failed = sum(len(t.branches) for t in trees) - scored
    say(f"{scored} rollouts of {len(trees)} prompts, {ledger.env_steps} steps")
    if not scored:
        first = next(b.failure for t in trees for b in t.branches if b.failure)
        raise ProbeError(f"all {failed} rollouts failed; the first, {first.kind}: {first.message}")
    quarters = tuple(quarter(trees, k, length, ask) for k in cuts)
    profile, remarks = _profile(trees, quarters, cuts, length)
    if failed:
        remarks.append(f"{failed} rollouts failed and are left out")
    groups = [[b for b in _roots(t) if b.failure is None] for t in trees]
    truth = [np.array([_success(b) for b in g]) for g in groups]
    told = all(not np.isnan(t).any() for t in truth)
    spurious = None
    if not told:
        remarks.append("the environment reports no true outcome (info.success): spurious variance is not measured")
    else:
        observed = [np.array([float(t.total_reward(b.id) > 0) for b in g]) for t, g in zip(trees, groups, strict=True)]
        spurious = stats.spurious(truth, observed)
    grams = [np.diag([_score(t, b) for b in g]) for t, g in zip(trees, groups, strict=True)]
    full = [i for i, g in enumerate(groups) if len(g) > 1]
    sides = [stats.flip_sides(grams[i], truth[i]) for i in full] if told else []
    flips = tuple(map(float, np.mean(sides, axis=0))) if sides else None
    pairing = await _pairing(run, prompts, groups, grams, full, ask.replays, noise, remarks)
    steps = ledger.env_steps
    return Found(quarters, profile, length, spurious, flips, pairing, scored, failed, steps, tuple(remarks))  # type: ignore[arg-type]


async def _grown(
    run: Run, prompts: Prompts, cuts: Sequence[int], length: float, ask: Ask, noise: Noise
) -> tuple[list[RolloutTree], Ledger]:
    width = 1 + ask.schedules * ask.rollouts
    at = tuple(k / PARTS for k in cuts)
    scheduler = Fixed(roots=ask.roots, at=at, width=width, expected=length, adapt=False, nested=False)
    ledger = Ledger()
    grower = Grower(run.policy, run.sandbox, scheduler, run.config.limits, "independent", ledger)
    async with asyncio.TaskGroup() as tasks:
        jobs = []
        for i, (course, task) in enumerate(prompts):
            key = noise.child("quarters", i, task.id)
            luck = Schedules(key.seed, key.own, each=ask.rollouts)
            jobs.append(tasks.create_task(grower.grow(course.make, task, luck)))
    return [job.result() for job in jobs], ledger


def quarter(trees: Sequence[RolloutTree], cut: int, length: float, ask: Ask) -> Quarter:
    """The decomposition at one boundary. A root that ended before it has no variance left there: its return stands for
    all rollouts from it."""
    turn = int(boundaries(length)[cut - 1])
    leaves: list[Leaf] = []
    tables: list[Array] = []
    missing = 0
    for i, tree in enumerate(trees):
        for root in _roots(tree):
            fresh = [b for b in tree.branches if b.fork is not None and b.fork.node == (root.id, turn, 0) and turn]
            here = (i, root.id)
            if fresh:
                each = [(b, n // ask.rollouts) for n, b in enumerate(fresh)]
                leaves += [Leaf(i, here, s, tree.total_reward(b.id)) for b, s in each if b.failure is None]
                if root.failure is None:
                    leaves.append(Leaf(i, here, "own", tree.total_reward(root.id)))
                if all(b.failure is None for b in fresh):
                    tables.append(np.array([tree.total_reward(b.id) for b in fresh]).reshape(-1, ask.rollouts))
            elif root.failure is None and len(root.turns) <= turn:
                ended = tree.total_reward(root.id)
                leaves += [Leaf(i, here, s, ended) for s in (0, 0, 1, 1)]
            else:
                missing += 1
    if not leaves:
        raise ProbeError(
            f"no root could be forked at {cut / PARTS:.0%} of an episode (snapshots refused, or all failed)"
        )
    luck = stats.luck_share(tables) if tables else None
    return Quarter(cut / PARTS, turn, stats.decompose(leaves), luck, missing)


def _profile(
    trees: Sequence[RolloutTree], quarters: Sequence[Quarter], cuts: Sequence[int], length: float
) -> tuple[Profile | None, list[str]]:
    """What plans are made from: costs, scores and the variance between roots from the trees, and at the boundaries what
    the prefix does not explain."""
    remarks = [f"at {q.at:.0%}: {r}" for q in quarters for r in q.components.remarks]
    evidence = Evidence().add(trees, (), length, "turn", 1.0)
    within, known = list(evidence.within), list(evidence.known)
    for k, q in zip(cuts, quarters, strict=True):
        if q.components.remaining is not None:
            known[k] = evidence.trees
            within[k] = q.components.remaining.value * known[k]
    try:
        profile = evidence.model_copy(update={"within": tuple(within), "known": tuple(known)}).profile()
    except PlanError as e:
        return None, [*remarks, str(e)]
    if not profile.informative:
        return None, [*remarks, "groups of one outcome only: there is no variance within a prompt to place"]
    return profile, remarks


def _length(trees: Sequence[RolloutTree]) -> float:
    lengths = [len(b.turns) for t in trees for b in _roots(t) if b.failure is None]
    if not lengths:
        raise ProbeError("no earlier rollout with a score says how long an episode is")
    return float(np.mean(lengths))


def _roots(tree: RolloutTree) -> list[Branch]:
    return [b for b in tree.branches if b.fork is None or b.fork.node == (0, 0, 0)]


def _success(branch: Branch) -> float:
    return float(branch.turns[-1].info.get("success", np.nan))


def _score(tree: RolloutTree, branch: Branch) -> float:
    """|S|^2 of a root rollout, its tokens taken as orthogonal."""
    alone = RolloutTree(tree.task, (Branch(0, None, branch.turns, branch.stop),))
    return float(np.sum(squared_scores(Segments.of(alone))))


async def _pairing(
    run: Run,
    prompts: Prompts,
    groups: Sequence[Sequence[Branch]],
    grams: Sequence[Array],
    full: Sequence[int],
    schedules: int,
    noise: Noise,
    remarks: list[str],
) -> float | None:
    """The general pairing condition, averaged over prompts: the roots' actions played again under shared luck."""
    found = []
    for i in full:
        course, task = prompts[i]
        try:
            rows = [
                [await _replayed(run, course, task, b, noise.child("replay", i, w)) for b in groups[i]]
                for w in range(schedules)
            ]
        except BranchFailure as e:
            remarks.append(
                f"task {task.id}: actions could not be played again ({e}); left out of the pairing condition"
            )
            continue
        found.append(stats.pairing_difference(grams[i], np.array(rows)))
    return float(np.mean(found)) if found else None


async def _replayed(run: Run, course: Course, task: Task, branch: Branch, luck: Noise) -> float:
    """The return of a rollout's actions under other luck, as far as the world goes along."""
    limits = run.config.limits
    async with asyncio.timeout(limits.start_seconds + limits.step_seconds * len(branch.turns)):
        env: Any = await settle(run.sandbox.open(course.make, task, luck))
        try:
            await settle(env.reset())
            total = 0.0
            for turn in branch.turns:
                answer = await settle(env.step(turn.text))
                total += answer.reward
                if answer.done or answer.truncated:
                    break
            return total
        finally:
            with suppress(BranchFailure):
                await settle(env.close())


def number(estimate: Estimate | None) -> dict[str, float | None] | None:
    """JSON values: value and error; None where not identified."""
    if estimate is None:
        return None
    return {"value": estimate.value, "error": estimate.error if np.isfinite(estimate.error) else None}
