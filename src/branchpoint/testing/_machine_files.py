"""Checks of machines: files that the host reads, writes and compares."""

from __future__ import annotations

from collections.abc import Callable

from branchpoint.sandbox.machine import Change, Machine
from branchpoint.testing._machine_bench import Bench, quote
from branchpoint.testing.report import expect
from branchpoint.world import SandboxFailure

ODD = (
    "new\nline",
    "\udcff\udcfe\udce9",
    "-dash",
    "n" * 255,
    " blank ",
    "quote'\"`$x",
    "back\\slash",
    "*",
    "é猫",
    "..x",
    "tab\t",
)
"""Names that a file may have; the second is no UTF-8."""


def raises(call: Callable[[], object], kinds: type[Exception] | tuple[type[Exception], ...], what: str) -> None:
    """Raises AssertionError unless the call raises one of these, of exactly this kind or a narrower one."""
    names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        call()
    except kinds:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__} ({error}); expected {names}") from error
    raise AssertionError(f"{what} raises nothing; expected {names}")


def host(bench: Bench) -> None:
    with bench.machine("mkfifo pipe; ln -s loop loop; ln -s d folder; ln -s none dangling; head -c 3000 /dev/zero >big",
                       "ln -s /etc passwords; mkdir tight; printf t >tight/f; chmod 0 tight/f") as machine:  # fmt: skip
        read = machine.read
        expect(read("/check/a.txt") == b"one\n", f"read gave {read('/check/a.txt')!r}")
        expect(read("/check/folder/old") == b"old\n", "a link inside is not followed")
        inside = bench.do(machine, "cat /etc/passwd").encode()
        expect(read("/check/passwords/passwd") == inside, "a link to / does not lead to the machine's own root")
        expect(read("/check/tight/f") == b"t", "a file without permissions is not read by the host")
        for path, kinds in (
            ("/check/none", FileNotFoundError), ("/check/a.txt/x", (FileNotFoundError, NotADirectoryError)),
            ("/check/dangling", FileNotFoundError), ("/check/d", IsADirectoryError), ("/", IsADirectoryError),
            ("/check/pipe", ValueError), ("/check/loop", (OSError, SandboxFailure)), ("/check/\0", ValueError),
        ):  # fmt: skip
            raises(lambda path=path: read(path), kinds, f"read({path!r})")
        raises(lambda: read("/check/big", limit=2999), ValueError, "read of 3000 bytes with limit 2999")
        expect(len(read("/check/big", limit=3000)) == 3000, "read of 3000 bytes with limit 3000")
        _writes(bench, machine)


def _writes(bench: Bench, machine: Machine) -> None:
    write, read = machine.write, machine.read
    write("/check/new/folder/f", b"\0\xff\r\n")
    expect(read("/check/new/folder/f") == b"\0\xff\r\n", "what was written is not read back")
    write("/check/run.sh", b"changed\n")
    write("/check/folder/old", b"through a link\n")
    write("/check/empty", b"")
    for n, name in enumerate(ODD):
        write(f"/check/new/{name}", b"%d" % n)
        expect(read(f"/check/new/{name}") == b"%d" % n, f"a file named {name!r} is not read back")
    for name in ("*", "[a]", "what?"):
        write(f"/check/new/{name}s/deep/f", name.encode())
        expect(
            read(f"/check/new/{name}s/deep/f") == name.encode(), f"a file in a folder named {name}s is not read back"
        )
        found = machine.changes(f"/check/new/{name}s/deep")
        right = {f"/check/new/{name}s/deep/f": Change("file", name.encode(), 0o644)}
        expect({p: c for p, c in found.items() if c.kind == "file"} == right, f"changes below {name}s gives {found}")
    raises(lambda: read("/check/new/*/f"), (OSError, ValueError), "read of a pattern")
    raises(lambda: read("/check/a.tx?"), OSError, "read of a pattern")
    got = bench.do(machine, "cat run.sh d/old empty; printf x >>new/folder/f; printf y >new/folder/made")
    expect(got == "changed\nthrough a link\n", f"after writes a command reads {got!r}")
    seen = bench.look(machine)
    expect(seen["run.sh"][1] == "755", f"a file that was 755 is {seen['run.sh'][1]} after a write")
    expect(seen["new/folder/f"][1] == "644", f"a new file has mode {seen['new/folder/f'][1]}; expected 644")
    expect(seen["new/folder"][1] == "755", f"a new folder has mode {seen['new/folder'][1]}; expected 755")
    for path in ("/check/d", "/", "/check/a.txt/x", "/check/pipe", "/check-bind/bound", "/check-bind/new"):
        raises(lambda path=path: write(path, b"x"), OSError, f"write({path!r})")
    raises(lambda: write("/check/loop", b"x"), (OSError, SandboxFailure), "write to a link to itself")
    raises(lambda: write("/check/\0", b""), (ValueError, OSError), "write to a name with NUL")
    raises(lambda: write("/check/" + "n" * 256, b""), OSError, "write to a name of 256 bytes")
    expect((bench.bind / "bound").read_text() == "bound of the host\n", "write reached a bind")


def traps(bench: Bench) -> None:
    """Links that lead to a folder of the host, were they followed there."""
    outside = str(bench.secret)
    up = "../" * 12
    with bench.machine(
        f"ln -s {outside}/secret trap; ln -s {outside} dir; ln -s {up}{outside[1:]}/secret up; ln -s {up} root",
        f"mv d moved; ln -s {outside} d; rm -rf gone; ln -s / gone; ln -s dir/secret chain",
    ) as machine:
        for path in ("trap", "dir/secret", "up", f"root{outside}/secret", "d/secret", f"gone{outside}/secret", "chain"):
            try:
                data = machine.read(f"/check/{path}")
            except (OSError, SandboxFailure):
                continue
            raise AssertionError(f"read(/check/{path}) followed a link and gave {data!r}")
        for path in ("trap", "dir/planted", "up", "d/planted", "chain", f"gone{outside}/planted", "dir/secret"):
            try:
                machine.write(f"/check/{path}", b"planted")
            except (OSError, SandboxFailure):
                continue
        held = {p.name: p.read_text() for p in bench.secret.iterdir()}
        expect(held == {"secret": "secret of the host\n"}, f"a write left the machine: the host's folder holds {held}")
        for under in ("/check", "/check/dir", "/check/d", "/check/gone"):
            for path, change in machine.changes(under).items():
                expect(b"of the host" not in (change.data or b""), f"changes({under}) holds {path}, a file of the host")
        found = machine.changes("/check")
        for name in ("trap", "dir", "up", "d", "gone"):
            got = found.get(f"/check/{name}")
            expect(got is not None and got.kind == "symlink" and got.data is None, f"changes has {got} for link {name}")
    expect((bench.secret / "secret").read_text() == "secret of the host\n", "the host's file has changed")


def changes(bench: Bench) -> None:
    with bench.machine() as machine:
        got = dict(machine.changes("/check"))
        expect(got == {}, f"changes of a new machine: {got}")
        odd = "".join(f"printf {n} >{quote(f'/check/odd/{name}')}; " for n, name in enumerate(ODD))
        bench.do(
            machine,
            "umask 022; printf 'two\\n' >keep/k; rm d/old; mkdir made odd; printf x >made/x; chmod 700 run.sh;"
            "touch d/sub/foo; mkfifo pipe; mv gone/x moved; rm link; ln -s /etc/shadow link;" + odd,
        )
        right = {
            "/check/keep/k": Change("file", b"two\n", 0o644), "/check/d/old": Change("deleted"),
            "/check/made": Change("directory", None, 0o755), "/check/made/x": Change("file", b"x", 0o644),
            "/check/run.sh": Change("file", b"echo ran\n", 0o700), "/check/pipe": Change("other", None, 0o644),
            "/check/gone/x": Change("deleted"), "/check/gone/x/y": Change("deleted"),
            "/check/moved": Change("directory", None, 0o755), "/check/moved/y": Change("file", b"y\n", 0o644),
            "/check/link": Change("symlink", None, 0o777), "/check/odd": Change("directory", None, 0o755),
        } | {f"/check/odd/{name}": Change("file", b"%d" % n, 0o644) for n, name in enumerate(ODD)}  # fmt: skip
        _equal(right, dict(machine.changes("/check")))
        with bench.frozen(machine) as frozen, bench.thawed(frozen) as branch:
            bench.do(branch, "printf 'k\\n' >keep/k; rm -rf odd; printf back >d/old")
            right = {p: c for p, c in right.items() if p != "/check/keep/k" and not p.startswith("/check/odd")}
            right["/check/d/old"] = Change("file", b"back", 0o644)
            _equal(right, dict(branch.changes("/check")))
            below = {p: c for p, c in right.items() if p.startswith("/check/gone/")}
            _equal(below, dict(branch.changes("/check/gone")))
            expect(dict(branch.changes("/no/such/place")) == {}, "changes of a place that never was are not empty")


def _equal(right: dict[str, Change], got: dict[str, Change]) -> None:
    rows = [
        f"{p!r}: {got.get(p)}; expected {right.get(p)}" for p in sorted({*right, *got}) if right.get(p) != got.get(p)
    ]
    expect(
        not rows, f"changes differ at {'; '.join(rows[:4])}" + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
    )
