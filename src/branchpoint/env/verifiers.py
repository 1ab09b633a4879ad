"""Environments of the ``verifiers`` library (0.4, its v1 interface) as worlds, and ours as theirs.

Theirs: an ``Env`` whose one seat is the policy, with a taskset that needs neither a box nor tool servers. The seat's
turns become steps; rewards, metrics and stop conditions are computed by the environment's own code, and the whole
reward comes with the last step. No harness and no model server run.

Dials (``Task.metadata``, set by :func:`tasks`): ``taskset`` (its id: an importable module) and ``config`` (its fields);
``env``: fields of the environment's config, ``id`` among them; ``io``: run it on an ordinary event loop, which an
environment that awaits the network or a subprocess needs (its process can then not be forked).

Needs ``pip install "branchpoint[verifiers]"``. No snapshot of its own: fork, or replay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from branchpoint import env as envs
from branchpoint.env._dialogue import Ask, Dialogue
from branchpoint.noise import Noise, digest
from branchpoint.world import EnvironmentFailure, GraderFailure, Message, Step, Task


def _package() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as e:
        raise ImportError('no package verifiers (0.4 or newer): pip install "branchpoint[verifiers]"') from e
    return vf


class Dials(NamedTuple):
    """The settings of a task. ``data``: the task as the taskset made it."""

    taskset: str
    data: Mapping[str, Any]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    io: bool = False

    @classmethod
    def of(cls, task: Task) -> Dials:
        if lacking := [name for name in cls._fields[:4] if name not in task.metadata]:
            raise EnvironmentFailure(
                f"task {task.id}: metadata has no {lacking[0]!r}; make tasks with verifiers.tasks()"
            )
        return cls(**{name: task.metadata[name] for name in cls._fields if name in task.metadata})


def load(taskset: str, config: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """The ``verifiers`` environment. Raises ValueError for one that is not there or cannot be played here."""
    try:
        vf = _package()
        loaded = vf.load_environment(vf.resolve_env_config({**env, "taskset": {**config, "id": taskset}}))
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        raise ValueError(f"taskset {taskset!r} cannot be loaded: {' '.join(str(e).split())}") from e
    seats = _seats(loaded)
    if len(seats) != 1:
        raise ValueError(f"{taskset!r} has the seats {', '.join(seats)}; only environments with one are played here")
    if loaded.taskset.toolsets(loaded.taskset.config):
        raise ValueError(f"{taskset!r} brings tool servers, which need verifiers' own harness")
    return loaded


def _seats(env: Any) -> dict[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    return dict(agent_config_fields(env.config))


def _needs(task: Any) -> str:
    """What a task needs beyond a conversation, or ""."""
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    data, trace = task.data, _package().Trace
    if data.image or task.NEEDS_CONTAINER or data.skills:
        return "a box for the agent (image, skills)"
    if task.toolsets(task.config):
        return "tool servers"
    if discover_decorated(task, "intercept") or any(
        hook_boundary(f, allow_trace=True) is not trace for f in task.hooks("stop")
    ):
        return "hooks on model requests"
    return ""


class _NoBox:
    """Stands in for the agent's box; whatever uses it learns that there is none."""

    def __getattr__(self, name: str) -> Any:
        raise EnvironmentFailure(f"the environment uses the agent's box (runtime.{name}); none is run here")


class _Interaction:
    """One conversation of the seat, kept as verifiers keeps it: a trace."""

    def __init__(self, task: Any, seat: Any, name: str, ask: Ask) -> None:
        from verifiers.v1.session import RolloutLimits
        from verifiers.v1.state import state_cls

        vf = _package()
        row = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=seat, name=name)
        self.trace: Any = vf.Trace(task=row, state=state_cls(type(task))(), agent=agent)
        self._task, self._ask, self._over = task, ask, False
        self._messages: list[Any] = []
        limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
        self._limits = RolloutLimits(**{limit: getattr(seat, limit) for limit in limits})

    async def turn(self, message: Any = None) -> Any:
        """As ``Interaction.turn`` of verifiers: the agent's reply to a user turn, or to the task's own prompt."""
        from verifiers.v1.dialects import parse_message

        vf = _package()
        prompted = not self._messages and self._task.data.prompt is not None
        if self._over:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        if prompted != (message is None):
            raise ValueError("a bare turn() opens a task that has a prompt, and every other turn takes a message")
        said: Any = self._task.data.prompt if prompted else message
        new = [vf.UserMessage(content=said)] if isinstance(said, str) else list(said)
        new = [parse_message(m) if isinstance(m, dict) else m for m in new]
        if not self._messages and self._task.data.system_prompt:
            new.insert(0, vf.SystemMessage(content=self._task.data.system_prompt))
        if await self._refused():
            self._over = True
            return vf.Segment(messages=[], terminated=True)
        reply = vf.AssistantMessage(content=await self._ask(_shown(new)))
        self._commit(new, reply)
        return vf.Segment(messages=[reply], root_reply=reply.content)

    def _commit(self, new: list[Any], reply: Any) -> None:
        from verifiers.v1.graph import prepare_turn

        self._messages += new
        turn = prepare_turn(self.trace, list(self._messages))
        name = f"turn-{len(self._messages)}"
        turn.commit(_package().Response(id=name, created=0, model="branchpoint", message=reply, finish_reason="stop"))
        self._messages.append(reply)

    async def _refused(self) -> bool:
        """The limits of the seat and the task's stop conditions, checked before every turn."""
        from verifiers.v1.session import call_hook

        if (limit := self._limits.reached(self.trace)) is not None:
            self.trace.stop(limit)
            return True
        for hook in self._task.hooks("stop"):
            if await call_hook(hook, {_package().Trace: self.trace}):
                self.trace.stop(hook.__name__)
                return True
        return False


def _shown(messages: list[Any]) -> str:
    """What the agent is shown of new messages: their text without the system prompt, which the task holds."""
    from verifiers.v1.types import content_text

    return "\n\n".join(content_text(m.content) for m in messages if m.role != "system")


class _Seat:
    """Takes the place of a verifiers ``Agent``: its replies are asked for."""

    def __init__(self, name: str, config: Any, ask: Ask, traces: list[Any]) -> None:
        self.name, self.config, self.trainable = name, config, True
        self._ask, self._traces = ask, traces

    async def run(self, task: Any, **_: Any) -> Any:
        """One reply to the task's prompt."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
            interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        """A conversation; leaving it finishes and scores it."""
        from verifiers.v1.utils.decorators import invoke

        if lack := _needs(task):
            raise EnvironmentFailure(
                f"a task of {type(task).__name__} needs {lack}; run it with verifiers' own harness"
            )
        box = _NoBox()
        interaction = _Interaction(task, self.config, self.name, self._ask)
        trace = interaction.trace
        await invoke(task.setup, {"trace": trace, "runtime": box})
        yield interaction
        trace.stop("user_closed")
        await invoke(task.finalize, {"trace": trace, "runtime": box})
        await task.score(trace, box)
        trace.is_completed, trace.ok = True, True
        self._traces.append(trace)


class _Seats:
    """The seats by name, as ``run(task, agents)`` takes them."""

    def __init__(self, seats: Mapping[str, _Seat]) -> None:
        self.__dict__.update(seats)


class VerifiersWorld:
    """One episode. Every observation but the last is what the agent is told next; the last is empty.

    ``Step.info`` of the last: ``rewards`` and ``metrics`` by name, ``stop`` (what ended it). ``truncated`` when a limit
    of the seat ended it.
    """

    def __init__(self, task: Task) -> None:
        self._dials = Dials.of(task)
        try:
            self._env = load(self._dials.taskset, self._dials.config, self._dials.env)
        except ValueError as e:
            raise EnvironmentFailure(f"task {task.id}: {e}") from e
        kind = type(self._env.taskset).task_type()
        self._task = kind(kind.data_type().model_validate(self._dials.data), self._env.taskset.config.task)
        self._dialogue: Dialogue[Any] | None = None

    def reset(self) -> Step:
        """What the agent is told first."""
        self.close()
        self._dialogue = Dialogue(self._episode, self._dials.io)
        return self._go(None)

    def step(self, action: str) -> Step:
        """The seat's reply."""
        if self._dialogue is None:
            raise EnvironmentFailure(f"{self._dials.taskset}: the episode has not started or is over; call reset()")
        return self._go(action)

    def close(self) -> None:
        if self._dialogue is not None:
            self._dialogue.close()
        self._dialogue = None

    async def _episode(self, ask: Ask) -> Any:
        vf = _package()
        row = vf.TraceTask(type=type(self._task).__name__, data=self._task.data)
        episode = vf.Episode(env=vf.EnvInfo(id=self._env.config.env_id), task=row)
        ((name, config),) = _seats(self._env).items()
        seats = _Seats({name: _Seat(name, config, ask, episode.traces)})
        await self._env.setup(seats)
        await self._env.run(self._task, seats)
        if not episode.traces:
            raise EnvironmentFailure(f"{type(self._env).__name__}.run() ended without a conversation")
        await self._env.finalize(self._task, episode)
        return episode

    def _go(self, reply: str | None) -> Step:
        assert self._dialogue is not None
        asked = self._dialogue.next(reply)
        if asked is not None:
            return Step(asked)
        traces = self._dialogue.result.traces
        reward = sum(t.reward for t in traces)
        if not math.isfinite(reward):
            raise GraderFailure(f"{self._dials.taskset}: the reward is {reward}")
        last = traces[-1]
        cut = str(last.stop_condition).startswith("max_")
        info = {
            "rewards": {k: r.value for k, r in last.rewards.items() if r is not None},
            "metrics": {k: m for k, m in last.metrics.items() if m is not None and math.isfinite(m)},
            "stop": last.stop_condition,
        }
        self.close()
        return Step("", float(reward), done=not cut, truncated=cut, info=info)


def make(task: Task) -> VerifiersWorld:
    """The world of a task."""
    return VerifiersWorld(task)


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    taskset: str,
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    held_out: int = 32,
    io: bool = False,
) -> tuple[Task, ...]:
    """Tasks of a taskset: its first ``held_out`` are ``validation``, the others ``train``; with 0 both have all (to be
    told apart by ``config``). ``n`` of them in an order keyed by ``seed``, or all; of an infinite taskset the next n.

    Raises ValueError naming the argument that cannot be met.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; use train or validation")
    loaded = load(taskset, config or {}, env or {})
    view = loaded.taskset
    if held_out:
        view = view.take(held_out) if split == "validation" else view.skip(held_out)
    if view.bounded:
        found = list(view)
        found = [found[i] for i in Noise(seed).at("verifiers", "order", split).permutation(len(found))]
    elif n is None:
        raise ValueError(f"{taskset!r} is infinite; give n")
    else:
        found = list(itertools.islice(view.skip(seed * n), n))
    if n is not None and not 0 < n <= len(found):
        raise ValueError(f"n is {n}; {split} has {len(found)} tasks")
    found = found[:n]
    if found and (lack := _needs(found[0])):
        raise ValueError(f"tasks of {taskset!r} need {lack}; run them with verifiers' own harness")
    shared = {"taskset": taskset, "config": dict(config or {}), "env": dict(env or {}), "io": io}
    return tuple(_task(t, taskset, shared) for t in found)


def _task(theirs: Any, taskset: str, shared: Mapping[str, Any]) -> Task:
    data = theirs.data.model_dump(mode="json", exclude_none=True)
    prompt = (Message("system", data["system_prompt"]),) if data.get("system_prompt") else ()
    name = f"verifiers/{taskset}/{theirs.key[:16]}"
    return Task(name, "verifiers", prompt, digest(0, "luck", name) >> 65, {**shared, "data": data})


def export(name: str, split: str = "train", n: int | None = None, seed: int = 0, **dials: Any) -> tuple[Any, Any]:
    """The ``Taskset`` and the ``Env`` class that give an environment of ours to verifiers.

    Its convention is a module named as the environment, with both in ``__all__``. ``split``, ``n``, ``seed`` and
    ``dials`` are defaults of the taskset's config. The seat is ``agent``. Rewards are summed; ``success`` is a metric.
    The luck of a rollout is keyed by the id of its trace.
    """
    vf = _package()
    defaults = (split, n, seed, dials)

    class WorldData(vf.TaskData):
        world: dict

    class WorldTask(vf.Task[WorldData, vf.State, vf.TaskConfig]):
        """A task of ours; its reward is recorded by the environment."""

    class WorldTasksetConfig(vf.TasksetConfig):
        split: str = defaults[0]
        n: int | None = defaults[1]
        seed: int = defaults[2]
        dials: dict = defaults[3]

    class WorldTaskset(vf.Taskset[WorldTask, WorldTasksetConfig]):
        """The tasks of a split."""

        def load(self) -> Any:
            c = self.config
            for ours in envs.tasks(name, c.split, c.n, c.seed, **c.dials):
                system = "\n\n".join(m.content for m in ours.prompt if m.role == "system")
                world = {"root": ours.root, "seed": ours.seed, "metadata": dict(ours.metadata)}
                yield WorldTask(WorldData(id=ours.id, name=ours.id, system_prompt=system or None, world=world), c.task)

    class WorldEnvConfig(vf.EnvConfig):
        agent: vf.AgentConfig = vf.AgentConfig()  # pyright: ignore[reportInvalidTypeForm]

    class WorldEnv(vf.Env[WorldEnvConfig]):
        """Our world plays the user of the conversation."""

        async def run(self, task: Any, agents: Any) -> None:
            await _serve(task, agents.agent)

    return WorldTaskset, WorldEnv


async def _serve(task: Any, agent: Any) -> None:
    kept = task.data.world
    world: Any = envs.make(kept["root"])(Task(task.data.id, kept["root"], (), kept["seed"], kept["metadata"]))
    total = 0.0
    try:
        async with agent.interaction(task) as interaction:
            luck = digest(0, "luck", interaction.trace.id)
            if hasattr(world, "reseed"):
                world.reseed(Noise(luck, luck))
            step = world.reset()
            segment = await interaction.turn(step.observation)
            while not segment.terminated:
                step = world.step(segment.last_reply)
                total += step.reward
                if step.done or step.truncated:
                    break
                segment = await interaction.turn(step.observation)
        interaction.trace.record_reward("reward", total)
        interaction.trace.record_metric("success", float(bool(step.info.get("success", step.reward > 0))))
    finally:
        world.close()
