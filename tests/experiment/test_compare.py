"""``branchpoint compare`` from the file to the page, killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from branchpoint.cli import main
from branchpoint.config import parse
from branchpoint.experiment import freeze, page, results, stats
from branchpoint.store import RunFolder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", *arguments]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    return err


def test_a_study_from_freezing_to_the_page(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not frozen" in refused(capsys, str(tiny))
    assert main(["compare", "freeze", str(tiny)]) == 0
    assert "not begun; finish it with: branchpoint compare run" in refused(capsys, "report", str(tiny))
    assert main(["compare", str(tiny)]) == 0
    out = capsys.readouterr().out
    assert "starts: 0 of 2 done" in out
    assert "Not shown" in out or "Shown" in out
    found = json.loads(Path("results/tiny/results.json").read_text())
    check_results(found)
    check_page(Path("results/tiny/index.html").read_text(), found)
    before = {p: p.read_bytes() for p in Path("runs/tiny").rglob("*") if p.is_file()}
    assert main(["compare", str(tiny)]) == 0, "nothing is left to do"
    assert {p: p.read_bytes() for p in before} == before, "the final test is touched once"
    assert json.loads(Path("results/tiny/results.json").read_text()) == found
    tiny.write_text(tiny.read_text().replace("amount: 20", "amount: 21"))
    assert "budget.amount was 20, is 21" in refused(capsys, "run", str(tiny))


def check_results(found: dict) -> None:
    assert [(r["arm"], r["seed"]) for r in found["runs"]] == [("flat", 0), ("tree", 0), ("flat", 1), ("tree", 1)]
    for row in found["runs"]:
        metrics = RunFolder(row["folder"]).rows("metrics.jsonl")
        assert row["spent"] == metrics[-1]["spent"] >= 20 > metrics[-2]["spent"], "stops with the budget"
        assert row["curve"][-1][0] == 20
        assert row["area"] == pytest.approx(stats.area(row["curve"], 20))
        assert row["ledger"]["env_steps"] > row["spent"], "evaluations are booked, and not counted"
        assert {r["spent"] for r in metrics if "eval/backoffice" in r} >= {0, metrics[-1]["spent"]}
    starts = {r["seed"]: r["curve"][0] for r in found["runs"] if r["arm"] == "flat"}
    assert starts == {r["seed"]: r["curve"][0] for r in found["runs"] if r["arm"] == "tree"}, "one start for all arms"
    (comparison,) = found["comparisons"]
    by = {(r["arm"], r["seed"]): r for r in found["runs"]}
    for field in ("area", "final"):
        expected = [by["tree", s][field] - by["flat", s][field] for s in (0, 1)]
        assert comparison[field]["differences"] == pytest.approx(expected, abs=1e-12)
    assert all(s["ledger"]["warm_start_tokens"] > 0 for s in found["starts"])
    assert found["decision"]["level_of_each"] == pytest.approx(0.95)


def check_page(text: str, found: dict) -> None:
    assert found["sha256"] in text
    assert "No deviation" in text
    assert text.count("<svg") == 2
    for outside in ("src=", "<script", "<link", "@import"):
        assert outside not in text, "a page that fetches nothing"
    told = dict(
        found, deviations=[{"date": "2026-02-01", "recorded": "later", "what": "a <b> fell", "changes": {"x": 1}}]
    )
    told["variance"] = [
        {"environment": "desk", "arm": "tree", "update": u, "spent": 10 * u, "ratio": r}
        for u, r in ((0, {"value": 0.8, "low": 0.5, "high": 1.2}), (1, None))
    ]
    shown = page.page(told)
    assert "a &lt;b&gt; fell [x = 1]" in shown
    assert shown.count("<svg") == 3
    assert page.page(found) == text, "equal results give an equal page"


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed(tiny: Path, jobs: int) -> None:
    """The study's process is killed, and its children with it; the second call ends as an unbroken study does."""
    assert main(["compare", "freeze", str(tiny)]) == 0
    command = [sys.executable, "-m", "branchpoint.cli", "compare", "run", str(tiny), "--jobs", str(jobs)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 400
        while not list(Path("runs/tiny").rglob("config.yaml")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    begun = {p.parent for p in Path("runs/tiny").rglob("config.yaml")}
    for folder in begun:
        free(RunFolder(folder))
    assert main(["compare", "run", str(tiny)]) == 0
    study = freeze.frozen(tiny)
    found = results.results(study)
    check_results(found)
    assert begun <= {Path("runs/tiny/desk/start") / f"seed-{s}" for s in (0, 1)}


def free(folder: RunFolder) -> None:
    """Wait until the run in it has died with its study."""
    deadline = time.monotonic() + 200
    while True:
        try:
            with folder.locked():
                return
        except Exception:
            assert time.monotonic() < deadline, "a killed study leaves its runs going"
            time.sleep(0.02)


def test_a_budget_ends_a_run_and_places_its_evaluations() -> None:
    training = parse(
        {"envs": [{"name": "x"}], "training": {"budget": {"amount": 100, "evals": 4}, "updates": 50}}
    ).training
    spent = [0, 10, 26, 49, 80, 99, 130]
    evaluated = [u for u in range(1, 7) if training.evaluates(u, spent[u - 1], spent[u])]
    assert evaluated == [2, 4, 6], "marks at 25, 50, 75 and 100: two passed at once are one evaluation"
    assert [training.ends(u, s) for u, s in enumerate(spent)] == [False] * 6 + [True]
    assert training.ends(50, 3)


def test_what_is_left_of_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "freeze|run|report" in refused(capsys, "frieze", str(tiny))
    assert "freeze|run|report" in refused(capsys, "run", str(tiny), "--jobs", "0")
    assert "no such file" in refused(capsys, "freeze", "nothing.yaml")
