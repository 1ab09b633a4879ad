"""Attacks on the shell sandbox from inside, as root and as an ordinary user: none gets out, and none outlives its time.

Programs of the attacks are in attack_kit.py. A limit that this computer cannot hold is named in ``unenforced``, and the
test asserts that instead.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attack_kit as kit
import pytest
import shell_kit

from branchpoint.sandbox.machine import Image, Ran
from branchpoint.sandbox.shell import Limits, ShellMachines
from branchpoint.world import SandboxFailure

LIMITS = Limits(
    seconds=20.0, memory_bytes=64 << 20, processes=40, disk_bytes=16 << 20, inodes=2000, output_bytes=1 << 14,
    file_bytes=64 << 20,
)  # fmt: skip


class Box:
    """Machines, who made them, and which process that is."""

    def __init__(self, machines: Any, unenforced: str, pid: int) -> None:
        self.start: Callable[[Image], Any] = machines.start if pid == os.getpid() else None  # type: ignore[assignment]
        self.machines, self.unenforced, self.pid = machines, unenforced, pid


@pytest.fixture(scope="module", params=["root", "user"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    if shell_kit.missing():
        pytest.skip(f"no shell sandbox here: {shell_kit.missing()}")
    if (os.getuid() == 0) == (request.param == "root"):
        machines = ShellMachines(limits=LIMITS)
        yield Box(machines, "; ".join(machines.unenforced), os.getpid())
        machines.close()
    elif request.param == "root":
        pytest.skip("the tests do not run as root")
    else:
        user = kit.Ordinary(lambda: ShellMachines(limits=LIMITS))
        if user.why:
            user.stop()
            pytest.skip(f"no shell sandbox for an ordinary user here: {user.why}")
        made = Box(user, "; ".join(user.call(0, "unenforced")), user.pid or 0)
        made.start = lambda image: user.call(0, "start", image)
        yield made
        user.stop()


@pytest.fixture
def machine(box: Box) -> Iterator[Any]:
    made = box.start(Image())
    yield made
    with suppress(SandboxFailure):
        made.close()


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder of the host that everybody may write to, so that nothing but the sandbox is in the way."""
    with tempfile.TemporaryDirectory(prefix="bp-out-") as name:
        place = Path(name)
        place.chmod(0o777)
        (place / "secret").write_text("of the host\n")
        (place / "secret").chmod(0o666)
        yield place
        assert {p.name: p.read_text() for p in place.iterdir()} == {"secret": "of the host\n"}


def python(machine: Any, code: str, **more: Any) -> Ran:
    ran = machine.run(f"python3 -c {shlex.quote(code)}", **more)
    if ran.code == 127:
        pytest.skip("this system has no Python below /usr for machines to run")
    return ran


def verdicts(ran: Ran) -> dict[str, str]:
    """What became of each try; at least one must have been made."""
    found = dict(line.rsplit(": ", 1) for line in ran.output.splitlines() if ": " in line)
    assert found, ran
    assert "Traceback" not in ran.output, ran.output
    return found


def held(ran: Ran) -> dict[str, str]:
    found = verdicts(ran)
    assert [name for name, verdict in found.items() if verdict == "got in"] == []
    return found


def running(marker: str) -> list[str]:
    """Processes of this computer with a word in their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if marker.encode() in Path("/proc", pid, "cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.fixture
def marker() -> Iterator[str]:
    """A number of seconds that nobody else sleeps; no process with it is left."""
    made = f"{secrets.randbelow(10**7) + 10**7}"
    yield made
    assert running(made) == []


def test_write_outside(machine: Any, outside: Path) -> None:
    for path in (f"{outside}/secret", f"{outside}/new", f"/proc/1/root{outside}/new", f"/proc/self/root{outside}/new",
                 f"../../../../../..{outside}/new", "/usr/bp-attack", "/usr/bin/bp-attack", "/sys/bp"):  # fmt: skip
        assert machine.run(f"echo attack >{path}").code != 0, path
    assert machine.run("touch /usr/bin/env").code != 0
    name = f"bp-{secrets.token_hex(6)}"
    assert machine.run(f"mkdir -p {outside} /var/lib; echo x | tee /tmp/{name} /{name} {outside}/{name}").code == 0
    assert not any(Path(p, name).exists() for p in ("/tmp", "/", outside))


def test_read_files_of_the_host(machine: Any, outside: Path) -> None:
    paths = [f"{outside}/secret", "/etc/shadow", "/root/.bash_history", "/proc/kcore", "/dev/mem", __file__]
    paths += [
        f"{root}{outside}/secret" for root in ("/proc/1/root", "/proc/self/root", "/proc/2/cwd", "/proc/1/cwd/..")
    ]
    held(python(machine, kit.reads(tuple(paths))))
    assert "of the host" not in machine.run(f"cat /proc/*/root{outside}/secret /proc/*/cwd{outside}/secret").output
    assert machine.run("cat /etc/passwd").output.count("\n") <= 4  # not that of this computer


def test_descriptors_lead_nowhere(box: Box, machine: Any) -> None:
    """Neither its own nor those of a machine beside it."""
    if box.pid != os.getpid():
        held(python(machine, kit.DESCRIPTORS))
        return
    other = box.start(Image())
    beside: list[Ran] = []
    thread = threading.Thread(target=lambda: beside.append(other.run("sleep 2; echo beside")))
    thread.start()
    try:
        time.sleep(0.3)
        held(python(machine, kit.DESCRIPTORS))
    finally:
        thread.join(30)
        other.close()
    assert [r.output for r in beside] == ["beside\n"]


def test_network(machine: Any) -> None:
    name = f"bp-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        tried = held(python(machine, kit.dials(tcp.getsockname(), name)))
        assert set(tried) == {"tcp", "udp", "abstract", "raw", "packet"}
        for listener in (tcp, abstract):
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listener.accept()
    assert machine.run("tail -n +2 /proc/net/route; tail -n +3 /proc/net/dev | grep -v lo:").output == ""


def test_signals_to_other_processes(box: Box, machine: Any) -> None:
    if box.pid == os.getpid():
        victim = subprocess.Popen(["sleep", "60"])
    else:
        victim = subprocess.Popen(["sleep", "60"], user=kit.NOBODY, group=kit.NOBODY, extra_groups=[])
    try:
        tried = held(python(machine, kit.signals(victim.pid) + kit.signals(os.getppid()).rpartition("\n\n")[2]))
        assert set(tried.values()) == {"ESRCH"}
        machine.run("kill -9 -1; kill -9 1; kill -9 $PPID")
        assert victim.poll() is None
        assert machine.run("echo alive").output == "alive\n"
    finally:
        victim.kill()
        victim.wait(10)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {close}
        os.execvp("sh", ["sh", "-c", "sleep 1; echo late >/tmp/late; sleep {marker}"])
    os._exit(0)
os.wait()
print("daemon started", flush=True)
"""


@pytest.mark.parametrize("close", ["pass", "os.closerange(0, 256)"], ids=["holds the output", "holds nothing"])
def test_daemons(machine: Any, marker: str, close: str) -> None:
    """setsid and a double fork: it ends with its command, and does not hold that up."""
    begun = time.monotonic()
    ran = python(machine, DAEMON.format(close=close, marker=marker))
    assert time.monotonic() - begun < 10
    assert (ran.output, ran.timed_out) == ("daemon started\n", False)
    assert ran.left >= 1
    assert running(marker) == []
    assert machine.run(f"nohup setsid sleep {marker} >/dev/null 2>&1 & disown; (sleep {marker} &) ; echo on").left >= 2
    assert running(marker) == []
    time.sleep(1.2)
    assert machine.run("cat /tmp/late").code != 0


def test_fork_bomb(box: Box, machine: Any) -> None:
    assert "processes" not in box.unenforced.partition(" of all processes")[0]
    limit = machine.run("ulimit -u").output.strip()
    assert limit.isdigit(), "no limit of processes is in place"
    assert int(limit) <= LIMITS.processes + 8
    told = python(machine, kit.bomb(most=400, seconds=3.0), seconds=10.0)
    assert "fork: EAGAIN after" in told.output
    assert int(told.output.rpartition("after")[2]) <= LIMITS.processes + 8
    assert machine.run("bomb() { bomb | bomb & }; bomb", seconds=3.0).code is not None
    assert machine.run("for i in {1..20}; do sleep 0.01 & done; wait; echo fine").output == "fine\n"


def test_memory_hog(box: Box, machine: Any) -> None:
    if "memory_bytes" not in box.unenforced:  # held together, with the files that lie in memory
        assert LIMITS.memory_bytes + LIMITS.disk_bytes < 400 << 20
        for processes in (1, 8):
            ran = python(machine, kit.hog(400, processes), seconds=15.0)
            filled = [line for line in ran.output.splitlines() if line in ("filled", "child done")]
            assert len(filled) < processes, ran
            assert any("memory" in note for note in ran.notes), ran
    else:
        ran = python(machine, kit.hog(400))
        assert "filled" not in ran.output.splitlines()
        assert ran.code != 0 or "MemoryError" in ran.output
    assert machine.run("echo fine").output == "fine\n"


def test_disk_and_inodes(box: Box, machine: Any) -> None:
    if "disk_bytes" in box.unenforced:
        assert "inodes" in box.unenforced
        return
    most = LIMITS.disk_bytes
    machine.run(
        "for d in / /tmp /var/tmp /home/user /run /root /dev/shm; do head -c 40000000 /dev/zero >$d/big; done",
        seconds=20,
    )
    used = machine.run("cat /tmp/big /home/user/big /var/tmp/big /run/big /big 2>/dev/null | wc -c").output
    assert 0 < int(used) <= most
    assert (
        machine.run("rm -f /big /tmp/big /home/user/big /var/tmp/big /run/big /dev/shm/big; echo x >/tmp/x").code == 0
    )
    ran = machine.run(
        f"mkdir /tmp/many; cd /tmp/many; for i in {{1..{LIMITS.inodes + 500}}}; do >$i || break; done; ls | wc -l"
    )
    assert int(ran.output.split()[-1]) <= LIMITS.inodes
    assert machine.run("cd /; rm -rf /tmp/many; echo fine >/tmp/fine; cat /tmp/fine").output == "fine\n"
    shm = machine.run("head -c 100000000 /dev/zero >/dev/shm/big; wc -c </dev/shm/big").output
    assert int(shm.split()[-1]) <= LIMITS.memory_bytes


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """How many bytes of memory a process took at most beyond what it had: the one item, once the block is left."""
    before, most, over = memory(pid), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], memory(pid) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join(10)


def test_endless_output_is_bounded_while_it_runs(box: Box, machine: Any) -> None:
    machine.run("yes", seconds=0.3)
    with watched(box.pid) as most:
        ran = machine.run("yes & yes >&2 & cat /dev/zero", seconds=1.5)
    assert ran.timed_out
    assert ran.omitted > 5 << 20
    assert len(ran.output.encode()) <= LIMITS.output_bytes * 3  # a byte that is no UTF-8 takes three
    assert most[0] < 24 << 20


def test_devices(machine: Any) -> None:
    tried = held(python(machine, kit.opens(("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse"))))
    assert set(tried.values()) <= {"ENOENT", "EACCES", "EPERM"}
    assert machine.run("mknod /tmp/sda b 8 0 || mknod /tmp/mem c 1 1").code != 0
    known = "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(machine.run("ls /dev").output.split()) <= set(known.split())
    assert machine.run("echo x >/dev/new").code != 0


def test_mounts_and_namespaces(machine: Any) -> None:
    tried = held(python(machine, kit.MOUNTS))
    assert len(tried) == 8
    for command in ("unshare -Ur true", "unshare -m true", "mount -t tmpfs none /tmp", "mount -o remount,rw /usr",
                    "umount /proc", "mount --bind / /tmp", "nsenter -t 1 -m true", "chroot / true"):  # fmt: skip
        assert machine.run(command).code != 0, command
    assert machine.run("grep -h ^Cap /proc/self/status /proc/1/status | sort -u | cut -f2 | sort -u").output == (
        "0000000000000000\n"
    )


def test_links_on_the_upper_layer(box: Box, machine: Any, outside: Path) -> None:
    """What the host reads, writes and compares lies in the machine, wherever links of an upper layer lead."""
    up = "../" * 20
    machine.run(
        f"mkdir -p /tmp/w /tmp/v{outside}; cd /tmp/w; ln -s {outside} dir; ln -s {outside}/secret file; ln -s / root;"
        f"ln -s {up}{outside}/secret up; ln -s /proc/self/root proc; ln -s /proc/1/cwd cwd; ln -s dir/secret chain;"
        "ln /etc/hosts hard; echo x >a; ln a b"
    )
    first = machine.freeze()
    machine.run(
        f"rm -rf /tmp/v /var/tmp; ln -s {outside} /tmp/v; ln -s {outside} /var/tmp; mv /etc /etc2; ln -s {outside} /etc"
    )
    second = machine.freeze()
    for frozen in (first, second):
        branch = frozen.thaw()
        inside = branch.run(f"cat {outside}/secret").code
        assert inside != 0
        for path in ("dir/secret", "file", "up", f"root{outside}/secret", f"proc{outside}/secret", "chain",
                     f"cwd{outside}/secret", "../v/secret"):  # fmt: skip
            with pytest.raises((OSError, ValueError)):
                branch.read(f"/tmp/w/{path}")
        for path in ("/tmp/w/dir/planted", "/tmp/w/file", "/tmp/w/up", f"/tmp/w/root{outside}/planted", "/tmp/w/hard",
                     "/tmp/v/planted", "/var/tmp/planted", "/etc/planted", "/tmp/w/chain"):  # fmt: skip
            with suppress(OSError):
                branch.write(path, b"planted")
        for under in ("/tmp", "/tmp/w", "/tmp/w/dir", "/tmp/v", "/etc", "/var", "/"):
            found = branch.changes(under)
            assert not [p for p, c in found.items() if b"of the host" in (c.data or b"")]
        branch.close()
    assert "planted" not in Path("/etc/hosts").read_text()


def test_sparse_files_cost_the_host_little_memory(box: Box, machine: Any) -> None:
    """They take no room in the machine, whatever size they say: 2.4 GB here. What is compared is bounded."""
    machine.run("cd /tmp; for i in {1..40}; do truncate -s 60M sparse$i; done")
    with watched(box.pid) as most:
        with pytest.raises((SandboxFailure, ValueError)):
            machine.changes("/tmp")
        with pytest.raises(ValueError, match="limit"):
            machine.read("/tmp/sparse1")
    assert most[0] < 600 << 20
    assert machine.run("rm /tmp/sparse*; echo fine").output == "fine\n"


def test_marks_of_the_overlay_cannot_be_forged(machine: Any) -> None:
    held(python(machine, kit.OVERLAY))
    for _ in range(2):
        frozen = machine.freeze()
        machine = frozen.thaw()
        assert machine.run("cat /tmp/forged/file /tmp/kept; ls /tmp/forged").output == "keptkeptfile\n"
        assert set(machine.changes("/tmp")) >= {"/tmp/forged/file", "/tmp/kept"}
        machine.run("echo >/tmp/next")
    machine.close()


def test_a_time_out_ends_the_whole_tree(machine: Any, marker: str) -> None:
    for command in (
        f"trap '' TERM INT HUP; setsid sleep {marker} & (trap '' TERM; sleep {marker}) & sleep {marker}",
        f"for i in 1 2 3 4 5; do (setsid nohup sleep {marker} >/dev/null 2>&1 &); done; exec sleep {marker}",
        f"kill -STOP $BASHPID; sleep {marker}",
    ):
        begun = time.monotonic()
        ran = machine.run(command, seconds=0.6)
        assert ran.timed_out
        assert time.monotonic() - begun < 10
        assert running(marker) == []
    assert machine.run("ls /proc | grep -c '^[0-9]'").output.strip() in "23456"


def test_a_command_that_waits_for_input(machine: Any) -> None:
    begun = time.monotonic()
    assert machine.run("cat; read x || echo none; wc -c </dev/stdin").output == "none\n0\n"
    assert machine.run("cat /dev/stdin; cat /proc/self/fd/0", stdin=b"given\n").output.startswith("given\n")
    assert python(machine, "input()").code == 1
    assert machine.run("read x </dev/tty").code != 0
    assert not machine.run("bash -i; python3 2>/dev/null; sh").timed_out
    assert time.monotonic() - begun < 15


def test_forged_states(machine: Any, outside: Path) -> None:
    """What a command writes where the shell's state goes is taken for one at most in its own machine."""
    machine.run("x=kept")
    forged = r"mark begin\0O\0Stouch OUT/new\0V x=forged\0\0mark end\0".replace("OUT", str(outside))
    for command in (
        f"for f in /proc/$$/fd/*; do printf '{forged}' >$f; done 2>/dev/null",
        f"for i in {{3..255}}; do printf '{forged}' >&$i; done 2>/dev/null; true",
        "for i in {3..255}; do head -c 9000000 /dev/zero >&$i; done 2>/dev/null; true",
        "__bp_dump='echo mine'; printf() { :; }; declare() { :; }",
        'for i in {3..255}; do eval "exec $i>&-"; done; exec <&- >&- 2>&-',
    ):
        assert not machine.run(command, seconds=20).timed_out, command
        assert machine.run("unset -f printf declare; builtin echo $x").output == "kept\n", command
    real = 'eval "${__bp_dump/set +o/echo}"; m=${__bp_dump##*end}; x="; touch ' + str(outside) + '/new; "'
    machine.run(real)
    machine.run(f"alias ls='touch {outside}/new'; PROMPT_COMMAND='touch {outside}/new'; BASH_ENV={outside}/secret")
    assert machine.run("builtin echo fine").output.endswith("fine\n")


def test_oversized_state(box: Box, machine: Any) -> None:
    machine.run("x=kept")
    before = memory(box.pid)
    ran = machine.run("x=$(head -c 3000000 /dev/zero | tr '\\0' a)")
    assert any("holds more than" in note for note in ran.notes)
    ran = machine.run("for i in {1..60}; do printf -v v$i %050000d $i; done", seconds=20)
    assert any("holds more than" in note for note in ran.notes), ran
    assert machine.run("echo $x $v7").output == "kept\n"
    assert memory(box.pid) - before < 40 << 20


def test_tracing_other_processes(machine: Any) -> None:
    code = kit.TRACES + f"attempt('host', lambda: trace({os.getpid()}))\nattempt('init', lambda: trace(1))\n"
    tried = verdicts(python(machine, code, seconds=3.0))  # an init that was stopped may hold it up
    assert tried["host"] in ("ESRCH", "EPERM")
    if tried["init"] == "got in":  # it has no right that the command lacks
        assert machine.run("grep ^CapEff /proc/1/status | cut -f2").output == "0000000000000000\n"
        assert machine.run("test / -ef /proc/1/root").code == 0
    assert machine.run("echo alive").output == "alive\n"


def test_files_of_proc_and_sys(machine: Any) -> None:
    held(python(machine, kit.opens(kit.WRITE_ONLY)))
    for path in ("kernel/core_pattern", "vm/drop_caches", "kernel/panic", "kernel/modprobe", "fs/file-max"):
        assert machine.run(f"true >>/proc/sys/{path}").code != 0, path  # opened, not written to
    for command in ("chmod 644 /proc/sys/kernel/core_pattern", "ls /proc/1/root/../srv/.", "mount -t proc proc /tmp",
                    "true >>/proc/sysrq-trigger", "echo -1000 >/proc/1/oom_score_adj"):  # fmt: skip
        assert machine.run(command).code != 0, command


def test_set_user_id_files(machine: Any) -> None:
    ran = machine.run("cd /tmp; cp /usr/bin/id me; chmod 6755 me; ./me -u; ./me -ru; stat -c %a me")
    assert ran.output == "1000\n1000\n6755\n"
    assert machine.run("grep NoNewPrivs /proc/self/status | cut -f2").output == "1\n"
    for command in ("su -c id", "sudo -n id", "newgrp root", "chown 0 /tmp/me"):
        ran = machine.run(f"{command} </dev/null", seconds=10)
        assert ran.code != 0, command
        assert "uid=0" not in ran.output
    frozen = machine.freeze()
    branch = frozen.thaw()
    assert branch.run("/tmp/me -u").output == "1000\n"
    branch.close()


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf --no-preserve-root --one-file-system / 2>/dev/null",
        "rm -rf /tmp /etc /home /var /run /root /opt; mkdir -m 0 /tmp /etc /home",
        "chmod 000 / /tmp /etc",
        "mv /etc /old; mv /tmp /gone; ln -s / /tmp; ln -s loop /loop",
        "rmdir /proc /dev; rm -f /bin",
        "rm -rf /bin /lib /lib64 /sbin; echo >/bin; echo >/lib64",
    ],
)
def test_a_machine_that_destroys_itself(box: Box, machine: Any, outside: Path, command: str) -> None:
    """It may be unusable, and says so; those beside it and before it are not touched."""
    assert machine.run(f"ls {outside}").code != 0  # before anything is deleted: this is not the host
    machine.run("echo kept >/tmp/kept")
    before = machine.freeze()
    ran = machine.run(command, seconds=20)
    assert not ran.timed_out
    with suppress(SandboxFailure):
        after = machine.run("echo on")
        assert isinstance(after, Ran)
        with suppress(OSError):
            machine.write("/tmp/x", b"x")
        machine.changes("/tmp")
        machine.freeze().discard()
    branch = before.thaw()
    assert branch.run("cat /tmp/kept; ls -d /bin/sh /etc/passwd").output == "kept\n/bin/sh\n/etc/passwd\n"
    branch.close()
    other = box.start(Image())
    assert other.run("echo fine").output == "fine\n"
    other.close()
