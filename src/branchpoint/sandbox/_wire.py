"""Messages between the trainer and its workers, over stream sockets: a length, then the body.

Requests are pickles (the trainer is trusted by its workers). Answers are JSON (a worker runs an environment on what an
agent writes, so the trainer never unpickles what it sends). A request to fork or open carries one file descriptor.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import sys
from typing import Any

from branchpoint.noise import Noise
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
LARGEST_READ = 1 << 20
FORK = b"F"  # how a request to fork begins; a pickle begins with another byte
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


class Inbox:
    """Puts together the messages that arrive on one socket, in order, and the descriptors that came with some."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fds: list[int] = []

    def take(self) -> bytes | None:
        """The body of the next message, or None while it is incomplete. Raises SandboxFailure when it is too long."""
        data = self.data
        if len(data) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(data)
        if length > LARGEST:
            raise SandboxFailure(f"a message of {length} bytes was announced; the limit is {LARGEST}")
        end = HEADER.size + length
        if len(data) < end:
            return None
        body = bytes(data[HEADER.size : end])
        del data[:end]
        return body

    @property
    def missing(self) -> int:
        """The bytes that the message which has begun still lacks; 0 before its length is known."""
        if len(self.data) < HEADER.size:
            return 0
        return HEADER.size + HEADER.unpack_from(self.data)[0] - len(self.data)

    def clear(self) -> None:
        """Forgets, and closes, what was meant for somebody else."""
        self.data.clear()
        while self.fds:
            os.close(self.fds.pop())


def request(call: str, arguments: dict[str, Any]) -> bytes:
    return frame(pickle.dumps({"call": call, **arguments}))


def fork_request(noise: Noise | None, seed: int) -> bytes:
    """The request to fork, with the luck of the child (None: an exact copy) and the seed of its global generators.

    Plain text: unpickling would touch more of the process that is copied than all the rest.
    """
    if noise is None:
        return frame(FORK)
    return frame(FORK + b"%d %d %d %d" % (seed, noise.seed, noise.own, noise.clean))


def fork_luck(body: bytes) -> list[int] | None:
    """The numbers in a :func:`fork_request`: seed of the global generators, and the fields of the noise."""
    return [int(number) for number in body[len(FORK) :].split()] or None


def born(pid: int) -> bytes:
    """The answer of a new process that is not ready yet: READY or a failure follows."""
    return b'{"pid": %d}' % pid


def ready(pid: int) -> bytes:
    """The answer of a new process that can be used."""
    return b'{"pid": %d, "ready": true}' % pid


READY = b'{"ready": true}'


def fingerprint(answer: bytes) -> str:
    return hashlib.blake2b(answer, digest_size=8).hexdigest()


def encode(value: Any) -> bytes:
    """An answer as JSON. Raises EnvironmentFailure when a Step's ``info`` does not fit into JSON."""
    try:
        return _encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"step.info must hold JSON values: {error}") from error


def _plain(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = json.JSONEncoder(default=_plain).encode


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
