"""Where instances come from. A source gives them by id, and for each its recipe and the image an agent works in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from branchpoint.env.swe import inject, place
from branchpoint.env.swe.repositories import REPOSITORIES
from branchpoint.env.swe.task import Instance, Recipe
from branchpoint.sandbox.machine import Image
from branchpoint.world import UserError

DATA = Path(__file__).parents[1] / "data" / "swe"


class SourceError(UserError):
    """No such source, instance or repository."""


@dataclass(frozen=True, slots=True)
class Source:
    """``instances`` are read when asked for; ``image`` may fetch what the cache does not hold."""

    instances: Callable[[], Mapping[str, Instance]]
    recipe: Callable[[Instance], Recipe]
    image: Callable[[Instance], Image]


MODULES = {"verified": "branchpoint.env.swe.verified"}
"""Sources that are a module with a ``SOURCE``."""


def find(name: str) -> Source:
    """``injected`` (the shipped tasks), another by its name, or a file that ``branchpoint swe inject`` wrote.

    Raises SourceError for any other name.
    """
    if name == "injected":
        return injected(DATA / "injected.jsonl.xz")
    if name in MODULES:
        return import_module(MODULES[name]).SOURCE
    if name.endswith((".jsonl", ".xz")):
        return injected(Path(name))
    raise SourceError(f"source is {name!r}; use injected, {', '.join(MODULES)}, or a .jsonl or .jsonl.xz file of tasks")


@cache
def injected(file: Path) -> Source:
    """The tasks of a file of injected bugs."""

    @cache
    def instances() -> Mapping[str, Instance]:
        return {i.instance_id: i for vetted in inject.load(file) for i in vetted.instances()}

    def image(instance: Instance) -> Image:
        repository = REPOSITORIES[instance.repo]
        return place.image(repository.recipe, place.tree(repository))

    return Source(instances, lambda instance: REPOSITORIES[instance.repo].recipe, image)


def instance(source: str, name: str) -> Instance:
    """One instance. Raises SourceError when the source has none of that id."""
    found = find(source).instances().get(name)
    if found is None:
        raise SourceError(f"instance {name!r}: source {source!r} has none of this id")
    return found
