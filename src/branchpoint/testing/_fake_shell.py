"""The command interpreter of a fake machine: a sliver of bash, enough for the conformance suite. It runs nothing.

Grammar: commands separated by ``;``, line breaks, ``&&``, ``||`` and ``&``; ``( )`` and ``{ }``; functions; arrays and
assignments; redirections ``>``, ``>>``, ``2>&1``; quotes; ``$x``, ``${x}``, ``${a[n]}``, ``$1``, ``$?``, ``$$``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)|(?P<op>&&|\|\||2>&1|>>|[;&()\n>])
    |(?P<word>(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|\\.|[^\s;&()>'"|\\])+)""",
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(
    r"""\$'(?P<ansi>(?:\\.|[^'\\])*)'|'(?P<plain>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"
    |\$\{(?P<name>\w+)(?:\[(?P<index>\d+)\])?\}|\$(?P<short>\w+|[?$])|\\(?P<escaped>.)|(?P<bare>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGN = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
Value = str | list[str]


class Syntax(Exception):
    """Not in the grammar."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``kind``: simple, array, group, subshell or function. ``after``: what follows it."""

    kind: str
    words: tuple[str, ...] = ()
    body: tuple[Command, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    after: str = ";"


@dataclass(slots=True)
class State:
    """What one command leaves to the next."""

    cwd: str = "/"
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, tuple[Command, ...]] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)
    umask: int = 0o022

    def copy(self) -> State:
        values = {k: list(v) if isinstance(v, list) else v for k, v in self.variables.items()}
        return State(self.cwd, values, set(self.exported), dict(self.functions), set(self.options), self.umask)


def parse(text: str) -> tuple[Command, ...]:
    """The commands of a text. Raises Syntax."""
    if "\0" in text:
        raise Syntax("a command cannot hold a NUL character")
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise Syntax(f"syntax error near {text[at : at + 20]!r}")
        if not found["space"]:
            tokens.append(found[0])
        at = found.end()
    tokens.reverse()
    commands = _list(tokens, "")
    if tokens:
        raise Syntax(f"syntax error near {tokens[-1]!r}")
    return commands


def _list(tokens: list[str], end: str) -> tuple[Command, ...]:
    commands: list[Command] = []
    while True:
        while tokens and tokens[-1] in (";", "\n"):
            tokens.pop()
        if not tokens or tokens[-1] == end:
            if end and not tokens:
                raise Syntax("syntax error: unexpected end")
            return tuple(commands)
        commands.append(_command(tokens))


def _command(tokens: list[str]) -> Command:
    kind, words, body = "simple", [], ()
    first = tokens[-1]
    if first in ("(", "{"):
        tokens.pop()
        kind, closing = ("subshell", ")") if first == "(" else ("group", "}")
        body = _list(tokens, closing)
        tokens.pop()
    elif tokens[-3:-1] == [")", "("] and re.fullmatch(r"\w+", first):
        words = [first]
        kind = "function"
        del tokens[-3:]
        if not tokens or tokens.pop() != "{":
            raise Syntax("syntax error: a function is f() { ...; }")
        body = _list(tokens, "}")
        tokens.pop()
    else:
        kind = _words(tokens, words)
    outputs, after = _rest(tokens, words)
    if not words and not body and not outputs:
        raise Syntax("syntax error near unexpected token")
    return Command(kind, tuple(words), body, tuple(outputs), after)


def _words(tokens: list[str], words: list[str]) -> str:
    """Takes the words of a simple command, or of ``a=(...)``."""
    if tokens[-1].endswith("=") and tokens[-2:-1] == ["("]:
        words.append(tokens.pop()[:-1])
        tokens.pop()
        while tokens and tokens[-1] != ")":
            words.append(tokens.pop())
        if not tokens:
            raise Syntax("syntax error: unexpected end")
        tokens.pop()
        return "array"
    return "simple"


def _rest(tokens: list[str], words: list[str]) -> tuple[list[tuple[str, str]], str]:
    """Takes further words, redirections, and what separates this command from the next."""
    outputs: list[tuple[str, str]] = []
    while tokens:
        token = tokens.pop()
        if token in (";", "\n", "&", "&&", "||"):
            return outputs, ";" if token == "\n" else token
        if token in (")", "}"):
            tokens.append(token)
            break
        if token == "2>&1":
            continue
        if token in (">", ">>"):
            if not tokens:
                raise Syntax("syntax error: unexpected end")
            outputs.append((token, tokens.pop()))
        elif token == "(":
            raise Syntax("syntax error near '('")
        else:
            words.append(token)
    return outputs, ";"


def assignment(word: str) -> tuple[str, str] | None:
    found = _ASSIGN.fullmatch(word)
    return (found[1], found[2]) if found else None


def expand(word: str, state: State, arguments: tuple[str, ...], code: int) -> list[str]:
    """The words that a word of a command becomes; one without quotes is split at blanks."""
    out, split = "", True

    def value(name: str, index: int = 0) -> str:
        if name == "?":
            return str(code)
        if name == "$":
            return "2"
        if name.isdigit():
            return arguments[int(name) - 1] if 0 < int(name) <= len(arguments) else ""
        held = state.variables.get(name, "")
        if isinstance(held, list):
            return held[index] if index < len(held) else ""
        return held if index == 0 else ""

    for part in _PART.finditer(word):
        if part["ansi"] is not None:
            out += _ansi(part["ansi"])
            split = False
        elif part["plain"] is not None:
            out += part["plain"]
            split = False
        elif part["double"] is not None:
            inner = re.sub(r"\\([\"$\\`])", lambda m: m[1], part["double"])
            out += re.sub(
                r"\$\{(\w+)(?:\[(\d+)\])?\}|\$(\w+|[?$])", lambda m: value(m[1] or m[3], int(m[2] or 0)), inner
            )
            split = False
        elif part["name"] or part["short"]:
            out += value(part["name"] or part["short"], int(part["index"] or 0))
        else:
            out += part["escaped"] or part["bare"] or ""
    return out.split() if split else [out]


def _ansi(text: str) -> str:
    """What ``$'..'`` stands for; bytes that are no UTF-8 become surrogates, as in names of files."""
    data: bytes = ast.literal_eval(
        "b'" + re.sub(r"[^\x00-\x7f]", lambda m: _hex(m[0]), text).replace("\n", "\\n") + "'"
    )
    return data.decode(errors="surrogateescape")


def _hex(character: str) -> str:
    return "".join(f"\\x{b:02x}" for b in character.encode(errors="surrogateescape"))
