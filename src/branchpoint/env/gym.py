"""Any Gymnasium environment with text or discrete actions as a world, and any world as a Gymnasium environment.

Dials (``Task.metadata``, set by :func:`tasks`):

* ``id``: the registered id, ``package:Name-v0`` where a package has to be imported first. ``kwargs``: for its maker.
* ``seed``: of ``reset``: the level. It is the task's own, so all rollouts of a task begin alike.
* ``actions``: names of the discrete actions in order; None: the environment's own (an ``actions`` enum or
  ``get_action_meanings()``), else the numbers.
* ``observation``: ``auto`` (text as it is, MiniGrid views as sentences, the rest as Python values), ``str``, ``map``
  (MiniGrid views as a map), ``render`` (the environment's ``ansi`` rendering), or ``module:function``, called with the
  observation and the info.
* ``max_steps``: a step limit in place of the registered one.
* ``luck``: ``keyed`` draws the chance of step n from the branch's noise, so siblings meet the same or their own luck
  as the run asks; ``seed`` leaves the generator as ``reset(seed)`` made it, as plain Gymnasium does.

Needs ``pip install "branchpoint[gym]"``. No snapshot of its own: fork the process, or (most pure-Python environments)
copy the object.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache
from string import printable
from typing import Any, Literal, NamedTuple, cast

from branchpoint import env as envs
from branchpoint.env import _grid_text
from branchpoint.noise import Noise
from branchpoint.world import EnvironmentFailure, Message, Step, Task, World

Luck = Literal["keyed", "seed"]
POOLS: Mapping[str, tuple[int, int]] = {"train": (0, 10_000), "validation": (10_000, 1_000), "test": (11_000, 1_000)}
"""First seed and number of seeds of each split."""
LONGEST = 20_000
"""Characters of an observation beyond which it is refused: a picture has no text."""
_COLOURED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class Dials(NamedTuple):
    """The settings of a task, checked when it is opened."""

    id: str
    seed: int = 0
    kwargs: Mapping[str, Any] | None = None
    actions: tuple[str, ...] | None = None
    observation: str = "auto"
    max_steps: int | None = None
    luck: Luck = "keyed"

    @classmethod
    def of(cls, task: Task) -> Dials:
        if "id" not in task.metadata:
            raise EnvironmentFailure(f"task {task.id}: metadata has no 'id'; make tasks with gym.tasks()")
        return cls(**{name: task.metadata[name] for name in cls._fields if name in task.metadata})


def _package() -> Any:
    try:
        import gymnasium
    except ImportError as e:
        raise ImportError('no package gymnasium: pip install "branchpoint[gym]"') from e
    return gymnasium


def open_env(dials: Dials) -> Any:
    """The Gymnasium environment. Raises ValueError, naming the dial, when it cannot be had."""
    gymnasium = _package()
    how: dict[str, Any] = dict(dials.kwargs or {})
    if dials.observation == "render":
        how["render_mode"] = "ansi"
    try:
        return gymnasium.make(dials.id, max_episode_steps=dials.max_steps, disable_env_checker=True, **how)
    except (gymnasium.error.Error, ImportError, TypeError, AttributeError) as e:
        raise ValueError(f"id {dials.id!r} cannot be made: {' '.join(str(e).split())}") from e


def begin(env: Any, dials: Dials) -> tuple[Any, Mapping[str, Any]]:
    """Reset to the dials' level: the observation and the info."""
    with redirect_stdout(io.StringIO()):  # MiniGrid prints every layout that it rejects
        return env.reset(seed=dials.seed)


class Vocabulary(NamedTuple):
    """How an action is written: ``names`` of the discrete actions from ``start`` on, or any text (``names`` None) of
    ``low`` to ``high`` characters out of ``charset``."""

    names: tuple[str, ...] | None
    start: int = 0
    charset: frozenset[str] = frozenset()
    low: int = 0
    high: int = 0

    @classmethod
    def of(cls, env: Any, names: tuple[str, ...] | None = None) -> Vocabulary:
        """Raises ValueError for an action space that is neither Discrete nor Text, or names that do not fit it."""
        spaces = _package().spaces
        space = env.action_space
        if isinstance(space, spaces.Text):
            return cls(None, 0, frozenset(space.character_set), space.min_length, space.max_length)
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"action space {space} is neither Discrete nor Text; wrap the environment so that it is")
        n, start = int(space.n), int(space.start)
        names = tuple(names) if names is not None else _own_names(env, n, start)
        if len(names) != n or len({_norm(a) for a in names}) != n or not all(map(_norm, names)):
            raise ValueError(f"actions must be {n} different names, one for each action; got {names!r:.200}")
        return cls(names, start)

    def read(self, action: str) -> tuple[Any, str]:
        """The environment's action, and what is wrong with the text if it is none."""
        if self.names is None:
            if not self.low <= len(action) <= self.high:
                return None, f"an action has {self.low} to {self.high} characters"
            odd = sorted(set(action) - self.charset)
            return action, f"an action cannot hold {odd[0]!r}" if odd else ""
        known = {_norm(name): i for i, name in enumerate(self.names)}
        if (at := known.get(_norm(action))) is not None:
            return self.start + at, ""
        more = ", ..." if len(self.names) > 30 else ""
        return None, f"no such action; actions: {', '.join(self.names[:30])}{more}"

    def listed(self, mask: Any) -> tuple[str, ...]:
        """The actions of a step; ``mask`` (Gymnasium's ``info["action_mask"]``, or None) takes out those without
        effect."""
        names = self.names or ()
        if mask is None or len(mask) != len(names):
            return names
        return tuple(name for name, on in zip(names, mask, strict=True) if on) or names

    def rules(self) -> str:
        if self.names is None:
            return "Reply with the text of your action and nothing else."
        return f"Reply with one action a turn and nothing else. Actions: {', '.join(self.names)}."


def _norm(name: str) -> str:
    return " ".join(name.split()).casefold()


def _own_names(env: Any, n: int, start: int) -> tuple[str, ...]:
    inner = env.unwrapped
    actions = getattr(inner, "actions", None)
    if isinstance(actions, type) and len(members := getattr(actions, "__members__", {})) == n:
        by_value = {int(member): name for name, member in members.items()}
        if set(by_value) == set(range(start, start + n)):
            return tuple(by_value[i] for i in range(start, start + n))
    meanings = getattr(inner, "get_action_meanings", None)
    if callable(meanings):
        return tuple(str(m).lower() for m in cast("Callable[[], list[str]]", meanings)())
    return tuple(str(start + i) for i in range(n))


class GymWorld:
    """One episode. Reward as the environment gives it; ``done`` when terminated, ``truncated`` when only truncated.

    A text that is no action changes nothing and says which there are. ``info``: what of the environment's info is
    JSON, ``success`` where it holds ``success`` or ``is_success``, ``invalid`` after a text that is no action.
    """

    def __init__(self, task: Task) -> None:
        self._dials = Dials.of(task)
        try:
            self._env = open_env(self._dials)
            self._words = Vocabulary.of(self._env, self._dials.actions)
            self._render = _renderer(self._dials.observation)
        except ValueError as e:
            raise EnvironmentFailure(f"task {task.id}: {e}") from e
        self._noise = Noise(task.seed, task.seed)
        self._turn = 0
        self._over = True
        self._listed: tuple[str, ...] = ()

    def reset(self) -> Step:
        """The level of the task's seed."""
        observation, info = begin(self._env, self._dials)
        self._turn, self._over = 0, False
        return self._show(observation, 0.0, info)

    def reseed(self, noise: Noise) -> None:
        """Use this luck from the next step on (``luck="keyed"``)."""
        self._noise = noise

    def step(self, action: str) -> Step:
        """Play an action by name (letter case and outer blanks are free), or as text."""
        if self._over:
            raise EnvironmentFailure(f"{self._dials.id}: the episode has not started or is over; call reset()")
        move, problem = self._words.read(action)
        if problem:
            return Step(problem, actions=self._listed, info={"invalid": True})
        if self._dials.luck == "keyed":
            self._env.unwrapped.np_random = self._noise.at("gym", self._turn)
        observation, reward, terminated, truncated, info = self._env.step(move)
        self._turn += 1
        self._over = bool(terminated or truncated)
        return self._show(observation, float(reward), info, bool(terminated), bool(truncated and not terminated))

    def close(self) -> None:
        self._over = True
        self._env.close()

    def _show(
        self, observation: Any, reward: float, info: Mapping[str, Any], done: bool = False, truncated: bool = False
    ) -> Step:
        text = _tidy(self._env.render()) if self._dials.observation == "render" else self._render(observation, info)
        if len(text) > LONGEST:
            raise EnvironmentFailure(
                f"{self._dials.id}: the observation has {len(text)} characters as text; set the dial 'observation' to "
                "a 'module:function' that describes it"
            )
        self._listed = () if done or truncated else self._words.listed(info.get("action_mask"))
        return Step(text, reward, done, truncated, self._listed, info=_facts(info))


def _renderer(name: str) -> Callable[[Any, Mapping[str, Any]], str]:
    if name == "auto":
        return _auto
    if name == "map":
        return lambda observation, info: _grid_text.chart(observation)
    if name in ("str", "render"):
        return lambda observation, info: str(plain(observation))
    if ":" not in name:
        raise ValueError(f"observation is {name!r}; use auto, str, map, render or 'module:function'")
    return cast("Callable[[Any, Mapping[str, Any]], str]", envs.make(name))


def _auto(observation: Any, _: Mapping[str, Any]) -> str:
    if isinstance(observation, str):
        return observation
    if _grid_text.is_grid(observation):
        return _grid_text.sentences(observation)
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {plain(value)}" for name, value in observation.items())
    return str(plain(observation))


def plain(value: Any) -> Any:
    """Python values for numpy's: arrays become lists, numpy scalars numbers (floats to 6 significant digits)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([plain(v) for v in value]) if type(value) in (tuple, list) else [plain(v) for v in value]
    return value


def _tidy(drawn: Any) -> str:
    """An ``ansi`` rendering without control codes; what is coloured stands in brackets."""
    text = _COLOURED.sub(lambda m: f"[{m[1]}]", str(drawn))
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).strip("\n")


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, raw in info.items():
        value = plain(raw)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        if name != "action_mask":
            facts[str(name)] = value
    for name in ("success", "is_success"):
        value = facts.get(name)
        if isinstance(value, bool | int | float) and math.isfinite(value):
            facts["success"] = bool(value)
            break
    return facts


def make(task: Task) -> GymWorld:
    """The world of a task."""
    return GymWorld(task)


def tasks(
    split: str,
    n: int | None = None,
    seed: int = 0,
    *,
    id: str = "FrozenLake-v1",
    kwargs: Mapping[str, Any] | None = None,
    actions: tuple[str, ...] | list[str] | None = None,
    observation: str = "auto",
    max_steps: int | None = None,
    luck: Luck = "keyed",
    root: str = "gym",
) -> tuple[Task, ...]:
    """``n`` levels of a split (all when None) in an order keyed by ``seed``: train has 10,000 seeds, validation and
    test 1,000 each, none shared. ``root``: the name that builds their worlds.

    Raises ValueError naming the argument that cannot be met.
    """
    if split not in POOLS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(POOLS)}")
    first, size = POOLS[split]
    if n is not None and not 0 < n <= size:
        raise ValueError(f"n is {n}; {split} has {size} seeds")
    if luck not in ("keyed", "seed"):
        raise ValueError(f"luck is {luck!r}; use 'keyed' or 'seed'")
    _renderer(observation)
    dials = Dials(id, 0, kwargs, None if actions is None else tuple(actions), observation, max_steps, luck)
    env = open_env(dials)
    try:
        prompt = (Message("system", Vocabulary.of(env, dials.actions).rules()),)
    finally:
        env.close()
    shared = {k: list(v) if isinstance(v, tuple) else v for k, v in dials._asdict().items() if v is not None}
    order = Noise(seed).at("gym", "order", split).permutation(size)
    levels = (first + int(i) for i in order[:n])
    return tuple(Task(f"{root}/{id}/{split}/{s}", root, prompt, s, {**shared, "seed": s}) for s in levels)


def as_gymnasium(
    name: str,
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    turns: int = 100,
    longest: int = 4096,
    charset: str = printable,
    **dials: Any,
) -> Any:
    """The tasks of an environment of ours as one ``gymnasium.Env`` with text observations and actions.

    ``reset(seed=...)`` draws the task and its luck; ``options={"task": i}`` chooses the task. ``info`` holds ``task``,
    ``actions`` (those admissible, if they can be listed), ``grammar`` and what the step's own info holds. Episodes are
    truncated after ``turns``. A Gymnasium text space fixes length and characters: observations are cut to ``longest``
    characters, and characters that are not in ``charset`` become ``?``.
    """
    if longest < 1 or "?" not in charset:
        raise ValueError("longest must be positive, and charset must hold '?'")
    return _exported()(envs.make(name), envs.tasks(name, split, n, seed, **dials), turns, longest, frozenset(charset))


@cache
def _exported() -> Any:
    gymnasium = _package()

    class BranchpointEnv(gymnasium.Env):
        """A Branchpoint environment behind Gymnasium's interface; see :func:`as_gymnasium`."""

        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own convention)

        def __init__(
            self, make: Any, tasks: tuple[Task, ...], turns: int, longest: int, charset: frozenset[str]
        ) -> None:
            self._make, self._tasks, self._turns, self._left = make, tasks, turns, 0
            self._longest, self._charset = longest, charset
            self._world: World | None = None
            self.observation_space = gymnasium.spaces.Text(longest, min_length=0, charset=charset)
            self.action_space = gymnasium.spaces.Text(longest, min_length=0, charset=charset)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
            super().reset(seed=seed)
            chosen, luck = (int(x) for x in self.np_random.integers((len(self._tasks), 2**62)))
            task = self._tasks[(options or {}).get("task", chosen)]
            self.close()
            self._world, self._left, noise = self._make(task), self._turns, Noise(luck, luck)
            if (reseed := getattr(self._world, "reseed", None)) is not None:
                reseed(noise)
            step = cast(World, self._world).reset()
            return self._text(step), {"task": task.id, **self._info(step)}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self._world is None:
                raise EnvironmentFailure("the episode has not started or is over; call reset()")
            step = self._world.step(action)
            self._left -= 1
            cut = step.truncated or (self._left <= 0 and not step.done)
            return self._text(step), step.reward, step.done, cut, self._info(step)

        def close(self) -> None:
            if self._world is not None:
                self._world.close()
            self._world = None

        def _text(self, step: Step) -> str:
            return "".join(c if c in self._charset else "?" for c in step.observation[: self._longest])

        def _info(self, step: Step) -> dict[str, Any]:
            return {**step.info, "actions": step.actions, "grammar": step.grammar}

    return BranchpointEnv
