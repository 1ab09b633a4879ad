"""The conformance suite of machines: who keeps the contract passes, and every way to break it is found."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shell_kit

from branchpoint.sandbox.container import ContainerMachines
from branchpoint.sandbox.machine import Change, Image, Ran
from branchpoint.sandbox.shell import ShellMachines
from branchpoint.testing import FakeMachines, check_machine
from branchpoint.testing._fake_files import Files, Node
from branchpoint.testing._fake_shell import State
from branchpoint.testing.fake_machine import FakeFrozen, FakeMachine
from branchpoint.testing.machine import KNOWN
from branchpoint.world import SandboxFailure, UserError


def test_the_fake_keeps_the_whole_contract() -> None:
    report = check_machine(FakeMachines)
    assert [r for r in report.results if r.status != "ok"] == []
    assert len(report.results) == 33


def test_machines_in_namespaces_keep_it() -> None:
    shell_kit.machines().close()
    report = check_machine(ShellMachines, depth=5)
    report.assert_ok()
    assert {r.name for r in report.results if r.status == "skipped"} == {
        "keeps owners", "keeps hard links that are written to"
    }  # fmt: skip


def test_containers_keep_what_their_engine_makes_hard(containers: ContainerMachines, container_base: str) -> None:
    """Folders that became files, names that the engine takes for patterns, links that lead nowhere."""
    machine = containers.start(Image(container_base, workdir="/job"))
    machine.run("mkdir -p gone/x '[a]'; echo 1 >'a*'; echo 2 >ab; echo 3 >'[a]/b\\c'; ln -s /none/there dangling")
    frozen = machine.freeze()
    branch = frozen.thaw()
    branch.run("rm -r gone; echo file >gone")
    after = branch.freeze()
    third = after.thaw()
    assert third.read("/job/gone") == b"file\n"
    assert (third.read("/job/a*"), third.read("/job/[a]/b\\c")) == (b"1\n", b"3\n")
    for path in ("/job/a?", "/job/*", "/job/[a]b"):
        with pytest.raises(FileNotFoundError):
            third.read(path)
    third.write("/job/[a]/new*/f", b"made")
    third.write("/job/dangling", b"led")
    assert third.run("cat '[a]/new*/f' /none/there; [[ -L dangling ]] && echo link").output == "madeledlink\n"
    assert set(third.changes("/job/[a]/new*")) == {"/job/[a]/new*", "/job/[a]/new*/f"}
    for each in (machine, branch, third):
        each.close()
    for each in (after, frozen):
        each.discard()


@pytest.mark.slow
def test_containers_keep_all_of_it(container_engine: str, container_base: str) -> None:
    report = check_machine(lambda: ContainerMachines(container_engine), Image(container_base), depth=20)
    report.assert_ok()
    assert {r.name for r in report.results if r.status == "skipped"} == {
        "keeps owners", "keeps hard links that are written to", "keeps names that stand for deletions, or refuses"
    }  # fmt: skip


class Machine(FakeMachine):
    """A machine that breaks what ``fault`` names."""

    def __init__(self, machines: Any, files: Files, state: State, image: Files) -> None:
        super().__init__(machines, files, state, image)
        self.fault: str = machines.fault
        self.frozen = False

    def run(self, command: str, *, seconds: float | None = None, stdin: bytes = b"") -> Ran:
        match self.fault:
            case "a command without input waits" if not stdin:
                stdin = b"what the trainer types\n"
            case "input is text":
                stdin = stdin.replace(b"\n", b"\r\n")
            case "exit status is lost":
                return replace(super().run(command, seconds=seconds, stdin=stdin), code=0)
            case "no state of the shell":
                self.state = State("/check", {"CHECK": self.state.variables["CHECK"]}, {"CHECK"})
            case "raises for NUL" if "\0" in command:
                raise ValueError("NUL")
            case "time-outs end the shell alone" if "after)" in command:
                self.files.write("/check/after", b"late")
            case "time-outs close the machine" if "sleep 300" in command:
                self.close()
        ran = super().run(command, seconds=seconds, stdin=stdin)
        return _told(self.fault, ran)

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        match self.fault:
            case "read ignores the limit":
                limit = 1 << 40
            case "read follows links on the host":
                _, _, node = self.files.find(path, follow=False) if "\0" not in path else (None, "", None)
                if node is not None and node.kind == "symlink" and node.data.startswith(b"/"):
                    return Path(node.data.decode()).read_bytes()
            case "errors are not typed":
                try:
                    return super().read(path, limit=limit)
                except (OSError, ValueError) as error:
                    raise RuntimeError(str(error)) from error
        return super().read(path, limit=limit)

    def write(self, path: str, data: bytes) -> None:
        if self.fault == "write follows links on the host":
            folder = self.files.find(str(Path(path).parent), follow=False)[2]
            if folder is not None and folder.kind == "symlink" and folder.data.startswith(b"/"):
                Path(folder.data.decode(), Path(path).name).write_bytes(data)
                return
        if self.fault == "write resets modes" and self.files.find(path)[2] is not None:
            self.files.remove(path)
        super().write(path, data)

    def changes(self, under: str) -> Mapping[str, Change]:
        found = dict(super().changes(under))
        match self.fault:
            case "changes leaves out deletions":
                return {p: c for p, c in found.items() if c.kind != "deleted"}
            case "changes lists what is as it was":
                return found | {f"{under}/a.txt": Change("file", b"one\n", 0o640)}
            case "changes against the parent" if self.frozen:
                return {}
            case "changes follows links on the host":
                led = Change("file", b"secret of the host\n")
                return {p: led if c.kind == "symlink" else c for p, c in found.items()}
        return found

    def freeze(self) -> FakeFrozen:
        made: Any = super().freeze()
        made.__class__ = Frozen
        match self.fault:
            case "a freeze moves the shell":
                self.state.cwd = "/"
            case "a frozen machine shares its files":
                made.files = self.files
            case "ids repeat":
                made.id = "frozen"
        return made

    def close(self) -> None:
        if self.fault == "close twice raises" and self.ended.is_set():
            raise SandboxFailure("closed already")
        if self.fault != "close waits for commands":
            super().close()


def _told(fault: str, ran: Ran) -> Ran:
    match fault:
        case "output beyond the limit is cut off":
            return replace(ran, omitted=0)
        case "only the end of output is kept" if ran.omitted:
            return replace(ran, output=ran.output[-100:], omitted=ran.omitted + len(ran.output) - 100)
        case "left processes are not counted":
            return replace(ran, left=0)
        case "partial output is lost" if ran.timed_out:
            return replace(ran, output="")
        case "standard error is lost":
            return replace(ran, output="".join(p for p in ran.output.splitlines(True) if not p.startswith("cat:")))
    return ran


class Frozen(FakeFrozen):
    """What a broken machine froze."""

    def thaw(self) -> FakeMachine:
        machines: Any = self.machines
        fault = machines.fault
        if fault == "thaw after discard":
            self.gone = False
        if fault == "siblings share their files":
            made: Any = machines.machine(self.files, self.state.copy(), self.image)
        else:
            made = super().thaw()
        made.frozen = True
        files: Files = made.files
        if fault == "what was deleted comes back":
            _merge(self.image.root, files.root)
        elif fault in _LOSSES:
            for _, node in list(files.walk("/check")):
                _LOSSES[fault](node)
        elif fault in _FORGETS:
            _FORGETS[fault](made.state)
        if fault == "depth 20 is too deep":
            machines.depth += 1
            if machines.depth > 20 and "all" in files.node("/check").below:
                files.write("/check/all", b"")
        return made

    def discard(self) -> None:
        machines: Any = self.machines
        if machines.fault == "discard twice raises" and self.gone:
            raise SandboxFailure("discarded already")
        if machines.fault == "discard closes what was thawed":
            for machine in machines.live[-1:]:
                machine.close()
        super().discard()


def _merge(image: Node, node: Node) -> None:
    """A directory that was deleted and made again shows its old content, as where an opaque mark is not honoured."""
    for name, old in image.below.items():
        if old.kind == "directory" and name in node.below and node.below[name].kind == "directory":
            for lost, below in old.below.items():
                node.below[name].below.setdefault(lost, copy.deepcopy(below))
            _merge(old, node.below[name])


def _lose(node: Node, kind: str) -> None:
    node.below = {n: b for n, b in node.below.items() if not (b.kind == kind and (kind != "directory" or not b.below))}


def _rename(node: Node) -> None:
    node.below = {n.encode(errors="surrogateescape").decode(errors="replace"): b for n, b in node.below.items()}


def _unmark(node: Node) -> None:
    node.below = {n: b for n, b in node.below.items() if not n.startswith(".wh.")}


def _split(node: Node) -> None:
    node.below = {n: copy.copy(b) if b.kind == "file" else b for n, b in node.below.items()}


_LOSSES: dict[str, Any] = {
    "modes are lost": lambda n: setattr(n, "mode", n.mode & 0o777),
    "times are lost": lambda n: setattr(n, "time", n.time + 5),
    "owners are lost": lambda n: setattr(n, "owner", (0, 0)),
    "empty folders are lost": lambda n: _lose(n, "directory"),
    "symbolic links are lost": lambda n: _lose(n, "symlink"),
    "pipes are lost": lambda n: _lose(n, "other"),
    "names are made UTF-8": _rename,
    "hard links are split": _split,
    "files are cut": lambda n: setattr(n, "data", n.data[:65536]),
    "marks of deletion are taken for deletions": _unmark,
}
_FORGETS: dict[str, Any] = {
    "the working directory is lost": lambda s: setattr(s, "cwd", "/check"),
    "plain variables are lost": lambda s: s.variables.pop("x", None),
    "variables are exported": lambda s: s.exported.update(s.variables),
    "arrays are lost": lambda s: s.variables.pop("a", None),
    "functions are lost": lambda s: s.functions.clear(),
    "options are lost": lambda s: s.options.clear(),
    "the umask is lost": lambda s: setattr(s, "umask", 0o022),
}


class Broken(FakeMachines):
    """A back-end that breaks the contract in one way."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.depth = fault, 0
        self.child: subprocess.Popen[bytes] | None = None
        if fault == "a process is left":
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if fault == "an unknown thing is kept":
            self.preserves = KNOWN | {"sockets"}  # type: ignore[misc]
        if fault == "limits are told without a reason":
            self.unenforced = ("memory_bytes",)

    def start(self, image: Image) -> FakeMachine:
        if self.fault == "a missing folder is no error":
            there = {k: v for k, v in image.trees.items() if Path(v).exists()}
            image = replace(image, trees=there)
        elif self.fault == "a missing folder is told late":
            try:
                return super().start(image)
            except UserError as error:
                raise SandboxFailure(str(error)) from error
        elif self.fault == "binds can be written to":
            image = replace(image, trees={**image.trees, **image.binds}, binds={})
        elif self.fault == "the environment is not set":
            image = replace(image, environment={})
        elif self.fault == "trees are the folders themselves":
            for folder in image.trees.values():
                (Path(folder) / "lock").touch()
        return super().start(image)

    def machine(self, files: Files, state: State, image: Files) -> FakeMachine:
        if self.closed and self.fault != "a closed back-end starts machines":
            raise SandboxFailure("the back-end is closed")
        made = Machine(self, files, state, image)
        self.live.append(made)
        return made

    def close(self) -> None:
        if self.fault == "machines go on when the back-end is closed":
            self.closed = True
        else:
            super().close()


FAULTS = {
    "an unknown thing is kept": "declares",
    "limits are told without a reason": "declares",
    "a missing folder is no error": "not there",
    "a missing folder is told late": "not there",
    "binds can be written to": "as its image says",
    "the environment is not set": "as its image says",
    "trees are the folders themselves": "as its image says",
    "exit status is lost": "output and status",
    "standard error is lost": "output and status",
    "a command without input waits": "standard input",
    "input is text": "standard input",
    "raises for NUL": "any command line",
    "output beyond the limit is cut off": "bounds output",
    "only the end of output is kept": "bounds output",
    "time-outs end the shell alone": "time-out",
    "time-outs close the machine": "time-out",
    "partial output is lost": "time-out",
    "left processes are not counted": "counts what",
    "read ignores the limit": "reads and writes",
    "errors are not typed": "reads and writes",
    "write resets modes": "reads and writes",
    "read follows links on the host": "follows no link",
    "write follows links on the host": "follows no link",
    "changes follows links on the host": "follows no link",
    "changes leaves out deletions": "what differs",
    "changes lists what is as it was": "what differs",
    "changes against the parent": "what differs",
    "modes are lost": "modes, times",
    "times are lost": "modes, times",
    "empty folders are lost": "modes, times",
    "symbolic links are lost": "modes, times",
    "pipes are lost": "modes, times",
    "files are cut": "modes, times",
    "owners are lost": "keeps owners",
    "what was deleted comes back": "keeps deletions",
    "names are made UTF-8": "odd names",
    "marks of deletion are taken for deletions": "stand for deletions",
    "hard links are split": "keeps hard links",
    "no state of the shell": "keeps the shell",
    "the working directory is lost": "keeps the shell",
    "plain variables are lost": "keeps the shell",
    "variables are exported": "keeps the shell",
    "arrays are lost": "keeps the shell",
    "functions are lost": "keeps the shell",
    "options are lost": "keeps the shell",
    "the umask is lost": "keeps the shell",
    "a freeze moves the shell": "freeze changes nothing",
    "a frozen machine shares its files": "freeze changes nothing",
    "siblings share their files": "siblings are independent",
    "depth 20 is too deep": "a chain of",
    "thaw after discard": "discard frees",
    "discard twice raises": "discard frees",
    "discard closes what was thawed": "discard frees",
    "ids repeat": "own id",
    "close twice raises": "a closed machine",
    "close waits for commands": "closes while",
    "machines go on when the back-end is closed": "the back-end closes",
    "a closed back-end starts machines": "the back-end closes",
    "a process is left": "nothing is left",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_way_to_break_it_is_found(fault: str) -> None:
    made: list[Broken] = []

    def factory() -> Broken:
        made.append(Broken(fault))
        return made[-1]

    try:
        report = check_machine(factory, depth=25, seconds=1.0, only=(FAULTS[fault],))
    finally:
        for machine in made[0].live:
            machine.ended.set()
        if made[0].child is not None:
            made[0].child.kill()
            made[0].child.wait(10)
    found = [r.name for r in report.results if r.status == "failed"]
    assert any(FAULTS[fault] in name for name in found), str(report)


def test_a_fault_is_told_in_one_line_and_the_rest_goes_on() -> None:
    report = check_machine(lambda: Broken("modes are lost"), only=("modes, times", "keeps odd names"))
    assert not report.ok
    _, first, second, *_ = report.results
    assert "empty" in first.detail
    assert "1777" in first.detail
    assert "\n" not in first.detail
    assert second.status == "ok"
    assert list(Path(tempfile.gettempdir()).glob("bp-check-*")) == []
