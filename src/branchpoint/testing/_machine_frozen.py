"""Checks of machines: what a frozen one keeps, and how machines thawed from it go their own ways."""

from __future__ import annotations

from branchpoint.sandbox.machine import Machine
from branchpoint.testing._machine_bench import Bench, quote, same
from branchpoint.testing._machine_files import ODD, raises
from branchpoint.testing.report import expect
from branchpoint.world import SandboxFailure, SnapshotUnsupported

_MADE = (
    "umask 022; mkdir -p made/deep empty; printf 'new\\n' >made/f; printf '#!x' >made/run",
    "head -c 100000 /dev/zero >made/zeros",
    "chmod 4755 made/run; chmod 600 made/f; ln -s /check/d/old made/abs; ln -s nowhere made/dangling; mkfifo made/pipe",
    "ln a.txt made/again; printf 'more\\n' >>keep/k; mkdir sealed; printf s >sealed/s; chmod 700 sealed",
    "chmod 1777 empty",
    "touch -d @1000000007 made/f; touch -d @1234567890 made/deep; touch -d @981173106 made",
)
_RIGHT = {  # kind, mode, size, time, target
    "made": ("d", "755", "", "981173106", ""), "made/deep": ("d", "755", "", "1234567890", ""),
    "made/f": ("f", "600", "4", "1000000007", ""), "made/run": ("f", "4755", "3", None, ""),
    "made/zeros": ("f", "644", "100000", None, ""), "made/abs": ("l", "777", None, None, "/check/d/old"),
    "made/dangling": ("l", "777", None, None, "nowhere"), "made/pipe": ("p", "644", None, None, ""),
    "empty": ("d", "1777", "", None, ""), "sealed": ("d", "700", "", None, ""), "keep/k": ("f", "644", "7", None, ""),
    "d/old": ("f", "644", "4", "1000000000", ""),
}  # fmt: skip


def keeps_files(bench: Bench) -> None:
    with bench.machine(*_MADE) as machine:
        before = bench.look(machine)
        for path, right in _RIGHT.items():
            kind, mode, _, _, _, size, time, target = before.get(path, ("",) * 8)
            got = [g if r is not None else None for g, r in zip((kind, mode, size, time, target), right, strict=True)]
            expect(got == list(right), f"{path} is {got} in the machine that made it; expected {list(right)}")
        files = [p for p, row in before.items() if row[0] == "f" and row[5] != "100000"]
        text = bench.content(machine, files)
        with bench.frozen(machine) as frozen:
            for _ in range(2):
                with bench.thawed(frozen) as branch:
                    same(before, bench.look(branch), "a thawed machine's files differ")
                    expect(bench.content(branch, files) == text, "a thawed machine's files hold something else")
                    expect(branch.read("/check/made/zeros") == bytes(100000), "a large file holds something else")


def _paths(bench: Bench, machine: Machine, right: str, when: str) -> None:
    got, wanted = {p: row[0] for p, row in bench.look(machine).items() if p}, {}
    for word in right.split():
        path, _, kind = word.partition(":")
        wanted[path] = kind
    odd = {p: (wanted.get(p), got.get(p)) for p in {*got, *wanted} if got.get(p) != wanted.get(p)}
    expect(not odd, f"{when}: (expected, found) {dict(sorted(odd.items()))}")


def deletions(bench: Bench) -> None:
    """Case 20 of the known faults: what was deleted stays deleted."""
    first = "a.txt:l d:d d/new:f d/sub:d moved:d moved/k:f moved/run.sh:f gone:f link:d hard:f"
    with bench.machine(
        "rm -rf d; mkdir -p d/sub; printf new >d/new; rm a.txt; ln -s d/new a.txt; mv keep moved",
        "mv run.sh moved/run.sh; rm -rf gone; printf file >gone; rm link; mkdir link",
    ) as machine:
        _paths(bench, machine, first, "after deletions and renames")
        with bench.frozen(machine) as one, bench.thawed(one) as branch:
            _paths(bench, branch, first, "deletions and renames in a thawed machine")
            expect(
                bench.content(branch, ["a.txt", "gone", "moved/k"]) == "newfilek\n", "renamed files hold something else"
            )
            bench.do(branch, "rm -rf d gone link; mkdir -p d gone/x; mv moved keep; rm a.txt; printf 2 >keep/z")
            second = "d:d gone:d gone/x:d keep:d keep/k:f keep/run.sh:f keep/z:f hard:f"
            with bench.frozen(branch) as two, bench.thawed(two) as third:
                _paths(bench, third, second, "deletions of deletions, thawed")
                bench.do(third, "rm keep/z; mkdir d/sub")
                with bench.frozen(third) as three, bench.thawed(three) as fourth:
                    right = second.replace(" keep/z:f", " d/sub:d")
                    _paths(bench, fourth, right, "a third layer")
        with bench.frozen(machine) as again, bench.thawed(again) as late:
            _paths(bench, late, first, "the first state, thawed late")


def odd_names(bench: Bench) -> None:
    make = "mkdir odd; " + "; ".join(f"printf {n} >{quote(f'/check/odd/{name}')}" for n, name in enumerate(ODD))
    with bench.machine(
        make, f"rm {quote(f'/check/odd/{ODD[0]}')}; printf 0 >{quote(f'/check/odd/{ODD[0]}')}"
    ) as machine:
        before = bench.look(machine)
        with bench.frozen(machine) as frozen, bench.thawed(frozen) as branch:
            same(before, bench.look(branch), "files with odd names")
            for n, name in enumerate(ODD):
                got = bench.content(branch, [f"odd/{name}"])
                expect(got == str(n), f"the file named {name!r} holds {got!r}; expected {n}")
            bench.do(branch, "; ".join(f"rm -- {quote(f'/check/odd/{name}')}" for name in ODD))
            with bench.frozen(branch) as later, bench.thawed(later) as third:
                left = [p for p in bench.look(third) if p.startswith("odd/")]
                expect(not left, f"deleted files with odd names are back: {left}")


def whiteouts(bench: Bench) -> str | None:
    with bench.machine("printf x >.wh.a.txt; mkdir .wh.d; printf y >d/.wh..wh..opq") as machine:
        before = bench.look(machine)
        try:
            frozen = machine.freeze()
        except SnapshotUnsupported:
            bench.do(machine, "rm -rf .wh.a.txt .wh.d d/.wh..wh..opq")
            with bench.frozen(machine) as kept, bench.thawed(kept) as branch:
                same(bench.look(machine), bench.look(branch), "after a refused snapshot")
            return "refused with SnapshotUnsupported"
        with bench.thawed(frozen) as branch:
            same(before, bench.look(branch), "names that stand for deletions")
        frozen.discard()
    return None


def owners(bench: Bench) -> str | None:
    with bench.machine() as machine:
        if machine.run("printf x >owned; chown 12:34 owned").code:
            return "a command cannot change owners in this machine"
        before = bench.look(machine)
        expect(before["owned"][2:4] == ("12", "34"), f"chown 12:34 gave {before['owned'][2:4]}")
        with bench.frozen(machine) as frozen, bench.thawed(frozen) as branch:
            same(before, bench.look(branch), "owners")
    return None


def hard_links(bench: Bench) -> None:
    with bench.machine("printf 'pair\\n' >p; ln p d/q; ln p r; printf 'more\\n' >>r") as machine:
        before = bench.look(machine)
        names = [before[p][4] for p in ("p", "d/q", "r")]
        expect(names == ["3"] * 3, f"a file with three names counts {names}")
        with bench.frozen(machine) as frozen, bench.thawed(frozen) as branch:
            same(before, bench.look(branch), "hard links")
            got = bench.content(branch, ["p", "d/q", "r"])
            expect(got == "pair\nmore\n" * 3, f"three names of a file hold {got!r}")
            bench.do(branch, "rm p; printf new >s; ln s t; printf er >>t")
            expect(
                bench.content(branch, ["d/q", "s", "t"]) == "pair\nmore\nnewernewer",
                "a new hard link, or one name less",
            )


def written_links(bench: Bench) -> str | None:
    if "links" not in bench.machines.preserves:
        return "not declared"
    with (
        bench.machine("printf 1 >p; ln p q") as machine,
        bench.frozen(machine) as frozen,
        bench.thawed(frozen) as branch,
    ):
        bench.do(branch, "printf 2 >>p; printf x >>a.txt")
        got = bench.content(branch, ["q", "hard"])
        expect(got == "12one\nx", f"after a write to another name, q and hard hold {got!r}")
    return None


_SHELL = (
    "mkdir -p 'a b'; cd 'a b'; x='two  words'; export e='it'\"'\"'s'; a=(1 'b c' 3); umask 027; set -o noglob",
    'f() { echo "f:$1"; }; g() { f "in $1"; }; unset CHECK',
)
_SAID = 'pwd; echo "$x|$e|${a[1]}|${a[2]}|${CHECK}"; g y; umask; [[ -o noglob ]] && echo noglob; printf x >made'


def shell(bench: Bench) -> str | None:
    right = "/check/a b\ntwo  words|it's|b c|3|\nf:in y\n0027\nnoglob\n"
    with bench.machine(*_SHELL) as machine:
        got = bench.do(machine, _SAID)
        expect(got == right, f"the next command finds {got!r}; expected {right!r}")
        machine.run("x=lost; kill -9 $$")
        got = bench.do(machine, _SAID)
        expect(got == right, f"after a shell was killed the next command finds {got!r}; expected {right!r}")
        if "shell" not in bench.machines.preserves:
            return "not declared"
        with bench.frozen(machine) as frozen:
            bench.do(machine, "x=other; cd /; umask 022; f() { echo other; }; set +o noglob; unset e")
            for _ in range(2):
                with bench.thawed(frozen) as branch:
                    got = bench.do(branch, _SAID)
                    expect(got == right, f"a thawed machine's shell says {got!r}; expected {right!r}")
                    said = bench.do(branch, "env")
                    expect("\ne=it's\n" in f"\n{said}", "an exported variable is not exported in a thawed machine")
                    expect("\nx=" not in f"\n{said}", "a plain variable is exported in a thawed machine")
                    expect(bench.look(branch)["a b/made"][1] == "640", "the umask is not kept")
                    bench.do(branch, "x=mine; cd /; f() { :; }")
            got = bench.do(machine, 'pwd; echo "$x"; f y')
            expect(got == "/\nother\nother\n", f"the machine that was frozen says {got!r}")
    return None


def unchanged(bench: Bench) -> None:
    with bench.machine("x=1; cd d; printf a >made") as machine:
        before = bench.look(machine)
        with bench.frozen(machine) as frozen:
            same(before, bench.look(machine), "a freeze changed the machine's files")
            got = bench.do(machine, 'pwd; echo "$x"; cat made')
            expect(got == "/check/d\n1\na", f"after a freeze the machine says {got!r}")
            bench.do(machine, "printf b >made; rm old; printf c >/check/later; x=2; cd /")
            machine.write("/check/written", b"w")
            with bench.thawed(frozen) as branch:
                same(before, bench.look(branch), "what a machine does after a freeze shows in it")
                got = bench.do(branch, "cat /check/d/made")
                expect(got == "a", f"what a machine writes after a freeze shows in it: {got!r}")
            got = bench.do(machine, 'pwd; echo "$x"; cat /check/d/made /check/later /check/written')
            expect(got == "/\n2\nbcw", f"after freeze and thaw the machine says {got!r}")


def siblings(bench: Bench) -> None:
    count = 5
    with bench.machine("x=0; printf 0 >shared; printf base >>keep/k") as machine, bench.frozen(machine) as frozen:
        branches = [frozen.thaw() for _ in range(count)]
        try:
            for n, branch in enumerate(branches):
                bench.do(
                    branch,
                    f"printf {n} >shared; printf {n} >>keep/k; printf x >own{n}; rm {'a.txt' if n % 2 else 'link'}",
                )
            bench.do(machine, "printf parent >shared")
            for n, branch in enumerate(branches):
                got = bench.do(branch, "cat shared; echo; cat keep/k")
                expect(got == f"{n}\nk\nbase{n}", f"sibling {n} of {count} holds {got!r}")
                seen = bench.look(branch)
                own = [p for p in seen if p.startswith("own")]
                expect(own == [f"own{n}"], f"sibling {n} holds {own}")
                lost = [p for p in ("a.txt", "link") if p not in seen]
                expect(lost == ["a.txt" if n % 2 else "link"], f"sibling {n} lacks {lost}")
        finally:
            for branch in branches:
                branch.close()
        got = bench.do(machine, "cat shared; cat keep/k")
        expect(got == "parentk\nbase", f"after its siblings the machine holds {got!r}")


def older(bench: Bench) -> None:
    """Case 20 (b): an older state has nothing of a newer one."""
    with bench.machine("printf 1 >one") as machine, bench.frozen(machine) as first:
        before = bench.look(machine)
        bench.do(machine, "printf 2 >two; rm one; mkdir three")
        with bench.frozen(machine) as second:
            for frozen in (first, second, first):
                with bench.thawed(frozen) as branch:
                    got = sorted(p for p in bench.look(branch) if p in ("one", "two", "three"))
                    right = ["one"] if frozen is first else ["three", "two"]
                    expect(got == right, f"a state holds {got}; expected {right}")
            with bench.thawed(first) as branch:
                same(before, bench.look(branch), "an older state")


def orphan(bench: Bench) -> None:
    with bench.machine("printf kept >made") as machine:
        frozen = machine.freeze()
    with bench.thawed(frozen) as branch:
        expect(bench.do(branch, "cat made a.txt") == "keptone\n", "a frozen machine depends on the one it came from")
        below = branch.freeze()
    frozen.discard()
    with bench.thawed(below) as branch:
        expect(bench.do(branch, "cat made a.txt") == "keptone\n", "a frozen machine depends on a discarded one")
    below.discard()


def chain(bench: Bench) -> None:
    machine = bench.machines.start(bench.image)
    try:
        for n in range(1, bench.depth + 1):
            bench.do(machine, f"x={n}; printf {n} >file{n}; printf '{n} ' >>all; rm -rf file{n - 3} again; mkdir again")
            machine.write(f"/check/again/{n}", b"")
            frozen = machine.freeze()
            machine.close()
            machine = frozen.thaw()
            frozen.discard()
            got = bench.do(machine, 'cat all; echo "$x"') if "shell" in bench.machines.preserves else ""
            right = "".join(f"{m} " for m in range(1, n + 1)) + f"{n}\n"
            expect(got in ("", right), f"at depth {n} the machine says {got[-60:]!r}; expected {right[-60:]!r}")
            seen = sorted(p for p in bench.look(machine) if p.startswith(("file", "again/")))
            wanted = sorted([f"again/{n}", *(f"file{m}" for m in range(max(1, n - 2), n + 1))])
            expect(seen == wanted, f"at depth {n} the machine holds {seen}; expected {wanted}")
    finally:
        machine.close()


def discarded(bench: Bench) -> None:
    with bench.machine("printf 1 >made") as machine:
        frozen, other = machine.freeze(), machine.freeze()
        with bench.thawed(frozen) as branch:
            frozen.discard()
            frozen.discard()
            raises(frozen.thaw, SandboxFailure, "thaw after discard")
            expect(
                bench.do(branch, "cat made; printf 2 >>made; cat made") == "112",
                "a branch dies with its discarded origin",
            )
            with bench.frozen(branch) as below, bench.thawed(below) as third:
                expect(bench.do(third, "cat made") == "12", "a state on a discarded one holds something else")
        with bench.thawed(other) as branch:
            expect(bench.do(branch, "cat made") == "1", "discard of one frozen machine took another one's files")
        other.discard()
        expect(bench.do(machine, "cat made") == "1", "discard changed the machine")


def ids(bench: Bench) -> None:
    with bench.machine() as machine:
        made = [machine.freeze() for _ in range(3)]
        bench.do(machine, "printf x >x")
        made.append(machine.freeze())
        names = [f.id for f in made]
        for each in made:
            each.discard()
    expect(
        len(set(names)) == 4 and all(isinstance(n, str) and n for n in names), f"four frozen machines have ids {names}"
    )
