"""The plain ALFWorld packages, for comparison: plays the games it is given on standard input, as they come.

In: a JSON line for a game: problem, goal, seed, steps. Out, JSON lines: first ``[seconds of load, seconds of reset]``,
then ``[seconds, command, feedback, admissible commands, score, done]`` of the reset and of every step. It runs in a
process of its own, since ``branchpoint.env.alfworld`` makes the packages faster in the process that uses it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any


def choose(luck: random.Random, commands: Sequence[str]) -> str:
    """A command: any of them, half of the time one that does more than to walk about, now and then one that is none."""
    if luck.random() < 0.03:
        return luck.choice(("fly to moon 1", "", "go to", "take  mug 1 from desk 1", "LOOK"))
    acts = [command for command in commands if not command.startswith(("go to ", "examine ", "help", "look", "inv"))]
    return luck.choice(acts if acts and luck.random() < 0.5 else commands)


def environment() -> tuple[Any, str, str]:
    """An environment of the packages, the domain, and the grammar without a goal."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from textworld.envs import PddlEnv

    plain = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
    with open(ALFRED_PDDL_PATH) as domain, open(ALFRED_TWL2_PATH) as grammar:
        return AlfredDemangler(plain, shuffle=False), domain.read(), grammar.read()


def play(game: dict[str, Any], made: tuple[Any, str, str]) -> None:
    """Play one game and write what it says."""
    env, domain, grammar = made
    luck = random.Random(game["seed"])
    start = time.perf_counter()
    grammar = grammar.replace("UNKNOWN GOAL", game["goal"])
    env.load({"pddl_domain": domain, "grammar": grammar, "pddl_problem": game["problem"]})
    loaded = time.perf_counter()
    state, score, done, command = env.reset(), 0, False, ""
    print(json.dumps([loaded - start, time.perf_counter() - loaded]))
    seconds = 0.0
    for turn in range(game["steps"] + 1):
        said = [seconds, command, state.feedback, list(state["admissible_commands"]), score, done]
        print(json.dumps(said), flush=True)
        if done or turn == game["steps"]:
            return
        command = choose(luck, state["admissible_commands"])
        start = time.perf_counter()
        state, score, done = env.step(command)
        seconds = time.perf_counter() - start


def main() -> None:
    made = environment()
    for line in sys.stdin:
        play(json.loads(line), made)


if __name__ == "__main__":
    main()
