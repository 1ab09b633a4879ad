"""What every sandbox does with a world: build it, seed it, enforce its contract, and type its failures."""

from __future__ import annotations

import importlib
import importlib.machinery
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """Seeds the global generators of ``random``, ``numpy.random`` and torch; of the last two once they are imported."""
    random.seed(seed)
    _late.seed = seed
    for name, own in _GENERATORS.items():
        module = sys.modules.get(name)
        if module is not None:
            own(module, seed)


def _seed_numpy(module: Any, seed: int) -> None:
    module.seed(seed & 0xFFFFFFFF)  # a list of integers would touch three times as many pages


def _seed_torch(module: Any, seed: int) -> None:
    if hasattr(module, "manual_seed"):  # else it is being imported
        module.manual_seed(seed >> 65)


_GENERATORS: dict[str, Callable[[Any, int], None]] = {"numpy.random": _seed_numpy, "torch": _seed_torch}


class _Late:
    """Seeds a global generator that is imported after the seeding, so that it makes no difference when."""

    seed: int | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _GENERATORS or self.seed is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run: Callable[[Any], None] = spec.loader.exec_module

            def run_and_seed(module: Any) -> None:
                run(module)
                _GENERATORS[fullname](module, self.seed or 0)

            spec.loader.exec_module = run_and_seed  # type: ignore[method-assign]
        return spec


_late = _Late()


def watch_imports() -> None:
    """In a process that serves one world: from now on, generators are seeded when they are imported."""
    if _late not in sys.meta_path:
        sys.meta_path.insert(0, _late)


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
    if hasattr(world, "reseed"):
        importlib.import_module("numpy.random")  # what a Noise draws with: here once, not in every branch anew
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
