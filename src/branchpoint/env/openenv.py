"""OpenEnv servers as worlds, and any environment of ours as an OpenEnv server on the loopback interface.

Dials (``Task.metadata``, set by :func:`tasks`): ``url`` of the server; ``reset``: arguments of its ``reset``, the seed
of the task among them; ``field``: the action field that takes the agent's text (None: the only required one; with
several, the agent writes a JSON object); ``observation``: the observation field to show (None: the only text field,
else all); ``deterministic``: whether equal actions after an equal reset are answered equally.

Needs ``pip install "branchpoint[openenv]"``. A session lives in the server, so there is no snapshot of it, and a
process with a connection cannot be forked: use ``sandbox: replay``, which repeats the actions in a new session and
refuses a server that answers differently.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from branchpoint import env as envs
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, GraderFailure, Message, SandboxFailure, Step, Task

TIMEOUT_S = 60.0
LONGEST = 20_000
_OURS = "BranchpointAction"
POOLS: Mapping[str, tuple[int, int]] = {"train": (0, 10_000), "validation": (10_000, 1_000), "test": (11_000, 1_000)}
"""First seed and number of seeds of each split, for servers whose tasks are seeds."""


def _package() -> Any:
    try:
        import openenv.core as core
        import openenv.core.env_server as server

        _ = core.GenericEnvClient, server.create_fastapi_app
    except (ImportError, AttributeError) as e:
        raise ImportError('no package openenv (0.10 or newer): pip install "branchpoint[openenv]"') from e
    return core, server


class Dials(NamedTuple):
    """The settings of a task."""

    url: str
    reset: Mapping[str, Any]
    field: str | None = None
    observation: str | None = None
    deterministic: bool = True

    @classmethod
    def of(cls, task: Task) -> Dials:
        if not {"url", "reset"} <= task.metadata.keys():
            raise EnvironmentFailure(f"task {task.id}: metadata has no url and reset; make tasks with openenv.tasks()")
        return cls(**{name: task.metadata[name] for name in cls._fields if name in task.metadata})


def fetch(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON that a server answers to a GET, or with a body to a POST. Raises ValueError naming the server."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url is {url!r}; it must start with http:// or https://")
    data, head = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(f"{url.rstrip('/')}/{path}", data, head)
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except (OSError, urllib.error.URLError, ValueError) as e:
        raise ValueError(f"no OpenEnv server answers at {url} ({path}): {e}") from e


class Form(NamedTuple):
    """How the agent's text becomes an action: ``field`` takes it (None: it is a JSON object with ``fields``)."""

    title: str
    fields: tuple[str, ...]
    field: str | None
    type: str = "string"
    choices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, schema: Mapping[str, Any], field: str | None) -> Form:
        """Raises ValueError for a field that the action does not have."""
        known = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        required = tuple(k for k in schema.get("required", ()) if k != "metadata")
        if field is not None and field not in known:
            raise ValueError(f"field is {field!r}; the action has {', '.join(known)}")
        chosen = field or (required[0] if len(required) == 1 else None)
        title, names = str(schema.get("title", "")), required or tuple(known)
        if chosen is None:
            return cls(title, names, None)
        spec = known[chosen]
        if "$ref" in spec:
            spec = schema.get("$defs", {}).get(spec["$ref"].rsplit("/", 1)[-1], {})
        return cls(title, names, chosen, str(spec.get("type", "string")), tuple(spec.get("enum", ())))

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(str(c) for c in self.choices)

    def read(self, text: str) -> tuple[dict[str, Any], str]:
        """The action, and what is wrong with the text if it is none."""
        if self.choices:
            found = [c for c in self.choices if str(c) == text.strip()]
            known = ", ".join(self.actions[:30])
            return ({self.field or "": found[0]}, "") if found else ({}, f"use one of {known}")
        if self.field is not None and self.type == "string":
            return {self.field: text}, ""
        try:
            value = json.loads(text) if len(text) <= LONGEST else None
        except (ValueError, RecursionError):
            value = None
        if self.field is not None:
            return ({self.field: value}, "") if value is not None else ({}, f"write {self.field} as JSON: {self.type}")
        if not isinstance(value, dict):
            return {}, f"write a JSON object with {', '.join(self.fields)}"
        return value, ""


class OpenEnvWorld:
    """A session on a server. An action that it refuses as invalid changes nothing and is answered with its reason.

    ``info``: the observation's metadata as far as it is JSON. ``truncated`` where the metadata says so. A server of
    ours is also told the luck of the branch; another keeps its own, whatever the arm.
    """

    def __init__(self, task: Task) -> None:
        self._dials, self._client, self._last, self._over = Dials.of(task), None, Step(""), True
        self.deterministic = self._dials.deterministic
        self._noise, self._told = Noise(task.seed, task.seed), False
        try:
            self._form = Form.of(fetch(self._dials.url, "schema")["action"], self._dials.field)
        except ValueError as e:
            raise EnvironmentFailure(f"task {task.id}: {e}") from e

    def reseed(self, noise: Noise) -> None:
        """Use this luck from the next call on; only a server of ours listens."""
        self._noise, self._told = noise, False

    def reset(self) -> Step:
        """Opens a session."""
        self.close()
        core, _ = _package()
        client = core.GenericEnvClient(base_url=self._dials.url, message_timeout_s=TIMEOUT_S).sync()
        try:
            self._client = client.connect()
            result = self._client.reset(**self._dials.reset, **({"luck": self._luck()} if self._ours else {}))
        except (OSError, RuntimeError, TimeoutError) as e:
            raise SandboxFailure(f"no session at {self._dials.url}: {e}") from e
        self._told, self._over = True, False
        return self._show(result, first=True)

    def step(self, action: str) -> Step:
        """Sends an action."""
        if self._client is None or self._over:
            raise EnvironmentFailure(f"{self._dials.url}: the episode has not started or is over; call reset()")
        payload, problem = self._form.read(action)
        if problem:
            return self._wrong(problem)
        if self._ours and not self._told:
            payload["metadata"] = {"luck": self._luck()}
        try:
            result = self._client.step(payload)
        except RuntimeError as e:
            if "VALIDATION_ERROR" in str(e):
                return self._wrong(" ".join(str(e).split())[:500])
            raise EnvironmentFailure(f"{self._dials.url}: {e}") from e
        except (OSError, TimeoutError) as e:
            raise SandboxFailure(f"{self._dials.url}: {type(e).__name__} {e}") from e
        self._told = True
        return self._show(result)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._over = None, True

    @property
    def _ours(self) -> bool:
        return self._form.title == _OURS

    def _luck(self) -> list[Any]:
        return [str(self._noise.seed), str(self._noise.own), self._noise.clean]  # beyond what JSON numbers hold

    def _wrong(self, problem: str) -> Step:
        return Step(problem, actions=self._last.actions, grammar=self._last.grammar, info={"invalid": True})

    def _show(self, result: Any, first: bool = False) -> Step:
        seen = {k: v for k, v in result.observation.items() if k not in ("metadata", "done", "reward")}
        facts = result.metadata or result.observation.get("metadata") or {}
        done, cut = bool(result.done), bool(facts.get("truncated", False))
        if done and result.reward is None:
            raise GraderFailure(f"{self._dials.url}: the episode ended without a reward")
        reward = 0.0 if first or result.reward is None else float(result.reward)
        actions, grammar = (tuple(seen.pop("actions", ())), seen.pop("grammar", "")) if self._ours else ((), "")
        self._over = done or cut
        listed = () if self._over else actions or self._form.actions
        text = _text(seen, self._dials)
        self._last = Step(text, reward, done and not cut, cut, listed, grammar, _json(facts))
        return self._last


def _text(seen: Mapping[str, Any], dials: Dials) -> str:
    if dials.observation is not None:
        if dials.observation not in seen:
            raise EnvironmentFailure(f"observation is {dials.observation!r}; the server's has {', '.join(seen)}")
        seen = {dials.observation: seen[dials.observation]}
    if len(seen) == 1 and isinstance(value := next(iter(seen.values())), str):
        text = value
    else:
        text = "\n".join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in seen.items())
    if len(text) > LONGEST:
        raise EnvironmentFailure(f"{dials.url}: the observation has {len(text)} characters; name the field to show")
    return text


def _json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in facts.items() if k != "truncated" and not (isinstance(v, float) and not math.isfinite(v))}


def make(task: Task) -> OpenEnvWorld:
    """The world of a task."""
    return OpenEnvWorld(task)


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    url: str,
    by: str = "seed",
    reset: Mapping[str, Any] | None = None,
    field: str | None = None,
    observation: str | None = None,
    deterministic: bool = True,
) -> tuple[Task, ...]:
    """``n`` tasks of a server (all when None) in an order keyed by ``seed``.

    ``by``: a task is a ``seed`` of its ``reset`` (train has 10,000, validation and test 1,000 each), or (``index``) a
    ``split`` and ``index`` of its task list. Raises ValueError naming the argument that cannot be met.
    """
    if by not in ("seed", "index"):
        raise ValueError(f"by is {by!r}; use seed or index")
    form = Form.of(fetch(url, "schema")["action"], field)
    name = fetch(url, "list_environments")[0] if by == "index" else ""
    if by == "index":
        first, size = 0, int(fetch(url, f"{name}/num_tasks", {"split": split})["num_tasks"])
    elif split not in POOLS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(POOLS)}")
    else:
        first, size = POOLS[split]
    if n is not None and not 0 < n <= size:
        raise ValueError(f"n is {n}; {split} has {size} tasks")
    order = (first + int(i) for i in Noise(seed).at("openenv", "order", split).permutation(size)[:n])
    shared = {"url": url, "field": field, "observation": observation, "deterministic": deterministic}
    rules = "" if form.field else f"Answer with a JSON object with {', '.join(form.fields)}."
    prompt = (Message("system", rules),) if rules else ()
    out = []
    for i in order:
        key = {"split": split, "index": i} if by == "index" else {"seed": i}
        if by == "index" and form.title == _OURS:
            spec = fetch(url, f"{name}/task", key)["task"]
            prompt = tuple(Message(role, content) for role, content in spec["prompt"])
        out.append(
            Task(f"openenv/{url}/{split}/{i}", "openenv", prompt, i, {**shared, "reset": {**(reset or {}), **key}})
        )
    return tuple(out)


def app(name: str, *, splits: tuple[str, ...] = ("train", "validation"), sessions: int = 256, **dials: Any) -> Any:
    """A FastAPI application that serves an environment of ours: ``sessions`` episodes at once, each its own world.

    An action is a ``text``, an observation has ``text``, ``actions`` and ``grammar``, and in its metadata what the
    step's info holds. ``reset(split=, index=)`` chooses a task (its list is served as OpenEnv's task API), or
    ``reset(seed=)`` draws one; ``seed`` also keys the luck.
    """
    _, server = _package()
    pools = {split: envs.tasks(name, split, **dials) for split in splits}
    from branchpoint.env._openenv_server import environment

    env, action, observation = environment(name, envs.make(name), pools, server, _OURS)
    return server.create_fastapi_app(env, action, observation, max_concurrent_envs=sessions, env_name=name)


def serve(name: str, port: int = 8000, **options: Any) -> None:
    """Serve an environment at ``http://127.0.0.1:port`` until interrupted. Only programs of this machine reach it:
    worlds run with the server's rights."""
    application = app(name, **options)
    import uvicorn

    uvicorn.run(application, host="127.0.0.1", port=port, log_level="warning", ws_max_size=2**24)
