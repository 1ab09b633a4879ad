"""Attacks on a machine, as programs to run inside one and nowhere else.

Each is Python source for an interpreter inside. It prints one line ``name: verdict`` a try, where the verdict is ``got
in`` when the attack worked, else the name of the error that stopped it. Files are opened and not written, signals are
signal 0, and what fills the process table stops by itself. Mounts do happen where they succeed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import branchpoint

NOBODY = 65534

_TRY = """
import ctypes, errno, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, act):
    try:
        act()
    except OSError as error:
        print(f"{name}: {errno.errorcode.get(error.errno, error.errno)}", flush=True)
    else:
        print(f"{name}: got in", flush=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "")
"""

WRITE_ONLY = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/vm/swappiness",
    "/proc/sysrq-trigger",
    "/sys/kernel/uevent_helper",
    "/sys/fs/cgroup/cgroup.procs",
    "/dev/mem",
    "/dev/kmsg",
)


def opens(paths: tuple[str, ...] = WRITE_ONLY) -> str:
    """Opens for writing what decides over the host; nothing is written."""
    return _TRY + f"for path in {paths!r}: attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))\n"


def reads(paths: tuple[str, ...]) -> str:
    """Reads files of the host."""
    return _TRY + f"for path in {paths!r}: attempt(path, lambda: open(path, 'rb').read(1))\n"


def dials(tcp: tuple[str, int], abstract: str) -> str:
    """Reaches for a listener of the host by TCP, UDP and an abstract socket, and for raw sockets."""
    return (
        _TRY
        + f"""
def dial(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(2)
        s.connect(address)
        s.send(b"x")
attempt("tcp", lambda: dial(socket.AF_INET, socket.SOCK_STREAM, {tcp!r}))
attempt("udp", lambda: dial(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)))
attempt("abstract", lambda: dial(socket.AF_UNIX, socket.SOCK_STREAM, b"\\0" + {abstract.encode()!r}))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close())
"""
    )


def signals(pid: int) -> str:
    """Asks whether a process of the host can be signalled (signal 0 harms nobody)."""
    return _TRY + f"attempt('kill', lambda: os.kill({pid}, 0))\n"


MOUNTS = (
    _TRY
    + """
os.makedirs("/tmp/mnt", exist_ok=True)
def mount(kind, flags=0, source=b"none"):
    if libc.mount(source, b"/tmp/mnt", kind, flags, None) == -1:
        raise OSError(ctypes.get_errno(), "")
def isolated(flag):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if libc.unshare(flag) == 0 else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, "")
attempt("tmpfs", lambda: mount(b"tmpfs"))
attempt("bind", lambda: mount(b"", 4096, b"/"))
attempt("userns", lambda: isolated(0x10000000))
attempt("mountns", lambda: isolated(0x00020000))
attempt("pivot_root", lambda: call(155, b"/tmp", b"/tmp"))
attempt("setns", lambda: call(308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))
attempt("mknod", lambda: os.mknod("/tmp/mem", 0o020600, os.makedev(1, 1)))
attempt("chroot", lambda: os.chroot("/tmp"))
"""
)
"""Mounts, namespaces, changes of the root, devices. Numbers are those of x86-64."""


def bomb(most: int = 2000, seconds: float = 5.0) -> str:
    """Forks sleepers until the limit, at most so many and so long. Refuses to start where it sees no limit
    under ``most`` in RLIMIT_NPROC or pids.max."""
    return (
        _TRY
        + f"""
import resource
limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
    try:
        limits.append(int(open(path).read()))
    except (OSError, ValueError):
        pass
if not any(0 <= limit < {most} for limit in limits):
    sys.exit("no limit of processes is in place")
end, made = time.monotonic() + {seconds}, 0
while time.monotonic() < end and made < {most}:
    try:
        if os.fork() == 0:
            time.sleep({seconds})
            os._exit(0)
        made += 1
    except OSError as error:
        print(f"fork: {{errno.errorcode[error.errno]}} after {{made}}", flush=True)
        break
else:
    print("fork: got in", flush=True)
"""
    )


DESCRIPTORS = (
    _TRY
    + """
import stat
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    try:
        found = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for fd in found:
        def use(path=f"/proc/{pid}/fd/{fd}"):
            mode = os.stat(path).st_mode
            if stat.S_ISSOCK(mode):
                raise OSError(errno.ENXIO, "")  # cannot be opened from here
            if stat.S_ISDIR(mode):
                os.close(os.open(path + "/..", os.O_RDONLY))
                if os.stat(path + "/..").st_dev != os.stat("/").st_dev:
                    return
            raise OSError(errno.ENOTDIR, "")
        attempt(f"{pid}/{fd}", use)
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
    handle = libc.syscall(434, int(pid), 0)
    for fd in range(256):
        libc.syscall(438, handle, fd, 0)  # a copy of another process's, where it may be traced
for fd in range(3, 900):
    def send(fd=fd):
        with socket.socket(fileno=os.dup(fd)) as s:
            s.send(b"x")
    if os.path.exists(f"/proc/self/fd/{fd}"):
        attempt(f"socket {fd}", send)
"""
)
"""Looks for descriptors that lead out: folders of another file system, sockets that take something."""

TRACES = (
    _TRY
    + """
def trace(pid):
    if libc.ptrace(16, pid, None, None) == -1:
        raise OSError(ctypes.get_errno(), "")
    libc.ptrace(17, pid, None, None)
"""
)

OVERLAY = (
    _TRY
    + """
os.makedirs("/tmp/forged", exist_ok=True)
open("/tmp/forged/file", "w").write("kept")
open("/tmp/kept", "w").write("kept")
for name in ("opaque", "redirect", "metacopy", "origin", "upper", "whiteout", "whiteouts", "impure", "nlink"):
    for path in ("/tmp/forged", "/tmp/forged/file"):
        for space in ("user", "trusted"):
            try:
                os.setxattr(path, f"{space}.overlay.{name}", b"/../../../../etc" if name == "redirect" else b"y")
            except OSError:
                pass
attempt("whiteout", lambda: os.mknod("/tmp/white", 0o020600, 0))
"""
)
"""Forges what an overlay keeps in extended attributes, and a whiteout."""


def hog(megabytes: int, processes: int = 1) -> str:
    """Touches so much memory, in so many processes together."""
    return f"""
import os
def fill():
    held = []
    for n in range({megabytes // processes}):
        held.append(bytearray(os.urandom(1 << 10) * 1024))
    return held
children = []
for n in range({processes - 1}):
    pid = os.fork()
    if pid == 0:
        try:
            held = fill()
            print("child done", flush=True)
            __import__("time").sleep(2)
        except MemoryError:
            pass
        os._exit(0)
    children.append(pid)
try:
    held = fill()
    print("filled", flush=True)
except MemoryError:
    print("MemoryError", flush=True)
for pid in children:
    os.waitpid(pid, 0)
"""


class Ordinary:
    """Machines made in a child process that is an ordinary user; calls on them, and what they return, are passed on.

    ``why``: the reason where that is not possible here.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make), daemon=True)
        self._process.start()
        there.close()
        self.pid = self._process.pid
        self.why = self.call(0, "why")
        self._number = 0

    def call(self, target: int, name: str, *args: Any, **named: Any) -> Any:
        self._here.send((target, name, args, named))
        if not self._here.poll(120):
            raise TimeoutError(name)
        kind, value = self._here.recv()
        if kind == "error":
            raise value
        return Passed(self, value) if kind == "object" else value

    def stop(self) -> None:
        self._here.send((0, "stop", (), {}))
        self._process.join(30)
        assert self._process.exitcode == 0


class Passed:
    """An object of the other process."""

    def __init__(self, user: Ordinary, number: int) -> None:
        self._user, self._object = user, number

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self._user.call(self._object, name, *args, **named)


def interpreter() -> str:
    """A Python that this user can start, or ""."""
    places = (sys.executable, "/usr/bin/python3", shutil.which("python3") or "")
    return next((path for path in places if path and os.access(path, os.X_OK)), "")


def _serve(pipe: Any, make: Callable[[], Any]) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    objects: list[Any] = [None]
    why = ""
    sys.executable = interpreter()
    source = Path(branchpoint.__file__)
    if not sys.executable:
        why = "no Python that an ordinary user can start"
    elif not os.access(source, os.R_OK):
        why = f"an ordinary user cannot read {source}"
    else:
        try:
            objects[0] = make()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    while True:
        target, name, args, named = pipe.recv()
        if name == "why":
            pipe.send(("value", why))
        elif name == "stop":
            if objects[0] is not None:
                objects[0].close()
            os._exit(0)
        else:
            pipe.send(_answer(objects, target, name, args, named))


def _answer(objects: list[Any], target: int, name: str, args: Any, named: Any) -> tuple[str, Any]:
    try:
        found = getattr(objects[target], name)
        value = found(*args, **named) if callable(found) else found
    except Exception as error:
        return "error", error
    if name in ("start", "freeze", "thaw"):
        objects.append(value)
        return "object", len(objects) - 1
    return "value", value
