"""The scheduler ``planned``: it measures where the return varies, forks there, and watches whether that pays.

One batch's design is decided from *earlier* batches alone, so it is predictable. Three kinds of batches:

* ``measure``: one fork of two at a boundary of the quarters (the middle first), until each boundary has been seen, and
  once every ``refresh`` batches at the one seen longest ago;
* ``plan``: the design of least predicted variance for the budget (:mod:`branchpoint.plan`), the flat group where none
  promises ``margin`` less. Designs with two forks come on the menu once one with a single fork has won;
* ``pause``: the flat group for ``pause`` batches, after the design in force did not win against the flat group that
  every tree contains (:func:`branchpoint.lagged.squares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from branchpoint import plan
from branchpoint.credit import Fraction
from branchpoint.lagged import PARTS, Evidence, Verdict, usable
from branchpoint.noise import Noise
from branchpoint.plan import Plan, PlanError, Profile
from branchpoint.tree import RolloutTree
from branchpoint.watch import ROOT, Never, Positions, Schedule, Start, Unit, Watch, fork_at

Why = Literal["measure", "plan", "pause", "alike"]


class State(BaseModel):
    """The design of the next batch (forks ``at`` these fractions into ``width`` children, with these ``gamma``), why it
    was chosen and the ``gain`` it promises; and what it was chosen from.

    ``rests``: the batch until which the group stays flat. ``confirmed``: a design with one fork has won. ``seen``: the
    last batch that forked at each boundary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    at: tuple[Fraction, ...] = ()
    width: tuple[int, ...] = ()
    gamma: tuple[Fraction, ...] = ()
    why: Why = "measure"
    gain: float | None = None
    batches: int = 0
    rests: int = 0
    confirmed: bool = False
    seen: tuple[int, ...] = (0,) * PARTS
    evidence: Evidence = Evidence()
    verdict: Verdict = Verdict()

    def but(self, **changes: Any) -> Self:
        """A copy with these changes."""
        return self.model_copy(update=changes)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The boundaries at which the design forks."""
        return tuple(round(a * PARTS) for a in self.at)


class Planned(Schedule):
    """Forks where the return's variance arises, as measured on earlier batches. Predictable.

    ``budget``: what a group may cost, in full-length rollouts; the flat group has that many roots, others fewer. Where
    it is not given, ``roots`` is taken for it. ``depth``: forks of a path, at most. ``memory``: the weight that old
    measurements keep when new ones are added. ``least``: trees before a boundary counts as measured or a design as
    judged. ``roots`` and ``state`` are those of the next batch; :meth:`update` replaces them.
    """

    kind: Literal["planned"] = "planned"
    budget: float = Field(default=8.0, ge=4.0, allow_inf_nan=False)
    unit: Unit = "turn"
    expected: float = Field(default=10.0, gt=0.0, allow_inf_nan=False)
    depth: int = Field(default=2, ge=1, le=2)
    margin: Fraction = plan.MARGIN
    refresh: int = Field(default=10, ge=2)
    pause: int = Field(default=10, ge=1)
    least: int = Field(default=8, ge=2)
    memory: float = Field(default=0.9, ge=0.0, lt=1.0)

    state: State = State()

    @model_validator(mode="before")
    @classmethod
    def _start(cls, given: Any) -> Any:
        """The first design, where no state is given."""
        if not isinstance(given, dict) or "state" in given:
            return given
        budget = given.get("budget", given.get("roots", 8))
        try:
            first = plan.predict(_even(), float(budget), (PARTS // 2,), (2,), whole=True)
        except (PlanError, TypeError, ValueError):
            return {**given, "budget": budget}  # the field's own check says it better
        state = State(at=first.at, width=(2,), gamma=(0.5,))
        return {**given, "budget": budget, "roots": int(first.roots), "state": state}

    @model_validator(mode="after")
    def _remembers(self) -> Self:
        if self.least * (1.0 - self.memory) >= 1.0:
            raise ValueError(f"least: with memory {self.memory:g} one tree a batch never makes {self.least} trees")
        return self

    def watch(self, noise: Noise, start: Start = ROOT) -> Watch:
        """A watch that forks at the design's positions."""
        if not self.state.at:
            return Never()
        positions = Positions(start, "turn", "first_token", False)
        targets = [round(a * self.expected) for a in self.state.at]
        return fork_at(positions, self.unit, targets, self.state.width, again=False)

    @property
    def gammas(self) -> tuple[float, ...]:
        """The weights planned with the forks."""
        return self.state.gamma

    def metrics(self) -> dict[str, Any]:
        """The design of the batch, why, what it promises and what was measured of it, as ``plan/...``."""
        now = self.state
        return {
            "plan/at": list(now.at),
            "plan/width": list(now.width),
            "plan/gamma": list(now.gamma),
            "plan/roots": self.roots,
            "plan/why": now.why,
            "plan/gain": now.gain,
            "plan/measured": now.verdict.ratio,
        }

    def update(self, trees: Sequence[RolloutTree]) -> Self:
        """The scheduler of the next batch: with these trees measured, and the design chosen anew."""
        old = self.state
        evidence = old.evidence.add(trees, old.cuts, self.expected, self.unit, self.memory)
        verdict = old.verdict
        if old.why == "plan" and old.at:
            verdict = verdict.add(trees, old.gamma, self.unit, self.memory)
        batches = old.batches + 1
        seen = tuple(batches if k in old.cuts else b for k, b in enumerate(old.seen))
        state = old.but(evidence=evidence, verdict=verdict, batches=batches, seen=seen)
        length = evidence.length if evidence.trees > 0 else 0.0
        made = self.model_copy(update={"expected": length if length > 0 else self.expected})
        return made._decided(state)

    def _decided(self, state: State) -> Self:
        cuts, asked = usable(self.expected), state.evidence.asked
        lacking = [k for k in cuts if asked[k] < self.least]
        if lacking:
            return self._measuring(state, min(lacking, key=lambda k: (asked[k], abs(k - PARTS / 2))))
        if cuts and state.batches % self.refresh == 0:
            return self._measuring(state, min(cuts, key=lambda k: state.seen[k]))
        if state.batches < state.rests:
            return self._takes(state, self._flat(), "pause")
        if state.verdict.lost(self.least):
            rests = state.batches + self.pause
            return self._takes(state.but(rests=rests, confirmed=False, verdict=Verdict()), self._flat(), "pause")
        return self._planning(state, cuts)

    def _planning(self, state: State, cuts: Sequence[int]) -> Self:
        try:
            profile = state.evidence.profile()
        except PlanError:
            return self._takes(state, self._flat(), "alike")
        if not profile.informative:
            return self._takes(state, self._flat(), "alike")
        confirmed = state.confirmed or state.verdict.won(self.least)
        depth = self.depth if confirmed else 1
        best = plan.choose(profile, self.budget, depth, self.margin, whole=True, allowed=cuts)
        return self._takes(state.but(confirmed=confirmed), self._kept(state, profile, best, cuts), "plan")

    def _kept(self, state: State, profile: Profile, best: Plan, cuts: Sequence[int]) -> Plan:
        """The design being watched, as long as the best one does not promise ``margin`` less than it."""
        watched = state.verdict.design
        held = tuple(round(a * PARTS) for a, _ in watched)
        if not watched or not set(held) <= set(cuts):
            return best
        try:
            current = plan.predict(profile, self.budget, held, tuple(k for _, k in watched), whole=True)
        except PlanError:
            return best
        return best if best.gain <= current.gain * (1.0 - self.margin) else current

    def _measuring(self, state: State, cut: int) -> Self:
        try:
            profile = state.evidence.profile()
        except PlanError:
            profile = _even()
        try:
            probe = plan.predict(profile, self.budget, (cut,), (2,), whole=True)
        except PlanError:  # episodes so uneven that the budget does not pay for two such trees
            probe = self._flat()
        return self._takes(state, probe, "measure")

    def _flat(self) -> Plan:
        return plan.predict(_even(), self.budget, whole=True)

    def _takes(self, state: State, made: Plan, why: Why) -> Self:
        """With this design for the next batch. What was measured of another planned design is dropped."""
        if why == "plan" and state.verdict.design != made.design:
            state = state.but(verdict=Verdict(design=made.design))
        state = state.but(at=made.at, width=made.widths, gamma=made.gamma, why=why, gain=made.gain)
        return self.model_copy(update={"state": state, "roots": int(made.roots)})


def _even() -> Profile:
    """A profile for when nothing is known: the same in all parts."""
    return Profile((1.0,) * PARTS, (1.0,) * PARTS, (1.0,) * PARTS)
