"""The server's side of :mod:`branchpoint.env.openenv`: one of our worlds behind OpenEnv's ``Environment``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from branchpoint.noise import Noise, digest
from branchpoint.world import Make, Step, Task, World


class Session:
    """An episode after the other, for one connection. :func:`environment` makes it an OpenEnv ``Environment``."""

    name: ClassVar[str]
    make: ClassVar[Make]
    pools: ClassVar[Mapping[str, tuple[Task, ...]]]
    server: ClassVar[Any]
    answer: ClassVar[Any]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._world: World | None = None
        self._task: Task | None = None
        self._state = self.server.State(episode_id=None, step_count=0)

    def list_splits(self) -> list[str]:
        return list(self.pools)

    def num_tasks(self, split: str) -> int:
        return len(self.pools[split])

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return [self.get_task(split, i) for i in range(len(self.pools[split]))]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        task = self.pools[split][index]
        return {"id": task.id, "index": index, "prompt": [[m.role, m.content] for m in task.prompt]}

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        luck: list[Any] | None = None,
    ) -> Any:
        """Start the task of a split and index, or one drawn by the seed."""
        pool = self.pools[split or next(iter(self.pools))]
        drawn = digest(seed or 0, "task") % len(pool) if index is None else index
        self.close()
        self._task, self._state = pool[drawn], self.server.State(episode_id=episode_id, step_count=0)
        self._world = type(self).make(self._task)
        own = digest(self._task.seed if seed is None else seed, "luck")
        self._reseed(_noise(luck) if luck is not None else Noise(own, own))
        return self._show(self._world.reset())

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Play the text of an action; its metadata may bring the luck to use from here on."""
        if self._world is None:
            raise RuntimeError("the episode has not started or is over; call reset")
        if (luck := action.metadata.get("luck")) is not None:
            self._reseed(_noise(luck))
        self._state.step_count += 1
        return self._show(self._world.step(action.text))

    @property
    def state(self) -> Any:
        return self._state

    def get_metadata(self) -> Any:
        about = f"{self.name}, an environment of Branchpoint"
        return self.server.types.EnvironmentMetadata(name=self.name, description=about)

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world = None

    def _reseed(self, noise: Noise) -> None:
        reseed = getattr(self._world, "reseed", None)
        if reseed is not None:
            reseed(noise)

    def _show(self, step: Step) -> Any:
        return self.answer(
            text=step.observation,
            actions=list(step.actions),
            grammar=step.grammar,
            reward=step.reward,
            done=step.done or step.truncated,
            metadata={**step.info, "truncated": step.truncated, "task": self._task.id if self._task else ""},
        )


def environment(
    name: str, make: Make, pools: Mapping[str, tuple[Task, ...]], server: Any, title: str
) -> tuple[Any, Any, Any]:
    """The classes of the environment, its action (called ``title``) and its observation, by the package's module
    ``server``."""

    class Observation(server.Observation):
        text: str
        actions: list[str] = []  # noqa: RUF012 (a field of pydantic, copied for every object)
        grammar: str = ""

    class Environment(Session, server.Environment):
        """One connection's episodes."""

    Environment.name, Environment.make, Environment.pools = name, staticmethod(make), pools
    Environment.server, Environment.answer = server, Observation
    fields = {"__module__": __name__, "__annotations__": {"text": str}}
    return Environment, type(title, (server.Action,), fields), Observation


def _noise(luck: list[Any]) -> Noise:
    seed, own, clean = luck
    return Noise(int(seed), int(own), bool(clean))
