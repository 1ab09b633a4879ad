"""Every estimator from one config with one key changed, on two environments, end to end; PPO resumed too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from branchpoint.advantage import Ppo
from branchpoint.command.train import train
from branchpoint.config import ConfigError, load, parse
from branchpoint.store import RunFolder, read_trees
from branchpoint.tree import Segments

CONFIG = """
seed: 3
envs:
  - name: backoffice
    options: {requests: 1, templates: [cancel_unpaid, ticket_order], contacts: [name], described: 0.0, customers: 2,
              orders: 2, products: 3, items: 1, ids: 40, price_step: 500, fixed_summaries: 0.0, style: compact,
              menu: true, menu_size: 20, p: 0.2, q: 0.2}
    train: {split: train, n: 12}
    eval: {split: validation, n: 1}
  - name: minigrid
    options: {level: BabyAI-GoToRedBall-v0}
    train: {split: train, n: 4}
    episodes: 2
    eval: {split: validation, n: 1}
model:
  name: small
  size: {width: 32, layers: 1, heads: 2, hidden: 64, context: 1024}
  warm_start: {episodes: 6, epochs: 1}
sampling: {restrict: actions}
scheduler: {kind: flat, roots: 2}
estimator: {kind: rloo}
learner: {lr: 1.0e-3}
limits: {turns: 5, action_tokens: 20, context_tokens: 1024}
sandbox: state
training: {updates: 1, tasks: 2, eval_every: 99}
"""
KINDS = [
    *("ppo", "vineppo", "gigpo", "tree_grpo", "rloo"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reinforce", "grpo", "dr_grpo", "tree", "bpo")),
]


def run(folder: Path, *overrides: str, resume: bool = False) -> RunFolder:
    config = folder / "c.yaml"
    config.write_text(CONFIG)
    name = folder / "run"
    with open(folder / "told.txt", "w", encoding="utf-8") as told:
        code = train(config, [f"run={name}", *overrides], resume, False, Console(file=told))
    assert code == 0, (folder / "told.txt").read_text()
    return RunFolder(name)


def register(folder: RunFolder, update: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.register_file(update).read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_one_config_runs_with_every_estimator_on_two_environments(tmp_path: Path, kind: str) -> None:
    folder = run(tmp_path, f"estimator.kind={kind}")
    last = folder.rows("metrics.jsonl")[-1]
    assert last["update"] == 1
    assert ("explained_variance" in last) == (kind == "ppo")
    lines = register(folder, 1)
    assert [line["env"] for line in lines] == ["backoffice", "minigrid"]
    assert {line["estimator"] for line in lines} == {kind}
    brought = {"vineppo": "vine", "tree_grpo": "uniform"}.get(kind, "flat")
    assert {line["scheduler"] for line in lines} == {brought}
    assert load(folder.path / "config.yaml").scheduler.kind == brought
    trees = list(read_trees(folder.trees_file(1)))
    if kind == "vineppo":
        assert any(not b.trained for b in trees[0].branches)
    for tree, line in zip(trees, lines, strict=True):
        _same(tree, line, kind)


def _same(tree: Any, line: dict[str, Any], kind: str) -> None:
    """The register says what the tree and the estimator say."""
    assert [b["reward"] for b in line["branches"]] == [
        None if b.failure else tree.total_reward(b.id) for b in tree.branches
    ]
    assert len({b["policy_seed"] for b in line["branches"]}) == len(tree.branches)
    if kind == "ppo":  # its values are not in the tree
        return
    segments = Segments.of(tree)
    credit = parse({"envs": [{"name": "x"}], "estimator": {"kind": kind}}).estimator.credit(segments)  # type: ignore[call-arg]
    total = sum(len_ * a * w for b in line["branches"] for _, _, a, w, len_ in _with_lengths(tree, b, segments))
    assert total == pytest.approx(float(np.sum(credit.up + credit.down)), abs=1e-9)


def _with_lengths(tree: Any, branch: dict[str, Any], segments: Segments) -> list[tuple[float, ...]]:
    own = [s for s in range(1, len(segments.parent)) if segments.branch[s] == branch["id"] and segments.trained[s]]
    sizes = [int(np.sum(segments.sampled[segments.start[s] : segments.start[s + 1]])) for s in own]
    return [(*row, n) for row, n in zip(branch["advantages"], sizes, strict=True)]


def test_ppo_resumes_to_the_same_bytes_critic_included(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    over = ["estimator.kind=ppo", "estimator.lam=0.9", "training.updates=3"]
    whole = run(tmp_path / "a", *over)
    broken = run(tmp_path / "b", *over)
    (broken.path / "checkpoints/000003/trainer.json").unlink()  # as if killed while that checkpoint was written
    broken.append("metrics.jsonl", {"update": 9})
    (broken.path / "register/000009.jsonl").write_text("{")
    again = run(tmp_path / "b", *over, resume=True)
    for name in ("metrics.jsonl", "register/000002.jsonl", "register/000003.jsonl", "trees/000003.jsonl.zst"):
        assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name
    assert not (again.path / "register/000009.jsonl").exists()
    values = [row["value_loss"] for row in whole.rows("metrics.jsonl") if row["update"]]
    assert len(values) == 3


@pytest.mark.parametrize("noise", ["clean", "paired", "independent", "blocked"])
def test_arms_in_training(tmp_path: Path, noise: str) -> None:
    """Seeds of the world are one in a paired group and all different elsewhere; blocked halves alternate."""
    folder = run(tmp_path, f"noise={noise}", "training.updates=2", "scheduler={kind: fixed, roots: 2, expected: 4}")
    arms = [[line["arm"] for line in register(folder, u)] for u in (1, 2)]
    if noise == "blocked":
        assert arms == [["independent", "clean"], ["clean", "independent"]]
    else:
        assert arms == [[noise] * 2] * 2
    for update in (1, 2):
        for line in register(folder, update):
            world = {b["world_seed"] for b in line["branches"]}
            assert len({b["policy_seed"] for b in line["branches"]}) == len(line["branches"]) > 1
            assert {b["clean"] for b in line["branches"]} == {line["arm"] == "clean"}
            if line["arm"] == "paired":
                assert len(world) == 1  # roots and siblings together
            if line["arm"] == "independent":
                assert len(world) == len(line["branches"])


def test_a_vine_is_asked_for_where_another_scheduler_is_named() -> None:
    base = {"envs": [{"name": "x"}], "estimator": {"kind": "vineppo"}}
    assert parse(base).scheduler.kind == "vine"
    assert parse(base | {"scheduler": {"kind": "flat", "roots": 7}}).scheduler.roots == 7
    with pytest.raises(ConfigError, match="takes its values from scheduler 'vine'"):
        parse(base | {"scheduler": {"kind": "fixed"}})
    with pytest.raises(ConfigError, match=r"estimator.lam"):
        parse(base | {"estimator": {"kind": "ppo", "lam": 1.5}})
    assert isinstance(parse(base | {"estimator": {"kind": "ppo"}}).estimator, Ppo)
