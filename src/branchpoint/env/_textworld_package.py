"""The only file to import the packages ``textworld`` and ``jericho`` (its Z-machine). ALFWorld takes the PDDL engine
from here, TextWorld the makers and the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Pddl(NamedTuple):
    """The engine of games written in PDDL: three modules, and the class that holds an entity's names."""

    pddl: Any
    textgen: Any
    logic: Any
    entity: Any


class Makers(NamedTuple):
    """``make``: {challenge: (settings, options) -> game}; ``compile``: (game, options) writes game and metadata."""

    make: dict[str, Callable[..., Any]]
    options: type
    compile: Callable[..., str]
    maker: Any
    progression: Any
    inform: Any
    knowledge: Any


class Player(NamedTuple):
    """What a compiled game is played with. ``interpreter(path, seed)`` is the Z-machine; ``tagged(text, names)`` and
    ``events(text)`` give the package's own marks in its text, and the text without them; the rest is the logic that
    admissible commands come from."""

    interpreter: Any
    tagged: Callable[..., Any]
    events: Callable[..., Any]
    state: Any
    fact: Any
    entity: Any
    knowledge: Any
    inform: Any


@contextmanager
def _luck_kept() -> Iterator[None]:
    """Importing the package draws a number from numpy's global generator."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


@functools.cache
def pddl_engine() -> Pddl:
    """Raises ImportError without the package."""
    with _luck_kept():
        from textworld import logic
        from textworld.envs.pddl import logic as pddl
        from textworld.envs.pddl import textgen
        from textworld.generator.game import EntityInfo
    return Pddl(pddl, textgen, logic, EntityInfo)


@contextmanager
def _named() -> Iterator[None]:
    try:
        with _luck_kept():
            yield
    except ImportError as error:
        raise ImportError(
            f'TextWorld games need the package textworld: pip install "branchpoint[textworld]" ({error})'
        ) from error


@functools.cache
def makers() -> Makers:
    """Raises ImportError that names the extra."""
    with _named():
        from textworld import GameMaker, GameOptions
        from textworld.challenges import CHALLENGES
        from textworld.generator import compile_game
        from textworld.generator.data import KnowledgeBase
        from textworld.generator.game import GameProgression
        from textworld.generator.inform7 import Inform7Game
    make = {name: make for name, (_, make, _) in CHALLENGES.items()}
    return Makers(make, GameOptions, compile_game, GameMaker, GameProgression, Inform7Game, KnowledgeBase)


@functools.cache
def player() -> Player:
    """Raises ImportError that names the extra."""
    with _named():
        from jericho import FrotzEnv
        from textworld.envs.wrappers import tw_inform7
        from textworld.generator.data import KnowledgeBase
        from textworld.generator.game import EntityInfo
        from textworld.generator.inform7 import Inform7Game
        from textworld.logic import Proposition, State
    tagged, events = tw_inform7._detect_extra_infos, tw_inform7._detect_i7_events_debug_tags
    return Player(FrotzEnv, tagged, events, State, Proposition, EntityInfo, KnowledgeBase, Inform7Game)


def rules() -> list[str]:
    """The rules of all kinds of games, as texts: those that the maker, which sorts the files, writes into a game.

    Raises ImportError that names the extra.
    """
    with _named():
        from textworld import challenges
        from textworld.generator.data import LOGIC_DATA_PATH
    own = Path(challenges.__file__).parent
    cooking = own / "tw_cooking" / "textworld_data"
    folders = [Path(LOGIC_DATA_PATH), own / "tw_coin_collector" / "textworld_data" / "logic"]
    folders += [own / "tw_treasure_hunter" / "textworld_data" / "logic", cooking / "logic", cooking / "logic_drop"]
    texts = ("".join(path.read_text() + "\n" for path in sorted(folder.glob("*.twl"))) for folder in folders)
    return list(dict.fromkeys(texts))


@functools.cache
def version() -> str:
    """Of the package ``textworld``."""
    from importlib.metadata import version

    return version("textworld")
