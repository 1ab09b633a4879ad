"""``branchpoint probe`` on a run folder: the result file, and one line for whatever is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from branchpoint.cli import main

CONFIG = """
envs: [{name: "count_kit:make", train: {split: train, n: 3}, eval: {split: validation, n: 1}}]
model: {name: small, size: {width: 32, layers: 1, heads: 2, hidden: 64}, warm_start: {episodes: 3, epochs: 1}}
sampling: {restrict: actions}
scheduler: {kind: fixed, roots: 3, width: 2, at: [0.5], expected: 3}
limits: {turns: 6, context_tokens: 256}
learner: {token_budget: 512}
sandbox: state
training: {updates: 1, tasks: 2, eval_every: 9}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "c.yaml").write_text(CONFIG)
    assert main(["train", str(folder / "c.yaml"), f"run={folder / 'run'}"]) == 0
    return folder / "run"


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["probe", *map(str, arguments)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("branchpoint: ")
    assert len(err.splitlines()) == 1
    return err


def test_gradient(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")}
    asked = ["probe", "gradient", str(run), "--designs", "flat:roots=4", "run", "--prompts", "2", "--groups", "4"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    result = json.loads((run / "probe" / "gradient-000001.json").read_text())
    assert [d["name"] for d in result["designs"]] == ["flat:roots=4", "run"]
    assert len(result["prompts"]) == 2
    assert result["checkpoint"] == 1
    flat, own = result["designs"]
    assert flat["trace"]["low"] < flat["trace"]["value"] < flat["trace"]["high"]
    assert own["scheduler"]["expected"] != 3, "what the scheduler learns from earlier trees, it has learnt"
    ratio = result["ratios"][0]["at_equal_cost"]
    assert ratio["value"] == pytest.approx(own["trace_at_cost"]["value"] / flat["trace_at_cost"]["value"])
    assert f"{ratio['value']:.2f}" in shown
    assert {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")} == before, "the checkpoint is at rest"
    assert main(asked) == 0
    again = json.loads((run / "probe" / "gradient-000001.json").read_text())
    assert again["designs"][0]["trace"] == flat["trace"], "equal seeds, equal figures"
    assert not list((run / "probe").glob(".*"))


def test_fidelity(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "fidelity", str(run), "--prompts", "2", "--siblings", "2", "--permutations", "99"]) == 0
    assert "faithful as far as these tests see" in capsys.readouterr().out
    result = json.loads((run / "probe" / "fidelity-000001.json").read_text())
    assert result["caught"] == []
    assert result["replays"] > 0 == len(result["differences"])


def test_what_is_missing_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run folder" in fails(capsys, "gradient", tmp_path)
    assert "holds no checkpoint of update 7; it holds 0, 1" in fails(capsys, "gradient", run, "--checkpoint", 7)
    assert "fewer than 4 training tasks" in fails(capsys, "gradient", run, "--prompts", 4)
    assert "single root" in fails(capsys, "gradient", run, "--designs", "flat:roots=1", "--prompts", 1)
    assert "ledger has no 'steps'" in fails(capsys, "gradient", run, "--column", "steps", "--prompts", 1)
    assert "3 groups of each prompt" in fails(capsys, "gradient", run, "--groups", 1, "--prompts", 1)
    assert "at least 2" in fails(capsys, "fidelity", run, "--siblings", 1, "--prompts", 1)
    other = fails(capsys, "gradient", run, "model.size={width: 64, layers: 1, heads: 2, hidden: 64}")
    assert "another architecture: llama with hidden_size = 32, the config says model.size.width = 64" in other
    half = tmp_path / "half"
    shutil.copytree(run, half)
    (half / "trees" / "000001.jsonl.zst").write_bytes(b"cut")
    assert "not a complete tree file" in fails(capsys, "gradient", half, "--prompts", 1)
    next((half / "checkpoints" / "000001").glob("*.safetensors")).write_bytes(b"cut")
    assert "cut short or damaged" in fails(capsys, "gradient", half, "--prompts", 1)
    (half / "checkpoints" / "000001" / "trainer.json").write_text("{")
    assert "trainer.json: cannot be read" in fails(capsys, "gradient", half)
    shutil.rmtree(half / "checkpoints")
    assert "half-written, it holds no complete checkpoint" in fails(capsys, "gradient", half)
    config = run.parent / "c.yaml"
    assert "holds a run: give that folder" in fails(capsys, "gradient", config, f"run={run}")
