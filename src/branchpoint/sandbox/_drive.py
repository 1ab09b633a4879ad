"""What every sandbox does with a world: build it, seed it, enforce its contract, and type its failures."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from branchpoint.noise import Noise, digest
from branchpoint.world import BranchFailure, EnvironmentFailure, Make, SandboxFailure, Step, Task, World


def resolve(make: Make | str) -> Make:
    """The builder itself, or what ``"module:attribute"`` names.

    Raises EnvironmentFailure for a name that cannot be imported or that is not callable.
    """
    if not isinstance(make, str):
        return make
    module, _, attribute = make.partition(":")
    if not module or not attribute:
        raise EnvironmentFailure(f"make is {make!r}; expected 'module:attribute', e.g. 'my_package.envs:make'")
    with typed(f"importing {make!r}"):
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    builder: Any = found
    if not callable(found):
        raise EnvironmentFailure(f"{make!r} is a {type(found).__name__}, not something that builds a world")
    return builder


@contextmanager
def typed(doing: str) -> Iterator[None]:
    """Turns whatever a world raises into a failure of its branch. Failures that are typed already pass through."""
    try:
        yield
    except BranchFailure:
        raise
    except MemoryError as error:
        raise SandboxFailure(f"out of memory while {doing} (raise memory_bytes if the world needs more)") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(f"{type(error).__name__} while {doing}: {error}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """The innermost line of the traceback, as text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" [{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}]"


def globals_seed(noise: Noise) -> int:
    """What seeds the global generators of one branch."""
    return digest(noise.own, "own", "global random state")  # what keys noise.private, and cheaper after a fork


def seed_globals(seed: int) -> None:
    """Seeds the global generators of ``random`` and ``numpy.random`` (and of torch, once imported)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # a list of integers would touch three times as many pages
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(seed >> 65)


def reseed(world: World, noise: Noise) -> None:
    """Gives a world its luck from here on: the global generators, then its own ``reseed(noise)`` if it has one."""
    seed_globals(globals_seed(noise))
    reseed_world(world, noise)


def reseed_world(world: World, noise: Noise) -> None:
    own = getattr(world, "reseed", None)
    if own is not None:
        with typed("reseeding the environment"):
            own(noise)


def build(make: Make | str, task: Task, noise: Noise) -> World:
    """A fresh world for a task under a luck. Raises EnvironmentFailure when the builder raises."""
    seed_globals(globals_seed(noise))
    builder = resolve(make)
    with typed("building the environment"):
        world = builder(task)
    reseed(world, noise)
    return world


def play(world: World, action: str | None) -> Step:
    """``reset`` (action None) or ``step``, with every fault typed. Checks that what comes back is a Step."""
    name = "reset" if action is None else "step"
    with typed(f"in {name}"):
        step = world.reset() if action is None else world.step(action)
    if not isinstance(step, Step):
        raise EnvironmentFailure(f"{name} returned {type(step).__name__}; expected a branchpoint.world.Step")
    return step


class Stage:
    """Where an episode stands, so that calls out of order are refused with one clear line."""

    def __init__(self) -> None:
        self.state = "new"

    def enter(self, call: str) -> None:
        """Raises RuntimeError when ``call`` (reset, step, snapshot) is not possible now."""
        if self.state == "closed":
            raise RuntimeError(f"{call} on a closed environment; an environment serves one episode")
        if self.state == "failed" and call != "reset":
            raise RuntimeError(f"{call} on an environment that has failed; restore a snapshot")
        if call == "reset" and self.state != "new":
            raise RuntimeError("reset was called twice; open a new environment, or restore a snapshot")
        if call == "step" and self.state != "running":
            cure = "call reset first" if self.state == "new" else "the episode is over"
            raise RuntimeError(f"step is not possible now: {cure}")

    def after(self, step: Step) -> None:
        self.state = "done" if step.done or step.truncated else "running"
