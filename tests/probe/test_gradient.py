"""The gradient probe through the real learner: exact bandits, agreement with growing by hand, designs, bad input."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from branchpoint import config as configs
from branchpoint.advantage import DrGrpo, Grpo, Rloo
from branchpoint.config import RunConfig, Sampling
from branchpoint.learner import Learner, LearnerConfig
from branchpoint.ledger import Ledger
from branchpoint.noise import Noise
from branchpoint.pack import pack
from branchpoint.policy import small
from branchpoint.policy.chat import PlainCodec
from branchpoint.policy.hf import HFPolicy
from branchpoint.probe import gradient as probe
from branchpoint.probe.design import Design
from branchpoint.probe.trace import ProbeError, mean_square, within
from branchpoint.rollout import Grower
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import Flat
from branchpoint.store import RunFolder
from branchpoint.testing import CoinWorld, CounterWorld
from branchpoint.train import Course, Run
from branchpoint.tree import Array, Branch, Fork, RolloutTree, Segments, Turn
from branchpoint.world import Step, Task

G, HALF = 8, np.log(0.5)


class Bandit:
    """A real model whose next token is a fair coin and whose trainable weights are the two rows of its head, so the
    score of a token is (a - 1/2) times one fixed vector: the bandit with a scalar score, up to ``scale``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, tie_word_embeddings=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(shape).double().eval()
        model.requires_grad_(False)
        model.lm_head.weight.zero_()
        model.lm_head.weight.requires_grad_(True)
        self.learner = Learner(model, LearnerConfig(token_budget=64))
        hidden = model.model(torch.zeros((1, 1), dtype=torch.long)).last_hidden_state[0, 0]
        off = math.exp(HALF - float(np.float32(HALF)))  # the tree keeps log-probabilities in float32
        self.scale = float(2 * hidden @ hidden) * off**2

    def gram(self, trees: list[RolloutTree], estimator: Any, folder: Path) -> Array:
        """[n, n] the inner products of the groups' gradients, in units of the scalar score."""
        with probe.rows_on_disk(folder / "rows", len(trees), self.learner.parameters) as rows:
            for i, tree in enumerate(trees):
                if probe.group_gradient(self.learner, estimator, tree, Ledger()):
                    rows.store(i)
            return rows.gram() / self.scale


def pulls(actions: list[int], rewards: list[float]) -> RolloutTree:
    turns = [Turn([0], [a], [HALF], [HALF], [-HALF], r) for a, r in zip(actions, rewards, strict=True)]  # type: ignore[arg-type]
    forks = [None, *(Fork(0, 0, 0, 1.0) for _ in turns[1:])]
    branches = tuple(Branch(i, f, (t,), "done") for i, (f, t) in enumerate(zip(forks, turns, strict=True)))
    return RolloutTree(Task("bandit", "bandit"), branches)


def choose(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def groups(paired: bool) -> Iterator[tuple[float, RolloutTree]]:
    """Every group of eight pulls with its probability: successes are turned into failures with probability 0.1, by one
    event for the whole group or by one for each."""
    for k in range(G + 1):
        for m in range(k + 1):
            flips = 0.9 * (m == k) + 0.1 * (m == 0) if paired else choose(k, m, 0.9)
            if flips:
                yield choose(G, k, 0.5) * flips, pulls([1] * k + [0] * (G - k), [1.0] * m + [0.0] * (G - m))


def expected(p: Array, gram: Array) -> tuple[float, float]:
    """The exact means of the probe's own trace and squared mean over two independent groups."""
    trace = square = 0.0
    for i in range(len(p)):
        for j in range(len(p)):
            pair = gram[np.ix_([i, j], [i, j])]
            trace += p[i] * p[j] * within(np.kron(np.eye(3), pair), np.repeat([0, 1, 2], 2)).value
            square += p[i] * p[j] * mean_square(pair, np.zeros(2, np.int64))
    return trace, square


@pytest.mark.parametrize(
    ("estimator", "paired", "trace", "mean"),
    [
        (DrGrpo(), False, 0.00261474609375, None),
        (DrGrpo(), True, 0.0058447265625, None),
        (Grpo(eps=1e-4), False, 0.007053392577241746, 0.39184209979720785),
        (Grpo(eps=1e-4), True, 0.01972383871776437, 0.39047850053321803),
    ],
    ids=["independent", "paired", "independent, std", "paired, std"],
)
def test_the_flipped_bandit_exactly(
    tmp_path: Path, estimator: Any, paired: bool, trace: float, mean: float | None
) -> None:
    p, trees = zip(*groups(paired), strict=True)
    found = expected(np.array(p), Bandit().gram(list(trees), estimator, tmp_path))
    assert found[0] == pytest.approx(trace, rel=1e-10)
    if mean is not None:
        assert found[1] == pytest.approx(mean**2, rel=1e-10)


def test_the_contrast_of_the_flipped_bandit_exactly() -> None:
    for paired, expected_contrast in ((False, 0.495), (True, 0.450)):
        total = sum(p * probe.contrast(probe.root_returns(tree)) for p, tree in groups(paired))
        assert total == pytest.approx(expected_contrast, abs=1e-12)


# --- the whole way ---------------------------------------------------------------------------------------------------

TASKS = tuple(Task(f"count{t}", "counter", metadata={"target": t, "limit": 6}) for t in (2, 3))
TOKENIZER = small.train_tokenizer(["count to 2 up down stop count 1 stopped unknown -1 0 3 coin heads"] * 3)


def run_of(tmp_path: Path, make: Any = CounterWorld, tasks: tuple[Task, ...] = TASKS, dtype: Any = None) -> Run:
    raw = {
        "envs": [{"name": "backoffice"}],
        "run": str(tmp_path / "run"),
        "sampling": {"restrict": "actions"},
        "scheduler": {"kind": "fixed", "roots": 2, "at": [0.5], "width": 2, "expected": 2},
        "limits": {"turns": 4, "action_tokens": 6, "context_tokens": 128},
        "learner": {"token_budget": 512},
        "sandbox": "state",
    }
    config: RunConfig = configs.parse(raw)
    model = small.build(TOKENIZER, small.Sizes(width=16, layers=1, heads=2, hidden=24, context=128), seed=1)
    model = model.to(dtype or torch.float32)
    codec = PlainCodec(TOKENIZER)
    learner = Learner(model, config.learner.model_copy(update={"vocabulary": codec.vocabulary}))
    policy = HFPolicy(model, codec, Sampling(restrict="actions"))
    course = Course("count", make, tasks, tasks)
    nothing: Any = lambda path: None  # noqa: E731
    folder = RunFolder(tmp_path / "run")
    return Run(config, (course,), policy, policy, InProcess(), learner, folder, nothing, nothing, Ledger())


def designs(run: Run, *texts: str) -> tuple[Design, ...]:
    own = Design("run", run.config.scheduler, run.config.estimator, run.config.noise)
    return tuple(Design.parse(t, own) for t in texts)


def plan(run: Run, *texts: str, groups: int = 4, **options: Any) -> probe.Plan:
    return probe.Plan(designs(run, *texts), tuple((run.courses[0], t) for t in run.courses[0].train), groups, **options)


def measured(run: Run, wanted: probe.Plan, tmp_path: Path) -> probe.Measured:
    return asyncio.run(probe.measure(run, wanted, Noise(3, 3), tmp_path, lambda line: None))


def test_the_rows_are_the_gradients_of_trees_grown_by_hand(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    wanted = plan(run, "run", "flat:roots=3,estimator=rloo@paired", groups=3)
    found = measured(run, wanted, tmp_path)
    rows = []
    for design in wanted.designs:
        for course, task in wanted.prompts:
            for i in range(wanted.groups):
                grower = Grower(run.policy, InProcess(), design.scheduler, run.config.limits, design.arm, Ledger())
                key = Noise(3, 3).child("gradient", design.name, task.id, i)
                segments = Segments.of(asyncio.run(grower.grow(course.make, task, key)))
                run.learner.gradient(pack([(segments, design.estimator.credit(segments))], 512), 1.0)
                rows.append(np.concatenate([_flat(p) for p in run.learner.parameters]))
    exact = np.array(rows, np.float64)
    np.testing.assert_allclose(found.gram, exact @ exact.T, rtol=1e-4, atol=1e-8)
    assert found.parameters == exact.shape[1]
    assert not list(tmp_path.glob(".gradients*")), "the rows are gone"
    result = probe.summary(found)
    for d, design in enumerate(result["designs"]):
        own = exact[6 * d : 6 * d + 6].reshape(2, 3, -1)
        trace = np.mean(np.sum(np.var(own, axis=1, ddof=1), axis=1))
        steps = np.mean([g.ledger.env_steps for g in found.groups[6 * d : 6 * d + 6]])
        assert design["trace"]["value"] == pytest.approx(trace, rel=1e-4)
        assert design["cost"] == design["ledger"]["env_steps"] == steps > 0
        assert design["trace_at_cost"]["value"] == pytest.approx(trace * steps, rel=1e-4)
    (ratio,) = result["ratios"]
    values = [d["trace_at_cost"]["value"] for d in result["designs"]]
    assert ratio["at_equal_cost"]["value"] == pytest.approx(values[1] / values[0])
    means = exact.reshape(2, 2, 3, -1).mean(axis=2)
    cross = float(np.mean(np.sum(means[0] * means[1], axis=1)))
    squares = [d["squared_mean"] for d in result["designs"]]
    assert ratio["gap"] == pytest.approx(squares[0] + squares[1] - 2 * cross, rel=1e-3, abs=1e-7)


def _flat(p: torch.Tensor) -> Array:
    return (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).double().numpy()


def test_paired_branches_share_their_luck_and_groups_do_not(tmp_path: Path) -> None:
    """One coin, flipped once: there is nothing to choose, so the returns of a paired group are all alike,
    and different groups meet different luck."""
    coin = (Task("coin", "coin", metadata={"coins": 1, "flips": 1}),)
    run = run_of(tmp_path, CoinWorld, coin)
    with pytest.raises(ProbeError, match="scored alike within its group"):  # nothing to learn from but luck
        measured(run, plan(run, "flat:roots=4@paired", groups=8), tmp_path / "one")
    found = measured(run, plan(run, "flat:roots=4@independent", groups=8), tmp_path / "two")
    assert len({r for g in found.groups for r in g.returns}) == 2
    assert any(g.informative for g in found.groups)


def test_a_block_of_columns_at_a_time_gives_the_same_gram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(7, 5)), torch.nn.Parameter(torch.zeros(11))]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 46))
    with probe.rows_on_disk(tmp_path / "rows", 3, parameters) as rows:
        for i, value in enumerate(values):
            parameters[0].grad = torch.tensor(value[:35], dtype=torch.float32).reshape(7, 5) if i else None
            parameters[1].grad = torch.tensor(value[35:], dtype=torch.float32)
            kept = np.where(np.arange(46) < 35, value if i else 0.0, value)
            assert rows.store(i) == pytest.approx(np.linalg.norm(kept), rel=1e-6)
        whole = rows.gram()
        monkeypatch.setattr(probe, "BLOCK_BYTES", 8 * 3 * 4)  # four columns
        np.testing.assert_allclose(rows.gram(), whole, rtol=1e-12)
        assert rows.values.dtype == np.float32
        assert whole.dtype == np.float64
    kept = np.array(values, np.float32).astype(np.float64)
    kept[0, :35] = 0.0
    np.testing.assert_allclose(whole, kept @ kept.T, rtol=1e-12)
    assert not (tmp_path / "rows").exists()


def test_a_disk_that_cannot_hold_the_rows_is_named(tmp_path: Path) -> None:
    big = torch.empty(1, dtype=torch.float32).expand(1 << 40)
    with pytest.raises(ProbeError, match=r"need 87\d+.\d GB in"), probe.rows_on_disk(tmp_path / "r", 200, [big]):
        pass


def test_designs_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    own, flat, fixed, other = designs(
        run, "run", "flat:roots=6@paired", "fixed:at=[0.25,0.75],width=[2,3]", "run:roots=5,estimator=rloo"
    )
    assert own.scheduler == run.config.scheduler
    assert (flat.scheduler.kind, flat.scheduler.roots, flat.arm, flat.estimator.kind) == ("flat", 6, "paired", "tree")
    assert fixed.scheduler.model_dump()["width"] == (2, 3)
    assert fixed.scheduler.roots == 2, "what is left out is the run's"
    assert (other.scheduler.kind, other.scheduler.roots, other.estimator) == ("fixed", 5, Rloo())
    lengths = some_trees(run)
    assert fixed.after(lengths).scheduler.model_dump()["expected"] == pytest.approx(
        np.mean([len(b.turns) for t in lengths for b in t.branches])
    )
    settled = Design("run", run.config.scheduler, Rloo(), "independent", learnt=True)
    assert Design.parse("run@paired", settled).after(lengths).scheduler == run.config.scheduler, "it has learnt already"
    planned = Design("planned", Steering(), designs(run, "run")[0].estimator, "independent")
    assert planned.after(lengths).estimator.model_dump()["gamma"] == (0.25, 0.75)


class Steering(Flat):
    """A scheduler that plans the weights of the siblings' baselines."""

    @property
    def gammas(self) -> tuple[float, ...]:
        return (0.25, 0.75)


def some_trees(run: Run) -> list[RolloutTree]:
    grower = Grower(
        run.policy, run.sandbox, designs(run, "flat:roots=3")[0].scheduler, run.config.limits, "independent", Ledger()
    )
    return [asyncio.run(grower.grow(CounterWorld, TASKS[0], Noise(1, 1)))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flat:roots=1", "single root has nothing to be compared with"),
        ("flat@both", "no arm 'both'; known: clean, paired, independent"),
        ("fixed:at=0.5,", "at"),
        ("bushy", "kind"),
        ("flat:roots", "write it as KIND"),
        ("flat:width=2", "width: Extra inputs"),
        ("flat:estimator=rlo", "kind"),
        ("top_entropy", "needs a predictable scheduler"),
    ],
)
def test_designs_that_cannot_be_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProbeError, match=f"design '{text.replace('[', '.')}'.*{message}"):
        designs(run_of(tmp_path), text)


def test_a_single_root_with_forks_is_measured_and_remarked_on(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    found = probe.summary(measured(run, plan(run, "fixed:roots=1,at=[0.5],expected=2", groups=16), tmp_path))
    assert any("single root has no root baseline" in r for r in found["designs"][0]["remarks"])


class Alike(CounterWorld):
    def step(self, action: str) -> Step:
        return Step("over", 1.0, done=True)


class Unscored(CounterWorld):
    def step(self, action: str) -> Step:
        return Step("over", float("nan"), done=True)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    alike, unscored = run_of(tmp_path, Alike), run_of(tmp_path, Unscored)
    with pytest.raises(ProbeError, match=r"all 16 groups are without a signal: every rollout scored 1,.*choose tasks"):
        measured(alike, plan(alike, "run", "flat"), tmp_path)
    with pytest.raises(ProbeError, match=r"no rollout of a group has a score; the first failed, grader: reward is nan"):
        measured(unscored, plan(unscored, "run"), tmp_path)
    with pytest.raises(ProbeError, match="3 groups of each prompt, or 2 of 3 prompts"):
        plan(run, "run", groups=2)
    with pytest.raises(ProbeError, match="the ledger has no 'steps'"):
        plan(run, "run", column="steps")
    with pytest.raises(ProbeError, match="each once"):
        plan(run, "run", "run")
    with pytest.raises(ProbeError, match="level: 95"):
        plan(run, "run", level=95)
    one = run_of(tmp_path, tasks=TASKS[:1])
    found = probe.summary(measured(one, plan(one, "run"), tmp_path))["designs"][0]
    assert found["between_prompts"] is None
    assert any("one prompt only" in r for r in found["remarks"])
    with torch.no_grad():
        one.learner.parameters[0].fill_(float("nan"))
    with pytest.raises((ProbeError, ValueError, ExceptionGroup)):
        measured(one, plan(one, "run"), tmp_path)
    assert not list(tmp_path.rglob(".gradients*"))


def test_seconds_are_measured_one_group_at_a_time(tmp_path: Path) -> None:
    run = run_of(tmp_path, tasks=TASKS[:1])
    found = measured(run, plan(run, "run", groups=3, column="wall_seconds"), tmp_path)
    for group in found.groups:
        parts = group.ledger
        assert parts.wall_seconds == parts.generation_seconds + parts.environment_seconds + parts.learning_seconds > 0
