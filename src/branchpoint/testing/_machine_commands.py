"""Checks of machines: commands, their input and output, and their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from branchpoint.sandbox.machine import Machine, Ran
from branchpoint.testing._machine_bench import FILES, Bench, brief, same
from branchpoint.testing.report import expect
from branchpoint.world import SandboxFailure, SnapshotUnsupported

_MUCH = 20_000_000
_MOST = 4 << 20  # of a command's output that a back-end may keep
_STRANGE = (
    "",
    "   ",
    "# nothing",
    "echo 'open",
    "f() {",
    "echo \0",
    "é猫 \u202e",
    "x" * 50_000,
    "\ud800",
    "exit 300; x",
)


def image(bench: Bench) -> None:
    with bench.machine() as machine:
        got = bench.do(machine, 'pwd; echo "$CHECK"; cat a.txt link /check-bind/bound')
        right = '/check\nit\'s "set"\none\nold\nbound of the host\n'
        expect(got == right, f"a new machine says {got!r}; expected {right!r}")
        expect('CHECK=it\'s "set"\n' in bench.do(machine, "env"), "image.environment is not exported")
        seen = bench.look(machine)
        paths = {"", "link", "hard", *FILES, "d", "d/sub", "gone", "gone/x", "keep"}
        expect(set(seen) == paths, f"/check holds {sorted(seen)}; expected {sorted(paths)}")
        modes = [seen[p][1] for p in ("a.txt", "run.sh", "d/sub/foo", "d")]
        expect(modes == ["640", "755", "644", "755"], f"the tree's modes are {modes}")
        expect(seen["d/old"][6] == "1000000000", f"d/old has the time {seen['d/old'][6]}; expected 1000000000")
        ran = machine.run("echo changed >a.txt; echo changed >/check-bind/bound; echo new >/check-bind/new")
        expect(ran.code != 0, "a bind can be written to")
        bench.do(machine, "rm -rf d; echo x >new")
    outside = {p.relative_to(bench.tree).as_posix() for p in bench.tree.rglob("*")}
    expect(outside == paths - {""}, f"a machine changed the folder its tree came from: {sorted(outside ^ paths)}")
    expect((bench.tree / "a.txt").read_text() == "one\n", "a machine wrote to a file that its tree came from")
    bound = {p.name: p.read_text() for p in bench.bind.iterdir()}
    expect(bound == {"bound": "bound of the host\n"}, f"a machine changed a bind: {bound}")
    with bench.machine() as machine:
        got = bench.do(machine, "cat a.txt d/old")
        expect(got == "one\nold\n", f"after another machine's changes a new one holds {got!r}")


def status(bench: Bench) -> None:
    with bench.machine() as machine:
        ran = machine.run("echo out; cat nowhere; echo last; exit 3")
        expect(ran.code == 3, f"exit 3 gave code {ran.code}")
        lines = ran.output.splitlines()
        expect(len(lines) == 3 and lines[0] == "out" and "nowhere" in f"nowhere {lines[1]}" and lines[2] == "last",
               f"standard output and error came as {ran.output!r}")  # fmt: skip
        expect(lines[1].startswith("cat:"), f"standard error is missing: {ran.output!r}")
        expect((ran.timed_out, ran.omitted, ran.left, ran.notes) == (False, 0, 0, ()), f"a plain command: {brief(ran)}")
        expect(machine.run("false").code == 1, "false gave no code 1")
        expect(machine.run("no-such-program-7f3a").code == 127, "an unknown program gave no code 127")
        ran = machine.run("echo on; kill -9 $$")
        expect(ran.code == 137, f"a shell that killed itself gave code {ran.code}; expected 128 + 9")
        got = bench.do(machine, "printf '%s' $'\\xff\\x00\\xe9\\n'")
        expect(got.startswith("\N{REPLACEMENT CHARACTER}"), f"undecodable bytes came as {got!r}")
        expect(bench.do(machine, "echo 猫") == "猫\n", "UTF-8 does not come back")


def stdin(bench: Bench) -> None:
    with bench.machine() as machine:
        begun = time.monotonic()
        expect(bench.do(machine, "cat; echo end") == "end\n", "a command without input reads something")
        took = time.monotonic() - begun
        expect(took < bench.seconds, "a command that waits for input finds no end of it")
        got = bench.do(machine, "cat; cat; echo end", stdin=b"two\nlines")
        expect(got == "two\nlinesend\n", f"input came as {got!r}")
        much = b"0123456789abcdef" * (1 << 16)
        got = bench.do(machine, "cat >much; echo done", stdin=much)
        expect(got == "done\n", f"a megabyte of input: {got!r}")
        expect(machine.read("/check/much", limit=1 << 20) == much, "a megabyte of input was not what the command read")
        bench.do(machine, "true", stdin=much)
        expect(bench.do(machine, "cat; echo end") == "end\n", "input that a command left is read by the next one")


def strange(bench: Bench) -> None:
    with bench.machine("x=kept") as machine:
        for command in _STRANGE:
            ran = machine.run(command, seconds=bench.seconds)
            expect(isinstance(ran, Ran), f"{command[:20]!r} gave a {type(ran).__name__}")
            expect(not ran.timed_out, f"{command[:20]!r} timed out")
        for command in ("echo 'open", "f() {", "echo \0"):
            code = machine.run(command, seconds=bench.seconds).code
            expect(code != 0, f"{command!r}, which no bash can take, gave code 0")
        got = bench.do(machine, 'echo "$x"')
        expect(got == "kept\n", f"after strange commands the machine says {got!r}")


def output(bench: Bench) -> None:
    with bench.machine() as machine:
        ran = machine.run(f"echo first; head -c {_MUCH} /dev/zero; echo last", seconds=bench.seconds)
        kept = len(ran.output.encode())
        expect(ran.code == 0, f"much output: {brief(ran)}")
        expect(kept <= _MOST, f"{kept} bytes of output were kept")
        expect(kept + ran.omitted == _MUCH + 11, f"{kept} bytes kept and {ran.omitted} omitted of {_MUCH + 11}")
        expect(ran.output.startswith("first\n") and ran.output.endswith("last\n"), "beginning or end of output is lost")
        ran = machine.run("echo first; yes", seconds=1.0)
        expect(ran.timed_out, f"yes did not time out: {brief(ran)}")
        kept = len(ran.output.encode())
        expect(kept <= _MOST and ran.omitted > 0, f"endless output: {kept} bytes kept, {ran.omitted} omitted")
        expect(ran.output.startswith("first\ny\n"), f"endless output begins with {ran.output[:20]!r}")
        expect(bench.do(machine, "echo on") == "on\n", "output of one command is told with the next")


def time_out(bench: Bench) -> None:
    with bench.machine("x=kept; cd d") as machine:
        for command in (
            "printf x >/check/before; (sleep 1; printf late >/check/after) & echo partial; sleep 300",
            "setsid sleep 300 & echo partial; sleep 300",
            "trap '' TERM INT HUP; echo partial; sleep 300; sleep 300",
            "(trap '' TERM; sleep 1; printf late >/check/after) & echo partial; yes >/dev/null",
        ):
            begun = time.monotonic()
            ran = machine.run(command, seconds=0.5)
            took = time.monotonic() - begun
            expect(ran.timed_out and ran.code != 0, f"{command!r} gave {brief(ran)}")
            expect(took < 0.5 + bench.seconds, f"{command!r} with 0.5 s took {took:.1f} s")
            expect(
                ran.output == "partial\n", f"{command!r} wrote {ran.output!r} until its time-out; expected 'partial'"
            )
        got = bench.do(machine, 'echo "$x"; pwd; cat /check/before')
        expect(got == "kept\n/check/d\nx", f"after time-outs the machine says {got!r}")
        seen = bench.look(machine)
        time.sleep(1.2)
        same(seen, bench.look(machine), "files changed after a time-out")
        expect("after" not in seen, "a process that timed out wrote a file later")


def left(bench: Bench) -> str | None:
    if "processes" in bench.machines.preserves:
        return "processes are kept"
    with bench.machine() as machine:
        begun = time.monotonic()
        ran = machine.run("(sleep 1; printf late >/check/late) & setsid sleep 300 & echo on", seconds=bench.seconds)
        expect(time.monotonic() - begun < bench.seconds, "who holds the output open holds up the command")
        expect((ran.code, ran.output, ran.timed_out) == (0, "on\n", False), f"a command left two behind: {brief(ran)}")
        expect(ran.left >= 2, f"a command left two processes; told: {ran.left}")
        seen = bench.look(machine)
        time.sleep(1.2)
        same(seen, bench.look(machine), "a process that was left still writes")
        try:
            with bench.frozen(machine) as frozen, bench.thawed(frozen) as branch:
                expect(bench.do(branch, "echo fine") == "fine\n", "a thawed machine does not answer")
        except SnapshotUnsupported:
            return None  # as configured
        expect(machine.run("true").left == 0, "true is said to have left processes")
    return None


def together(bench: Bench) -> None:
    """Machines are used from several threads at once."""

    def work(n: int) -> str:
        with bench.machine(f"x={n}; printf {n} >own") as machine, bench.frozen(machine) as frozen:
            bench.do(machine, "x=0; printf 0 >own")
            with bench.thawed(frozen) as branch:
                return bench.do(branch, 'cat own; echo " $x"')

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(8)))
    right = [f"{n} {n}\n" for n in range(8)]
    expect(got == right, f"eight machines at once say {got}")


def closed(bench: Bench) -> None:
    with bench.machine() as machine, bench.frozen(machine):
        machine.close()
        machine.close()
        calls: list[tuple[str, Callable[[], object]]] = [
            ("run", lambda: machine.run("true")), ("read", lambda: machine.read("/check/a.txt")),
            ("write", lambda: machine.write("/check/a.txt", b"")), ("changes", lambda: machine.changes("/check")),
            ("freeze", machine.freeze),
        ]  # fmt: skip
        for name, call in calls:
            try:
                call()
            except SandboxFailure:
                continue
            raise AssertionError(f"{name} of a closed machine raises no SandboxFailure")


def closed_meanwhile(bench: Bench) -> None:
    with bench.machine() as machine:
        ended = _while_running(machine, machine.close, bench.seconds)
        expect(isinstance(ended, (SandboxFailure, Ran)), f"the command that ran raised {ended!r}")
        expect(not isinstance(ended, Ran) or ended.code != 0, "the command that ran is said to have succeeded")


def _while_running(machine: Machine, act: Callable[[], None], seconds: float) -> object:
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(machine.run("sleep 300", seconds=300))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.3)
    act()
    thread.join(seconds)
    expect(not thread.is_alive(), f"{seconds:g} s after close a command still runs")
    return ended[0]
