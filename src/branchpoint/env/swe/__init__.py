"""Repository tasks: repair a fault in real code; hidden tests grade.

Two sources. ``injected``: small bugs in source distributions from PyPI, found by the packages' own tests
(:mod:`branchpoint.env.swe.inject` makes more). ``verified``: tasks of SWE-bench Verified (Jimenez et al., 2024,
https://arxiv.org/abs/2310.06770). Commands of the agent run in a machine: ``sandbox: shell`` or ``container``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from branchpoint.env.swe import sources
from branchpoint.env.swe.dials import Dials, Style, Tests
from branchpoint.env.swe.expert import Expert, Searcher
from branchpoint.env.swe.grade import Report
from branchpoint.env.swe.rehearsal import rehearse
from branchpoint.env.swe.task import Instance, Recipe, Repository
from branchpoint.env.swe.world import Repair
from branchpoint.noise import Noise
from branchpoint.world import Message, Task, Transcript

__all__ = [
    "Dials", "Expert", "Instance", "Recipe", "Repair", "Report", "Repository", "Searcher", "expert", "make",
    "tasks", "transcripts",
]  # fmt: skip

RULES = (
    "You repair a fault in a repository. Reply with one action a turn and nothing else:\n"
    "run COMMAND - a bash command line; the shell keeps its state\n"
    "view PATH [FROM TO] - numbered lines of a file\n"
    "search PATTERN [PATH] - lines that a regular expression matches; quote a pattern with spaces\n"
    "edit PATH, then on the next lines the replacement; the old text must stand in the file exactly once:\n"
    "<<<<<<< SEARCH\nold text\n=======\nnew text\n>>>>>>> REPLACE\n"
    "submit - you are done; hidden tests then decide. Changes to tests and to their configuration do not count."
)


def make(task: Task) -> Repair:
    """The world of a task. Raises EnvironmentFailure for a bad dial, UserError when what it needs cannot be had."""
    return Repair(task)


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    source: str = "injected",
    repos: tuple[str, ...] | list[str] = (),
    style: Style = "text",
    tests: Tests | None = None,
    choices: int = 4,
    max_steps: int = 30,
    command_seconds: float = 60.0,
    observation: int = 4000,
    base: str = "host",
) -> tuple[Task, ...]:
    """``n`` tasks of a split (all when None) in an order keyed by ``seed``; the first m of n are the tasks of ``n=m``.

    Args:
        split: ``train``, ``validation`` or ``test``; no repository is in two of them.
        source: ``injected``, ``verified``, or a file that ``branchpoint swe inject`` wrote.
        repos: only tasks of these repositories; all when empty.
        style: ``text``: five free actions; ``compact``: a menu of edits, for small models.
        tests: whether the agent's copy holds the files of the failing tests; ``hidden`` unless the style is compact.
        choices: how many edits the menu offers.
        max_steps: the step limit.
        command_seconds: the time limit of a command of the agent.
        observation: characters of an observation at most; the middle of a longer one is left out.
        base: what machines start from (:class:`~branchpoint.sandbox.machine.Image`); for containers an image with bash,
            coreutils, find, grep and the libraries of this computer's Python, which is mounted into it.

    Raises ValueError naming the argument that cannot be met.
    """
    dials: dict[str, Any] = {
        "source": source, "style": style, "tests": tests or ("visible" if style == "compact" else "hidden"),
        "choices": choices, "max_steps": max_steps, "command_seconds": command_seconds, "observation": observation,
        "base": base,
    }  # fmt: skip
    if problem := Dials("", **dials).problem():
        raise ValueError(problem)
    known = sources.find(source).instances().values()
    names = {instance.repo for instance in known}
    if strange := sorted(set(repos) - names):
        raise ValueError(f"repos names {strange[0]!r}; source {source!r} has {', '.join(sorted(names))}")
    found = [i for i in known if i.split == split and (not repos or i.repo in repos)]
    if not found:
        raise ValueError(f"split is {split!r}; of these repositories {source!r} has {sorted({i.split for i in known})}")
    if n is not None and not 0 < n <= len(found):
        raise ValueError(f"n is {n}; split {split!r} has {len(found)} tasks")
    order = Noise(seed).at("swe", "order", source, split).permutation(len(found))
    return tuple(_task(found[i], seed, dials) for i in order[:n].tolist())


def _task(instance: Instance, seed: int, dials: dict[str, Any]) -> Task:
    prompt = () if dials["style"] == "compact" else (Message("system", RULES),)
    return Task(f"swe/{instance.instance_id}", "swe", prompt, seed, {"instance": instance.instance_id, **dials})


def transcripts(split: str = "train", **dials: Any) -> Iterator[Transcript] | None:
    """Rehearsed episodes of the :class:`Searcher` in style ``compact``, without a machine; None in style ``text``.

    See :mod:`branchpoint.env.swe.rehearsal` for what they take for granted.
    """
    if dials.get("style") != "compact":
        return None
    return (episode for task in tasks(split, **dials) if (episode := rehearse(task)) is not None)


def expert(task: Task) -> Expert | Searcher:
    """A scripted agent for one episode. In style ``text`` it knows the reference repair, in ``compact`` it does not."""
    dials = Dials.of(task)
    if dials.style == "compact":
        return Searcher(task.id)
    instance = sources.instance(dials.source, dials.instance)
    return Expert(instance, sources.find(dials.source).recipe(instance))
