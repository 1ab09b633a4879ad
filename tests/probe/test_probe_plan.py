"""``branchpoint probe variance`` and ``plan`` on a run that was trained with planned forks, and the page they write."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchpoint.cli import main
from branchpoint.noise import Noise
from branchpoint.probe.quarters import Ask, Schedules, quarter
from branchpoint.probe.report import page
from branchpoint.probe.words import plan_text, planned, variance_text, where
from branchpoint.store import read_trees
from branchpoint.tree import Branch, Fork, RolloutTree, Turn
from branchpoint.world import Task

CONFIG = """
envs: [{name: "count_kit:make", train: {split: train, n: 3}, eval: {split: validation, n: 1}}]
model: {name: small, size: {width: 32, layers: 1, heads: 2, hidden: 64}, warm_start: {episodes: 3, epochs: 1}}
sampling: {restrict: actions}
scheduler: {kind: planned, roots: 4, expected: 4, least: 2, refresh: 3, memory: 0.7}
limits: {turns: 6, context_tokens: 256}
learner: {token_budget: 512}
sandbox: state
training: {updates: 6, tasks: 2, eval_every: 9, checkpoint_every: 3, keep_checkpoints: 9}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "c.yaml").write_text(CONFIG)
    assert main(["train", str(folder / "c.yaml"), f"run={folder / 'run'}"]) == 0
    return folder / "run"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_design_of_every_update_is_in_the_metrics_and_in_the_trees(run: Path) -> None:
    updates = [r for r in rows(run) if r["update"] > 0]
    assert updates[0]["plan/why"] == "measure"
    assert updates[0]["plan/at"] == [0.5]
    assert {"measure", "plan", "alike", "pause"} >= {r["plan/why"] for r in updates}
    assert len({r["plan/why"] for r in updates}) > 1, "it does not go on measuring for ever"
    for r in updates:
        trees = list(read_trees(run / "trees" / f"{r['update']:06d}.jsonl.zst"))
        for tree in trees:
            roots = [b for b in tree.branches if b.fork is None or b.fork.node == (0, 0, 0)]
            assert len(roots) == r["plan/roots"]
            if not r["plan/at"]:
                assert len(tree.branches) == len(roots)


def test_a_resumed_run_goes_on_byte_for_byte(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "whole"
    shutil.copytree(run, other)
    for newer in [*run.glob("checkpoints/*6"), *run.glob("trees/*[456].jsonl.zst")]:
        shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
    assert main(["train", str(run.parent / "c.yaml"), f"run={run}", "--resume"]) == 0
    assert (other / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert len(list(run.glob("trees/*.zst"))) == 6
    for file in sorted(run.glob("trees/*.zst")):
        assert (other / "trees" / file.name).read_bytes() == file.read_bytes()


def test_variance_and_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["probe", "variance", str(run), "--prompts", "2"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "probe" / "variance-000006.json").read_text())
    assert len(found["prompts"]) == 2
    assert found["quarters"]
    assert "prompt" in shown
    assert main(["probe", "plan", str(run), "--prompts", "2", "--budget", "8"]) == 0
    shown = capsys.readouterr().out
    made = json.loads((run / "probe" / "plan-000006.json").read_text())
    assert made["quarters"] == found["quarters"], "equal seeds, equal figures"
    assert made["config"][0] in shown
    html = (run / "probe" / "plan-000006.html").read_text()
    assert made["config"][0].split("{")[0] in html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--roots", "1"], "--roots"),
        (["--schedules", "1"], "--schedules"),
        (["--prompts", "99"], "fewer than 99"),
        (["--budget", "2"], "--budget"),
        (["--gradients", "nowhere.json"], "no result of probe gradient"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    arguments: list[str], words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["probe", "plan", str(run), *arguments]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_fresh_siblings_share_luck_two_by_two_and_never_a_policy() -> None:
    noise = Schedules(1, 2, each=2)
    keys = [(), (0, 0, 0), (2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 0, 3), (0, 0, 0, 2, 0, 0)]
    made = [noise.branch("independent", *k) for k in keys]
    assert len({n.own for n in made}) == len(keys)
    seeds = [n.seed for n in made]
    assert seeds[2] == seeds[3]
    assert seeds[4] == seeds[5]
    assert len(set(seeds)) == 5
    assert all(isinstance(n, Noise) for n in made)


def _branch(i: int, fork: Fork | None, turns: int, reward: float) -> Branch:
    none, one = np.zeros(0, np.int32), np.ones(1, np.int32)
    zero = np.zeros(1, np.float32)
    played = [
        Turn(none if fork and t == 0 else one, one, zero, zero, zero, reward * (t == turns - 1)) for t in range(turns)
    ]
    return Branch(i, fork, tuple(played), "done")


def test_a_root_that_ended_before_the_boundary_has_no_variance_left() -> None:
    node = Fork(0, 2, 0, 1.0)
    branches = [_branch(0, None, 4, 1.0), _branch(1, Fork(0, 0, 0, 1.0), 1, 0.5)]
    branches += [_branch(2 + i, node, 2, r) for i, r in enumerate((1.0, 0.0, 0.0, 0.0))]
    found = quarter([RolloutTree(Task("t", "x"), tuple(branches))], 2, 4.0, Ask())
    assert found.missing == 0
    assert found.luck is not None
    remaining = found.components.remaining
    assert remaining is not None
    # Schedules: own (1), first (1, 0), second (0, 0): C4 = (1 + 1/2 + 0) / 3, C2 = (1/2 + 0 + 0) / 3. Other root: 0.
    assert remaining.value == pytest.approx((0.5 - 1 / 6) / 2)


RESULT: dict[str, Any] = {
    "quarters": [
        {
            "at": k / 4, "turn": 2 * k, "missing": 0,
            "prompt": {"value": 0.1, "error": 0.02}, "prefix": {"value": -0.01, "error": None}, "luck": None,
            "policy": {"value": 0.2, "error": 0.05}, "total": None, "remaining": None,
            "luck_share": {"value": 0.25, "low": 0.1, "high": 0.5, "remarks": []},
        }
        for k in (1, 2, 3)
    ],
    "profile": {"cost": [2.0] * 4, "score": [1.0] * 4, "variance": [0.01, 0.01, 0.01, 0.5]},
    "explained": [0.02, 0.04, 0.06], "length": 8.0, "flips": [0.05, 0.1], "pairing": -0.01,
    "spurious": {"succeeded": {"groups": 4, "q": 0.1, "seen": 0.5, "expected": 0.34}, "failed": None},
    "rollouts": 100, "failed": 0, "env_steps": 800, "remarks": ["a <remark> & more"], "prompts": ["a", "b"],
}  # fmt: skip
GRADIENTS = {
    "level": 0.9,
    "designs": [
        {"name": "flat:roots=8", "trace": {"value": 2.0, "low": 1.5, "high": 2.6}},
        {"name": "planned", "trace": {"value": 1.0, "low": 0.8, "high": 1.3}},
        {"name": "odd", "trace": None},
    ],
}


def test_the_words_say_where_and_what() -> None:
    made = RESULT | planned(RESULT, 8.0)
    assert "last quarter (2%, 2%, 2%, 94%)" in where(made)
    assert len(made["best"]["at"]) > 0
    assert min(made["menu"], key=lambda p: p["gain"])["gain"] == made["best"]["gain"]
    assert any(not p["at"] and p["gain"] == pytest.approx(1.0) for p in made["menu"])
    text = variance_text(made) + plan_text(made)
    for words in (
        "pairing would help",
        "lowers",
        "34% expected",
        "kind: planned",
        "not identified",
        "25% (10% to 50%)",
    ):
        assert words in text
    none: dict[str, Any] = RESULT | {"profile": None}
    none = none | planned(none, 8.0)
    assert "keep the flat group" in plan_text(none)
    assert "roots: 8" in none["config"][0]


def test_the_page_needs_nothing_else() -> None:
    for result in (RESULT, RESULT | {"profile": None}):
        html = page(result | planned(result, 8.0), GRADIENTS)
        assert not re.search(r"(src|href|url)\s*[=(]|@import|<script", html)
        assert "<remark>" not in html
    assert "&lt;remark&gt;" in html


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed (apt-get install chromium)")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(page(RESULT | planned(RESULT, 8.0), GRADIENTS), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    shot = tmp_path / "page.png"
    picture = ["chromium", *options, "--window-size=1000,1600", f"--screenshot={shot}", file.as_uri()]
    subprocess.run(picture, capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 10_000
    dom = subprocess.run(
        ["chromium", *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert dom.count("<rect") == 4 + len(planned(RESULT, 8.0)["menu"]) + 2
    assert dom.count('class="interval"') == 2
    for figure in ("profile", "menu", "traces"):
        assert f'id="{figure}"' in dom
    assert 'id="components"' in dom
    assert "kind: fixed" in dom
