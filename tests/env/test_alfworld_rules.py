"""The rules of ALFWorld games: reading PDDL, and finding the actions that a state allows."""

from __future__ import annotations

import random
from itertools import count, product
from typing import Any

import pytest

from branchpoint.env import _alfworld_rules as rules

DOMAIN = """
(define (domain tiny)  ; a comment (with parentheses
 (:types box ball cat)
 (:action Move :parameters (?c - cat ?from - box ?to - box)
   :precondition (and (in ?c ?from) (near ?from ?to))
   :effect (and (not (in ?c ?from)) (in ?c ?to) (increase (total-cost) 1)))
 (:action purr :parameters (?c - cat) :precondition () :effect (happy ?c))
 (:action poke :parameters (?c - cat ?b - ball)
   :precondition (exists (?x - box) (and (in ?c ?x) (in ?b ?x) (or (not (lid ?x)) (open ?x))))
   :effect (and (when (rolling ?b) (not (rolling ?b))) (when (not (rolling ?b)) (rolling ?b)) (poked ?b)))
 (:action flip :parameters (?x - box) :precondition (and (lid ?x) (not (open ?x)))
   :effect (and (open ?x) (happy tom)))
 (:action shut :parameters (?x - box) :precondition (open ?x) :effect (not (open ?x)))
 (:action sleep :parameters (?c - cat ?x - box) :precondition (in ?c ?x) :effect (in ?c ?x))
 (:action ghost :parameters (?b - ball) :precondition (exists (?x - box, ?c - cat) (in ?b ?x)) :effect (poked ?b))
)
"""
PROBLEM = """
(define (problem one) (:domain tiny) (:objects tom - cat B1 b2 b3 - box red blue - ball)
 (:init (in tom b1) (in red b1) (in blue b2) (near b1 b2) (near b2 b1) (near b1 b1) (near b2 b3) (lid b2))
 (:goal (and (exists (?b - ball) (and (rolling ?b) (not (= ?b red)))) (exists (?b - ball ?x - box) (in ?b ?x)))))
"""
ACTIONS = rules.actions(DOMAIN)


def words(state: rules.State) -> list[str]:
    return [" ".join((name, *arguments)) for name, arguments in state.moves()]


def played(*moves: str) -> rules.State:
    state = rules.State(ACTIONS, PROBLEM)
    for move in moves:
        assert move in words(state)
        name, *arguments = move.split()
        state.play((name, tuple(arguments)))
    return state


def test_the_actions_of_a_state() -> None:
    # Not "move tom b1 b1", not "sleep": they set nothing. Not "ghost": as the packages read it, "box," is a type.
    assert words(played()) == ["flip b2", "move tom b1 b2", "poke tom red", "purr tom"]
    there = ["flip b2", "move tom b2 b1", "move tom b2 b3", "purr tom"]
    assert words(played("move tom b1 b2")) == there  # the ball is under a lid
    opened = [*there[1:3], "poke tom blue", "purr tom", "shut b2"]
    assert words(played("move tom b1 b2", "flip b2")) == opened
    assert words(played("move tom b1 b2", "flip b2", "shut b2")) == there
    assert words(played("purr tom", "purr tom")) == words(played())


def test_an_action_adds_and_removes_facts_and_what_it_removed_can_be_looked_up() -> None:
    state = played("move tom b1 b2")
    assert state.facts - played().facts == {("in", "tom", "b2")}
    assert played().facts - state.facts == {("in", "tom", "b1")}
    assert set(state.find(("not_in",), 0)) == {("not_in", "tom", "b1")}
    assert set(state.find(("in", "", "b2"), 2)) == {("in", "tom", "b2"), ("in", "blue", "b2")}
    back = played("move tom b1 b2", "move tom b2 b1")
    assert back.facts == played().facts
    assert set(back.find(("not_in", "tom"), 1)) == {("not_in", "tom", "b2")}


def test_conditions_of_effects_are_those_before_the_action() -> None:
    once, twice = played("poke tom red"), played("poke tom red", "poke tom red")
    assert once.facts - played().facts == {("rolling", "red"), ("poked", "red")}
    assert twice.facts - played().facts == {("poked", "red")}


def test_what_an_action_removes_and_adds_stays() -> None:
    effect = "(and (up ?c) (not (up ?c)) (spun ?c))"
    spin = f"(define (domain d) (:action spin :parameters (?c - cat) :precondition () :effect {effect}))"
    state = rules.State(
        rules.actions(spin), "(define (problem p) (:objects tom - cat) (:init (up tom)) (:goal (up tom)))"
    )
    state.play(("spin", ("tom",)))
    assert state.facts == {("up", "tom"), ("spun", "tom")}


def test_the_goal() -> None:
    assert not played("poke tom red").won  # the red ball does not count
    assert played("move tom b1 b2", "flip b2", "poke tom blue").won
    assert not played("move tom b1 b2", "flip b2", "poke tom blue", "poke tom blue").won


def holds(condition: Any, binding: dict[str, str], facts: set[rules.Fact], types: dict[str, str]) -> bool:
    """A condition by its definition."""
    if not condition:
        return True
    head, *parts = condition
    if head in ("and", "or"):
        return (all if head == "and" else any)(holds(part, binding, facts, types) for part in parts)
    if head == "not":
        return not holds(parts[0], binding, facts, types)
    if head == "exists":
        variables = rules.typed(parts[0])
        kinds = [[n for n, its in types.items() if kind in (its, "object")] for _, kind in variables]
        names = [name for name, _ in variables]
        return any(
            holds(parts[1], binding | dict(zip(names, choice, strict=True)), facts, types) for choice in product(*kinds)
        )
    fact = tuple(binding.get(word, word) for word in condition)
    return fact[1] == fact[2] if head == "=" else fact in facts


def test_random_states_allow_what_trying_every_argument_allows() -> None:
    luck, sections = random.Random(0), {s[1]: s for s in rules.read(DOMAIN) if s[0] == ":action"}
    types = {"tom": "cat", "kit": "cat", "b1": "box", "b2": "box", "b3": "box", "red": "ball", "blue": "ball"}
    goal = (
        "(exists (?c - cat ?b - ball) (or (and (in ?c b1) (not (in ?b b1)) (poked ?b)) (and (happy ?c) (rolling ?b))))"
    )
    goals, several = set(), 0
    everything = [("in", x, b) for x in ("tom", "kit", "red", "blue") for b in ("b1", "b2", "b3")] + [
        (p, b) for p in ("lid", "open") for b in ("b1", "b2", "b3")
    ]
    everything += [("near", a, b) for a in ("b1", "b2", "b3") for b in ("b1", "b2", "b3")]
    everything += [(p, b) for p in ("poked", "rolling", "happy") for b in ("red", "blue", "tom")]
    for _ in range(200):
        facts = {fact for fact in everything if luck.random() < 0.3}
        objects = " ".join(f"{name} - {kind}" for name, kind in types.items())
        first = " ".join(f"({' '.join(fact)})" for fact in facts)
        state = rules.State(ACTIONS, f"(define (problem x) (:objects {objects}) (:init {first}) (:goal {goal}))")
        expected = []
        for name, section in sections.items():
            parts = dict(zip(section[2::2], section[3::2], strict=True))
            variables = rules.typed(parts[":parameters"])
            for choice in product(*([n for n, its in types.items() if its == kind] for _, kind in variables)):
                binding = dict(zip([v for v, _ in variables], choice, strict=True))
                void = name == "sleep" or (name == "move" and choice[1] == choice[2])
                if not void and holds(parts[":precondition"], binding, facts, types):
                    expected.append((name, choice))
        assert state.moves() == sorted(expected)
        assert state.won == holds(rules.read(goal), {}, facts, types)
        goals.add(state.won)
        several += len(expected) > 5
    assert goals == {True, False}
    assert several > 50


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("(a (b)", "as many closing"), ("(a) b)", "closed that was not opened"), ("", "expected one list")],
)
def test_unbalanced_parentheses(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        rules.read(text)


@pytest.mark.parametrize("condition", ["(forall (?x - box) (open ?x))", "(not (or (a) (b)))", "(imply (a) (b))"])
def test_conditions_that_are_not_known_are_named(condition: str) -> None:
    with pytest.raises(ValueError, match=r"expected a predicate and its arguments, found '(forall|or|imply)'"):
        rules.clauses(rules.read(condition), count())


def test_a_first_state_of_more_than_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="may only list facts"):
        rules.State(ACTIONS, "(define (problem x) (:objects a - box) (:init (= (far a a) 3)) (:goal (in a a)))")
