"""A design: how a group is grown, and how it becomes a gradient. Read from one word of a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from branchpoint.advantage import Estimator, Reinforce, Tree, steered
from branchpoint.noise import Arm
from branchpoint.probe.trace import ProbeError
from branchpoint.scheduler import Scheduler
from branchpoint.tree import RolloutTree

SYNTAX = "KIND[:field=value,...][@ARM], for example flat:roots=8, fixed:at=[0.5],width=2,roots=5@paired, or run"
"""How a design is written."""


@dataclass(frozen=True)
class Design:
    """A topology (any scheduler, ``flat`` included), an estimator, and whether the branches of a group share the
    world's luck: ``paired`` (roots and siblings together), ``independent``, or ``clean`` (no luck). ``learnt``: the
    scheduler has learnt from earlier trees already."""

    name: str
    scheduler: Scheduler
    estimator: Estimator
    arm: Arm
    learnt: bool = False

    @staticmethod
    def parse(text: str, run: Design) -> Design:
        """The design that ``text`` names (see SYNTAX). What it leaves out is as in ``run``; ``run`` is that itself.

        ``estimator`` among the fields takes a kind or a mapping, all others are the scheduler's. Raises ProbeError.
        """
        body, _, arm = text.rpartition("@") if "@" in text else (text, "", run.arm)
        kind, _, rest = body.partition(":")
        if arm not in get_args(Arm):
            raise ProbeError(f"design {text!r}: no arm {arm!r}; known: {', '.join(get_args(Arm))}")
        fields = _fields(text, rest)
        estimator = fields.pop("estimator", None)
        if kind == "run":
            settings = run.scheduler.model_dump() | fields
        else:
            settings = {"kind": kind, "roots": run.scheduler.roots} | fields
        made = Design(
            text,
            _valid(Scheduler, settings, text),
            run.estimator if estimator is None else _valid(Estimator, _kind(estimator), text),
            arm,  # type: ignore[arg-type]
            run.learnt and kind == "run",
        )
        made._check()
        return made

    def after(self, trees: Sequence[RolloutTree]) -> Design:
        """The design with what its scheduler learns from *earlier* trees (expected lengths, lagged quantiles, a plan),
        the weights of the baselines that it plans included."""
        scheduler = self.scheduler if self.learnt else self.scheduler.update(trees)
        return replace(self, scheduler=scheduler, estimator=steered(self.estimator, scheduler.gammas), learnt=True)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "name": self.name,
            "arm": self.arm,
            "scheduler": self.scheduler.model_dump(mode="json"),
            "estimator": self.estimator.model_dump(mode="json"),
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the figures has to know."""
        if self.scheduler.roots == 1 and isinstance(self.estimator, Tree):
            return ("a single root has no root baseline: before the first fork this is REINFORCE; take roots >= 2",)
        return ()

    def _check(self) -> None:
        if isinstance(self.estimator, Tree | Reinforce) and not self.scheduler.predictable:
            raise ProbeError(
                f"design {self.name!r}: estimator {self.estimator.kind!r} needs a predictable scheduler and "
                f"{self.scheduler.kind!r} looks ahead; add estimator=bpo"
            )
        if self.scheduler.roots == 1 and self.scheduler.kind == "flat" and not isinstance(self.estimator, Reinforce):
            raise ProbeError(
                f"design {self.name!r}: a single root has nothing to be compared with; give roots of at least 2"
            )


def _kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _fields(text: str, rest: str) -> dict[str, Any]:
    """``a=1,b=[2,3]`` as a mapping; values are YAML."""
    try:
        found = yaml.safe_load("{" + rest.replace("=", ": ") + "}")
    except yaml.YAMLError:
        found = None
    if not isinstance(found, Mapping) or any(v is None for v in found.values()):
        raise ProbeError(f"design {text!r}: write it as {SYNTAX}")
    return dict(found)


def _valid(union: Any, value: Any, text: str) -> Any:
    try:
        return TypeAdapter(union).validate_python(value)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "kind"
        raise ProbeError(f"design {text!r}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
