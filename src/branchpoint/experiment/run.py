"""The runs of a study: starts, tuning, training and the final test, each a normal run in a folder of its own.

    FOLDER/ENVIRONMENT/start/seed-0                      the warm start that all arms share
    FOLDER/ENVIRONMENT/ARM/tune/SETTING/seed-100         a candidate of the tuned values
    FOLDER/ENVIRONMENT/ARM/seed-0                        a run of the study, and final.json in it

Beside each folder lies the YAML file that ``branchpoint train`` is given. A study that was killed goes on where it was:
what is complete stays, what was begun is resumed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from branchpoint import config as configs
from branchpoint.config import RunConfig
from branchpoint.experiment.spec import Study, StudyError, Values
from branchpoint.experiment.stats import Curve, area
from branchpoint.store import RunFolder, StoreError, write_json, write_text

Execute = Callable[[Sequence[list[str]], bool], Sequence[int]]
"""Runs ``branchpoint`` with each list of arguments, in any order; the exit statuses, in the order of the lists. With
True it raises StudyError instead when one of them fails."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``values``: its tuned values. ``amount``: what it has to spend, 0 for a start."""

    environment: str
    arm: str
    seed: int
    values: Values
    config: RunConfig
    amount: int

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.run)

    @property
    def file(self) -> Path:
        """The configuration that it is run with."""
        return Path(f"{self.config.run}.yaml")

    @property
    def done(self) -> bool:
        """Whether its last update is there, with a checkpoint."""
        return not self.missing()

    def missing(self) -> str:
        """What a run lacks, in words; empty for a complete one."""
        if not self.folder.started:
            return "not begun"
        rows = self.folder.rows("metrics.jsonl")
        if not rows:
            return "begun, but without metrics.jsonl"
        if not (self.folder.path / "ledger.json").exists():
            return "without ledger.json"
        if rows[-1].get("spent", 0) < self.amount:
            return f"stopped at {rows[-1].get('spent', 0):,} of {self.amount:,}"
        return "" if rows[-1]["update"] in self.folder.checkpoints() else "without its last checkpoint"

    def arguments(self) -> list[str]:
        """What to give to ``branchpoint``, the configuration written."""
        text = configs.dump(self.config)
        saved = self.folder.path / "config.yaml"
        if saved.exists() and saved.read_text(encoding="utf-8") != text:
            raise StudyError(
                f"{self.folder.path}: holds a run with another configuration; move it away, then run again"
            )
        write_text(self.file, text)
        return ["train", str(self.file), *(["--resume"] if self.folder.started else [])]

    def curve(self) -> Curve:
        """[(spent, success on validation), ...]. Raises StoreError for an incomplete run."""
        if not self.done:
            raise StoreError(f"{self.folder.path}: {self.missing()}; finish it with: branchpoint compare run")
        name = f"eval/{self.config.envs[0].name}"
        return [(float(r.get("spent", 0)), float(r[name])) for r in self.folder.rows("metrics.jsonl") if name in r]

    def area(self) -> float:
        """The endpoint."""
        return area(self.curve(), self.amount)


def starts(study: Study) -> dict[tuple[str, int], Job]:
    """The common start of every environment and seed, tuning seeds included."""
    seeds = [*study.seeds, *(study.tune.seeds if study.tune else ())]
    out = {}
    for environment in study.environments:
        for seed in seeds:
            place = Path(study.folder) / environment / "start" / f"seed-{seed}"
            out[environment, seed] = Job(environment, "start", seed, {}, study.start(environment, seed, place), 0)
    return out


def tuning(study: Study) -> list[Job]:
    """The runs of all candidates; none where there is nothing to choose."""
    if study.tune is None or len(study.tune.candidates()) == 1:
        return []
    return [
        _job(study, environment, arm, seed, values, study.tune.share, Path("tune") / setting(values))
        for environment, arm in study.pairs()
        for values in study.tune.candidates()
        for seed in study.tune.seeds
    ]


def chosen(study: Study) -> dict[tuple[str, str], tuple[Values, dict[str, float]]]:
    """For each (environment, arm), never for a seed, the candidate of the highest mean endpoint over the tuning seeds,
    and the endpoints of all (by setting). A tie goes to the earlier candidate. Raises StoreError for missing runs."""
    jobs, out = tuning(study), {}
    for environment, arm in study.pairs():
        candidates = study.tune.candidates() if study.tune else [{}]
        scores = {}
        for values in candidates if jobs else ():
            own = [j.area() for j in jobs if (j.environment, j.arm, j.values) == (environment, arm, values)]
            scores[setting(values)] = sum(own) / len(own)
        best = max(candidates, key=lambda v: scores.get(setting(v), 0.0))
        out[environment, arm] = best, scores
    return out


def runs(study: Study, values: Mapping[tuple[str, str], Values]) -> list[Job]:
    """The runs of the study itself, seed by seed, so that an early stop leaves whole comparisons."""
    return [
        _job(study, environment, arm, seed, values[environment, arm], 1.0, Path())
        for seed in study.seeds
        for environment, arm in study.pairs()
    ]


def final_file(job: Job) -> Path:
    """The success of a run's last checkpoint on the test tasks, written once."""
    return job.folder.path / "final.json"


def final_success(job: Job) -> float:
    """Raises StoreError when it is not there or cut short."""
    try:
        return float(json.loads(final_file(job).read_text(encoding="utf-8"))[f"eval/{job.config.envs[0].name}"])
    except (OSError, ValueError, KeyError) as e:
        raise StoreError(f"{final_file(job)}: no complete final test; finish it with: branchpoint compare run") from e


def run(study: Study, execute: Execute, say: Say) -> None:
    """Do all that is left. The final test is touched when every run is complete, and once for each."""
    for title, jobs in _stages(study):
        left = [j for j in jobs if not j.done]
        say(f"{title}: {len(jobs) - len(left)} of {len(jobs)} done")
        execute([j.arguments() for j in left], True)
        for job in left:
            if not job.done:
                raise StoreError(f"{job.folder.path}: {job.missing()} after its run")
    last = [j for j in runs(study, {k: v for k, (v, _) in chosen(study).items()}) if not final_file(j).exists()]
    say(f"final test: {len(last)} left")
    execute([_final(study, j) for j in last], True)
    _measure(study, execute, say)


def _measure(study: Study, execute: Execute, say: Say) -> None:
    """The gradient's variance. Where no rollout scores the probe refuses: that is noted and does not stop the study."""
    left = [(job, update) for job, update, file in probed(study) if not file.exists() and not refused(file).exists()]
    if left:
        say(f"variance of the gradient: {len(left)} checkpoints left")
    while left:
        together = list({str(job.folder.path): (job, update) for job, update in reversed(left)}.values())
        statuses = execute([_probe(study, *p) for p in together], False)  # one of each run: a probe locks its folder
        for (job, update), status in zip(together, statuses, strict=True):
            if status not in (0, 1):
                raise StoreError(f"{_measured(job, update)}: the probe was ended (status {status}); run it again")
            if status:
                write_json(refused(_measured(job, update)), {"status": status})
        left = [p for p in left if p not in together]


def refused(file: Path) -> Path:
    """The note that a checkpoint could not be measured."""
    return file.with_suffix(".refused.json")


def _measured(job: Job, update: int) -> Path:
    return job.folder.path / "probe" / f"gradient-{update:06d}.json"


def probed(study: Study) -> list[tuple[Job, int, Path]]:
    """The checkpoints at which the gradient's variance is measured: run, update, and the probe's result file."""
    if study.variance is None:
        return []
    jobs = runs(study, {k: v for k, (v, _) in chosen(study).items()})
    return [
        (job, update, _measured(job, update))
        for job in jobs
        if job.seed == study.variance.seed and job.arm in study.variance.arms
        for update in _evaluated(job)
        if update in job.folder.checkpoints()
    ]


def _evaluated(job: Job) -> list[int]:
    name = f"eval/{job.config.envs[0].name}"
    return [int(r["update"]) for r in job.folder.rows("metrics.jsonl") if name in r]


def _probe(study: Study, job: Job, update: int) -> list[str]:
    v = study.variance
    assert v is not None
    told = ["--checkpoint", str(update), "--prompts", str(v.prompts), "--groups", str(v.groups)]
    return [
        "probe",
        "gradient",
        str(job.folder.path),
        *told,
        "--column",
        study.budget.column,
        "--designs",
        v.against,
        "run",
    ]


def _stages(study: Study) -> Iterator[tuple[str, Sequence[Job]]]:
    """In order; each is made when the one before is complete."""
    yield "starts", list(starts(study).values())
    yield "tuning", tuning(study)
    yield "runs", runs(study, {k: v for k, (v, _) in chosen(study).items()})


def _final(study: Study, job: Job) -> list[str]:
    tasks = yaml.safe_dump(study.environments[job.environment].final, default_flow_style=True, width=10_000).strip()
    return ["eval", str(job.folder.path), f"envs.0.eval={tasks}", "--out", str(final_file(job))]


def setting(values: Values) -> str:
    """A folder's name for tuned values: readable where short, and always distinct."""
    text = ",".join(f"{k}={v}" for k, v in values.items())
    plain = "".join(c if c.isalnum() or c in "=.,-+" else "_" for c in text)
    return (
        plain if plain == text and len(text) < 80 else f"{plain[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def _job(study: Study, environment: str, arm: str, seed: int, values: Values, share: float, sub: Path) -> Job:
    top = Path(study.folder) / environment
    start = top / "start" / f"seed-{seed}" / "checkpoints" / "000000"
    place = top / arm / sub / f"seed-{seed}"
    config = study.config(environment, arm, seed, values, place, start, share)
    budget = config.training.budget
    assert budget is not None
    return Job(environment, arm, seed, values, config, budget.amount)


def command(arguments: Sequence[str]) -> list[str]:
    """The command line of ``branchpoint`` with this Python."""
    return [sys.executable, "-m", "branchpoint.cli", *arguments]


def load_ledger(job: Job) -> dict[str, Any]:
    """The full ledger of a run. Raises StoreError."""
    path = job.folder.path / "ledger.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise StoreError(f"{path}: cannot be read ({e}); finish the run with: branchpoint compare run") from e
