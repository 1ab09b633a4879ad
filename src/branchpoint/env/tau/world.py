"""The world: a conversation with a user, tools on a database, and a grade at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, cast

from branchpoint.env.tau.calls import Call, Malformed, parse
from branchpoint.env.tau.common import TRANSFER
from branchpoint.env.tau.database import Tables
from branchpoint.env.tau.domains import Problem, load, problems
from branchpoint.env.tau.grade import grade
from branchpoint.env.tau.user import STOP, Brief, User, scripted
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Message, Step, Task


@dataclass(frozen=True, slots=True)
class Episode:
    """The whole state. ``changes`` holds the records that a tool has touched; none is changed in place."""

    changes: Tables
    said: tuple[Message, ...] = ()
    steps: int = 0
    calls: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Dials:
    """The settings of a task, checked."""

    domain: str
    split: str
    index: int
    user: str = "scripted"
    reveal: str = "asked"
    max_steps: int = 30

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Dials:
        """Raises EnvironmentFailure naming the dial and the cure."""
        lacking = [name for name in ("domain", "split", "index") if name not in metadata]
        if lacking:
            raise EnvironmentFailure(f"a tau task without {lacking[0]!r} in its metadata; make tasks with tau.tasks()")
        dials = cls(**{field.name: metadata[field.name] for field in fields(cls) if field.name in metadata})
        size = len(problems(dials.domain, dials.split))
        if not isinstance(dials.index, int) or not 0 <= dials.index < size:
            raise EnvironmentFailure(f"index is {dials.index!r}; {dials.domain} {dials.split} has 0 to {size - 1}")
        if dials.reveal not in ("asked", "opening"):
            raise EnvironmentFailure(f"reveal is {dials.reveal!r}; use 'asked' or 'opening'")
        if not isinstance(dials.max_steps, int) or dials.max_steps < 1:
            raise EnvironmentFailure(f"max_steps is {dials.max_steps!r}; use a positive integer")
        return dials

    @property
    def problem(self) -> Problem:
        return problems(self.domain, self.split)[self.index]


class TauWorld:
    """One conversation. The first observation is what the user says; an action is a tool call or a reply to the user.

    A tool's answer begins with ``API output: ``; the user's words stand alone. The conversation ends when the user ends
    it or the agent transfers it to a human, and is graded then: reward 1 or 0. ``truncated`` after ``max_steps``
    actions, with reward 0. ``Step.info``: ``steps``, ``calls``, ``malformed`` (why an action was neither), and at the
    end ``success``, ``database`` and ``outputs``.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for bad dials, an unknown domain, or damaged data files."""
        dials = Dials.of(task.metadata)
        self._domain, self._problem = load(dials.domain), dials.problem
        self._limit = dials.max_steps
        reveal = "opening" if dials.reveal == "opening" else "asked"
        self._brief = Brief(dials.domain, self._problem.user_id, self._problem.instruction, reveal)
        self._user = user(dials.user)
        self.deterministic = bool(getattr(self._user, "deterministic", True))
        self._noise = Noise(task.seed, task.seed)
        self._state = Episode({}, over=True)

    def reset(self) -> Step:
        """What the user opens with."""
        opening = self._ask(())
        self._state = Episode({}, (Message("user", opening),))
        return self._step(opening)

    def get_state(self) -> Episode:
        """The whole state, immutable: keeping it is the snapshot."""
        return self._state

    def set_state(self, state: Episode) -> None:
        """Go to a state of the same task."""
        self._state = state

    def close(self) -> None:
        """End the conversation. Harmless when called twice."""
        self._state = replace(self._state, over=True)

    def step(self, action: str) -> Step:
        """Play an action. Any text is answered; after the end, with a step that is done and has reward 0."""
        state = self._state
        if state.over:
            return Step("Error: the conversation is over", done=True)
        state = self._state = replace(state, steps=state.steps + 1)
        said = parse(action, self._domain.tools)
        if isinstance(said, Malformed):
            return self._step(f"API output: Error: {said.problem}", malformed=said.problem)
        if isinstance(said, Call):
            changes, text = self._domain.run(state.changes, said.tool.name, said.args)
            self._state = replace(state, changes=changes, calls=state.calls + 1)
            return self._end(f"API output: {text}") if said.tool.name == TRANSFER else self._step(f"API output: {text}")
        talk = (*state.said, Message("assistant", said.content))
        answer = self._ask(talk)
        self._state = replace(state, said=(*talk, Message("user", answer)))
        return self._end(answer) if STOP in answer else self._step(answer)

    def _ask(self, said: tuple[Message, ...]) -> str:
        answer = self._user(self._brief, said, self._noise.child("user", len(said)))
        if not isinstance(answer, str):
            raise EnvironmentFailure(f"the user answered with a {type(answer).__name__}; expected str")
        return answer

    def _end(self, text: str) -> Step:
        state = self._state = replace(self._state, over=True)
        replies = [message.content for message in state.said if message.role == "assistant"]
        verdict = grade(self._domain, self._problem, state.changes, replies)
        facts = {"success": verdict.success, "database": verdict.database, "outputs": dict(verdict.outputs)}
        return Step(text, float(verdict.success), done=True, info=self._counts(facts))

    def _step(self, text: str, **info: Any) -> Step:
        if self._state.steps < self._limit:
            return Step(text, grammar=self._domain.grammar, info=self._counts(info))
        self._state = replace(self._state, over=True)
        return Step(text, truncated=True, info=self._counts({**info, "success": False}))

    def _counts(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"steps": self._state.steps, "calls": self._state.calls, **info}


class SampledTauWorld(TauWorld):
    """The same with luck, for a user that samples. (A process sandbox imports numpy for worlds that take luck, which
    would make opening one with the scripted user ten times slower.)"""

    def reseed(self, noise: Noise) -> None:
        """The luck of the user from now on."""
        self._noise = noise


def user(name: str) -> User:
    """The scripted user, or what ``module:attribute`` names. Raises EnvironmentFailure when it cannot be had."""
    if name == "scripted":
        return scripted
    module, _, attribute = str(name).partition(":")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentFailure(f"user is {name!r}; use 'scripted' or 'module:attribute' ({error})") from error
    if not callable(found):
        raise EnvironmentFailure(f"user {name!r} is a {type(found).__name__}; expected user(brief, said, noise) -> str")
    return cast(User, found)
