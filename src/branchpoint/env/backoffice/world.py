"""The world: text in, steps out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from branchpoint.env.backoffice.calls import GRAMMAR, Call, Malformed, parse
from branchpoint.env.backoffice.desk import same
from branchpoint.env.backoffice.dials import Dials
from branchpoint.env.backoffice.episode import Episode, malformed, serve
from branchpoint.env.backoffice.luck import flipped
from branchpoint.env.backoffice.menu import Seen, menu
from branchpoint.env.backoffice.render import render
from branchpoint.env.backoffice.scenario import scenario
from branchpoint.env.backoffice.tools import Payload, error
from branchpoint.env.backoffice.wording import message, understand
from branchpoint.noise import Noise
from branchpoint.world import Step, Task


class BackOffice:
    """One episode at the desk.

    A text that is no call changes nothing and costs nothing: one bounded error says how to write a call (bound the
    turns of an episode outside). Every tool call but ``finish`` counts against the budget; a call beyond it ends the
    episode, truncated. ``Step.info``: ``calls``, ``budget``, ``fate`` (what befell the call, or None), ``malformed``,
    and at the end ``success`` (the true outcome) and ``observed`` (after grader noise; the reward).
    """

    def __init__(self, task: Task) -> None:
        self._dials = Dials.of(task.metadata)
        if not {"split", "index"} <= task.metadata.keys():
            raise ValueError(f"task {task.id!r} has no split and index in its metadata; make tasks with tasks(split)")
        self._scenario = scenario(task.metadata["split"], task.metadata["index"], self._dials)
        # The grammar is of compact calls; under the JSON style any text may be tried.
        self._grammar = GRAMMAR if self._dials.style == "compact" else ""
        self._noise = Noise(task.seed, task.seed)
        self._message = message(self._scenario, self._dials.style, self._dials.wording)
        self._first = self._start()
        self._state = self._first

    def reset(self) -> Step:
        """The customer's message."""
        self._state = self._first
        return self._show(self._message)

    def reseed(self, noise: Noise) -> None:
        """Use this luck from now on; what has befallen so far stays."""
        self._noise = noise

    def get_state(self) -> Episode:
        """The whole state, immutable: keeping it is the snapshot."""
        return self._state

    def set_state(self, state: Episode) -> None:
        """Go back (or on) to a state of the same task."""
        self._state = state

    def close(self) -> None:
        self._state = replace(self._state, over=True)

    def step(self, action: str) -> Step:
        """Play one call. Never raises for a text, however odd."""
        state = self._state
        if state.over:
            return self._answer(error("EPISODE_FINISHED", "the episode is over"), done=True)
        call = parse(action)
        if isinstance(call, Malformed):
            payload = malformed(call.problem, self._dials.style == "compact")
            return self._answer(payload, malformed=call.problem)
        if call.tool == "finish":
            return self._finish(call)
        if state.calls >= self._scenario.budget:
            self._state = replace(state, over=True)
            return self._answer(
                error("BUDGET_EXHAUSTED", "no tool call is left"), truncated=True, success=False, observed=False
            )
        state, payload, fate = serve(state, call, self._noise, self._dials)
        text = render(payload, self._dials.style)
        if state.seen is not None:
            seen = state.seen.note(call, payload)
            if seen is not state.seen:
                state = replace(state, seen=seen, actions=menu(seen, self._dials.menu_size))
        self._state = state
        return self._show(text, fate=None if fate is None else fate.kind)

    def _finish(self, call: Call) -> Step:
        if problem := call.problem:
            return self._answer(error("INVALID_ARGUMENT", problem))
        s = self._scenario
        success = same(self._state.desk, s.wanted, s.fixed)
        observed = success and not flipped(self._noise, self._dials.q)
        self._state = replace(self._state, over=True)
        return self._answer({"finished": "yes"}, float(observed), done=True, success=success, observed=observed)

    def _start(self) -> Episode:
        desk = self._scenario.desk
        if not self._dials.menu:
            return Episode(desk, desk)
        seen = Seen.first(understand(self._message))
        return Episode(desk, desk, seen, actions=menu(seen, self._dials.menu_size))

    def _answer(
        self, payload: Payload, reward: float = 0.0, done: bool = False, truncated: bool = False, **info: Any
    ) -> Step:
        return self._show(render(payload, self._dials.style), reward, done, truncated, **info)

    def _show(self, text: str, reward: float = 0.0, done: bool = False, truncated: bool = False, **info: Any) -> Step:
        state, ended = self._state, done or truncated
        actions = () if ended else state.actions
        facts = {"calls": state.calls, "budget": self._scenario.budget, **info}
        return Step(text, reward, done, truncated, actions, self._grammar if not actions and not ended else "", facts)
