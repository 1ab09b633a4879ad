"""The agent's actions as text.

    run COMMAND                    a bash command line, or several lines; the shell keeps its state
    view PATH [FROM TO]            lines of a file, numbered
    search PATTERN [PATH]          lines that an extended regular expression matches; quote a pattern with spaces
    edit PATH                      followed by one replacement; the old text must stand in the file exactly once
    <<<<<<< SEARCH
    old text
    =======
    new text
    >>>>>>> REPLACE
    submit                         the work is done: the hidden tests are run

An empty old text makes a new file. A reply in a fence of three backticks is read without it.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

LONGEST = 100_000
_FENCE = re.compile(r"\A```[a-z]*\n(.*)\n```\Z", re.DOTALL)
_EDIT = re.compile(r"\A(\S+)\n<<<<<<< SEARCH\n(.*?)\n?=======\n(.*?)\n?>>>>>>> REPLACE\Z", re.DOTALL)
_KNOWN = "run, view, search, edit, submit"


class Action(NamedTuple):
    """``name`` is one of the five, or ``bad`` with the reason in ``text``. ``text``: the command, the pattern, or the
    new text of an edit; ``old``: what an edit replaces; ``first``, ``last``: lines to view, 0 when not given."""

    name: str
    text: str = ""
    path: str = ""
    old: str = ""
    first: int = 0
    last: int = 0


def parse(text: str) -> Action:
    """The action that a text asks for; never raises."""
    if len(text) > LONGEST:
        return Action("bad", f"the action is longer than {LONGEST} characters")
    if "\0" in text:
        return Action("bad", "an action cannot hold a NUL character")
    text = text.strip()
    if fenced := _FENCE.match(text):
        text = fenced[1].strip()
    found = re.match(r"\S+", text)
    name = found[0] if found else ""
    rest = text[len(name) :].strip()
    reader = _READERS.get(name)
    if reader is None:
        return Action("bad", f"unknown action {name[:40]!r}; use one of {_KNOWN}")
    return reader(rest)


def _run(rest: str) -> Action:
    return Action("run", rest) if rest else Action("bad", "run needs a command: run COMMAND")


def _view(rest: str) -> Action:
    parts = _words(rest)
    if len(parts) not in (1, 3) or not all(re.fullmatch(r"\d{1,9}", part) for part in parts[1:]):
        return Action("bad", "view needs a path, or a path and two line numbers: view PATH [FROM TO]")
    first, last = (int(parts[1]), int(parts[2])) if len(parts) == 3 else (0, 0)
    if len(parts) == 3 and not 1 <= first <= last:
        return Action("bad", "view: lines count from 1, and FROM is not after TO")
    return Action("view", path=parts[0], first=first, last=last)


def _search(rest: str) -> Action:
    parts = _words(rest)
    if len(parts) not in (1, 2) or not parts[0]:
        return Action("bad", "search needs a pattern, in quotes if it holds spaces: search PATTERN [PATH]")
    return Action("search", parts[0], path=parts[1] if len(parts) == 2 else ".")


def _edit(rest: str) -> Action:
    found = _EDIT.match(rest)
    if found is None:
        return Action("bad", "edit needs: edit PATH, <<<<<<< SEARCH, old text, =======, new text, >>>>>>> REPLACE")
    return Action("edit", found[3], found[1], found[2])


def _submit(rest: str) -> Action:
    return Action("bad", "submit stands alone") if rest else Action("submit")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


_READERS = {"run": _run, "view": _view, "search": _search, "edit": _edit, "submit": _submit}


def edit(path: str, old: str, new: str) -> str:
    """The text of an edit."""
    return f"edit {path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"
