"""``branchpoint check``: the shipped checkers, on a built-in by name or on a user's ``module:attribute``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from branchpoint import env as envs
from branchpoint.config import ConfigError
from branchpoint.world import Task, settle

CONTAINER_IMAGE = "debian:stable-slim"
"""What containers are checked with: a small image that has bash, coreutils and find."""


def check(what: str, name: str | None, console: Console, image: str | None = None) -> int:
    """Print the reports; 0 when everything holds, else 1. ``image``: what machines of a sandbox start from."""
    if what == "oracles":
        return _oracles(name, console)
    if name is None:
        raise ConfigError(f"check {what}: name a built-in or module:attribute")
    try:
        reports = _sandbox(name, image) if what == "sandbox" else [{"env": _env, "policy": _policy}[what](name)]
        ok = True
        for report in reports:
            console.print(str(report), highlight=False, markup=False)
            ok &= report.ok
    except ValueError as e:
        raise ConfigError(f"check {what}: {e}") from e
    return 0 if ok else 1


def _oracles(name: str | None, console: Console) -> int:
    from branchpoint.probe import oracles

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    return oracles.check(Path(name) if name else None, say).status


def _env(name: str) -> Any:
    """An environment by registered name, or ``module:make`` with tasks from ``module.tasks`` if there are any."""
    from branchpoint.testing import check_env

    make = envs.make(name)
    if ":" not in name:
        task = envs.tasks(name, n=1)[0]
    else:
        tasks = getattr(import_module(name.split(":")[0]), "tasks", None)
        task = tasks("train", n=1)[0] if tasks else Task("check", name)
    world = make(task)
    world.close()
    if not hasattr(world, "attach"):
        return check_env(make, task)
    from branchpoint.sandbox.machine import Housed
    from branchpoint.sandbox.shell import ShellMachines

    machines = ShellMachines()

    def housed(task: Task) -> Housed:
        return Housed(make(task), machines)

    housed.__qualname__ = f"{name} on shell machines"
    try:
        return check_env(housed, task)
    finally:
        machines.close()


def _sandbox(name: str, image: str | None) -> Iterator[Any]:
    """The report on a sandbox, and where it has machines the one on these."""
    from branchpoint.sandbox.container import Container, ContainerMachines
    from branchpoint.sandbox.forkserver import ForkServer
    from branchpoint.sandbox.inprocess import InProcess
    from branchpoint.sandbox.machine import Image
    from branchpoint.sandbox.replay import Replay
    from branchpoint.sandbox.shell import Shell, ShellMachines
    from branchpoint.testing import check_machine, check_sandbox

    builtin: dict[str, Callable[[], Any]] = {
        "process": ForkServer,
        "state": InProcess,
        "replay": Replay,
        "shell": Shell,
        "container": Container,
    }
    factory: Any = builtin.get(name) or (envs.make(name) if ":" in name else None)
    if factory is None:
        raise ConfigError(f"check sandbox: no {name!r}; known: {', '.join(builtin)}, or module:attribute")
    yield asyncio.run(check_sandbox(factory))
    machines: Any = {"shell": ShellMachines, "container": ContainerMachines}.get(name)
    if machines is not None:
        base = image or ("host" if name == "shell" else CONTAINER_IMAGE)
        yield check_machine(machines, Image(base), depth=40 if name == "shell" else 10)


def _policy(name: str) -> Any:
    """A policy object or factory ``module:attribute``; a folder or hub id of a model; ``fake``; ``small``."""
    from branchpoint.testing import FakePolicy, check_policy

    if name == "fake":
        return asyncio.run(check_policy(FakePolicy()))
    if ":" in name:
        found: Any = envs.make(name)
        policy: Any = found() if callable(found) and not hasattr(found, "open") else found
        return asyncio.run(check_policy(policy))
    return asyncio.run(_model(name, check_policy))


async def _model(name: str, check_policy: Callable[..., Any]) -> Any:
    from branchpoint.command.build import codec_of
    from branchpoint.config import Chat, Sampling
    from branchpoint.policy import models, small
    from branchpoint.policy.hf import HFPolicy

    if name == "small":
        tokenizer = small.train_tokenizer(["count up down stop 1 2 3"] * 3)
        model = small.build(tokenizer)
    else:
        model, tokenizer = models.load(name)
    policy = HFPolicy(model, codec_of(tokenizer, Chat()), Sampling())
    try:
        return await check_policy(policy)
    finally:
        await settle(policy.close())
