"""Studies on real sdists in the shell sandbox: injection makes the shipped tasks again, experts repair them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import swe_kit as kit

from branchpoint.env import swe
from branchpoint.env.swe import inject, place, sdists, sources
from branchpoint.env.swe.repositories import REPOSITORIES
from branchpoint.noise import Noise
from branchpoint.sandbox.machine import MachineSandbox
from branchpoint.world import Step, Task

pytestmark = pytest.mark.slow
SHIPPED = {vetted.name: vetted for vetted in inject.load(sources.DATA / "injected.jsonl.xz")}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[MachineSandbox]:
    made = MachineSandbox(kit.machines())
    yield made
    made.close()


def here(name: str) -> None:
    """Skips where the source distribution or its packages cannot be had."""
    try:
        repository = REPOSITORIES[name]
        place.image(repository.recipe, place.tree(repository))
    except (sdists.SdistError, place.PlaceError) as error:
        pytest.skip(f"no package index here: {error}")


@pytest.mark.parametrize("name", ["inflection", "schema"])
def test_injection_makes_the_shipped_tasks_again(name: str, sandbox: MachineSandbox, tmp_path: Path) -> None:
    here(name)
    inject.inject([REPOSITORIES[name]], sandbox.machines, 3, tmp_path / "tasks.jsonl", 0, 2, print)
    (made,) = inject.load(tmp_path / "tasks.jsonl")
    shipped = SHIPPED[name]
    assert (made.tests, made.flaky) == (shipped.tests, shipped.flaky)
    assert made.bugs == shipped.bugs[:3]


async def played(sandbox: MachineSandbox, task: Task) -> Step:
    env = await sandbox.open(swe.make, task, Noise(0))
    try:
        step, agent = await env.reset(), swe.expert(task)
        while not (step.done or step.truncated):
            step = await env.step(agent.act(step))
        return step
    finally:
        await env.close()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_expert_repairs_with_hidden_tests(name: str, sandbox: MachineSandbox) -> None:
    """Two tasks of each repository; the reference repair goes through the actions, all tests of both lists pass."""
    here(name)
    for task in swe.tasks(next(SHIPPED[name].instances()).split, 2, repos=[name]):
        last = asyncio.run(played(sandbox, task))
        assert last.reward == 1.0, (task.id, last.observation, last.info)
