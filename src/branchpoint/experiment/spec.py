"""What a registered comparison says before any of its runs: claim, arms, environments, seeds, budget, decision rule.

A study is one YAML file. Every run of it is a normal configuration: ``base``, then the environment's part, then the
arm's, then the tuned values, each laid over what came before.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from branchpoint import config as configs
from branchpoint.config import Budget, RunConfig

ARM_KEYS = ("scheduler", "estimator", "learner", "noise", "training.tasks")
"""What an arm may set: how trees are grown and learnt from. All else is the same for every arm."""
_MANY_UPDATES = 100_000  # the budget ends a run, never this
Values = dict[str, Any]
"""Tuned values: dotted key of the configuration to value."""


class StudyError(Exception):
    """The study cannot be used; one line that names the field or file and the cure."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Environment(_Frozen):
    """``config``: its part of the configuration, with one entry of ``envs``. ``final``: the test tasks, arguments of
    the environment's ``tasks`` function in place of ``eval``'s. ``threshold``: success, for the steps to it.
    ``amount``: of the budget, where it is not the study's."""

    config: dict[str, Any]
    final: dict[str, Any]
    threshold: float = Field(gt=0, le=1)
    amount: int | None = Field(default=None, ge=1)


class Tune(_Frozen):
    """Values to choose from, by the endpoint on validation: once for each arm and environment, over all ``seeds``.

    ``grid``: candidates of each dotted key; all combinations are run. ``share``: of the budget that a candidate gets.
    """

    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    share: float = Field(default=1.0, gt=0, le=1)

    def candidates(self) -> list[Values]:
        """All combinations, the first values first: a tie goes to the earlier one."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


class Variance(_Frozen):
    """The gradient's variance over training: of each arm's design against a flat one, by ``branchpoint probe gradient``
    at every evaluated checkpoint of one seed. ``against``: the first design, as the probe reads it."""

    arms: tuple[str, ...] = Field(min_length=1)
    seed: int
    against: str = "flat:estimator=rloo"
    prompts: int = Field(default=4, ge=1)
    groups: int = Field(default=4, ge=3)


class Decision(_Frozen):
    """When the claim counts as shown: ``arm`` beats each of ``against`` by more than ``margin`` in the endpoint, in at
    least ``environments`` of them (default: all), and is worse in none.

    Better or worse: the t interval of the paired differences over seeds lies on one side of the margin (of minus the
    margin). ``level``: of all intervals together; Bonferroni divides 1 - level among arms and environments.
    """

    arm: str
    against: tuple[str, ...] = Field(min_length=1)
    environments: int | None = Field(default=None, ge=1)
    margin: float = Field(default=0.0, ge=0)
    level: float = Field(default=0.95, gt=0.5, lt=1)


class Deviation(_Frozen):
    """What was done otherwise than written, and when. ``changes``: dotted keys of the study and their new values."""

    date: str
    what: str = Field(min_length=1)
    changes: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _date(cls, raw: Any) -> Any:
        """YAML reads 2026-01-31 as a date."""
        return {**raw, "date": str(raw["date"])} if isinstance(raw, Mapping) and "date" in raw else raw


class Study(_Frozen):
    """A registered comparison. ``folder``: where the runs go; ``results``: where the report goes; ``reference``: the
    arm that all others are compared with; ``endpoint``: the area under the curve of true success on validation."""

    name: str
    claim: str = Field(min_length=1)
    folder: str
    results: str
    seeds: tuple[Annotated[int, Field(ge=0)], ...]
    budget: Budget
    base: dict[str, Any] = Field(default_factory=dict)
    environments: dict[str, Environment] = Field(min_length=1)
    arms: dict[str, dict[str, Any]] = Field(min_length=2)
    reference: str
    endpoint: Literal["area"] = "area"
    tune: Tune | None = None
    decision: Decision
    variance: Variance | None = None
    deviations: tuple[Deviation, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> Study:
        if len(set(self.seeds)) < 2:
            raise ValueError("seeds: a single seed shows no spread; give at least 2 different ones")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each seed once")
        if self.tune and set(self.tune.seeds) & set(self.seeds):
            raise ValueError("tune.seeds: must not be among seeds; values chosen on a seed flatter its result")
        for field, names in {
            "reference": [self.reference],
            "decision.arm": [self.decision.arm],
            "decision.against": list(self.decision.against),
            "variance.arms": list(self.variance.arms) if self.variance else [],
        }.items():
            for name in names:
                if name not in self.arms:
                    raise ValueError(f"{field}: no arm {name!r}; arms: {', '.join(self.arms)}")
        if self.decision.arm in self.decision.against:
            raise ValueError("decision.against: an arm cannot be compared with itself")
        if self.variance and self.variance.seed not in self.seeds:
            raise ValueError("variance.seed: must be among seeds")
        if (self.decision.environments or 1) > len(self.environments):
            raise ValueError(f"decision.environments: the study has {len(self.environments)}")
        for name, arm in self.arms.items():
            _check_arm(name, arm)
        return self

    def amount(self, environment: str) -> int:
        """The budget of a run in an environment, in ``budget.column``."""
        return self.environments[environment].amount or self.budget.amount

    def _probed(self) -> set[tuple[int, str]]:
        return {(self.variance.seed, arm) for arm in self.variance.arms} if self.variance else set()

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(environment, arm), in the order of the file."""
        return product(self.environments, self.arms)

    def config(
        self,
        environment: str,
        arm: str,
        seed: int,
        values: Mapping[str, Any],
        place: Path,
        start: Path | None = None,
        share: float = 1.0,
    ) -> RunConfig:
        """The configuration of one run.

        ``values``: tuned ones. ``place``: its run folder. ``start``: the checkpoint that all arms of this environment
        and seed start from. ``share``: of the budget. Raises StudyError that names the arm, field and cure.
        """
        raw = merged(merged(self.base, self.environments[environment].config), self.arms[arm])
        for key, value in values.items():
            raw = merged(raw, _nested(key, value))
        amount = max(1, round(share * self.amount(environment)))
        budget = self.budget.model_copy(update={"amount": amount}).model_dump()
        kept = budget["evals"] + 2 if (seed, arm) in self._probed() else 2
        training = {"budget": budget, "updates": _MANY_UPDATES, "checkpoint_every": 50, "keep_checkpoints": kept}
        raw = merged(raw, {"run": str(place), "seed": seed, "training": training})
        if start is not None:
            raw["model"] = {**raw.get("model", {}), "name": str(start), "warm_start": None, "size": {}}
        return _parsed(raw, f"environments.{environment}, arms.{arm}")

    def start(self, environment: str, seed: int, place: Path) -> RunConfig:
        """The configuration of the run that makes the common start of all arms: no update, only the warm start."""
        raw = merged(self.base, self.environments[environment].config)
        own = {"run": str(place), "seed": seed, "training": {"updates": 0, "budget": None}}
        return _parsed(merged(raw, own), f"environments.{environment}")


def read(path: Path) -> dict[str, Any]:
    """The file as it is written. Raises StudyError when it is not a mapping."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudyError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise StudyError(f"{path}: not a YAML file ({' '.join(str(e).split())})") from e
    if not isinstance(raw, dict):
        raise StudyError(f"{path}: must be a mapping of fields, found {type(raw).__name__}")
    return raw


def parse(raw: Mapping[str, Any], source: str) -> Study:
    """A study from plain values, with every run's configuration checked. Raises StudyError."""
    try:
        study = Study.model_validate(raw)
    except ValidationError as e:
        raise StudyError(f"{source}: {_explain(e)}") from e
    for name, environment in study.environments.items():
        if len(environment.config.get("envs", [])) != 1:
            raise StudyError(f"{source}: environments.{name}.config.envs: must have one entry")
    candidates = study.tune.candidates() if study.tune else [{}]
    for environment, arm in study.pairs():
        for values in candidates:
            try:
                study.config(environment, arm, study.seeds[0], values, Path("run"))
            except StudyError as e:
                raise StudyError(f"{source}: {e}") from e
    return study


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``under``: mappings are merged, all else is replaced, and so is a mapping of another ``kind``
    (the fields of one strategy mean nothing to the next)."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and below.get("kind") == value.get("kind"):
            out[key] = merged(below, value)
        else:
            out[key] = value
    return out


def replaced(raw: Any, key: str, value: Any) -> Any:
    """Plain values with the one at a dotted key replaced. Raises StudyError when the key leads nowhere."""
    first, _, rest = key.partition(".")
    if not isinstance(raw, Mapping) or (rest and first not in raw):
        raise StudyError(f"deviations: changes: no field {key!r} in the study")
    return {**raw, first: replaced(raw[first], rest, value) if rest else value}


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _check_arm(name: str, arm: Mapping[str, Any]) -> None:
    """Raises ValueError for what an arm may not set: arms that differ in more than their method compare nothing."""
    for key in _leaves(arm):
        if key in ARM_KEYS or key.split(".")[0] in ARM_KEYS:
            continue
        if key.startswith("training."):
            raise ValueError(
                f"arms.{name}.{key}: unequal budgets; only training.tasks may differ, the budget is the study's"
            )
        close = difflib.get_close_matches(key.split(".")[0], ARM_KEYS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"an arm sets {', '.join(ARM_KEYS)}; all else goes into base"
        raise ValueError(f"arms.{name}.{key}: unknown key of an arm; {hint}")


def _leaves(raw: Mapping[str, Any]) -> Iterator[str]:
    for key, value in raw.items():
        if key == "training" and isinstance(value, Mapping):
            yield from (f"{key}.{k}" for k in value)
        else:
            yield str(key)


def _parsed(raw: Mapping[str, Any], source: str) -> RunConfig:
    try:
        return configs.parse(raw, source)
    except configs.ConfigError as e:
        raise StudyError(str(e)) from e


def _explain(error: ValidationError) -> str:
    errors = error.errors()  # a misspelt field is missing too: tell the misspelling
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), _fields(first["loc"][:-1]), n=1)
        return f"{name}: unknown field" + (f"; did you mean {close[0]!r}?" if close else "; remove it")
    if first["type"] == "missing":
        return f"{name}: missing; add it to the file"
    message = first["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _fields(place: Sequence[str | int]) -> list[str]:
    models = {(): Study, ("tune",): Tune, ("variance",): Variance, ("decision",): Decision, ("budget",): Budget}
    found = models.get(tuple(map(str, place)), Environment if place and place[0] == "environments" else None)
    return sorted(found.model_fields) if found else []
