"""The user at the other end: scripted, or driven by a model through the same call.

A user is a function ``user(brief, said, noise) -> str``: what it says next, given the whole talk. It holds no state, so
a snapshot of a world needs none of it. ``said`` is empty for the opening, and ends with the agent's latest reply after
that; tool calls are not in it. An answer that holds :data:`STOP` ends the conversation. A user that samples takes its
luck from ``noise``, or sets the attribute ``deterministic = False`` on itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from branchpoint.noise import Noise
from branchpoint.world import Message

STOP = "###STOP###"
PATIENCE = 5
"""How many questions or pauses that lead nowhere the scripted user bears."""
Reveal = Literal["asked", "opening"]


@dataclass(frozen=True, slots=True)
class Brief:
    """What a user knows. ``reveal``: whether the scripted one tells its facts when asked, or all at the opening."""

    domain: str
    user_id: str
    instruction: str
    reveal: Reveal = "asked"


class User(Protocol):
    """What the user says next."""

    def __call__(self, brief: Brief, said: Sequence[Message], noise: Noise) -> str: ...


def scripted(brief: Brief, said: Sequence[Message], noise: Noise) -> str:
    """A user that follows rules, told from the sentences of its instruction.

    It opens with the first sentence that wants something. To a question it answers with identity when that is asked,
    with yes when it is to confirm, else with the untold sentence that shares most words with the question; with all of
    them when asked for all details or anything else. A statement draws the next untold sentence. When all is told, a
    statement, or asking for anything else, ends the conversation.
    """
    memory = _open(_facts(brief.instruction), brief.reveal)
    for message in said:
        if message.role == "assistant":
            memory = _hear(memory, message.content)
    return memory.answer


@dataclass(frozen=True, slots=True)
class _Memory:
    facts: tuple[str, ...]
    told: frozenset[int]
    answer: str
    idle: int = 0

    @property
    def untold(self) -> list[int]:
        return [i for i in range(len(self.facts)) if i not in self.told]

    def tell(self, which: Sequence[int], before: str = "") -> _Memory:
        words = " ".join([before, *(_first_person(self.facts[i]) for i in which)]).strip()
        return _Memory(self.facts, self.told | frozenset(which), words, self.idle)

    def wait(self, words: str) -> _Memory:
        answer = STOP if self.idle + 1 >= PATIENCE else words
        return _Memory(self.facts, self.told, answer, self.idle + 1)


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z#\"'(])")
_IDENTITY = re.compile(r"\b\d{5}\b|\S+@\S+|\b[a-z]+_[a-z]+_\d+\b")
_WISH = re.compile(
    r"\b(want|wanna|wish|like to|need|return|exchange|cancel|change|modify|book|upgrade|remove|refund|compensation)",
    re.IGNORECASE,
)
_ASKS_WHO = re.compile(r"\b(name|zip|e-?mail|user ?id|identity|identify|verify|authenticate|who)\b", re.IGNORECASE)
_ASKS_ALL = re.compile(r"\b(everything|anything else|something else|all (the |your )?details|more details)\b", re.I)
_ASKS_YES = re.compile(
    r"\b(confirm|proceed|go ahead|yes|correct|right|shall i|should i|do you want me|okay|ok)\b", re.I
)
_PAUSES = re.compile(r"\b(let me|i will|i'll|i am going to|moment|please wait|hold on|checking|looking)\b", re.I)


def _facts(instruction: str) -> tuple[str, ...]:
    return tuple(s for s in _SENTENCE.split(" ".join(instruction.split())) if s)


def _open(facts: tuple[str, ...], reveal: Reveal) -> _Memory:
    start = _Memory(facts, frozenset(), "")
    if reveal == "opening":
        return start.tell(range(len(facts)), "Hi!")
    wishes = [i for i, fact in enumerate(facts) if _WISH.search(fact)]
    plain = [i for i in wishes if not _IDENTITY.search(facts[i])]
    return start.tell((plain or wishes or [0])[:1], "Hi!")


def _hear(memory: _Memory, reply: str) -> _Memory:
    untold = memory.untold
    if "?" not in reply:
        if untold:
            return memory.tell(untold[:1])
        return memory.wait("All right.") if _PAUSES.search(reply) else memory.tell((), STOP)
    if _ASKS_ALL.search(reply):
        return memory.tell(untold) if untold else memory.tell((), STOP)
    identity = [i for i, fact in enumerate(memory.facts) if _IDENTITY.search(fact)] or [0]
    confirms = bool(_ASKS_YES.search(reply))
    if _ASKS_WHO.search(reply) and (not confirms or set(identity) & set(untold)):
        return memory.tell(identity)
    if confirms:
        return memory.tell(_closest(memory, untold, reply), "Yes, please go ahead.")
    if untold:
        return memory.tell(_closest(memory, untold, reply))
    again = _closest(memory, range(len(memory.facts)), reply)
    return memory.wait(_first_person(memory.facts[again[0]]))


def _closest(memory: _Memory, which: Sequence[int], reply: str) -> list[int]:
    """The sentence that shares most words with the reply, the earliest of equals; none when there is none."""
    asked = _words(reply)
    return sorted(which, key=lambda i: -len(asked & _words(memory.facts[i])))[:1]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9#_]+", text.lower()) if len(word) > 3}


_AS_OBJECT = "to|for|with|from|of|tells?|gives?|asks?|helps?|lets?|refunds?|charges?|offers?|sends?|shows?|assists?"
_PERSON = (
    (r"\byou are\b", "I am"),
    (r"\byou're\b", "I'm"),
    (r"\byou were\b", "I was"),
    (rf"\b({_AS_OBJECT}) you\b", r"\1 me"),
    (r"\byou\b", "I"),
    (r"\byourself\b", "myself"),
    (r"\byours\b", "mine"),
)


def _first_person(sentence: str) -> str:
    """The sentence as the user would say it, by a few substitutions; grammar may suffer."""
    for pattern, words in _PERSON:
        sentence = re.sub(pattern, words, sentence, flags=re.IGNORECASE)
    return re.sub(r"\b([Yy])our\b", lambda m: "My" if m[1] == "Y" else "my", sentence)
