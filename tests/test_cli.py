"""The command line: bad input ends in one line that names it and the cure, with a non-zero exit."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from branchpoint import env as envs
from branchpoint.cli import main
from branchpoint.command import build
from branchpoint.noise import Noise
from branchpoint.policy.hf import HFPolicy
from branchpoint.world import PolicyFailure, Step

ENVS = "envs: [{name: backoffice, train: {split: train, n: 2}, eval: {split: validation, n: 1}}]\n"


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 1
    err = capsys.readouterr().err
    assert err.startswith("branchpoint: ")
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (ENVS, "learner.lrr=1", "learner.lrr: unknown field; did you mean 'lr'?"),
        (ENVS, "model.name=/no/such/model", "'/no/such/model' does not exist"),
        (ENVS, "model.size={widht: 3}", "model.size"),
        (ENVS, "model.size={context: 512}", "limits.context_tokens: 2048, but this model holds 512 positions"),
        (ENVS, "learner.token_budget=100", "learner.token_budget: must be at least limits.context_tokens"),
        (ENVS, "sampling.greedy=true", "training.eval_greedy"),
        (ENVS, "envs.0.options.requestz=1", "requestz"),
        (ENVS.replace("backoffice", "nothing"), "seed=1", "no environment 'nothing'; known: alfworld, backoffice"),
        (ENVS.replace("backoffice", "no.module:make"), "seed=1", "no module"),
        (ENVS.replace("split: validation", "split: train"), "seed=1", "are in train and eval"),
    ],
)
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, override: str, message: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    run = tmp_path / "run"
    assert message in fails(capsys, "train", str(config), f"run={run}", override)
    assert not (run / "config.yaml").exists(), "a failed start leaves a folder that can be used"


@pytest.mark.parametrize("override", ["envs.0.options.requestz=1", "model.name=/no/such/model"])
def test_an_old_run_is_kept_when_the_new_config_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    config, run = tmp_path / "c.yaml", tmp_path / "run"
    config.write_text(ENVS)
    run.mkdir()
    (run / "config.yaml").write_text("an old run")
    fails(capsys, "train", str(config), f"run={run}", override, "--fresh")
    assert (run / "config.yaml").read_text() == "an old run"


SMALL = """
envs:
  - name: backoffice
    options: {requests: 1, templates: [ticket_order], customers: 2, orders: 2, products: 3, style: compact, menu: true}
    train: {split: train, n: 2}
    eval: {split: validation, n: 1}
model: {name: small, size: {width: 32, layers: 1, heads: 2, hidden: 64}, warm_start: {episodes: 4, epochs: 3}}
sampling: {restrict: actions}
scheduler: {kind: flat, roots: 2}
learner: {kl: 0.01}
limits: {turns: 2, context_tokens: 1024}
sandbox: state
training: {updates: 1, tasks: 1}
"""


def test_a_run_closes_its_policies_counts_its_warm_start_and_is_evaluated_without_its_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[HFPolicy] = []

    class Kept(HFPolicy):
        def __init__(self, *given: object, **options: object) -> None:
            super().__init__(*given, **options)  # type: ignore[arg-type]
            policies.append(self)

    monkeypatch.setattr(build, "HFPolicy", Kept)
    config, run = tmp_path / "c.yaml", tmp_path / "run"
    config.write_text(SMALL)
    assert main(["train", str(config), f"run={run}"]) == 0
    told = capsys.readouterr().out
    rows = int(re.search(r"4 expert episodes, ([\d,]+) tokens, 3 epochs", told)[1].replace(",", ""))  # type: ignore[index]
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["warm_start_tokens"] == 3 * rows > 0
    assert len(policies) == 1, "training and evaluation sample alike, so they share one"
    shutil.rmtree(run / "reference")
    assert main(["eval", str(run)]) == 0
    assert main(["eval", str(run), "training.eval_greedy=true"]) == 0
    assert len(policies) == 4
    assert not (run / "reference").exists()
    for policy in policies:
        with pytest.raises(PolicyFailure, match="the policy is closed"):
            asyncio.run(policy.open().act(np.ones(3, np.int32), Step(""), Noise(0), 1))


def test_the_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run folder" in fails(capsys, "eval", str(tmp_path))
    assert "holds no trees" in fails(capsys, "view", str(tmp_path))
    assert "no environment 'nothing'" in fails(capsys, "check", "env", "nothing")
    assert "known: process, state, replay" in fails(capsys, "check", "sandbox", "nothing")
    assert "name a built-in" in fails(capsys, "check", "env")
    broken = tmp_path / "o.json"
    broken.write_text('{"mdps": 3}')
    assert "mdps: expected" in fails(capsys, "check", "oracles", str(broken))
    assert main(["check", "policy", "fake"]) == 0
    assert "failed" not in capsys.readouterr().out


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "x.yaml", "--frehs"])
    assert stop.value.code == 2
    assert "--frehs" in capsys.readouterr().err


def test_envs_lists_what_is_there_and_how_to_get_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in envs.LISTINGS)
    monkeypatch.setattr(envs, "find_spec", lambda name: None)
    assert main(["envs"]) == 0
    assert 'pip install "branchpoint[alfworld]"' in capsys.readouterr().out
    assert 'pip install "branchpoint[alfworld]"' in fails(capsys, "check", "env", "alfworld")
