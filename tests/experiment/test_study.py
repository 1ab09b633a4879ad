"""What a study may say, how it is frozen, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from branchpoint.experiment import freeze, run, spec
from branchpoint.experiment.results import verdict
from branchpoint.experiment.spec import Decision, StudyError
from branchpoint.experiment.stats import Paired
from branchpoint.store import write_text

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seeds: [0, 1]", "seeds: [0]", "a single seed shows no spread"),
        ("seeds: [0, 1]", "seeds: [1, 1, 0]", "each seed once"),
        ("seeds: [0, 1]", "sedes: [0, 1]", "did you mean 'seeds'?"),
        (
            "estimator: {kind: grpo}",
            "estimatr: {kind: grpo}",
            "arms.flat.estimatr: unknown key of an arm; did you mean",
        ),
        ("estimator: {kind: grpo}", "seed: 3", "arms.flat.seed: unknown key of an arm"),
        ("estimator: {kind: grpo}", "estimator: {kind: grpp}", "environments.desk, arms.flat: estimator"),
        ("estimator: {kind: grpo}", "scheduler: {kind: flat, rots: 2}", "rots: unknown field"),
        ("estimator: {kind: grpo}", "training: {updates: 9}", "arms.flat.training.updates: unequal budgets"),
        ("reference: flat", "reference: flaat", "reference: no arm 'flaat'; arms: flat, tree"),
        ("against: [flat]", "against: [tree]", "cannot be compared with itself"),
        ("arm: tree,", "arm: tree, environments: 2,", "the study has 1"),
        ("threshold: 0.5", "threshold: 1.5", "environments.desk.threshold"),
        (
            "reference: flat",
            "reference: flat\ntune: {grid: {learner.lr: [1.0e-3]}, seeds: [1]}",
            "must not be among seeds",
        ),
        (
            "reference: flat",
            "reference: flat\ntune: {grid: {learner.l: [1.0e-3]}, seeds: [9]}",
            "learner.l: unknown field",
        ),
        ("reference: flat", "reference: flat\nvariance: {arms: [tre], seed: 0}", "variance.arms: no arm 'tre'"),
        ("claim: A tree", "clame: A tree", "clame: unknown field; did you mean 'claim'?"),
        ("reference: flat\n", "", "reference: missing; add it to the file"),
    ],
)
def test_a_wrong_study_is_refused_in_one_line(tiny: Path, old: str, new: str, told: str) -> None:
    changed(tiny, old, new)
    with pytest.raises(StudyError, match=r".") as error:
        freeze.freeze(tiny)
    text = str(error.value)
    assert told in text
    assert "\n" not in text
    assert not freeze.record_of(tiny).exists()


def test_every_arm_gets_the_same_but_its_method(tiny: Path) -> None:
    study = spec.parse(spec.read(tiny), "tiny")
    flat, tree = run.runs(study, {key: {} for key in study.pairs()})[:2]
    one, two = flat.config.model_dump(), tree.config.model_dump()
    assert {k for k in one if one[k] != two[k]} == {"run", "scheduler", "estimator"}
    assert flat.config.training.budget == tree.config.training.budget == study.budget
    assert flat.config.model.name == "runs/tiny/desk/start/seed-0/checkpoints/000000"


def test_a_strategy_of_another_kind_replaces_and_one_of_the_same_merges() -> None:
    base = {"scheduler": {"kind": "flat", "roots": 8}, "learner": {"lr": 1, "epochs": 2}}
    assert spec.merged(base, {"scheduler": {"kind": "fixed"}})["scheduler"] == {"kind": "fixed"}
    assert spec.merged(base, {"scheduler": {"kind": "flat", "roots": 2}})["scheduler"] == {"kind": "flat", "roots": 2}
    assert spec.merged(base, {"learner": {"lr": 3}})["learner"] == {"lr": 3, "epochs": 2}
    assert base["learner"]["lr"] == 1


def test_freezing(tiny: Path) -> None:
    with pytest.raises(StudyError, match="not frozen; run: branchpoint compare freeze"):
        freeze.frozen(tiny)
    record = freeze.freeze(tiny, NOW)
    kept = json.loads(record.read_text())
    assert (kept["date"], kept["sha256"]) == ("2026-01-02T03:04:05+00:00", freeze.fingerprint(spec.read(tiny)))
    with pytest.raises(StudyError, match="frozen already"):
        freeze.freeze(tiny)
    tiny.write_text("# a comment\n" + tiny.read_text())
    assert freeze.frozen(tiny).study.budget.amount == 20
    changed(tiny, "amount: 20", "amount: 30")
    with pytest.raises(StudyError, match=r"changed after freezing on 2026-01-02.*budget.amount was 20, is 30"):
        freeze.frozen(tiny)


def test_a_study_with_runs_cannot_be_frozen_any_more(tiny: Path) -> None:
    write_text(Path("runs/tiny/desk/flat/seed-0/config.yaml"), "seed: 0")
    with pytest.raises(StudyError, match="frozen before its first run"):
        freeze.freeze(tiny)


def test_a_tampered_or_cut_record_is_noticed(tiny: Path) -> None:
    record = freeze.freeze(tiny)
    whole = record.read_text()
    record.write_text(whole.replace('"amount": 20', '"amount": 30'))
    with pytest.raises(StudyError, match="does not have the hash"):
        freeze.frozen(tiny)
    record.write_text(whole[: len(whole) // 2])
    with pytest.raises(StudyError, match="not a complete record"):
        freeze.frozen(tiny)


def test_deviations_are_recorded_applied_and_cannot_be_taken_back(tiny: Path) -> None:
    record = freeze.freeze(tiny, NOW)
    plain = tiny.read_text()
    first = "- {date: 2026-02-01, what: the machine was slow, changes: {budget.amount: 16}}\n"
    tiny.write_text(plain + "deviations:\n" + first)
    found = freeze.frozen(tiny, NOW)
    assert found.study.budget.amount == 16
    assert json.loads(record.read_text())["deviations"] == [
        {"date": "2026-02-01", "what": "the machine was slow", "changes": {"budget.amount": 16}, "recorded": found.date}
    ]
    tiny.write_text(plain + "deviations:\n" + first + "- {date: 2026-02-02, what: a seed was lost}\n")
    assert [d["what"] for d in freeze.frozen(tiny).deviations] == ["the machine was slow", "a seed was lost"]
    for without in (plain, plain + "deviations:\n" + first.replace("slow", "fast")):
        tiny.write_text(without)
        with pytest.raises(StudyError, match="changed or removed"):
            freeze.frozen(tiny)


def test_a_deviation_that_names_no_field_is_not_recorded(tiny: Path) -> None:
    record = freeze.freeze(tiny)
    before = record.read_bytes()
    tiny.write_text(tiny.read_text() + "deviations: [{date: 2026-02-01, what: x, changes: {budgget.amount: 16}}]\n")
    with pytest.raises(StudyError, match="no field 'budgget"):
        freeze.frozen(tiny)
    assert record.read_bytes() == before


def test_values_are_chosen_for_a_method_and_environment_over_all_tuning_seeds(tiny: Path) -> None:
    raw = spec.read(tiny) | {"tune": {"grid": {"learner.lr": [1e-3, 3e-3]}, "seeds": [7, 8], "share": 0.5}}
    study = spec.parse(raw, "tiny")
    success = {("flat", 1e-3, 7): 0.9, ("flat", 1e-3, 8): 0.1, ("flat", 3e-3, 7): 0.6, ("flat", 3e-3, 8): 0.6}
    jobs = run.tuning(study)
    assert len(jobs) == 8
    assert {j.amount for j in jobs} == {10}
    for job in jobs:
        height = success.get((job.arm, job.values["learner.lr"], job.seed), 0.5)
        finish(job, height)
    found = run.chosen(study)
    assert found["desk", "flat"] == (
        {"learner.lr": 3e-3},
        pytest.approx({"learner.lr=0.001": 0.5, "learner.lr=0.003": 0.6}),
    )
    assert found["desk", "tree"][0] == {"learner.lr": 1e-3}, "a tie goes to the first"
    own = run.runs(study, {k: v for k, (v, _) in found.items()})
    assert {(j.arm, j.config.learner.lr) for j in own} == {("flat", 3e-3), ("tree", 1e-3)}


def finish(job: run.Job, height: float) -> None:
    """A complete run folder of a flat curve."""
    folder = job.folder.path
    write_text(folder / "config.yaml", "")
    rows = [{"update": u, "spent": s, "eval/backoffice": height} for u, s in ((0, 0), (1, job.amount))]
    write_text(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    write_text(folder / "ledger.json", json.dumps({"env_steps": job.amount}))
    write_text(folder / "checkpoints" / "000001" / "trainer.json", "{}")


def test_a_half_written_run_says_what_is_missing(tiny: Path) -> None:
    study = spec.parse(spec.read(tiny), "tiny")
    job = run.runs(study, {key: {} for key in study.pairs()})[0]
    assert job.missing() == "not begun"
    finish(job, 0.5)
    assert job.done
    assert job.area() == 0.5
    metrics = job.folder.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"spent": 20', '"spent": 14'))
    assert job.missing() == "stopped at 14 of 20"
    metrics.unlink()
    assert job.missing() == "begun, but without metrics.jsonl"
    finish(job, 0.5)
    (job.folder.path / "ledger.json").unlink()
    assert job.missing() == "without ledger.json"
    finish(job, 0.5)
    (job.folder.path / "checkpoints" / "000001" / "trainer.json").unlink()
    assert job.missing() == "without its last checkpoint"


def test_a_checkpoint_that_cannot_be_measured_is_noted_once(tiny: Path) -> None:
    study = spec.parse(spec.read(tiny) | {"variance": {"arms": ["tree"], "seed": 0}}, "tiny")
    for job in [*run.starts(study).values(), *run.runs(study, {key: {} for key in study.pairs()})]:
        finish(job, 0.5)
        write_text(run.final_file(job), "{}")
    for start in run.starts(study).values():
        write_text(start.folder.path / "checkpoints" / "000001" / "trainer.json", "{}")
    asked: list[list[str]] = []

    def execute(todo: Sequence[list[str]], strict: bool) -> list[int]:
        asked.extend(todo)
        assert not (strict and todo)
        return [1] * len(todo)

    run.run(study, execute, lambda text: None)
    assert [a[:5] for a in asked] == [["probe", "gradient", "runs/tiny/desk/tree/seed-0", "--checkpoint", "1"]]
    assert run.refused(run.probed(study)[0][2]).exists()
    run.run(study, execute, lambda text: None)
    assert len(asked) == 1, "it is not asked again"


def test_folders_of_settings_are_distinct() -> None:
    names = {run.setting({"a.b": v}) for v in (1, "1/2", "1_2", "x" * 100, "x" * 101, [1, 2])}
    assert len(names) == 6
    assert all("/" not in n for n in names)


@pytest.mark.parametrize(
    ("intervals", "shown", "won", "lost"),
    [
        ({("a", "x"): (0.1, 0.3), ("b", "x"): (0.06, 0.2)}, True, ["a", "b"], []),
        ({("a", "x"): (0.1, 0.3), ("b", "x"): (0.04, 0.2)}, False, ["a"], []),
        ({("a", "x"): (0.1, 0.3), ("b", "x"): (-0.2, -0.06)}, False, ["a"], ["b"]),
        ({("a", "x"): (-0.1, 0.3), ("b", "x"): (-0.06, 0.2)}, False, [], []),
    ],
)
def test_the_decision_rule(
    intervals: dict[tuple[str, str], tuple[float, float]], shown: bool, won: list[str], lost: list[str]
) -> None:
    pairs = {k: Paired((0, 1), (0.0, 0.0), 0.0, t, (0.0, 0.0), 1.0, 0.95) for k, t in intervals.items()}
    found = verdict(Decision(arm="t", against=("x",), margin=0.05), ["a", "b"], pairs)
    assert (found["shown"], found["better_in"], found["worse_in"]) == (shown, won, lost)


STUDIES = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_the_studies_of_this_repository_are_valid(path: Path) -> None:
    study = spec.parse(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
    assert len(study.seeds) >= 5
