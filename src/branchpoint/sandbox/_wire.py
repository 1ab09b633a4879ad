"""Messages between the trainer and its workers, over stream sockets: a length, then the body.

Requests are pickles (the trainer is trusted by its workers). Answers are JSON (a worker runs an environment on what an
agent writes, so the trainer never unpickles what it sends). A request may carry one file descriptor.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from typing import Any

import numpy as np

from branchpoint.world import (
    BranchFailure,
    EnvironmentFailure,
    GraderFailure,
    PolicyFailure,
    SandboxFailure,
    SnapshotUnsupported,
    Step,
)

HEADER = struct.Struct("<I")
LARGEST = 1 << 30
_KINDS: dict[str, type[BranchFailure]] = {
    "policy": PolicyFailure,
    "environment": EnvironmentFailure,
    "sandbox": SandboxFailure,
    "grader": GraderFailure,
    "unsupported": SnapshotUnsupported,
}


def frame(body: bytes) -> bytes:
    if len(body) > LARGEST:
        raise EnvironmentFailure(f"a message of {len(body)} bytes; the limit is {LARGEST}")
    return HEADER.pack(len(body)) + body


def receive(sock: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The next request and the descriptor that came with it; None when the other side is gone. Blocks."""
    head, fds = _exactly(sock, HEADER.size)
    if len(head) < HEADER.size:
        return None
    (length,) = HEADER.unpack(head)
    body, more = _exactly(sock, length)
    if len(body) < length:
        return None
    fds += more
    return pickle.loads(body), fds[0] if fds else None


def _exactly(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    parts, fds, left = [], [], size
    while left:
        part, new, _, _ = socket.recv_fds(sock, min(left, 1 << 20), 4, socket.MSG_CMSG_CLOEXEC)
        fds += new
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts), fds


def encode(value: Any) -> bytes:
    """An answer as JSON. Raises EnvironmentFailure when a Step's ``info`` does not fit into JSON."""
    try:
        return json.dumps(value, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"step.info must hold JSON values: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def step_fields(step: Step) -> dict[str, Any]:
    """A Step as plain JSON fields; raises EnvironmentFailure where a field has the wrong type."""
    if not isinstance(step.observation, str):
        raise EnvironmentFailure(f"step.observation is {type(step.observation).__name__}; expected str")
    if any(not isinstance(a, str) for a in step.actions):
        raise EnvironmentFailure("step.actions must hold str only")
    return {
        "observation": step.observation,
        "reward": float(step.reward),
        "done": bool(step.done),
        "truncated": bool(step.truncated),
        "actions": list(step.actions),
        "grammar": step.grammar,
        "info": dict(step.info),
    }


def to_step(fields: dict[str, Any]) -> Step:
    return Step(**{**fields, "actions": tuple(fields["actions"])})


def failure_fields(error: BranchFailure) -> dict[str, str]:
    kind = "unsupported" if isinstance(error, SnapshotUnsupported) else error.kind
    return {"fail": kind, "message": str(error)}


def to_failure(fields: dict[str, Any]) -> BranchFailure:
    return _KINDS[fields["fail"]](fields["message"])


def loads(answer: bytes) -> dict[str, Any]:
    """An answer as fields. Raises SandboxFailure when it is none."""
    try:
        fields = json.loads(answer)
    except ValueError as error:
        raise SandboxFailure(f"the worker sent something that is no answer: {answer[:80]!r}") from error
    if not isinstance(fields, dict):
        raise SandboxFailure(f"the worker sent something that is no answer: {answer[:80]!r}")
    return fields
