"""One episode's state, and how a call is served under luck. The state is immutable: holding it is a snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from branchpoint.env.backoffice.calls import TOOLS, Call
from branchpoint.env.backoffice.desk import Desk
from branchpoint.env.backoffice.dials import Dials
from branchpoint.env.backoffice.luck import Fate, fate
from branchpoint.env.backoffice.menu import Seen
from branchpoint.env.backoffice.tools import Payload, error, run
from branchpoint.noise import Noise

Event = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Episode:
    """``before``: the desk ahead of the last write, which a stale read still sees. ``repeats``: how often each event
    has met its fate. ``down``: events in outage. ``clock`` and ``open_at`` (end of a rate limit) in seconds.
    ``over``: the episode has ended. ``actions``: the menu of this state."""

    desk: Desk
    before: Desk
    seen: Seen | None = None
    repeats: Mapping[Event, int] = field(default_factory=dict)
    down: frozenset[Event] = frozenset()
    clock: int = 0
    open_at: int = 0
    calls: int = 0
    over: bool = False
    actions: tuple[str, ...] = ()


def serve(state: Episode, call: Call, noise: Noise, dials: Dials) -> tuple[Episode, Payload, Fate | None]:
    """The state after one tool call (not ``finish``), what the agent is told, and the fate that befell the call.

    A call refused for its values, for a running rate limit or for an outage meets no new fate.
    """
    calls = state.calls + 1
    if problem := call.problem:
        return replace(state, calls=calls), error("INVALID_ARGUMENT", problem), None
    if call.tool == "wait":
        seconds = int(call.args["seconds"])
        return replace(state, calls=calls, clock=state.clock + seconds), {"waited": seconds}, None
    if state.clock < state.open_at:
        return replace(state, calls=calls), _limited(state.open_at - state.clock), None
    key = call.key
    if key in state.down:
        return replace(state, calls=calls), _outage(), None
    repeat = state.repeats.get(key, 0)
    state = replace(state, calls=calls, repeats={**state.repeats, key: repeat + 1})
    befallen = fate(noise, dials.p, dials.luck, key, repeat)
    if befallen is None:
        return (*_apply(state, call), None)
    return (*_suffer(state, call, befallen), befallen)


def _apply(state: Episode, call: Call) -> tuple[Episode, Payload]:
    desk, answer = run(state.desk, call)
    if desk is state.desk:
        return state, answer
    return replace(state, desk=desk, before=state.desk), answer


def _suffer(state: Episode, call: Call, befallen: Fate) -> tuple[Episode, Payload]:
    match befallen.kind:
        case "transient":
            return state, error("TRANSIENT_FAILURE", "the request failed; it may work when tried again")
        case "rate_limit":
            return replace(state, open_at=state.clock + befallen.retry_after), _limited(befallen.retry_after)
        case "outage":
            return replace(state, down=state.down | {call.key}), _outage()
        case "stale":
            return state, run(state.before, call)[1]
        case "truncation":
            return state, _truncated(run(state.desk, call)[1])
        case "dropout":
            return state, _without_one(run(state.desk, call)[1], befallen.pick)
        case "timeout":
            state, _ = _apply(state, call)
            return state, error("TIMEOUT", "no answer in time; the request may or may not have been carried out")


def _limited(seconds: int) -> Payload:
    return error("RATE_LIMITED", f"too many requests; wait {seconds} seconds", retry_after=seconds)


def _outage() -> Payload:
    return error("SERVICE_UNAVAILABLE", "this request cannot be served today")


def _truncated(answer: Payload) -> Payload:
    """The first half of a page; the rest has to be asked for."""
    name = next((k for k in ("customers", "orders") if k in answer), None)
    if name is None or not answer[name]:
        return answer
    rows = answer[name][: len(answer[name]) // 2]
    return answer | {name: rows, "next_offset": answer["offset"] + len(rows)}


def _without_one(answer: Payload, pick: float) -> Payload:
    """An answer without one of its fields; errors, and the id that says what is answered, stay."""
    fields = [] if "error" in answer else list(answer)[1:]
    if not fields:
        return answer
    lost = fields[int(pick * len(fields))]
    return {k: v for k, v in answer.items() if k != lost}


def malformed(problem: str, compact: bool) -> Payload:
    """The observation for a text that is no call: bounded, and it teaches the form."""
    if compact:
        return {"error": "MALFORMED_CALL", "problem": problem, "write": "tool arg=value"}
    example = json.dumps({"name": "get_order", "arguments": {"order": "O0042"}})
    tools = ", ".join(TOOLS)
    return error("MALFORMED_CALL", f"{problem}. Write one call: {example}. Tools: {tools}")
