"""One live ALFWorld game. The only file to import the packages ``alfworld``, ``textworld`` and ``fast_downward``.

The text, the admissible commands and the goal check are the packages' own; tests compare them byte for byte with
``AlfredDemangler(PddlEnv(...))``. What differs is the time: grammar rules are parsed once a process, a problem is
translated to SAS once (and kept on disk, if a folder is given), a command is worded once a game, and the 33 MB planner
library that the packages copy for every environment is used again when a game is closed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from branchpoint.noise import digest
from branchpoint.world import EnvironmentFailure

GOAL = "UNKNOWN GOAL"


class _Packages(NamedTuple):
    domain: str
    grammar: str
    goals: dict[str, Any]
    logic: Any
    textgen: Any
    rule: Any
    entity: Any
    demangler: Any
    downward: Any
    translate: Any


@functools.cache
def _packages() -> _Packages:
    """Import the packages without the side effects of their import: a folder in the home folder, changed variables."""
    before = os.environ.get("ALFWORLD_DATA")
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ALFWORLD_DATA"] = before or folder
            import alfworld.info as info
            import fast_downward
            from alfworld.agents.utils.misc import Demangler
            from alfworld.gen.goal_library import gdict
            from textworld.envs.pddl import logic, textgen
            from textworld.generator.game import EntityInfo
            from textworld.logic import Rule
    except ImportError as error:
        raise ImportError(
            f'ALFWorld needs the packages alfworld and textworld[pddl]: pip install "branchpoint[alfworld]" ({error})'
        ) from error
    finally:
        if before is None:
            os.environ.pop("ALFWORLD_DATA", None)
    domain, grammar = (Path(path).read_text() for path in (info.ALFRED_PDDL_PATH, info.ALFRED_TWL2_PATH))
    plain = fast_downward.pddl2sas
    found = _Packages(domain, grammar, gdict, logic, textgen, Rule, EntityInfo, Demangler, fast_downward, plain)
    _memoise(found)
    return found


def _memoise(packages: _Packages) -> None:
    """Parse each grammar text once a process. Same results: whoever asks gets a copy of what was parsed."""
    parse_symbols = packages.textgen._parse_and_convert
    parsed: dict[tuple[str, str | None], Any] = {}

    def symbols(text: str, rule_name: str | None = None, **options: Any) -> Any:
        if options.get("trace"):
            return parse_symbols(text, rule_name=rule_name, **options)
        key = (text, rule_name)
        if key not in parsed:
            parsed[key] = parse_symbols(text, rule_name=rule_name)
        return copy.deepcopy(parsed[key])

    packages.textgen._parse_and_convert = symbols
    packages.textgen.copy_context = _copy_context
    packages.logic._parse_and_convert = functools.lru_cache(maxsize=4)(packages.logic._parse_and_convert)
    packages.rule.parse_conjunctive_query = staticmethod(
        functools.lru_cache(None)(packages.rule.parse_conjunctive_query)
    )


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """A context whose two mappings may be extended. Their values are never changed by the grammar."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


# --- translation PDDL -> SAS, the slow part of loading a game -------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The translator reads its options from ``sys.argv`` when it is imported, overwrites it, and prints warnings."""
    arguments = sys.argv
    sys.argv = ["translate.py", "domain", "task"]
    try:
        with contextlib.redirect_stdout(None):
            yield
    finally:
        sys.argv = arguments


def _parse(problem: str) -> Any:
    """The packages' task object (types, objects, actions, initial atoms) without grounding it."""
    with _quiet():
        from fast_downward.translate import normalize
        from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions

        domain, text = (lisp_parser.parse_nested_list(part.split("\n")) for part in (_packages().domain, problem))
        task = parsing_functions.parse_task(domain, text)
        normalize.normalize(task)
    return task


def _ground(problem: str, optimize: bool) -> tuple[Any, str]:
    with _quiet():
        return _packages().translate(_packages().domain, problem, optimize=optimize)


def _translate(problem: str, cache: Path | None) -> tuple[Any, str]:
    """Task object and SAS text of a problem; the text is kept in ``cache``, with a digest that is checked on use."""
    if cache is None:
        return _ground(problem, optimize=False)
    key = hashlib.sha256(f"{_version()}\0{_packages().domain}\0{problem}".encode()).hexdigest()
    path = cache / f"{key}.sas.zst"
    with contextlib.suppress(OSError, zstandard.ZstdError):
        raw = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        if hashlib.sha256(raw[32:]).digest() == raw[:32]:
            return _parse(problem), raw[32:].decode()
    task, sas = _ground(problem, optimize=False)
    raw = sas.encode()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as draft:
        draft.write(zstandard.ZstdCompressor(level=3).compress(hashlib.sha256(raw).digest() + raw))
    os.replace(draft.name, path)
    return task, sas


@functools.cache
def _version() -> str:
    from importlib.metadata import version

    return version("fast_downward_textworld")


@contextlib.contextmanager
def _translator(translate: Callable[..., tuple[Any, str]]) -> Iterator[None]:
    """Let the packages' state constructor, which calls ``fast_downward.pddl2sas`` by name, call ``translate``."""
    downward = _packages().downward
    plain = downward.pddl2sas
    downward.pddl2sas = translate
    try:
        yield
    finally:
        downward.pddl2sas = plain


# --- the planner library --------------------------------------------------------------------------------------------

_FREE: list[Any] = []
"""Libraries of closed games. One library holds one game's state; after a fork each process has its own copy of both."""


def _borrow() -> Any:
    return _FREE.pop() if _FREE else _packages().downward.load_lib()


@functools.cache
def _mentioned(template: str) -> frozenset[str]:
    """The words of a command template, the action's parameters among them."""
    return frozenset(re.findall(r"\w+", template))


class Game:
    """A live game: ``feedback``, ``moves`` (the packages' action of each admissible command, sorted by command) and
    ``won`` describe the state just reached."""

    def __init__(self, problem: str, goal: str, cache: Path | None = None, planning: bool = False) -> None:
        """``planning``: also translate the problem for the planner, for :meth:`plan`."""
        packages = _packages()
        self._logic = packages.logic.GameLogic(domain=packages.domain, grammar=packages.grammar)
        known = _translate(problem, cache)

        def translate(domain: str, text: str, verbose: bool = False, optimize: bool = False) -> tuple[Any, str]:
            return _ground(problem, optimize=True) if optimize and planning else known

        self._lib: Any = _borrow()
        with _translator(translate):
            self._state = packages.logic.PddlState(self._lib, problem, self._logic)
        self._entities = self._name_entities()
        self._names = {name: entity.name for name, entity in self._entities.items()}
        self._worded: dict[tuple[str, ...], str] = {}
        intro = self._logic.grammar.derive("#intro#", self._context({}))
        self.feedback: str = intro.replace(GOAL, goal)
        self._look()

    def _name_entities(self) -> dict[str, Any]:
        packages = _packages()
        arguments = {v.name: v.type for fact in self._state.facts for v in fact.arguments}
        entities = {name: packages.entity(name, arguments[name]) for name in sorted(arguments)}
        names = packages.demangler(game_infos=entities, shuffle=False)
        for entity in entities.values():
            entity.name = names.demangle_alfred_name(entity.id)
            entity.definite, entity.indefinite = "the", "a"
        return entities

    def _context(self, mapping: dict[Any, Any]) -> dict[str, Any]:
        """What the grammar words a text from: the state, and the arguments of an action."""
        return {
            "state": self._state,
            "facts": (),
            "variables": {slot.name: self._entities[value.name] for slot, value in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entities,
        }

    def _command(self, action: Any) -> str:
        """The command of an action. It depends on the arguments that its template mentions and on constants of the game
        (names; where receptacles stand), so it is worded once."""
        mentioned = _mentioned(action.command_template)
        arguments = (value.name for slot, value in action.mapping.items() if slot.name in mentioned)
        key = (action.name, *arguments)
        if key not in self._worded:
            context = self._context(action.mapping)
            action.command_template = self._logic.grammar.derive(action.command_template, context)
            self._worded[key] = action.format_command(self._names)
        return self._worded[key]

    def _look(self) -> None:
        moves: dict[str, Any] = {}
        for action in self._state.all_applicable_actions():
            moves.setdefault(self._command(action), action)
        self.moves = dict(sorted(moves.items()))
        self.won = bool(self._state.check_goal())

    def play(self, command: str) -> None:
        """Carry out an admissible command; anything else leaves the state as it is ("Nothing happens.")."""
        action = self.moves.get(command)
        if action is None:
            self.feedback = "Nothing happens."
            return
        self._state.apply(action)
        self.feedback = self._logic.grammar.derive(action.feedback_rule, self._context(action.mapping))
        self._look()

    def plan(self) -> tuple[str, ...]:
        """The commands of a plan from here to the goal by the packages' planner, empty when it finds none."""
        return tuple(self._state.replan(self._entities))

    def facts(self) -> list[tuple[str, tuple[str, ...]]]:
        """The facts of the state just reached: predicate and arguments, as the engine names them."""
        return [(fact.name, tuple(value.name for value in fact.arguments)) for fact in self._state.facts]

    def name_of(self, entity: str) -> str:
        """What commands call an entity of the engine (``desk 1``)."""
        return self._entities[entity].name

    def close(self) -> None:
        """Give the library back. Harmless when called twice."""
        if self._lib is not None:
            _FREE.append(self._lib)
            self._lib = None


def goal_text(game_id: str, task_type: str, params: dict[str, Any]) -> str:
    """The goal sentence: one of the packages' templates for this type, chosen by the game's name and nothing else."""
    try:
        templates = _packages().goals[task_type]["templates"]
    except KeyError:
        raise EnvironmentFailure(f"game {game_id}: unknown task type {task_type!r}") from None
    words = {"obj": "object_target", "recep": "parent_target", "toggle": "toggle_target", "mrecep": "mrecep_target"}
    template = templates[digest(0, "alfworld", "goal", game_id) % len(templates)]
    return template.format(**{word: params[field].lower() for word, field in words.items()})


def preload() -> None:
    """Do now what the first game of a process does once: import, parse the grammar, load a library."""
    packages = _packages()
    packages.logic.GameLogic(domain=packages.domain, grammar=packages.grammar)
    if not _FREE:
        _FREE.append(_borrow())
