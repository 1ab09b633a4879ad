"""One live ALFWorld game. The only file to import the packages ``alfworld`` and ``fast_downward``.

All words are the packages': the domain's rules, the grammar that tells what happened, the names of things, the goals.
Tests compare text, admissible commands and outcomes with ``AlfredDemangler(PddlEnv(...))`` byte for byte. What differs
is the time: the rules are applied to facts by :mod:`branchpoint.env._alfworld_rules` instead of being ground for a
planner library, the grammar is parsed once a process, and a command is worded once a game.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from branchpoint.env import _alfworld_rules as rules
from branchpoint.env._textworld_package import pddl_engine
from branchpoint.noise import digest
from branchpoint.world import EnvironmentFailure

GOAL = "UNKNOWN GOAL"


class _Packages(NamedTuple):
    domain: str
    grammar: str
    goals: dict[str, Any]
    pddl: Any
    textgen: Any
    logic: Any
    entity: Any
    demangler: Any
    downward: Any


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

            engine = pddl_engine()
    except ImportError as error:
        raise ImportError(
            f'ALFWorld needs the packages alfworld and textworld[pddl]: pip install "branchpoint[alfworld]" ({error})'
        ) from error
    finally:
        if before is None:
            os.environ.pop("ALFWORLD_DATA", None)
    domain, grammar = (Path(path).read_text() for path in (info.ALFRED_PDDL_PATH, info.ALFRED_TWL2_PATH))
    found = _Packages(domain, grammar, gdict, *engine, Demangler, fast_downward)
    _memoise(found)
    return found


def _memoise(packages: _Packages) -> None:
    """Parse each grammar text once a process. Same results: whoever asks gets a copy of what was parsed."""
    textgen, rule = packages.textgen, packages.logic.Rule
    parse_symbols = textgen._parse_and_convert
    parsed: dict[tuple[str, str | None], Any] = {}

    def symbols(text: str, rule_name: str | None = None, **options: Any) -> Any:
        if options.get("trace"):
            return parse_symbols(text, rule_name=rule_name, **options)
        key = (text, rule_name)
        if key not in parsed:
            parsed[key] = parse_symbols(text, rule_name=rule_name)
        return copied(parsed[key])

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(part) for part in value]
        if not isinstance(value, textgen.Symbol):
            return value
        symbol = object.__new__(type(value))
        symbol.__dict__.update({name: copied(part) for name, part in value.__dict__.items()})
        return symbol

    textgen._parse_and_convert = symbols
    textgen.deepcopy = copied  # a symbol is changed by the grammar, what it refers to never is
    textgen.copy_context = _copy_context
    textgen.check_flag = functools.cache(textgen.check_flag)
    rule.parse_conjunctive_query = staticmethod(functools.lru_cache(None)(rule.parse_conjunctive_query))


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """A context whose two mappings may be extended. Their values are never changed by the grammar."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


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


@functools.cache
def _logic() -> Any:
    """The packages' grammar and wording of actions, made once a process: games only read them."""
    return _packages().pddl.GameLogic(domain=_packages().domain, grammar=_packages().grammar)


@functools.cache
def _actions() -> tuple[rules.Action, ...]:
    return rules.actions(_packages().domain)


class _Told:
    """What the grammar asks of a state: the answers of ``textworld.logic.State``, looked up by argument.

    As there, different placeholders stand for different things, and answers are sorted by the things' names.
    """

    def __init__(self, state: rules.State) -> None:
        self._state = state
        self.variables = {name: _packages().logic.Variable(name, kind) for name, kind in state.types.items()}

    def all_assignments(self, rule: Any, mapping: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """All mappings from placeholders to variables that extend ``mapping`` and make the rule's conditions hold."""
        yield from self._assign(rule.preconditions, 0, dict(mapping))

    def _assign(self, conditions: Sequence[Any], depth: int, mapping: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        if depth == len(conditions):
            yield mapping
            return
        slots = conditions[depth].parameters
        pattern = (conditions[depth].name, *(mapping[slot].name if slot in mapping else "" for slot in slots))
        known = [place for place, word in enumerate(pattern) if word]
        for fact in sorted(self._state.find(pattern, known[-1])):
            extended = dict(mapping)
            for slot, name in zip(slots, fact[1:], strict=True):
                variable = self.variables[name]
                if slot not in extended:
                    if variable in extended.values() or slot.type not in (variable.type, "object"):
                        break
                    extended[slot] = variable
                elif extended[slot] != variable:
                    break
            else:
                yield from self._assign(conditions, depth + 1, extended)


@functools.cache
def _mentioned(template: str) -> frozenset[str]:
    """The words of a command template, the action's parameters among them."""
    return frozenset(re.findall(r"\w+", template))


class Game:
    """A live game: ``feedback``, ``moves`` (the action of each admissible command, sorted by command) and ``won``
    describe the state just reached; ``played`` are the actions that led to it."""

    def __init__(self, problem: str, goal: str, played: Sequence[rules.Move] = ()) -> None:
        """At the game's start, or where ``played`` leads, without ``feedback`` then."""
        self._problem = problem
        self._state = rules.State(_actions(), problem)
        self._told = _Told(self._state)
        self._entities = self._name_entities()
        self._names = {name: entity.name for name, entity in self._entities.items()}
        self._worded: dict[tuple[str, ...], str] = {}
        self.played: list[rules.Move] = []
        self.feedback = "" if played else _logic().grammar.derive("#intro#", self._context({})).replace(GOAL, goal)
        for move in played:
            self._apply(move)
        self._look()

    def _name_entities(self) -> dict[str, Any]:
        """The packages' name of every thing that a fact of the first state mentions."""
        packages = _packages()
        mentioned = sorted({name for fact in self._state.facts for name in fact[1:]})
        entities = {name: packages.entity(name, self._state.types[name]) for name in mentioned}
        names = packages.demangler(game_infos=entities, shuffle=False)
        for entity in entities.values():
            entity.name = names.demangle_alfred_name(entity.id)
            entity.definite, entity.indefinite = "the", "a"
        return entities

    def _mapping(self, move: rules.Move) -> dict[Any, Any]:
        logic = _packages().logic
        slots = self._state.parameters(move[0])
        return {
            logic.Placeholder(slot.strip("?"), kind): self._told.variables[value]
            for (slot, kind), value in zip(slots, move[1], strict=True)
        }

    def _context(self, mapping: dict[Any, Any]) -> dict[str, Any]:
        """What the grammar words a text from: the state, and the arguments of an action."""
        return {
            "state": self._told,
            "facts": (),
            "variables": {slot.name: self._entities[value.name] for slot, value in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entities,
        }

    def _command(self, move: rules.Move) -> str:
        """The command of an action. It depends on the arguments that its template mentions and on constants of the game
        (names; where receptacles stand), so it is worded once."""
        name, arguments = move
        template = _logic().actions[name].template
        mentioned, slots = _mentioned(template), self._state.parameters(name)
        key = (name, *(value for (slot, _), value in zip(slots, arguments, strict=True) if slot[1:] in mentioned))
        if key not in self._worded:
            text = _logic().grammar.derive(template, self._context(self._mapping(move)))
            self._worded[key] = text.format(**self._names)
        return self._worded[key]

    def _look(self) -> None:
        moves: dict[str, rules.Move] = {}
        for move in self._state.moves():
            moves.setdefault(self._command(move), move)
        self.moves = dict(sorted(moves.items()))
        self.won = self._state.won

    def _apply(self, move: rules.Move) -> None:
        self._state.play(move)
        self.played.append(move)

    def play(self, command: str) -> None:
        """Carry out an admissible command; anything else leaves the state as it is ("Nothing happens.")."""
        move = self.moves.get(command)
        if move is None:
            self.feedback = "Nothing happens."
            return
        self._apply(move)
        rule = _logic().actions[move[0]].feedback_rule
        self.feedback = _logic().grammar.derive(rule, self._context(self._mapping(move)))
        self._look()

    def facts(self) -> list[rules.Fact]:
        """The facts of the state just reached, as the engine names them: predicate and arguments."""
        return sorted(self._state.facts)

    def name_of(self, entity: str) -> str:
        """What commands call an entity of the engine (``desk 1``)."""
        return self._entities[entity].name

    def packages_plan(self) -> tuple[str, ...]:
        """The commands of a shortest plan from the game's start to the goal by the packages' planner, empty when it
        finds none. May take minutes and a gigabyte."""
        packages, library = _packages(), _planner()
        logic = packages.pddl.GameLogic(domain=packages.domain, grammar=packages.grammar)
        try:
            with _quiet():
                return tuple(packages.pddl.PddlState(library, self._problem, logic).replan(self._entities))
        finally:
            library.cleanup()


@functools.cache
def _planner() -> Any:
    """The planner library, one copy a process and never unloaded: copies of it share a registry of functions, and an
    unloaded one crashes the process at its end."""
    return _packages().downward.load_lib()


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
    """Do now what the first game of a process does once: import the packages, read the grammar and the rules."""
    _logic()
    _actions()
