"""Attacks on a machine, as programs to run inside one and nowhere else.

Each is Python source for an interpreter inside. It prints one line ``name: verdict`` a try, where the verdict is ``got
in`` when the attack worked, else the name of the error that stopped it. Files are opened and not written, signals are
signal 0, and what fills the process table stops by itself. Mounts do happen where they succeed.
"""

from __future__ import annotations

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
