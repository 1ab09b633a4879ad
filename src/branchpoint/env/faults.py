"""Faults on any environment: tools that fail and a grader that errs, keyed by event.

A wrapped world's actions are sorted by a *key rule*: which tool an action uses, on which resources, and whether it only
reads; or that it is no tool call. A call's fate is drawn from the noise keyed by tool, resources and how often that
call met its fate before. Free text and the order of unrelated calls never enter, so two siblings under equal luck meet
the same faults however they word their calls.

Dials (of :func:`tasks`, kept in ``Task.metadata``): ``env`` names the environment and ``dials`` are its own; ``p`` is
the probability that a call goes wrong, ``luck`` a mixture of kinds (or weights by kind), ``q`` and ``q_up`` how often
the grader takes a success for a failure and the reverse, ``keys`` the key rule, ``errors`` how failures are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from branchpoint import env as envs
from branchpoint.noise import Key, Noise, digest
from branchpoint.world import EnvironmentFailure, Step, Task, World

Kind = Literal["transient", "rate_limit", "outage", "stale", "partial", "timeout"]
WEIGHTS: Mapping[Kind, float] = {
    "transient": 0.45,
    "rate_limit": 0.15,
    "outage": 0.10,
    "stale": 0.15,
    "partial": 0.15,
    "timeout": 1.0,
}
MIXTURES: Mapping[str, tuple[Kind, ...]] = {
    "training": ("transient", "rate_limit", "outage", "stale", "partial"),
    "no_outage": ("transient", "rate_limit", "stale", "partial"),
    "held_out": ("timeout",),
}
RETRY_AFTER = (1, 2, 3, 4)
"""Actions that a rate limit lasts."""
_LOW = 2**40 - 1


@dataclass(frozen=True, slots=True)
class Event:
    """What an action does, for its luck: ``tool`` and the ``resources`` it touches, never free text. ``reads``: it
    changes nothing, so its answer can also be stale or partial."""

    tool: str
    resources: tuple[str, ...] = ()
    reads: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return (self.tool, *self.resources)


Rule = Callable[[str], Event | None]
"""The key rule: the event of an action's text, or None for what is no tool call (it meets no fault)."""


def draw(noise: Noise, rate: float, shares: Mapping[Any, float], label: str, *key: Key) -> tuple[Any, float] | None:
    """What befalls an event: a kind drawn by its share (they sum to 1), with a uniform number for its details; None
    with probability 1 - ``rate``, and always in the clean arm."""
    if noise.clean or rate <= 0 or not shares:
        return None
    # Three uniforms from the 128 bits of the event's own hash: a generator an event would be most of a step's cost.
    bits = digest(noise.seed, label, *key)
    happens, which, detail = (bits >> 80) / 2**48, (bits >> 40 & _LOW) / 2**40, (bits & _LOW) / 2**40
    if happens >= rate:
        return None
    kind = list(shares)[-1]
    for candidate, share in shares.items():
        if which < share:
            kind = candidate
            break
        which -= share
    return kind, detail


@dataclass(frozen=True, slots=True)
class Faults:
    """The settings, checked. Raises ValueError naming the dial.

    ``keys``: ``env`` (the environment's own ``event_of``), ``listed`` (an action of ``Step.actions`` is its own event,
    all else is none), ``json`` (a call ``{"name": ..., "arguments": {...}}`` of one of ``tools``, whose values name the
    arguments that identify a resource; those in ``reads`` change nothing), or ``module:function`` (a :data:`Rule`).
    """

    p: float = 0.1
    q: float = 0.0
    q_up: float = 0.0
    luck: str | Mapping[str, float] = "training"
    keys: str = "env"
    tools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    errors: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        for name in ("p", "q", "q_up"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability; got {value!r}")
        if isinstance(self.luck, str) and self.luck not in MIXTURES:
            raise ValueError(f"luck must be one of {', '.join(MIXTURES)}, or weights by kind; got {self.luck!r}")
        raw = self.weights
        if unknown := set(raw) - set(get_args(Kind)):
            raise ValueError(f"luck has no kind {min(unknown)!r}; known: {', '.join(get_args(Kind))}")
        if not raw or not all(isinstance(w, int | float) and math.isfinite(w) and w > 0 for w in raw.values()):
            raise ValueError(f"luck needs a positive weight for at least one kind; got {self.luck!r}")
        if self.keys == "json" and not self.tools:
            raise ValueError("keys 'json' needs tools: the name of each with the arguments that name its resources")
        if unread := set(self.reads) - set(self.tools):
            raise ValueError(f"reads names {min(unread)!r}, which is not among the tools")
        if self.errors not in ("text", "json"):
            raise ValueError(f"errors must be 'text' or 'json'; got {self.errors!r}")

    @property
    def weights(self) -> Mapping[str, float]:
        if isinstance(self.luck, str):
            return {k: WEIGHTS[k] for k in MIXTURES[self.luck]}
        return self.luck

    def shares(self, reads: bool) -> dict[str, float]:
        """The kinds that can befall a call, given that one does; sums to 1 (empty: none can)."""
        raw = {k: float(w) for k, w in self.weights.items() if reads or k not in ("stale", "partial")}
        total = sum(raw.values())
        return {k: w / total for k, w in raw.items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Faults:
        if unknown := set(values) - {f.name for f in fields(cls)}:
            raise ValueError(f"no dial {min(unknown)!r}; known: {', '.join(f.name for f in fields(cls))}")
        tools = {name: tuple(args or ()) for name, args in (values.get("tools") or {}).items()}
        return cls(**{**values, "tools": tools, "reads": tuple(values.get("reads") or ())})

    def json(self) -> dict[str, Any]:
        """JSON values that :meth:`of` reads back."""
        return json.loads(json.dumps(asdict(self)))


def json_calls(tools: Mapping[str, tuple[str, ...]], reads: tuple[str, ...] = ()) -> Rule:
    """The rule for actions that are one JSON tool call, bare or between ``<tool_call>`` tags: of the arguments only
    those that ``tools`` names enter the key. Other texts, other tools and other types are no call."""

    def rule(action: str) -> Event | None:
        text = action.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            call = json.loads(text) if len(text) <= 20_000 else None
        except (ValueError, RecursionError):
            return None
        name, args = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or name not in tools or not isinstance(args, dict):
            return None
        ids = tuple(str(args[a]) if isinstance(args.get(a), str | int) else "" for a in tools[name])
        return Event(name, ids, name in reads)

    return rule


def rule_of(faults: Faults, env: str) -> Rule | None:
    """The key rule that the dials name; None for ``listed``, which needs the steps. Raises ValueError without one."""
    if faults.keys == "listed":
        return None
    if faults.keys == "json":
        return json_calls(faults.tools, faults.reads)
    if faults.keys == "env":
        if (own := envs.event_of(env)) is None:
            raise ValueError(
                f"{env} declares no key rule (event_of); set keys to 'listed', 'json' or 'module:function'"
            )
        return own
    if ":" not in faults.keys:
        raise ValueError(f"keys is {faults.keys!r}; use env, listed, json or 'module:function'")
    return cast(Rule, envs.make(faults.keys))


@dataclass(frozen=True, slots=True)
class Record:
    """What has befallen so far, immutable. ``turns``: actions played, the clock of rate limits. ``repeats``: how often
    each event met its fate. ``down``: events in outage. ``open_at``: by tool, the turn its limit ends. ``answers``: the
    last full answer to each read. ``last``: the step to show the actions of while a call is refused."""

    last: Step
    turns: int = 0
    repeats: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    down: frozenset[tuple[str, ...]] = frozenset()
    open_at: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[tuple[str, ...], str] = field(default_factory=dict)


class Faulty:
    """A world whose tools fail and whose grader errs.

    ``info`` holds in addition ``fate`` (what befell the action) and, at the end, ``success`` (the true outcome: the
    world's own, else whether its last reward was positive) and ``observed`` (after the grader's error). A flipped
    success gives reward 0, a flipped failure reward 1. Refused calls never reach the world and cost it nothing: bound
    the turns of an episode outside. Without state of its own the inner world is copied, forked or replayed as a whole.
    """

    def __init__(self, world: World, rule: Rule | None, faults: Faults, noise: Noise) -> None:
        self._world, self._rule, self._faults, self._noise = world, rule, faults, noise
        self._shares = {reads: faults.shares(reads) for reads in (False, True)}
        self._record = Record(Step(""))
        self.deterministic = bool(getattr(world, "deterministic", True))

    def reset(self) -> Step:
        self._record = Record(self._world.reset())
        return self._record.last

    def reseed(self, noise: Noise) -> None:
        """Use this luck from now on, here and in the world; what has befallen so far stays."""
        self._noise = noise
        own = getattr(self._world, "reseed", None)
        if own is not None:
            own(noise)

    def close(self) -> None:
        self._world.close()

    def step(self, action: str) -> Step:
        """Play an action, if nothing befalls it."""
        event = self._event(action)
        record = self._record = replace(self._record, turns=self._record.turns + 1)
        if event is None:
            return self._pass(action, None, None)
        wait = record.open_at.get(event.tool, 0) - record.turns
        if wait >= 0:
            return self._refuse("rate_limit", wait + 1)
        if event.key in record.down:
            return self._refuse("outage")
        repeat = record.repeats.get(event.key, 0)
        self._record = replace(record, repeats={**record.repeats, event.key: repeat + 1})
        fate = draw(self._noise, self._faults.p, self._shares[event.reads], "fault", *event.key, repeat)
        return self._pass(action, event, None) if fate is None else self._suffer(action, event, *fate)

    def _event(self, action: str) -> Event | None:
        if self._rule is not None:
            return self._rule(action)
        return Event("action", (action,)) if action in self._record.last.actions else None

    def _suffer(self, action: str, event: Event, kind: Kind, detail: float) -> Step:
        record = self._record
        if kind == "rate_limit":
            after = RETRY_AFTER[int(detail * len(RETRY_AFTER))]
            self._record = replace(record, open_at={**record.open_at, event.tool: record.turns + after})
            return self._refuse(kind, after)
        if kind == "outage":
            self._record = replace(record, down=record.down | {event.key})
        if kind in ("transient", "outage"):
            return self._refuse(kind)
        return self._pass(action, event, kind)

    def _pass(self, action: str, event: Event | None, kind: Kind | None) -> Step:
        """The world's own answer, withheld (time-out), out of date or cut as the kind says."""
        step = self._world.step(action)
        record = replace(self._record, last=step)
        text = step.observation
        if kind == "timeout":
            text = self._say("TIMEOUT", "no answer in time; the request may or may not have been carried out")
        elif kind == "stale" and event is not None:
            text = record.answers.get(event.key, text)
        elif kind == "partial":
            text = _half(text)
        if event is not None and event.reads:
            record = replace(record, answers={**record.answers, event.key: step.observation})
        self._record = record
        return self._grade(replace(step, observation=text, info={**step.info, "fate": kind}))

    def _grade(self, step: Step) -> Step:
        if not (step.done or step.truncated):
            return step
        success = bool(step.info.get("success", step.reward > 0))
        wrong = self._noise.happens(self._faults.q if success else self._faults.q_up, "fault", "grader")
        reward = step.reward if not wrong else 0.0 if success else 1.0
        return replace(step, reward=reward, info={**step.info, "success": success, "observed": success != wrong})

    def _refuse(self, kind: Kind, after: int = 0) -> Step:
        if kind == "rate_limit":
            text = self._say("RATE_LIMITED", f"too many requests; try again after {after} more actions", after)
        elif kind == "outage":
            text = self._say("SERVICE_UNAVAILABLE", "this request cannot be served today")
        else:
            text = self._say("TRANSIENT_FAILURE", "the request failed; it may work when tried again")
        last = self._record.last
        return Step(text, actions=last.actions, grammar=last.grammar, info={"fate": kind})

    def _say(self, code: str, message: str, after: int = 0) -> str:
        if self._faults.errors == "text":
            return f"{code}: {message}"
        return json.dumps({"error": code, "message": message, **({"retry_after": after} if after else {})})


class FaultyState(Faulty):
    """The same over a world with a native snapshot, which it keeps."""

    def get_state(self) -> tuple[Record, Any]:
        """What has befallen, and the state of the world."""
        return self._record, cast(Any, self._world).get_state()

    def set_state(self, state: tuple[Record, Any]) -> None:
        """Go back (or on) to a state of the same task."""
        self._record, inner = state
        cast(Any, self._world).set_state(inner)


def wrap(world: World, rule: Rule | None, faults: Faults, noise: Noise) -> Faulty:
    """A world under faults, with a native snapshot if the world has one."""
    native = hasattr(world, "get_state") and hasattr(world, "set_state")
    return (FaultyState if native else Faulty)(world, rule, faults, noise)


def _half(text: str) -> str:
    """The first half of the lines, of a single line the first half of its characters; it says that it was cut."""
    lines = text.splitlines()
    kept = "\n".join(lines[: len(lines) // 2]) if len(lines) > 1 else text[: len(text) // 2]
    return f"{kept}\n[answer cut]"


def _inner(task: Task) -> tuple[str, Task]:
    try:
        env, kept = task.metadata["env"], task.metadata["task"]
        return env, Task(kept["id"], env, task.prompt, kept["seed"], kept["metadata"])
    except KeyError as e:
        raise EnvironmentFailure(f"task {task.id}: metadata has no {e}; make tasks with faults.tasks()") from None


def make(task: Task) -> Faulty:
    """The world of a task. Raises ValueError for dials that cannot be met."""
    env, inner = _inner(task)
    faults = Faults.of(task.metadata["faults"])
    return wrap(envs.make(env)(inner), rule_of(faults, env), faults, Noise(task.seed, task.seed))


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    env: str = "backoffice",
    dials: Mapping[str, Any] | None = None,
    **faults: Any,
) -> tuple[Task, ...]:
    """The tasks of an environment, under the :class:`Faults` that the other arguments set."""
    chosen = Faults.of(faults)
    rule_of(chosen, env)
    shared = {"env": env, "faults": chosen.json()}
    return tuple(
        Task(
            f"faults/{t.id}",
            "faults",
            t.prompt,
            t.seed,
            {**shared, "task": {"id": t.id, "seed": t.seed, "metadata": dict(t.metadata)}},
        )
        for t in envs.tasks(env, split, n, seed, **(dials or {}))
    )


class Patient:
    """An environment's own expert that asks again for what failed for now or was cut. It shows it the other faults as
    they are; where it can make nothing of one, the last action is played again, and the episode may be lost."""

    def __init__(self, agent: envs.Agent) -> None:
        self._agent, self._last, self._met = agent, "", False

    def act(self, step: Step) -> str:
        fate = step.info.get("fate")
        self._met = self._met or fate is not None
        if self._last and fate in ("transient", "rate_limit", "partial"):
            return self._last
        try:
            self._last = self._agent.act(step)
        except Exception:
            if not (self._met and self._last):
                raise
        return self._last


def expert(task: Task) -> Patient:
    """The environment's expert, patient with faults."""
    return Patient(envs.expert(_inner(task)[1]))
