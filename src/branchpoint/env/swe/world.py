"""A repository with a fault as a world: the agent's commands run in its machine, hidden tests grade what it submits."""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import replace
from typing import NamedTuple

from branchpoint.env.swe import actions, grade, place, sources
from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.compact import Menu
from branchpoint.env.swe.dials import Dials
from branchpoint.env.swe.task import ROOT
from branchpoint.sandbox.machine import Machine, Ran
from branchpoint.world import EnvironmentFailure, Step, Task

WINDOW, HITS = 100, 50
"""Lines that ``view`` shows when none are named, and that ``search`` shows at most."""


class Progress(NamedTuple):
    """The Python side of an episode; the files are the machine's. ``applied``: the menu's edit in force, 0 for none."""

    steps: int = 0
    over: bool = True
    applied: int = 0


class Repair:
    """One episode. Reward at ``submit``, 0 before: 1 when all hidden tests pass, else 0.

    ``info``: success, steps, valid; after ``submit`` the parts of the grader's report too. An action that cannot be
    done changes nothing, is answered with one line, and costs a step.
    """

    def __init__(self, task: Task) -> None:
        """Raises EnvironmentFailure for a bad dial, UserError when the repository or its packages cannot be had."""
        self._dials = Dials.of(task)
        source = sources.find(self._dials.source)
        self._instance = sources.instance(self._dials.source, self._dials.instance)
        self._recipe = source.recipe(self._instance)
        self.image = replace(source.image(self._instance), base=self._dials.base)
        compact = self._dials.style == "compact"
        self._menu = Menu.of(self._instance, self.image.trees[ROOT], self._dials.choices) if compact else None
        self._progress = Progress()
        self._machine: Machine | None = None
        self._start: grade.Start | None = None

    def attach(self, machine: Machine) -> None:
        """The machine to work in from now on."""
        self._machine = machine

    def spare(self, start: grade.Start) -> None:
        """How to start the machines that tests are graded in."""
        self._start = start

    def get_state(self) -> Progress:
        """The state, immutable."""
        return self._progress

    def set_state(self, state: Progress) -> None:
        """Go on from a state of the same task."""
        self._progress = state

    def close(self) -> None:
        """Nothing is held open: the machine is its sandbox's."""

    def reset(self) -> Step:
        """The task, with the repository in its faulty state."""
        base = self.image.trees[ROOT]
        after = diffs.apply(self._instance.bug, lambda path: (base / path).read_bytes().decode())
        files: dict[str, bytes | None] = {k: None if v is None else v.encode() for k, v in after.items()}
        files |= dict.fromkeys(self._hidden())
        grade.prepare(self._box(), files)
        self._progress = Progress(over=False)
        if self._menu:
            return self._step(self._menu.opening())
        return self._step(f"{self._instance.problem_statement}\n\nThe repository is in {ROOT}.")

    def step(self, action: str) -> Step:
        """Does one action. Raises EnvironmentFailure before reset or after the end."""
        if self._progress.over:
            raise EnvironmentFailure("the episode has not started or is over; call reset()")
        steps = self._progress.steps + 1
        self._progress = self._progress._replace(steps=steps, over=steps >= self._dials.max_steps)
        done = self._menu_action(action) if self._menu else actions.parse(action)
        if isinstance(done, str):
            return self._step(done)
        match done.name:
            case "bad":
                return self._step(done.text, valid=False)
            case "submit":
                return self._submit()
            case "run":
                return self._step(self._run(done.text))
        try:
            said = {"view": self._view, "search": self._search, "edit": self._edit}[done.name](done)
        except (OSError, ValueError) as error:
            why = {FileNotFoundError: "no such file", IsADirectoryError: "a folder"}.get(type(error), str(error))
            return self._step(f"{done.name}: {done.path}: {why}", valid=False)
        return self._step(said, valid=not said.startswith(f"{done.name}: "))

    def _hidden(self) -> frozenset[str]:
        """The files of the failing tests, where the agent is not to see them. A ``test_patch`` brings the failing tests
        only when they are graded: the agent keeps the files as they are."""
        if self._instance.test_patch:
            return frozenset()
        names = {test.split("::")[0] for test in self._instance.FAIL_TO_PASS}
        there = (name for name in names if (self.image.trees[ROOT] / name).is_file())
        return frozenset(there if self._dials.tests == "hidden" else ())

    def _box(self) -> Machine:
        if self._machine is None:
            raise EnvironmentFailure("this world needs a machine; use sandbox: shell or sandbox: container")
        return self._machine

    def _run(self, command: str) -> str:
        ran = self._box().run(command, seconds=self._dials.command_seconds)
        return self._cut(_told(ran, self._dials.command_seconds))

    def _view(self, action: actions.Action) -> str:
        text = self._box().read(_place(action.path)).decode(errors="replace")
        rows = text.splitlines()
        first = action.first or 1
        last = min(action.last or WINDOW, len(rows))
        shown = "\n".join(f"{i:>5} {row}" for i, row in enumerate(rows[first - 1 : last], first))
        rest = f"\n({len(rows)} lines in all)" if last < len(rows) or first > 1 else ""
        return self._cut(f"{shown}{rest}") if shown else f"view: {action.path} has {len(rows)} lines"

    def _search(self, action: actions.Action) -> str:
        pattern, path = shlex.quote(action.text), shlex.quote(_place(action.path))
        options = "-rnIE --exclude-dir=.git --exclude-dir=__pycache__"
        # In a subshell, so that the agent's shell stays as it is.
        command = f"(cd {ROOT} && grep {options} -e {pattern} -- {path} | cut -c -200 | head -n {HITS})"
        ran = self._box().run(command, seconds=self._dials.command_seconds)
        return self._cut(ran.output.replace(f"{ROOT}/", "").rstrip()) or "no match"

    def _edit(self, action: actions.Action) -> str:
        place, box = _place(action.path), self._box()
        if not action.old:
            try:
                box.read(place)
            except FileNotFoundError:
                box.write(place, f"{action.text}\n".encode())
                return f"made {action.path}"
            return f"edit: {action.path} exists; name the old text to replace"
        text = box.read(place).decode()
        if (count := text.count(action.old)) != 1:
            return f"edit: the old text stands {count} times in {action.path}; it must stand there once"
        at = text.index(action.old)
        box.write(place, (text[:at] + action.text + text[at + len(action.old) :]).encode())
        return f"edited {action.path}, line {text.count(chr(10), 0, at) + 1}"

    def _menu_action(self, action: str) -> actions.Action | str:
        assert self._menu is not None
        name, number = self._menu.parse(action)
        if name == "view":
            return self._menu.view(number)
        if name == "apply":
            path, data = self._menu.applied(number)
            self._box().write(f"{ROOT}/{path}", data)
            self._progress = self._progress._replace(applied=number)
            return f"applied {number}"
        if name == "run":
            ran = self._box().run(self._menu.command(place.python(self._recipe)), seconds=self._recipe.seconds)
            return "tests pass" if ran.code == 0 else "tests fail"
        return actions.Action("submit") if name == "submit" else actions.Action("bad", "no such action")

    def _submit(self) -> Step:
        if self._start is None:
            raise EnvironmentFailure("this world needs a sandbox that starts machines for grading")
        ours = {f"{ROOT}/{name}" for name in self._hidden()}
        found = self._box().changes(ROOT)
        changes = {k: v for k, v in found.items() if not (k in ours and v.kind == "deleted")}
        report = grade.grade(self._instance, self._recipe, self.image, changes, self._start)
        self._progress = self._progress._replace(over=True)
        passed = report.fail_to_pass[0] + report.pass_to_pass[0], report.fail_to_pass[1] + report.pass_to_pass[1]
        said = "resolved" if report.resolved else f"not resolved: {passed[0]} of {passed[1]} tests pass"
        return self._step(said, report)

    def _step(self, said: str, report: grade.Report | None = None, valid: bool = True) -> Step:
        over, steps = self._progress.over, self._progress.steps
        info = {"success": bool(report and report.resolved), "steps": steps, "valid": valid}
        if report:
            info |= report.info()
        offered = self._menu.actions() if self._menu and not over else ()
        reward = float(info["success"])
        return Step(said, reward, report is not None, over and report is None, offered, "", info)

    def _cut(self, text: str) -> str:
        """At most as many characters as an observation may have: the head and the tail."""
        most = self._dials.observation
        if len(text) <= most:
            return text
        half = most // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _place(path: str) -> str:
    """The absolute path of what an action names. Raises ValueError outside the repository."""
    whole = posixpath.normpath(posixpath.join(ROOT, path))
    if whole != ROOT and not whole.startswith(f"{ROOT}/"):
        raise ValueError(f"outside {ROOT}; use run for other files")
    return whole


def _told(ran: Ran, seconds: float) -> str:
    lines = [ran.output.rstrip()] if ran.output.strip() else []
    lines += [f"[{ran.omitted} bytes left out]"] if ran.omitted else []
    lines += [f"[stopped after {seconds:g} s]"] if ran.timed_out else []
    lines += [f"[{ran.left} background processes ended]"] if ran.left else []
    lines += [f"[{note}]" for note in ran.notes]
    lines += [f"[exit status {ran.code}]"] if ran.code and not ran.timed_out else []
    return "\n".join(lines) or "[no output]"
