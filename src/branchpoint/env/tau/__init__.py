"""tau-bench: customer service in an online shop or at an airline, by tools under a policy (Yao et al., 2024,
https://arxiv.org/abs/2406.12045), on its real records and tasks. Tools, grader and user are written anew.

``tasks(split, domain=...)``: retail has ``train`` 500, ``dev`` 20, ``test`` 115; airline ``test`` 50. ``expert(task)``
plays the published correct calls.

Dials (``Task.metadata``):

* ``domain``: ``retail`` or ``airline``.
* ``user``: ``scripted``, or ``module:attribute``, a function ``user(brief, said, noise) -> str``
  (:class:`~branchpoint.env.tau.user.User`), e.g. one that asks a model.
* ``reveal``: when the scripted user tells what it knows: ``asked``, or all at the ``opening``.
* ``max_steps``: actions of an episode, 30 as in tau-bench.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from branchpoint.env.faults import Event
from branchpoint.env.tau import airline, retail
from branchpoint.env.tau.calls import Call, parse
from branchpoint.env.tau.domains import SPLITS, Domain, load, problems
from branchpoint.env.tau.expert import Expert
from branchpoint.env.tau.user import STOP, Brief, User
from branchpoint.env.tau.world import Dials, SampledTauWorld, TauWorld
from branchpoint.noise import Noise, digest
from branchpoint.world import Message, Task

__all__ = ["SPLITS", "STOP", "Brief", "Dials", "TauWorld", "User", "event_of", "expert", "make", "tasks"]

_FORMAT = """# How to act
Answer every turn with exactly one of two things: a tool call, a JSON object {"name": tool, "arguments": {...}} and \
nothing else; or plain text, which the user reads. The conversation ends when the user is served or you transfer it.

# Tools
"""
_ALL_TOOLS = {**retail.TOOLS, **airline.TOOLS}
_RESOURCES = frozenset(
    (
        "order_id",
        "user_id",
        "product_id",
        "reservation_id",
        "email",
        "last_name",
        "zip",
        "origin",
        "destination",
        "date",
    )
)


def make(task: Task) -> TauWorld:
    """The world of a task."""
    return (TauWorld if task.metadata.get("user", "scripted") == "scripted" else SampledTauWorld)(task)


def tasks(split: str, n: int | None = None, seed: int = 0, domain: str = "retail", **dials: Any) -> tuple[Task, ...]:
    """The tasks of a split in the published order, or ``n`` of them drawn by ``seed``.

    Raises ValueError for an unknown domain, split or dial, or more tasks than there are.
    """
    if split not in SPLITS.get(domain, ()):
        known = "; ".join(f"{name}: {', '.join(splits)}" for name, splits in SPLITS.items())
        raise ValueError(f"no split {split!r} of domain {domain!r}; known: {known}")
    if unknown := sorted(dials.keys() - {"user", "reveal", "max_steps"}):
        raise ValueError(f"no dial {unknown[0]!r}; known: domain, user, reveal, max_steps")
    size = len(problems(domain, split))
    if n is not None and not 0 <= n <= size:
        raise ValueError(f"n must be 0 to {size}, the size of {domain} {split}; got {n}")
    chosen = range(size) if n is None else sorted(Noise(seed).at("tau", domain, split).permutation(size)[:n].tolist())
    prompt = (Message("system", system(load(domain))),)
    return tuple(_task(domain, split, index, dials, prompt) for index in chosen)


def expert(task: Task) -> Expert:
    """An agent that plays the correct calls of the task."""
    dials = Dials.of(task.metadata)
    return Expert(load(dials.domain), dials.problem)


def event_of(action: str) -> Event | None:
    """The key rule for :mod:`branchpoint.env.faults`: the tool and the ids, dates and places that a well-formed call
    names; None for a reply, and for tools that touch no record."""
    call = parse(action, _ALL_TOOLS)
    if not isinstance(call, Call) or not (call.tool.kind == "write" or set(call.args) & _RESOURCES):
        return None
    resources = tuple(str(value) for name, value in call.args.items() if name in _RESOURCES)
    return Event(call.tool.name, resources, call.tool.kind == "read")


def system(domain: Domain) -> str:
    """The system message: the policy, how to act, and the tools."""
    functions = [json.dumps(tool.schema["function"]) for tool in domain.tools.values()]
    return f"{domain.policy}\n\n{_FORMAT}" + "\n".join(functions)


def _task(domain: str, split: str, index: int, dials: dict[str, Any], prompt: tuple[Message, ...]) -> Task:
    name = f"tau/{domain}/{split}/{index:03d}"
    metadata = asdict(Dials(domain, split, index, **dials))
    Dials.of(metadata)
    return Task(name, "tau", prompt, digest(0, "luck", name) >> 65, metadata)
