"""A study small enough for a test: two arms, two seeds, one environment of one-request tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = """
name: tiny
claim: A tree learns faster than a flat group.
folder: runs/tiny
results: results/tiny
seeds: [0, 1]
budget: {column: env_steps, amount: 20, evals: 2}
base:
  model: {name: small, size: {width: 32, layers: 1, heads: 2, hidden: 64}, warm_start: {episodes: 4, epochs: 2}}
  sampling: {restrict: actions}
  learner: {lr: 1.0e-3}
  limits: {turns: 3, context_tokens: 1024}
  sandbox: state
  training: {tasks: 2}
environments:
  desk:
    config:
      envs:
        - name: backoffice
          options: {requests: 1, templates: [ticket_order], customers: 2, orders: 2, products: 3, style: compact,
                    menu: true}
          train: {split: train, n: 4}
          eval: {split: validation, n: 2}
    final: {split: test, n: 3}
    threshold: 0.5
arms:
  flat: {scheduler: {kind: flat, roots: 2}, estimator: {kind: grpo}}
  tree: {scheduler: {kind: fixed, roots: 2, at: [0.5], expected: 2}, estimator: {kind: tree}}
reference: flat
decision: {arm: tree, against: [flat]}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the study, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path
