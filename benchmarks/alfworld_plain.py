"""The plain ALFWorld packages, for comparison: plays the games it is given on standard input, as they come.

In: a JSON line for a game: problem, goal, seed, steps. Out, JSON lines: first the seconds of ``load`` and of ``reset``,
then ``[seconds of the step or null, command, feedback, admissible commands, score, done]`` of the reset and of every
step; seconds are ``[by the clock, by the processor]``. It runs in a process of its own, since
``branchpoint.env.alfworld`` makes the packages faster in the process that uses it.

With ``--memoised`` the packages remember what they have parsed and translated, and do not copy deeply what they never
change, which makes a step more than ten times faster: for long comparisons. All else is their own code.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
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


def timed(call: Callable[[], Any]) -> tuple[Any, list[float]]:
    """What a call returns and what it took, by the clock and by the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    return result, [time.perf_counter() - wall, time.process_time() - processor]


def play(game: dict[str, Any], made: tuple[Any, str, str]) -> None:
    """Play one game and write what it says."""
    env, domain, grammar = made
    luck = random.Random(game["seed"])
    grammar = grammar.replace("UNKNOWN GOAL", game["goal"])
    text = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": game["problem"]}
    _, load = timed(lambda: env.load(text))
    state, reset = timed(env.reset)
    print(json.dumps([load, reset]))
    score, done, command, seconds = 0, False, "", None
    for turn in range(game["steps"] + 1):
        said = [seconds, command, state.feedback, list(state["admissible_commands"]), score, done]
        print(json.dumps(said), flush=True)
        if done or turn == game["steps"]:
            return
        command = choose(luck, state["admissible_commands"])
        (state, score, done), seconds = timed(lambda command=command: env.step(command))


def memoise() -> None:
    """Remember parsed grammar texts, queries and translated problems; copy contexts of the grammar shallowly."""
    import fast_downward
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

    parse = functools.cache(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda *texts, **options: copy.deepcopy(parse(*texts, **options))
    textgen.copy_context = lambda context: {
        **context,
        "variables": dict(context["variables"]),
        "mapping": dict(context["mapping"]),
    }
    logic._parse_and_convert = functools.lru_cache(2)(logic._parse_and_convert)
    Rule.parse_conjunctive_query = staticmethod(functools.cache(Rule.parse_conjunctive_query))
    fast_downward.pddl2sas = functools.lru_cache(2)(fast_downward.pddl2sas)


def main() -> None:
    if "--memoised" in sys.argv[1:]:
        memoise()
    made = environment()
    for line in sys.stdin:
        play(json.loads(line), made)


if __name__ == "__main__":
    main()
