"""The rules of ALFWorld games: the actions of the PDDL domain, applied to the facts of one game.

The packages ground a game into all its operators, thousands, and give them to a planner library. A state allows about
thirty, which are found here by matching the actions' preconditions against its facts. Same operators as the packages':
tests compare them. This is the part of PDDL that ALFWorld uses; anything else raises ValueError.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, product
from typing import Any, NamedTuple

Fact = tuple[str, ...]
"""A predicate and its arguments: objects, or variables (``?x``) in a pattern."""
Move = tuple[str, tuple[str, ...]]
"""An action and its arguments."""
_WORDS = ("and", "or", "not", "exists", "forall", "imply", "when", "increase")


class Lookup(NamedTuple):
    """A pattern to look up when the other variables are known: ``by`` the argument at a place (0: none is known), which
    gives the variables of ``new`` (place, variable, type or "" for any) their values."""

    pattern: Fact
    by: int
    new: tuple[tuple[int, str, str], ...]


class Clause(NamedTuple):
    """Patterns that hold and patterns that do not. ``kinds``: the types of variables. ``plan``: how to look up
    ``holds``; all variables are known then."""

    holds: tuple[Fact, ...] = ()
    lacks: tuple[Fact, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    plan: tuple[Lookup, ...] = ()

    def planned(self, known: Iterable[str] = (), fluents: Container[str] = ()) -> Clause:
        """The same with a plan. It starts with a predicate that actions change (``fluents``): those are true of few
        things. Next is a pattern of which something is known by then, one with fewest unknown variables. A variable
        that occurs in no pattern is given one, ``:type ?x``."""
        met, bound, plan = {word for fact in self.holds for word in fact}, set(known), []
        kinds = {name: kind for name, kind in self.kinds if kind != "object"}  # everything is an object
        left = [*self.holds, *((f":{kind}", name) for name, kind in self.kinds if name not in met)]

        def places(pattern: Fact, known: bool) -> list[int]:
            return [i for i, word in enumerate(pattern) if i and (word[0] != "?" or word in bound) == known]

        def effort(pattern: Fact) -> tuple[bool, bool, int, int]:
            ours, others = len(places(pattern, True)), len(places(pattern, False))
            return not ours, not ours and pattern[0] not in fluents, others, -ours

        while left:
            pattern = min(left, key=effort)
            left.remove(pattern)
            new = tuple((i, pattern[i], kinds.get(pattern[i], "")) for i in places(pattern, False))
            plan.append(Lookup(pattern, max(places(pattern, True), default=0), new))
            bound.update(pattern)
        return self._replace(plan=tuple(plan))


def _all(parts: Iterable[Clause]) -> Clause:
    """The clause that holds where all of these do."""
    holds, lacks, kinds, _ = zip(*parts, strict=True)
    return Clause(tuple(chain(*holds)), tuple(chain(*lacks)), tuple(chain(*kinds)))


class Effect(NamedTuple):
    """Adds or removes a fact, if one of the clauses holds before the action."""

    when: tuple[Clause, ...]
    fact: Fact
    adds: bool


class Action(NamedTuple):
    """``parameters``: (variable, type); ``when``: the action is possible where one of the clauses holds."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    when: tuple[Clause, ...]
    effects: tuple[Effect, ...]


# --- reading --------------------------------------------------------------------------------------------------------


def read(text: str) -> list[Any]:
    """The nested lists of a PDDL text, in lower case, without comments. Raises ValueError for stray parentheses."""
    stack: list[list[Any]] = [[]]
    for word in re.sub(r";.*", "", text).lower().replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            stack.append([])
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            raise ValueError("PDDL: a parenthesis is closed that was not opened")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError("PDDL: expected one list, with as many closing as opening parentheses")
    return stack[0][0]


def typed(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """``a b - agent c`` -> (a, agent), (b, agent), (c, object)."""
    found, names, rest = [], [], iter(words)
    for word in rest:
        if word != "-":
            names.append(word)
            continue
        kind = next(rest)
        found += [(name, kind) for name in names]
        names = []
    return (*found, *((name, "object") for name in names))


def clauses(condition: Sequence[Any], fresh: Iterator[int]) -> tuple[Clause, ...]:
    """A condition in disjunctive normal form. The variables of ``exists`` get names of their own, with numbers from
    ``fresh``."""
    if not condition:
        return (Clause(),)
    head, *parts = condition
    if head == "and":
        return tuple(_all([Clause(), *choice]) for choice in product(*(clauses(part, fresh) for part in parts)))
    if head == "or":
        return tuple(chain(*(clauses(part, fresh) for part in parts)))
    if head == "exists":
        new = {name: (f"{name}.{next(fresh)}", kind) for name, kind in typed(parts[0])}
        inner = _renamed(parts[1], {name: other for name, (other, _) in new.items()})
        return tuple(_all([Clause(kinds=tuple(new.values())), clause]) for clause in clauses(inner, fresh))
    if head == "not":
        return (Clause(lacks=(_atom(parts[0]),)),)
    return (Clause(holds=(_atom(condition),)),)


def _atom(condition: Sequence[Any]) -> Fact:
    if condition[0] in _WORDS or not all(isinstance(word, str) for word in condition):
        raise ValueError(f"PDDL: expected a predicate and its arguments, found {condition[0]!r}")
    return tuple(condition)


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    return names.get(tree, tree) if isinstance(tree, str) else [_renamed(part, names) for part in tree]


def _effects(effect: Sequence[Any], when: tuple[Clause, ...], fresh: Iterator[int]) -> Iterator[Effect]:
    head, *parts = effect
    if head == "and":
        for part in parts:
            yield from _effects(part, when, fresh)
    elif head == "when":
        yield from _effects(parts[1], clauses(parts[0], fresh), fresh)
    elif head == "not":
        yield Effect(when, _atom(parts[0]), False)
    elif head != "increase":  # of the cost, which only a planner needs
        yield Effect(when, _atom(effect), True)


def actions(domain: str) -> tuple[Action, ...]:
    """The actions of a PDDL domain. Raises ValueError for what this module does not know."""
    found, fresh = [], count()
    for section in read(domain):
        if section[0] == ":action":
            parts = dict(zip(section[2::2], section[3::2], strict=True))
            when = clauses(parts.get(":precondition", ()), fresh)
            effects = tuple(_effects(parts[":effect"], (Clause(),), fresh))
            found.append(Action(section[1], typed(parts[":parameters"]), when, effects))
    fluents = {effect.fact[0] for action in found for effect in action.effects}
    return tuple(_planned(action, fluents) for action in found)


def _planned(action: Action, fluents: Container[str]) -> Action:
    given, known = Clause(kinds=action.parameters), [name for name, _ in action.parameters]
    return action._replace(
        when=tuple(_all([given, clause]).planned((), fluents) for clause in action.when),
        effects=tuple(e._replace(when=tuple(c.planned(known, fluents) for c in e.when)) for e in action.effects),
    )


# --- playing --------------------------------------------------------------------------------------------------------


def _filled(pattern: Fact, binding: Mapping[str, str]) -> Fact:
    return tuple([binding.get(word, word) for word in pattern])


class State:
    """The facts of a game, which :meth:`play` changes. ``types``: the type of every object.

    What an action has removed can be looked up as a fact ``not_...``, as in the packages; what was never there cannot.
    """

    def __init__(self, actions: Sequence[Action], problem: str) -> None:
        """Raises ValueError for a problem that cannot be read."""
        sections = {section[0]: section[1:] for section in read(problem)[1:]}
        self.types = dict(typed(sections[":objects"]))
        try:
            self.facts = set(map(tuple, sections[":init"]))
        except TypeError:
            raise ValueError("PDDL: the first state may only list facts; found a list within one") from None
        self._by_predicate: defaultdict[str, set[Fact]] = defaultdict(set)
        for name, kind in self.types.items():
            self._by_predicate[f":{kind}"].add((f":{kind}", name))
        self._by_predicate[":object"] = {(":object", name) for name in self.types}
        for fact in self.facts:
            self._by_predicate[fact[0]].add(fact)
        self._by_argument: dict[tuple[str, int], defaultdict[str, set[Fact]]] = {}
        self._actions = {action.name: action for action in actions}
        self._goal = [clause.planned() for clause in clauses(sections[":goal"][0], count())]

    def _set(self, fact: Fact, holds: bool) -> None:
        put = set.add if holds else set.discard
        put(self._by_predicate[fact[0]], fact)
        for (predicate, position), facts in self._by_argument.items():
            if predicate == fact[0]:
                put(facts[fact[position]], fact)

    def _is(self, fact: Fact) -> bool:
        if fact[0] == "=":
            return fact[1] == fact[2]
        return fact in self._by_predicate[fact[0]]

    def find(self, pattern: Fact, by: int) -> Iterable[Fact]:
        """Facts of a predicate; where ``by`` is not 0, those that have the pattern's argument at this place."""
        predicate = pattern[0]
        if not by:
            return self._by_predicate[predicate]
        if (predicate, by) not in self._by_argument:
            self._by_argument[predicate, by] = defaultdict(set)
            for fact in self._by_predicate[predicate]:
                self._by_argument[predicate, by][fact[by]].add(fact)
        return self._by_argument[predicate, by][pattern[by]]

    def _matches(self, clause: Clause, binding: dict[str, str], depth: int = 0) -> Iterator[dict[str, str]]:
        """All bindings of a clause's variables that make it hold."""
        if depth == len(clause.plan):
            if not any(self._is(_filled(pattern, binding)) for pattern in clause.lacks):
                yield binding
            return
        pattern, by, new = clause.plan[depth]
        filled = _filled(pattern, binding)
        if not new:
            if self._is(filled):
                yield from self._matches(clause, binding, depth + 1)
            return
        for fact in self.find(filled, by):
            extended = binding | {name: fact[place] for place, name, _ in new}
            if _filled(pattern, extended) == fact and all(
                not kind or kind == self.types[fact[place]] for place, _, kind in new
            ):
                yield from self._matches(clause, extended, depth + 1)

    def moves(self) -> list[Move]:
        """The actions possible now, sorted. As in the packages, an action is left out whose effects are all among its
        preconditions: to go where one is."""
        found: set[Move] = set()
        for action in self._actions.values():
            for clause in action.when:
                for binding in self._matches(clause, {}):
                    if not _void(action, clause, binding):
                        found.add((action.name, tuple([binding[name] for name, _ in action.parameters])))
        return sorted(found)

    def play(self, move: Move) -> None:
        """Carry out an action of :meth:`moves`."""
        action = self._actions[move[0]]
        binding = {name: value for (name, _), value in zip(action.parameters, move[1], strict=True)}
        set_now: dict[Fact, bool] = {}
        for when, fact, adds in action.effects:
            if self._holds(when, binding):
                fact = _filled(fact, binding)
                set_now[fact] = adds or set_now.get(fact, False)  # what is removed and added, stays
        for fact, holds in set_now.items():
            denial = (f"not_{fact[0]}", *fact[1:])
            (self.facts.add if holds else self.facts.discard)(fact)
            self._set(fact, holds)
            self._set(denial, not holds)

    @property
    def won(self) -> bool:
        """Whether the goal holds."""
        return self._holds(self._goal, {})

    def _holds(self, clauses: Iterable[Clause], binding: dict[str, str]) -> bool:
        return any(next(self._matches(clause, binding), None) is not None for clause in clauses)

    def parameters(self, action: str) -> tuple[tuple[str, str], ...]:
        """The variables of an action and their types."""
        return self._actions[action].parameters


def _void(action: Action, clause: Clause, binding: Mapping[str, str]) -> bool:
    """Whether all that an action sets is so by its preconditions."""

    def among(fact: Fact, patterns: Iterable[Fact]) -> bool:
        return any(p[0] == fact[0] and _filled(p, binding) == _filled(fact, binding) for p in patterns)

    added = [fact for _, fact, adds in action.effects if adds]
    return (
        all(among(fact, clause.holds) for fact in added)
        and all(adds or among(fact, clause.lacks) or among(fact, added) for _, fact, adds in action.effects)
        and all(when == (Clause(),) for when, _, _ in action.effects)
    )
