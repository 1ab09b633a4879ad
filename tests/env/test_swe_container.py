"""A repair in a container, on Podman: the same world, actions and grader as in the shell sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest
import swe_kit as kit

from branchpoint.env import swe
from branchpoint.env.swe import patch, sources
from branchpoint.noise import Noise
from branchpoint.sandbox.container import Container

sys.path.append(str(Path(__file__).parents[1] / "sandbox"))
import container_kit  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.slow
BUG = patch.diff("calc/__init__.py", kit.CODE, kit.BROKEN)
INSTANCE = dataclasses.replace(kit.INSTANCE, bug=BUG, patch=patch.reverse(BUG), split="train")


def base(path: Path) -> Path:
    """A tar of a root file system with the libraries of this interpreter, which is mounted from the host."""
    container_kit.rootfs(path)
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    told = subprocess.run(
        ["ldd", os.path.realpath(sys.executable), *modules], capture_output=True, text=True, timeout=60
    )
    with tarfile.open(path, "a") as tar:
        there = set(tar.getnames())
        for library in sorted(set(re.findall(r"(/\S+) \(0x", told.stdout))):
            if (name := f"usr/lib/{Path(library).name}") not in there:
                container_kit._add(tar, name, Path(library).read_bytes(), 0o755)
        for program in ("grep", "xargs", "cut", "head"):
            if (name := f"usr/bin/{program}") not in there:
                container_kit._add(tar, name, Path("/usr/bin", program).read_bytes(), 0o755)
    return path


def test_a_compact_task_is_searched_and_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHPOINT_CACHE", str(tmp_path / "cache"))
    tree, tools = kit.repository(tmp_path / "tree"), kit.tools(tmp_path / "tools")
    own = sources.Source(
        lambda: {INSTANCE.instance_id: INSTANCE}, lambda _: kit.RECIPE, lambda _: kit.image(tree, tools)
    )
    monkeypatch.setattr(sources, "find", lambda _: own)
    start = str(base(tmp_path / "base.tar"))

    async def episode(sandbox: Any) -> list[Any]:
        task = swe.tasks("train", source="tiny", style="compact", max_steps=20, base=start)[0]
        env = await sandbox.open(swe.make, task, Noise(0))
        steps, agent = [await env.reset()], swe.expert(task)
        steps.append(await env.step(agent.act(steps[-1])))
        snapshot = await env.snapshot()
        sibling = await snapshot.restore(Noise(1))
        while not steps[-1].done:
            steps.append(await sibling.step(agent.act(steps[-1])))
        other = await env.step("submit")
        for each in (env, sibling):
            await each.close()
        await snapshot.discard()
        return [*steps, other]

    with container_kit.engine() as socket:
        sandbox = Container(socket)
        try:
            steps = asyncio.run(episode(sandbox))
        finally:
            sandbox.close()
    assert "tests pass" in [step.observation for step in steps]
    assert (steps[-2].reward, steps[-2].info["resolved"]) == (1.0, True)
    assert steps[-1].done
