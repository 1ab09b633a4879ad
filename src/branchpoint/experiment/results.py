"""What a finished study shows, as JSON values: every curve, endpoint and ledger, the comparisons and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from branchpoint.experiment import run as runs
from branchpoint.experiment import stats
from branchpoint.experiment.freeze import Frozen
from branchpoint.experiment.run import Job
from branchpoint.experiment.spec import Decision, Study
from branchpoint.noise import Noise
from branchpoint.store import StoreError


def results(frozen: Frozen) -> dict[str, Any]:
    """Everything that the page shows. Raises StoreError that names the first run which lacks something, and what."""
    study, chosen = frozen.study, runs.chosen(frozen.study)
    rows = [_row(study, job) for job in runs.runs(study, {k: v for k, (v, _) in chosen.items()})]
    level = _level(study)
    return {
        "name": study.name,
        "claim": " ".join(study.claim.split()),
        "sha256": frozen.sha256,
        "frozen": frozen.date,
        "branchpoint": version("branchpoint"),
        "deviations": [dict(d) for d in frozen.deviations],
        "endpoint": study.endpoint,
        "column": study.budget.column,
        "reference": study.reference,
        "decision": study.decision.model_dump(mode="json") | {"level_of_each": level},
        "seeds": list(study.seeds),
        "arms": list(study.arms),
        "environments": {
            name: {"amount": study.amount(name), "threshold": e.threshold} for name, e in study.environments.items()
        },
        "tuned": [
            {"environment": e, "arm": a, "values": values, "scores": scores}
            for (e, a), (values, scores) in chosen.items()
        ],
        "starts": [_start(job) for job in runs.starts(study).values()],
        "runs": rows,
        "summary": [_summary(study, environment, arm, rows) for environment, arm in study.pairs()],
        "comparisons": _comparisons(study, rows, level),
        "verdict": verdict(study.decision, list(study.environments), _decided(study, rows, level)),
        "variance": _variance(study),
    }


def verdict(
    decision: Decision, environments: Sequence[str], pairs: Mapping[tuple[str, str], stats.Paired]
) -> dict[str, Any]:
    """The decision rule on the intervals of (environment, opponent): whether the claim is ``shown``, and for each pair
    ``better``, ``worse`` or ``undecided``."""
    judged = {key: _judge(p.t, decision.margin) for key, p in pairs.items()}
    won = [e for e in environments if all(judged[e, o] == "better" for o in decision.against)]
    lost = sorted({e for (e, _), j in judged.items() if j == "worse"})
    needed = decision.environments or len(environments)
    return {
        "shown": len(won) >= needed and not lost,
        "needed": needed,
        "better_in": won,
        "worse_in": lost,
        "pairs": [{"environment": e, "against": o, "outcome": j} for (e, o), j in judged.items()],
    }


def _judge(interval: tuple[float, float], margin: float) -> str:
    if interval[0] > margin:
        return "better"
    return "worse" if interval[1] < -margin else "undecided"


def _level(study: Study) -> float:
    """Of each interval, so that all of the decision hold together with its level."""
    return 1 - (1 - study.decision.level) / (len(study.decision.against) * len(study.environments))


def _row(study: Study, job: Job) -> dict[str, Any]:
    curve, e = job.curve(), study.environments[job.environment]
    return {
        "environment": job.environment,
        "arm": job.arm,
        "seed": job.seed,
        "values": job.values,
        "folder": str(job.folder.path),
        "curve": [list(p) for p in stats.clipped(curve, job.amount)],
        "spent": curve[-1][0],
        "area": stats.area(curve, job.amount),
        "last": stats.at(curve, job.amount),
        "steps_to_threshold": stats.steps_to(curve, e.threshold, job.amount),
        "final": runs.final_success(job),
        "ledger": runs.load_ledger(job),
    }


def _start(job: Job) -> dict[str, Any]:
    return {"environment": job.environment, "seed": job.seed, "ledger": runs.load_ledger(job)}


def _of(rows: Sequence[Mapping[str, Any]], environment: str, arm: str, field: str) -> dict[int, Any]:
    return {r["seed"]: r[field] for r in rows if (r["environment"], r["arm"]) == (environment, arm)}


def _summary(study: Study, environment: str, arm: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one arm in one environment: means over seeds, and steps to the threshold."""
    mean = {f: _mean(list(_of(rows, environment, arm, f).values())) for f in ("area", "last", "final")}
    steps = list(_of(rows, environment, arm, "steps_to_threshold").values())
    reached = asdict(stats.reached(steps, study.amount(environment)))
    ledgers = list(_of(rows, environment, arm, "ledger").values())
    costs = {column: _mean([ledger[column] for ledger in ledgers]) for column in ledgers[0]}
    return {"environment": environment, "arm": arm} | mean | {"steps": reached, "ledger": costs}


def _comparisons(study: Study, rows: Sequence[Mapping[str, Any]], level: float) -> list[dict[str, Any]]:
    """Every arm against the reference, and those of the decision, in area and in the final test."""
    wanted = {(arm, study.reference): None for arm in study.arms if arm != study.reference}
    wanted |= {(study.decision.arm, other): None for other in study.decision.against}
    out = []
    for environment in study.environments:
        for arm, other in wanted:
            found: dict[str, Any] = {"environment": environment, "arm": arm, "against": other}
            for field in ("area", "final"):
                found[field] = asdict(_paired(rows, environment, arm, other, field, study.decision.level))
            if (arm, other) in {(study.decision.arm, o) for o in study.decision.against}:
                found["decided"] = asdict(_paired(rows, environment, arm, other, "area", level))
            out.append(found)
    return out


def _decided(study: Study, rows: Sequence[Mapping[str, Any]], level: float) -> dict[tuple[str, str], stats.Paired]:
    arm = study.decision.arm
    return {
        (e, other): _paired(rows, e, arm, other, "area", level)
        for e in study.environments
        for other in study.decision.against
    }


def _paired(
    rows: Sequence[Mapping[str, Any]], environment: str, arm: str, other: str, field: str, level: float
) -> stats.Paired:
    noise = Noise(0).child(environment, arm, other, field)
    return stats.paired(_of(rows, environment, arm, field), _of(rows, environment, other, field), level, noise)


def _variance(study: Study) -> list[dict[str, Any]]:
    """The gradient's variance at equal cost, over that of the flat design, at each checkpoint. ``ratio``: None where
    there is none, since a variance was not positive or no rollout had a signal (the probe refused)."""
    out = []
    for job, update, file in runs.probed(study):
        try:
            ratio = None
            if not runs.refused(file).exists():
                ratio = json.loads(file.read_text(encoding="utf-8"))["ratios"][0]["at_equal_cost"]
        except (OSError, ValueError, KeyError, IndexError) as e:
            raise StoreError(f"{file}: no complete measurement; finish it with: branchpoint compare run") from e
        spent = next(r.get("spent", 0) for r in job.folder.rows("metrics.jsonl") if r["update"] == update)
        out.append({"environment": job.environment, "arm": job.arm, "update": update, "spent": spent, "ratio": ratio})
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
