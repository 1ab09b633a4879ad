"""The shell sandbox: what commands see, what snapshots keep, what becomes of layers, limits and left processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shell_kit as kit

from branchpoint.sandbox.machine import Change, Image
from branchpoint.sandbox.shell import Limits, ShellMachines
from branchpoint.world import SandboxFailure, SnapshotUnsupported, UserError


@pytest.fixture(scope="module")
def box() -> Iterator[ShellMachines]:
    yield from kit.opened(limits=Limits(seconds=20.0, output_bytes=1 << 12, disk_bytes=32 << 20, inodes=2000))


@pytest.fixture
def machine(box: ShellMachines) -> Iterator[Any]:
    made = kit.one(box)
    yield made
    made.close()


def test_commands_run_as_a_user_without_rights_who_sees_little(machine: Any) -> None:
    told = machine.run(
        "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status | cut -f2; ls /; ls /home /root; "
        "hostname; "
        "cat /proc/net/dev | grep -c :; ls /proc | grep -c '^[0-9]'"
    )
    lines = told.output.split()
    assert lines[:4] == ["1000", "0000000000000000", "0000000000000000", "1"]
    assert "etc" in lines
    assert "sandbox" in lines
    assert lines[-2] == "1"  # the loopback device alone
    assert int(lines[-1]) < 10
    assert machine.run("cat /etc/shadow; ls /srv /mnt").code != 0


def test_no_variable_of_the_trainer_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cr3t")
    box = kit.machines()
    try:
        told = kit.one(box).run("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; env")
        assert "HOME=/home/user" in told.output
        assert "s3cr3t" not in told.output
        assert str(Path.cwd()) not in told.output
    finally:
        box.close()


def test_files_and_shell_go_on_from_command_to_command(machine: Any) -> None:
    machine.run(
        "mkdir -p /tmp/d && cd /tmp/d && export E=1 && v=2 && f() { echo $v; } && umask 027 && echo text > file"
    )
    assert machine.run('pwd; echo "$E$v"; f; umask; cat file').output.split() == ["/tmp/d", "12", "2", "0027", "text"]
    assert machine.read("/tmp/d/file") == b"text\n"


def test_what_a_command_is_given_and_gives_back(machine: Any) -> None:
    assert machine.run("cat", stdin=b"\xffin\n").output == "\ufffdin\n"
    assert machine.run("cat; echo end").output == "end\n"  # nothing to wait for
    assert machine.run("cat /dev/stdin; cat /dev/stdin", stdin=b"1").output == "11"
    assert machine.run("exit 7").code == 7
    assert machine.run("kill -TERM $BASHPID").code == 128 + signal.SIGTERM
    assert machine.run("echo $SHLVL; ((BASHPID == $$)) && echo same").output == "1\nsame\n"
    assert machine.run("x=1; sleep 60 & exec true").left == 1
    assert machine.run("x=2; kill -9 $$; x=3").code == 137
    assert machine.run("kill -9 1; echo -$x-").output == "--\n"
    assert machine.run("exec true").notes
    assert machine.run("a\0b").code == 2
    assert machine.run("echo '\ud800'").output == "?\n"
    assert machine.run("echo out; echo err >&2").output == "out\nerr\n"
    told = machine.run("head -c 100000 /dev/zero | tr '\\0' x; echo; echo last")
    assert told.output.endswith("last\n")
    assert told.omitted == 100_006 - len(told.output)
    assert len(told.output) == 1 << 12


def test_time_is_over(machine: Any) -> None:
    machine.run("x=kept")
    began = time.monotonic()
    told = machine.run("x=lost; setsid sleep 60 & sleep 60", seconds=0.5)
    assert told.timed_out
    assert told.code == 137
    assert time.monotonic() - began < 15
    assert machine.run("echo $x; pgrep sleep").output == "kept\n"


def test_left_processes_are_killed_and_told(box: ShellMachines, machine: Any) -> None:
    told = machine.run("sleep 60 & (setsid nohup sleep 60 >/dev/null 2>&1 &) ; (setsid sleep 60 &) ; echo done")
    assert (told.output, told.left) == ("done\n", 3)
    assert machine.run("pgrep sleep").output == ""
    machine.freeze()
    strict = kit.machines(left="refuse")
    try:
        other = kit.one(strict)
        other.freeze().discard()
        other.run("sleep 60 &")
        with pytest.raises(SnapshotUnsupported, match="left 1 processes"):
            other.freeze()
    finally:
        strict.close()


KEPT = r"""
cd /tmp; mkdir -p tree/sub gone opaque
echo one > tree/file; chmod 640 tree/file; touch -d '2001-02-03 04:05:06.789' tree/file; ln tree/file tree/hard
ln -s ../nowhere tree/link; mkfifo tree/pipe; printf x > $'tree/new\nline'; printf y > $'tree/\xff\xfe'
printf z > tree/-rf
printf w > "tree/$(printf 'n%.0s' {1..250})"; chmod 1751 tree/sub; echo a > gone/a; echo b > opaque/b; touch old
truncate -s 1M tree/sparse
"""
CHANGED = (
    "cd /tmp; rm -r gone; rm old; rm -r opaque; mkdir opaque; echo c > opaque/c; "
    "mv tree/sub tree/moved; mkdir tree/file2"
)
LOOK = (
    "cd /tmp; find . -printf '%P|%y|%m|%n|%s|%T@|%l\\n' | grep -v '^|' | LC_ALL=C sort; "
    "cat tree/file tree/hard opaque/* 2>/dev/null"
)


def test_a_snapshot_keeps_files_as_they_are(machine: Any) -> None:
    machine.run(KEPT)
    first_look, first = machine.run(LOOK).output, machine.freeze()
    machine.run(CHANGED)
    second_look, second = machine.run(LOOK).output, machine.freeze()
    assert "gone" in first_look
    assert "2001" not in first_look  # times are told in seconds
    assert "gone" not in second_look
    assert "opaque/b" not in second_look
    for frozen, look in ((first, first_look), (second, second_look)):
        for _ in range(2):
            again = frozen.thaw()
            assert again.run(LOOK).output == look
            again.run("rm -rf /tmp/*")
            again.close()


def test_siblings_and_their_parent_go_their_own_ways(machine: Any) -> None:
    machine.run("cd /tmp; x=0; echo base > file")
    frozen = machine.freeze()
    siblings = [frozen.thaw() for _ in range(3)]
    for n, sibling in enumerate(siblings):
        sibling.run(f"x={n}; echo {n} >> file")
    machine.run("x=p; echo p >> file")
    machine.close()
    frozen.discard()
    with pytest.raises(SandboxFailure, match="discarded"):
        frozen.thaw()
    assert [s.run("echo $x; cat file").output for s in siblings] == [f"{n}\nbase\n{n}\n" for n in range(3)]


def test_a_freeze_without_changes_makes_no_layer(machine: Any) -> None:
    machine.run("echo 1 > /tmp/a")
    before = machine.freeze()
    machine.run("ls /tmp; x=1")
    after = machine.freeze()
    assert after._state.layers == before._state.layers
    assert after.thaw().run("echo $x").output == "1\n"


def test_depth_300_keeps_every_file_on_few_layers(box: ShellMachines) -> None:
    machine = kit.one(box)
    for n in range(300):
        machine.write(f"/tmp/d/{n % 50}", b"%d" % n)
        if n % 50 == 25:
            machine.run("rm /tmp/d/7; mkdir -p /tmp/e; rm -r /tmp/e; mkdir /tmp/e; touch /tmp/e/$RANDOM")
        frozen = machine.freeze()
        machine.close()
        machine = frozen.thaw()
        frozen.discard()
    assert len(machine._state.layers) <= box.layers
    assert machine.run("ls /tmp/d | wc -l").output.strip() == "49"
    assert [machine.read(f"/tmp/d/{n}") for n in (0, 8, 25, 49)] == [b"250", b"258", b"275", b"299"]
    assert machine.run("ls /tmp/e | wc -l").output.strip() == "1"
    machine.close()


def test_merged_layers_hide_what_lies_below_them(box: ShellMachines, tmp_path: Path) -> None:
    for name in ("again/old", "gone/old", "file/old", "kept/old"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("old")
    machine = kit.one(box, trees={"/repo": tmp_path}, workdir="/repo")
    machine.run("rm -r again gone file; mkdir again; touch again/new file kept/new; ln again/new again/hard")
    look = "find . | LC_ALL=C sort; stat -c %h again/hard"
    before = machine.run(look).output
    for n in range(box.layers + 1):
        machine.write("/tmp/n", b"%d" % n)
        machine.freeze()
    assert len(machine._state.layers) < box.layers
    assert machine.run(look).output == before
    assert "again/old" not in before
    assert "kept/old" in before


def test_layers_are_gone_when_nothing_needs_them(box: ShellMachines) -> None:
    def stores() -> int:
        place = Path(f"/proc/{box.link.process.pid}/root{box.folder}/k")
        return len(list(place.iterdir()))

    before = stores()
    machine = kit.one(box)
    machine.run("echo 1 > /tmp/a")
    frozen = machine.freeze()
    sibling = frozen.thaw()
    sibling.run("echo 2 > /tmp/a")
    machine.close()
    assert stores() == before + 2
    frozen.discard()
    assert sibling.run("cat /tmp/a").output == "2\n"
    sibling.close()
    for _ in range(100):
        if stores() == before:
            break
        time.sleep(0.05)
    assert stores() == before


def test_reading_and_writing_stay_inside(machine: Any) -> None:
    machine.run("cd /tmp; ln -s /etc/shadow s; ln -s /proc/1/environ e; mkfifo p; mkdir d; ln -s ../../../../root r")
    for path, error in (
        ("/tmp/s", FileNotFoundError), ("/tmp/e", FileNotFoundError), ("/tmp/p", ValueError),
        ("/tmp/d", IsADirectoryError), ("/nowhere", FileNotFoundError), ("", ValueError), ("/a\0b", ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            machine.read(path)
    with pytest.raises(ValueError, match="limit"):
        machine.read("/usr/bin/env", limit=10)
    machine.write("/tmp/r/x/y", b"inside")
    assert machine.run("cat /root/x/y; stat -c %U:%a /root/x/y").output == "insideuser:644\n"
    assert not Path("/root/x/y").exists()
    machine.write("relative", b"")
    assert machine.read("/relative") == b""
    with pytest.raises(OSError, match=r"(?i)read-only"):
        machine.write("/usr/x", b"1")
    with pytest.raises(OSError):
        machine.write("/tmp/p", b"1")
    big = os.urandom(3 << 20)
    machine.write("/tmp/big", big)
    assert machine.read("/tmp/big", limit=4 << 20) == big


def test_changes_are_those_against_the_image(box: ShellMachines, tmp_path: Path) -> None:
    for name in ("a", "b", "sub/c", "sub/d", "same"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    machine = kit.one(box, trees={"/repo": tmp_path}, workdir="/repo")
    assert machine.changes("/repo") == {}
    machine.run("echo more >> a; rm b; ln -s a l; chmod 700 same; mkfifo p")
    machine = machine.freeze().thaw()
    machine.run("rm -r sub; mkdir -p sub new; echo e > sub/e; touch new/f; cp -p a a2; mv a2 a; echo out > /tmp/o")
    assert machine.changes("/repo") == {
        "/repo/a": Change("file", b"amore\n", 0o644),
        "/repo/b": Change("deleted"),
        "/repo/l": Change("symlink", None, 0o777),
        "/repo/new": Change("directory", None, 0o755),
        "/repo/new/f": Change("file", b"", 0o644),
        "/repo/p": Change("other", None, 0o644),
        "/repo/same": Change("file", b"same", 0o700),
        "/repo/sub/c": Change("deleted"),
        "/repo/sub/d": Change("deleted"),
        "/repo/sub/e": Change("file", b"e\n", 0o644),
    }
    assert list(machine.changes("/repo/new")) == ["/repo/new/f"]
    machine.run("cd /; rm -r /repo")  # which the workdir of later commands is not
    assert set(machine.changes("/repo").values()) == {Change("deleted")}
    assert len(machine.changes("/repo")) == 7
    assert (tmp_path / "b").exists()


def test_image(box: ShellMachines, tmp_path: Path) -> None:
    tree, bound = tmp_path / "tree", tmp_path / "bound"
    tree.mkdir()
    bound.mkdir()
    tmp_path.chmod(0o755)
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (bound / "data").write_text("data")
    image = Image(
        trees={"/code": tree}, binds={"/opt/x": bound, "/opt/y": bound, "/opt/f": bound / "data"},
        environment={"A": "b c"}, workdir="/code",
    )  # fmt: skip
    machine = box.start(image)
    assert (
        machine.run('./run; cat /opt/x/data /opt/y/data /opt/f; echo "$A"; pwd').output
        == "ran\ndatadatadatab c\n/code\n"
    )
    assert "Read-only" in machine.run("echo > /opt/x/new").output
    assert machine.run("echo new > run && cat run").output == "new\n"
    assert (tree / "run").read_text().startswith("#!")
    machine.run("mv /opt /elsewhere; rm -rf /opt; rmdir /opt/x; ln -sf /etc /opt/y")
    assert machine.run("cat /opt/x/data /opt/y/data").output == "datadata"
    for wrong, match in (
        (Image(trees={"/x": tmp_path / "no"}), "image.trees"),
        (Image(binds={"/x": tmp_path / "no"}), "image.binds"),
        (Image(base="debian:12"), "image.base"),
        (Image(workdir="up/../.."), "absolute path"),
    ):
        with pytest.raises(UserError, match=match):
            box.start(wrong)


def test_a_root_file_system_as_base(box: ShellMachines, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("bin", "lib", "lib64", "etc", "srv"):
        (root / name).mkdir(parents=True)
    for program in ("/bin/bash", "/bin/cat"):
        shutil.copy(program, root / "bin")
        for line in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.splitlines():
            library = next((word for word in line.split() if word.startswith("/")), "")
            if library:
                (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, root / library.lstrip("/"))
    (root / "etc/name").write_text("mine")
    tmp_path.chmod(0o755)
    machine = kit.one(box, base=str(root))
    assert machine.run("cat /etc/name; echo; echo x > /tmp/a; cat /tmp/a; echo /usr/*").output == "mine\nx\n/usr/*\n"
    assert not (root / "tmp").exists()


def test_disk_and_files_are_limited_with_what_was_inherited(machine: Any) -> None:
    told = machine.run("head -c 20M /dev/zero > /tmp/a; echo $?; head -c 100M /dev/zero > /tmp/b; echo $?")
    assert told.output.split()[0] == "0"
    assert "No space left" in told.output
    assert told.notes
    machine.run("rm /tmp/b")
    assert machine.run("echo usable > /tmp/c; cat /tmp/c").output == "usable\n"
    machine.run("for i in {1..3000}; do : > /tmp/g$i; done 2>/dev/null")
    assert "No space left" in machine.run("touch /tmp/one-more").output
    assert machine.run("rm /tmp/g1 && touch /tmp/one-more; echo $?").output == "0\n"
    machine.freeze()
    assert machine.run("rm /tmp/g2*0; touch /tmp/another; echo $?").output == "0\n"
    sibling = machine.freeze().thaw()
    assert "No space left" in sibling.run("head -c 20M /dev/zero > /tmp/d").output
    assert "No space left" in sibling.run("for i in {1..3000}; do : > /tmp/f$i; done").output


def test_closing_from_another_thread_ends_a_command(box: ShellMachines) -> None:
    machine = kit.one(box)
    machine.run("true")
    threading.Timer(0.3, machine.close).start()
    began = time.monotonic()
    with pytest.raises(SandboxFailure, match="closed"):
        machine.run("sleep 60", seconds=30)
    assert time.monotonic() - began < 15
    machine.close()
    with pytest.raises(SandboxFailure, match="closed"):
        machine.run("true")


def test_machines_work_side_by_side(box: ShellMachines) -> None:
    machine = kit.one(box)
    machine.run("echo base > /tmp/f")
    frozen = machine.freeze()
    out: dict[int, str] = {}

    def work(n: int) -> None:
        sibling = frozen.thaw()
        sibling.run(f"echo {n} >> /tmp/f")
        out[n] = sibling.run("cat /tmp/f").output
        sibling.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert out == {n: f"base\n{n}\n" for n in range(16)}


SCRIPT = """
import sys, time
from branchpoint.sandbox.machine import Image
from branchpoint.sandbox.shell import ShellMachines
box = ShellMachines(sys.argv[1])
machine = box.start(Image())
machine.run("true")
print(box.link.process.pid, flush=True)
machine.run("sleep 300", seconds=300)
"""


def test_nothing_is_left_of_a_killed_trainer(tmp_path: Path) -> None:
    if kit.missing():
        pytest.skip(kit.missing())
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    keeper = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    for _ in range(100):
        if not Path(f"/proc/{keeper}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{keeper}").exists()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0300" in _read(p)]
    for group in Path("/sys/fs/cgroup").glob("*/branchpoint-*"):
        assert group.name != f"branchpoint-{keeper}" or not any(group.glob("m*"))
    assert len(list(tmp_path.iterdir())) == 1
    kit.machines(folder=tmp_path).close()
    assert not list(tmp_path.iterdir())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_storage_on_disk_says_what_it_does_not_limit(tmp_path: Path) -> None:
    box = kit.machines(folder=tmp_path, storage="disk")
    try:
        assert any("disk_bytes" in limit for limit in box.unenforced)
        machine = kit.one(box)
        machine.run("echo 1 > /tmp/a; rm -rf /home")
        sibling = machine.freeze().thaw()
        assert sibling.run("cat /tmp/a; ls -d /home").output.startswith("1\n")
        assert "/home" in sibling.changes("/")
    finally:
        box.close()
    assert not list(tmp_path.iterdir())


def test_what_cannot_work_is_told(tmp_path: Path) -> None:
    kit.machines().close()
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        ShellMachines(bwrap="no-such-bwrap")
    with pytest.raises(UserError, match="folder is"):
        ShellMachines(tmp_path / "nowhere")
    with pytest.raises(UserError, match="storage is"):
        ShellMachines(storage="tape")  # type: ignore[arg-type]
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    old.chmod(0o755)
    with pytest.raises(UserError, match=r"0\.8 or newer"):
        ShellMachines(bwrap=str(old))
    old.write_text("#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.9.0 || { echo no namespaces >&2; exit 1; }\n")
    tmp_path.chmod(0o755)
    with pytest.raises(SandboxFailure, match=r"no namespaces|could not start"):
        ShellMachines(bwrap=str(old))
    box = kit.machines()
    box.close()
    with pytest.raises(SandboxFailure, match="closed"):
        box.start(Image())
    box.close()
