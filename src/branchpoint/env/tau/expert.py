"""An agent that knows the correct calls of its task, and plays them as the policy asks: identify, look, ask, act."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from branchpoint.env.tau.calls import Call
from branchpoint.env.tau.common import TRANSFER
from branchpoint.env.tau.domains import Domain, Problem
from branchpoint.world import Step

_LOOKS = {"order_id": "get_order_details", "reservation_id": "get_reservation_details"}


class Expert:
    """Plays one episode; what it does depends on the task alone."""

    def __init__(self, domain: Domain, problem: Problem) -> None:
        self._script = tuple(script(domain, problem))
        self._next = 0

    def act(self, step: Step) -> str:
        self._next += 1
        return self._script[self._next - 1] if self._next <= len(self._script) else _close(())


def script(domain: Domain, problem: Problem) -> Iterator[str]:
    """The actions: ask for everything, find the user, look at what a write will touch, have each write confirmed,
    make it, and say the required outputs at the end. A transfer, which ends the conversation, comes last."""
    yield "Hello! Could you tell me your name and zip code or your user id, and all the details of what you need?"
    calls = [(name, args) for name, args in problem.actions if name != TRANSFER]
    seen: set[str] = set()
    if domain.name == "retail" and not any(name.startswith("find_user") for name, _ in calls):
        user = domain.tables["users"][problem.user_id]
        yield _text(domain, "find_user_id_by_name_zip", {**user["name"], "zip": user["address"]["zip"]})
    for name, args in calls:
        writes = domain.tools[name].kind == "write"
        for look in _looks(args) if writes else ():
            if _key(*look) not in seen:
                seen.add(_key(*look))
                yield _text(domain, *look)
        seen.add(_key(name, args))
        if writes:
            yield f"I would call {name} with {json.dumps(args)}. Do you confirm (yes/no)?"
        yield _text(domain, name, args)
    transfers = [args for name, args in problem.actions if name == TRANSFER]
    for args in transfers[:1]:
        if problem.outputs:
            yield f"{_close(problem.outputs)} Shall I go ahead and transfer you to a human agent?"
        yield _text(domain, TRANSFER, args)
    if not transfers:
        yield _close(problem.outputs)


def _looks(args: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((tool, {key: args[key]}) for key, tool in _LOOKS.items() if key in args)


def _key(name: str, args: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(args)], sort_keys=True)


def _text(domain: Domain, name: str, args: Mapping[str, Any]) -> str:
    tool = domain.tools[name]
    return Call(tool, {key: args[key] for key in tool.args}).text()


def _close(outputs: tuple[str, ...]) -> str:
    return f"What you wanted to know: {', '.join(outputs)}." if outputs else "All of it is done. Goodbye."
