"""BFCL multi-turn: a user asks for several things in turn, the agent calls functions of eight simulated services
(Patil et al., 2025, Berkeley Function Calling Leaderboard v4, category ``multi_turn_base``).

Simulators, tasks and checkers are those of the package ``bfcl-eval`` (Apache-2.0), whose many requirements are not
needed: ``pip install "branchpoint[bfcl]" && pip install --no-deps bfcl-eval==2026.3.23``.

200 tasks. Splits: ``train`` 160, ``validation`` 40 (every fifth), ``all``. Dials (``Task.metadata``):

* ``credit``: ``all`` (reward 1 at the end when every turn passed) or ``turns`` (each passed turn pays its share).
* ``stop_early``: end the episode at the first failed turn, which cannot be made good.
* ``max_steps``: actions with calls in a turn, 20 as in BFCL; one more cuts the episode.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from branchpoint.env._bfcl_calls import Call, Malformed, Say, grammar, parse
from branchpoint.env.faults import Event
from branchpoint.noise import Noise, digest
from branchpoint.world import EnvironmentFailure, Message, Step, Task

SPLITS = ("train", "validation", "all")
INSTALL = 'pip install "branchpoint[bfcl]" && pip install --no-deps bfcl-eval==2026.3.23'
_PRECISION, _EXPONENT = 1000, 1000  # beyond them a call of MathAPI may take minutes
_RULES = """You serve a user by calling functions. The user asks for one thing after the other. Answer every turn with \
exactly one of two things: one or more calls, [function(argument=value), ...], with nothing else; or, when all that \
was asked is done, the word done. The functions:"""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task as published. ``answers``: the calls of a correct agent, by turn; ``functions``: the documents it sees."""

    id: str
    questions: tuple[str, ...]
    config: Mapping[str, Any]
    services: tuple[str, ...]
    functions: tuple[Mapping[str, Any], ...]
    answers: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True, slots=True)
class Dials:
    """The settings of a task, checked."""

    number: int
    credit: str = "all"
    stop_early: bool = True
    max_steps: int = 20

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Dials:
        """Raises EnvironmentFailure naming the dial and the cure."""
        if "number" not in metadata:
            raise EnvironmentFailure("a bfcl task without 'number' in its metadata; make tasks with bfcl.tasks()")
        dials = cls(**{f.name: metadata[f.name] for f in fields(cls) if f.name in metadata})
        if not isinstance(dials.number, int) or not 0 <= dials.number < len(problems()):
            raise EnvironmentFailure(f"number is {dials.number!r}; use 0 to {len(problems()) - 1}")
        if dials.credit not in ("all", "turns"):
            raise EnvironmentFailure(f"credit is {dials.credit!r}; use 'all' or 'turns'")
        if not isinstance(dials.max_steps, int) or dials.max_steps < 1:
            raise EnvironmentFailure(f"max_steps is {dials.max_steps!r}; use a positive integer")
        return dials


@dataclass(slots=True)
class _Episode:
    services: dict[str, Any]
    turn: int = 0
    steps: int = 0  # actions of this turn
    called: bool = False  # in this turn
    results: list[str] = field(default_factory=list)  # of all turns
    passed: list[bool] = field(default_factory=list)
    over: bool = False


class BfclWorld:
    """One conversation. The first observation is what the user asks; an action is a list of calls, or text (``done``),
    which ends the turn.

    The answer to calls begins with ``API output: `` and has a line for each; after the end of a turn the user's next
    words stand alone. A turn passes by BFCL's rule: some call was made, the services are in the state that the correct
    calls leave them in, and the results so far hold all results of the turn's correct calls. ``Step.info``: ``turn``,
    ``passed`` (by turn), ``malformed``, and at the end ``success``.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for bad dials, ImportError without the package."""
        self._dials = Dials.of(task.metadata)
        self._problem = problems()[self._dials.number]
        self._grammar = grammar(self._problem.functions)
        self._state = _Episode({}, over=True)

    def reset(self) -> Step:
        """What the user asks first."""
        self._state = _Episode(simulators(self._problem))
        return self._step(self._problem.questions[0])

    def get_state(self) -> bytes:
        """The whole state, pickled."""
        return pickle.dumps(self._state)

    def set_state(self, state: bytes) -> None:
        """Go to a state of the same task."""
        self._state = pickle.loads(state)

    def close(self) -> None:
        """End the conversation. Harmless when called twice."""
        self._state.over = True

    def step(self, action: str) -> Step:
        """Play an action. Any text is answered; after the end, with a step that is done and has reward 0."""
        state = self._state
        if state.over:
            return Step("Error: the conversation is over", done=True)
        said = parse(action)
        if isinstance(said, Say):
            return self._end_turn()
        state.steps += 1
        if isinstance(said, Malformed):
            return self._step(f"API output: Error: {said.problem}", malformed=said.problem)
        results = execute(state.services, said)
        state.called = True
        state.results += results
        return self._step("API output: " + "\n".join(results))

    def _end_turn(self) -> Step:
        state, turns = self._state, len(self._problem.questions)
        passed = turn_passes(self._problem, state.turn, state.services, state.results, state.called)
        state.passed.append(passed)
        state.turn, state.steps, state.called = state.turn + 1, 0, False
        ends = state.turn == turns or (self._dials.stop_early and not passed)
        success = ends and len(state.passed) == turns and all(state.passed)
        reward = passed / turns if self._dials.credit == "turns" else float(success)
        if not ends:
            return self._step(self._problem.questions[state.turn], reward)
        state.over = True
        return Step("The conversation is over.", reward, done=True, info=self._info(success=success))

    def _step(self, text: str, reward: float = 0.0, **info: Any) -> Step:
        if self._state.steps <= self._dials.max_steps:
            return Step(text, reward, grammar=self._grammar, info=self._info(**info))
        self._state.over = True
        return Step(text, reward, truncated=True, info=self._info(**info, success=False))

    def _info(self, **more: Any) -> dict[str, Any]:
        return {"turn": self._state.turn, "passed": list(self._state.passed), **more}


class Expert:
    """Plays the published correct calls, one an action, and ends each turn; it looks at nothing but the task."""

    def __init__(self, problem: Problem) -> None:
        self._script = [text for turn in problem.answers for text in (*(f"[{c.text()}]" for c in turn), "done")]
        self._next = 0

    def act(self, step: Step) -> str:
        self._next += 1
        return self._script[self._next - 1] if self._next <= len(self._script) else "done"


def make(task: Task) -> BfclWorld:
    """The world of a task."""
    return BfclWorld(task)


def expert(task: Task) -> Expert:
    """An agent that plays the correct calls of the task."""
    return Expert(problems()[Dials.of(task.metadata).number])


def tasks(split: str, n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Task, ...]:
    """The tasks of a split in the published order, or ``n`` of them drawn by ``seed``.

    Raises ValueError for an unknown split or dial, or more tasks than there are.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    known = [f.name for f in fields(Dials) if f.name != "number"]
    if unknown := sorted(dials.keys() - set(known)):
        raise ValueError(f"no dial {unknown[0]!r}; known: {', '.join(known)}")
    numbers = [i for i in range(len(problems())) if split == "all" or (i % 5 == 4) == (split == "validation")]
    if n is not None:
        if not 0 <= n <= len(numbers):
            raise ValueError(f"n must be 0 to {len(numbers)}, the size of {split}; got {n}")
        order = Noise(seed).at("bfcl", split).permutation(len(numbers))[:n]
        numbers = sorted(numbers[i] for i in order)
    return tuple(_task(number, dials) for number in numbers)


def event_of(action: str) -> Event | None:
    """The key rule for :mod:`branchpoint.env.faults`: the functions of a list of calls, whatever their arguments; None
    for text."""
    calls = parse(action)
    return Event("+".join(call.name for call in calls)) if isinstance(calls, tuple) else None


def execute(services: Mapping[str, Any], calls: Sequence[Call]) -> list[str]:
    """Call the functions of the services in turn. Returns the text of each result; an exception is one, too."""
    return [_result(services, call) for call in calls]


def turn_passes(problem: Problem, turn: int, services: Mapping[str, Any], results: Sequence[str], called: bool) -> bool:
    """Whether a turn passes the package's checks; a turn without correct calls always does."""
    if not problem.answers[turn]:
        return True
    if not called:
        return False
    right, expected = simulators(problem), []
    for calls in problem.answers[: turn + 1]:
        expected = execute(right, calls)
    checker = _checker()
    if not checker.state_checker(dict(services), right)["valid"]:
        return False
    return bool(checker.response_checker(list(results), expected, turn)["valid"])


def simulators(problem: Problem) -> dict[str, Any]:
    """The services of a problem, fresh."""
    config, out = _config(), {}
    for name in problem.services:
        out[name] = getattr(import_module(config.CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in config.STATELESS_CLASSES:
            out[name]._load_scenario(copy.deepcopy(problem.config.get(name, {})), long_context=False)
    return out


@cache
def problems() -> tuple[Problem, ...]:
    """The published problems. Raises ImportError without the package, EnvironmentFailure for damaged data."""
    rows, answers = _rows("BFCL_v4_multi_turn_base.json"), _rows("possible_answer", "BFCL_v4_multi_turn_base.json")
    try:
        if [row["id"] for row in rows] != [answer["id"] for answer in answers]:
            raise EnvironmentFailure(f"bfcl-eval: tasks and answers do not belong together; {INSTALL}")
        return tuple(_problem(row, answer["ground_truth"]) for row, answer in zip(rows, answers, strict=True))
    except (KeyError, TypeError) as error:
        raise EnvironmentFailure(f"bfcl-eval: data of another form ({error!r}); {INSTALL}") from error


def preload() -> None:
    """Read the data and import all simulators now, e.g. in a process that is going to be forked."""
    for problem in problems():
        simulators(problem)


def _result(services: Mapping[str, Any], call: Call) -> str:
    found = next((getattr(s, call.name) for s in services.values() if hasattr(s, call.name)), None)
    if call.name.startswith("_") or not inspect.ismethod(found):
        return f"Error during execution: name {call.name!r} is not defined"
    try:
        _refuse_endless(call, inspect.signature(found))
        value = found(*call.args, **call.kwargs)
        return value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else str(value)
    except Exception as error:  # whatever a simulator raises for odd arguments is its answer
        return f"Error during execution: {error}"


def _refuse_endless(call: Call, signature: inspect.Signature) -> None:
    try:
        given = signature.bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return  # the call itself says what is wrong with it
    for name, limit in (("precision", _PRECISION), ("exponent", _EXPONENT)):
        value = given.get(name, 0)
        if isinstance(value, int | float) and abs(value) > limit:
            raise ValueError(f"{call.name}: {name} is beyond {limit}")


def _problem(row: Mapping[str, Any], answers: Sequence[Sequence[str]]) -> Problem:
    documents = [d for name in row["involved_classes"] for d in _documents(name)]
    visible = tuple(d for d in documents if d["name"] not in row.get("excluded_function", ()))
    questions = tuple("\n".join(message["content"] for message in turn) for turn in row["question"])
    services = tuple(row["involved_classes"])
    calls = tuple(tuple(_named(text, services) for text in turn) for turn in answers)
    return Problem(row["id"], questions, row["initial_config"], services, visible, calls)


def _named(text: str, services: Sequence[str]) -> Call:
    """A published call with all its arguments named."""
    said = parse(text)
    if not isinstance(said, tuple) or len(said) != 1:
        raise EnvironmentFailure(f"bfcl-eval: {text!r} is not one call; {INSTALL}")
    (call,) = said
    for name in services:
        function = getattr(getattr(import_module(_config().CLASS_FILE_PATH_MAPPING[name]), name), call.name, None)
        if function is not None:
            bound = inspect.signature(function).bind(None, *call.args, **call.kwargs).arguments
            (document,) = (d for d in _documents(name) if d["name"] == call.name)
            return Call(call.name, (), {k: bound[k] for k in document["parameters"]["properties"] if k in bound})
    raise EnvironmentFailure(f"bfcl-eval: no service of {', '.join(services)} has {call.name!r}; {INSTALL}")


def _task(number: int, dials: Mapping[str, Any]) -> Task:
    problem = problems()[number]
    metadata = asdict(Dials(number, **dials))
    Dials.of(metadata)
    system = "\n".join([_RULES, *(json.dumps(function) for function in problem.functions)])
    name = f"bfcl/{problem.id}"
    return Task(name, "bfcl", (Message("system", system),), digest(0, "luck", name) >> 65, metadata)


@cache
def _documents(service: str) -> tuple[dict[str, Any], ...]:
    return tuple(_rows("multi_turn_func_doc", _config().MULTI_TURN_FUNC_DOC_FILE_MAPPING[service]))


def _rows(*path: str) -> list[dict[str, Any]]:
    _config()
    try:
        text = files("bfcl_eval").joinpath("data", *path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(f"bfcl-eval: {'/'.join(path)} cannot be read ({error}); {INSTALL}") from error


def _config() -> Any:
    try:
        from bfcl_eval.constants import executable_backend_config
    except ImportError as error:
        raise ImportError(f"BFCL needs its package: {INSTALL}") from error
    return executable_backend_config


def _checker() -> Any:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker

    return multi_turn_checker
