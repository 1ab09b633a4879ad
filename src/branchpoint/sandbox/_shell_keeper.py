"""The keeper: a small process that holds the mounts of the shell sandbox and starts its commands.

Started by :mod:`branchpoint.sandbox.shell` as a program of its own, with one thread and the standard library alone: a
fork of the trainer would copy gigabytes of page tables and the locks of other threads. It lives in a mount namespace of
its own (and, for an ordinary user, in a user namespace where it is root), so all that it mounts is gone when it ends,
which it does with the trainer.

Requests are JSON over a SOCK_SEQPACKET socket, each with a socket for its answer and what else it needs as descriptors.
What is quick is done at once, the rest in a forked child: a command becomes bubblewrap there, work on files runs in
:mod:`._shell_files`.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from branchpoint.sandbox import _shell_cgroup as cgroup
from branchpoint.sandbox import _shell_files as files
from branchpoint.sandbox import _shell_mount as mount
from branchpoint.sandbox import _shell_process as process

LARGEST = process.LARGEST
STORES = "k"  # holds a file system, or a folder, for the layers of each machine
_DEVICES = "dev"
FOLDERS = (STORES, _DEVICES)
"""What the folder that a keeper works in must hold."""
_SPARE = 16
_MANY = 64  # stores of machines; a list of mounts that long costs more than to take them away
_NETWORKS = 4  # that are made while there is nothing else to do: one takes milliseconds
_ROOT = "/tmp"  # where a child puts a machine's root in its own mount namespace: a place that every system has
_MODE = 0o755
_INSIDE = 1000  # user and group id of commands, as they see it


@dataclass(slots=True)
class Call:
    """A command that runs. Its end is complete when bubblewrap and the first process inside are both gone."""

    reply: socket.socket
    machine: str
    info: int
    counts: tuple[int, int]
    status: int = -1
    first: int = 0  # process id of the first process inside
    started: bool = False


class Keeper:
    """See the module. ``user``: host user id of commands when the keeper runs as root, else ignored."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self.control = control
        self.bwrap: str = settings["bwrap"]
        self.memory: bool = settings["memory"]
        self.user: int | None = settings["user"] if os.getuid() == 0 else None
        self.poll = select.poll()
        self.watched: dict[int, Callable[[], None]] = {}
        self.calls: dict[int, Call] = {}  # by bubblewrap's process id
        self.known: set[int] = set()  # children whose end is waited for
        self.stores = 0
        self.networks: list[int] = []  # that no machine has yet
        self.network_of: dict[str, int] = {}  # by machine
        self.counts: dict[str, tuple[int, int]] = {}  # by machine: how often limits were hit so far
        self.groups = cgroup.groups(cgroup.Bounds(**settings["bounds"]))
        self._enter()

    def _enter(self) -> None:
        if self.user is None:
            uid, gid = os.getuid(), os.getgid()
            mount.unshare(mount.NEWUSER | mount.NEWNS | mount.NEWNET)  # to whose network it may come back
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        else:
            mount.unshare(mount.NEWNS)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a machine takes one or two
        mount.make_private()
        mount.adopt_orphans()
        if self.memory:
            mount.attach(mount.memory(1 << 20, 1 << 16), STORES)
            if not mount.keeps_attributes(STORES):
                mount.detach(STORES)
                self.memory = False
        mount.make_devices(_DEVICES)

    def serve(self) -> None:
        """Answers until the other end is closed or the trainer has ended."""
        self._watch(self.control.fileno(), self._request)
        self._watch(os.pidfd_open(os.getppid()), self._quit)
        self._say(
            self.control, memory=self.memory, missing=self.groups.missing, memory_group="memory" in self.groups.roots
        )
        try:
            while True:
                ready = [fd for fd, _ in self.poll.poll(0 if len(self.networks) < _NETWORKS else None)]
                if not ready:
                    self.networks.append(mount.network())
                # New requests last: they take descriptors that what ends before them has closed.
                for fd in sorted(ready, key=lambda fd: fd == self.control.fileno()):
                    if fd in self.watched:
                        self.watched[fd]()
        finally:
            for pid in self.calls:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in process.children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while True:
                    os.wait()
            self.groups.close()

    def _quit(self) -> None:
        raise SystemExit

    def _watch(self, fd: int, then: Callable[[], None]) -> None:
        self.watched[fd] = then
        self.poll.register(fd, select.POLLIN)

    def _forget(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.watched[fd]

    def _say(self, reply: socket.socket, **answer: Any) -> None:
        with suppress(OSError):  # the other end has gone
            reply.send(json.dumps(answer).encode())

    def _request(self) -> None:
        data, fds = process.receive(self.control)
        if not data:
            raise SystemExit
        order = json.loads(data)
        reply = socket.socket(fileno=fds[0])
        try:
            getattr(self, f"do_{order.pop('do')}")(order, reply, fds[1:])
        except OSError as error:
            self._say(reply, error=str(error))
        finally:
            for fd in fds[1:]:
                os.close(fd)

    # Quick requests

    def do_freeze(self, order: dict[str, Any], reply: socket.socket, fds: Sequence[int]) -> None:
        """Takes the layer that a machine writes to from under it."""
        place = f"{STORES}/{order['machine']}"
        changed = bool(os.listdir(f"{place}/u")) or os.stat(f"{place}/u").st_mode & 0o7777 != _MODE
        if changed:
            os.rename(f"{place}/u", order["layer"])
            with self._room(place, order["room"]):
                self._upper(place)
        told = os.statvfs(place)
        used = (told.f_blocks - told.f_bfree) * told.f_frsize if self.memory else 0
        self._say(reply, changed=changed, bytes=used, files=told.f_files - told.f_ffree if self.memory else 0)
        reply.close()

    def do_remove(self, order: dict[str, Any], reply: socket.socket, fds: Sequence[int]) -> None:
        """Removes a layer."""
        self._fork(lambda: shutil.rmtree(order["layer"], ignore_errors=True))
        self._say(reply)
        reply.close()

    def do_drop(self, order: dict[str, Any], reply: socket.socket, fds: Sequence[int]) -> None:
        """Removes a machine's store, or its control group alone while its layers are in use."""
        self.groups.remove(order["machine"])
        self.counts.pop(order["machine"], None)
        if (network := self.network_of.pop(order["machine"], None)) is not None:
            os.close(network)
        if order["store"]:
            place = f"{STORES}/{order['machine']}"
            self.stores -= 1
            with suppress(OSError):
                if self.memory:
                    mount.detach(place)
            self._fork(lambda: shutil.rmtree(place, ignore_errors=True))
        self._say(reply)
        reply.close()

    def _store(self, machine: str, size: int, inodes: int) -> str:
        """The folder of a machine's layers; made at its first command."""
        place = f"{STORES}/{machine}"
        if not os.path.isdir(f"{place}/u"):
            self.groups.make(machine)
            os.mkdir(place, 0o711)
            self.stores += 1
            if self.memory:
                mount.attach(mount.memory(size, inodes), place)
            self._upper(place)
        return place

    def _upper(self, place: str) -> None:
        os.mkdir(f"{place}/u", _MODE)
        os.chmod(f"{place}/u", _MODE)
        if self.user is not None:
            os.chown(f"{place}/u", self.user, self.user)

    @contextmanager
    def _room(self, place: str, then: int = 0) -> Iterator[None]:
        """A few files beyond the limit, for folders of the keeper's own where commands have used all up.

        ``then``: how many there is room for afterwards at least.
        """
        told = os.statvfs(place)
        short = self.memory and told.f_ffree < max(_SPARE, then)
        if short:
            mount.resize(place, told.f_files - told.f_ffree + _SPARE)
        yield
        if short:
            now = os.statvfs(place)
            mount.resize(place, max(told.f_files, now.f_files - now.f_ffree + then))

    # Requests that a child works on

    def _fork(self, work: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                work()
                code = 0
            except BaseException as error:  # the child ends here, whatever it was
                with suppress(OSError):
                    os.write(2, f"{error}\n".encode(errors="replace"))
            finally:
                os._exit(code)
        self._await(pid, lambda status: None)

    def _await(self, pid: int, then: Callable[[int], None]) -> None:
        """Calls ``then`` with the status of a child when it has ended."""
        fd = os.pidfd_open(pid)
        self.known.add(pid)

        def ended() -> None:
            self._forget(fd)
            self.known.discard(pid)
            os.close(fd)
            status = 0
            with suppress(ChildProcessError):
                status = os.waitpid(pid, 0)[1]
            then(status)

        self._watch(fd, ended)

    def do_files(self, order: dict[str, Any], reply: socket.socket, fds: Sequence[int]) -> None:
        """Work of :mod:`._shell_files`, in a child. Descriptor: the file that content comes from or goes to."""
        place = self._store(order["machine"], order["bytes"], order["inodes"])
        data = fds[0]

        def work() -> None:
            mount.unshare(mount.NEWNS)
            try:
                more = {"root": _ROOT, "upper": f"{place}/u"}
                answer = files.work(
                    order | more, data, lambda lowers: self._root(place, lowers, order["binds"]), self.user
                )
            except OSError as error:
                answer = {"errno": error.errno or 0, "error": error.strerror or str(error), "path": error.filename}
            except ValueError as error:
                answer = {"value": str(error)}
            self._say(reply, **answer)

        self._fork(work)
        reply.close()

    def _root(self, place: str, lowers: Sequence[str], binds: Sequence[tuple[str, str]]) -> list[str]:
        """Mounts a machine's root in this child's namespace. Returns what could not be mounted in it."""
        trees = [(mount.read_only(source), inside) for inside, source in binds]
        if os.path.lexists(f"{place}/w"):
            _clear(place)
        with self._room(place):
            os.mkdir(f"{place}/w", 0o700)
            mount.attach(mount.overlay(lowers, f"{place}/u", f"{place}/w"), _ROOT)
        missing: list[str] = []
        for tree, inside in trees:
            target = files.place(_ROOT, inside)
            if target is None:
                missing.append(inside)
                os.close(tree)
            else:
                mount.attach(tree, target)
        return missing

    def do_run(self, order: dict[str, Any], reply: socket.socket, fds: Sequence[int]) -> None:
        """Starts a command. Descriptors: script, output, what shells tell, and the command's input."""
        machine = order["machine"]
        place = self._store(machine, order["bytes"], order["inodes"])
        if machine not in self.network_of and self.networks:
            self.network_of[machine] = self.networks.pop()
        info, told = os.pipe()
        counts = self.counts.get(machine, (0, 0))
        pid = os.fork()
        if pid == 0:
            try:
                self._become(order, place, fds, told)
            except BaseException as error:
                os.write(fds[1], f"sandbox: {error}\n".encode(errors="replace"))
            finally:
                os._exit(125)
        os.close(told)
        call = self.calls[pid] = Call(reply, machine, info, counts)
        self._watch(reply.fileno(), lambda: self._kill(pid))
        self._await(pid, lambda status: self._left(pid, call, status))

    def _become(self, order: dict[str, Any], place: str, fds: Sequence[int], info: int) -> None:
        """Turns this child into bubblewrap."""
        self.groups.enter(order["machine"])
        mount.unshare(mount.NEWNS)
        devices = mount.read_only(_DEVICES, devices=True)
        missing = self._root(place, order["lowers"], order["binds"])
        mount.attach_devices(f"{_ROOT}/dev", devices, order["shm"])
        if self.memory and self.stores > _MANY:
            mount.detach(STORES)
        network = self.network_of.get(order["machine"])
        if network is not None:
            mount.enter(network)
        for inside in missing:
            os.write(fds[1], f"sandbox: {inside} is not there: its folder was moved away\n".encode())
        lowest = order["told"] + 4
        info = fcntl.fcntl(info, fcntl.F_DUPFD, lowest)
        script, output, told, stdin = fds
        wanted = (script, output, output, told, *os.pipe(), stdin)
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest) for fd in wanted]
        for target, source in zip((0, 1, 2, *range(order["told"], lowest)), given, strict=True):
            os.dup2(source, target)
        os.closerange(3, order["told"])  # all others close on exec, too
        for name, value in order["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.umask(0o022)
        if self.user is not None:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        command = [self.bwrap, *_BWRAP, *(() if network is not None else ("--unshare-net",))]
        for key, value in order["environment"].items():
            command += ["--setenv", key, value]
        # With no variables at all: those that a process starts with stay readable in /proc.
        os.execve(self.bwrap, [*command, "--info-fd", str(info), "--", *order["command"]], {})

    def _kill(self, pid: int) -> None:
        """The caller wants no more of it: its time is over, or it was closed."""
        call = self.calls[pid]
        self._forget(call.reply.fileno())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # which ends the process namespace, too

    def _left(self, pid: int, call: Call, status: int) -> None:
        """Bubblewrap has ended; the namespace's first process, and with it all others, may be about to."""
        call.status = status
        told = b""
        while part := os.read(call.info, 4096) if not told.endswith(b"}") else b"":
            told += part
        os.close(call.info)
        with suppress(ValueError, KeyError):
            call.first = json.loads(told)["child-pid"]
            call.started = True
        if not call.first:  # killed before it could say; what it had begun is ours now
            call.first = next((child for child in process.children() if child not in self.known), 0)
        if call.first and process.mine(call.first):
            os.kill(call.first, signal.SIGKILL)
            self._await(call.first, lambda _: self._done(pid, call))
        else:
            self._done(pid, call)

    def _done(self, pid: int, call: Call) -> None:
        del self.calls[pid]
        if call.reply.fileno() in self.watched:
            self._forget(call.reply.fileno())
        self.counts[call.machine] = oom, full = self.groups.counts(call.machine)
        told = os.statvfs(f"{STORES}/{call.machine}")
        self._say(
            call.reply,
            started=call.started,
            code=os.waitstatus_to_exitcode(call.status),
            oom=oom - call.counts[0],
            full=full - call.counts[1],
            disk=self.memory and not (told.f_bavail and told.f_favail),
        )
        call.reply.close()
        _clear(f"{STORES}/{call.machine}")  # now, while nobody waits for it


def _clear(place: str) -> None:
    """Removes the work folder of an overlay, since the kernel refuses one that was volatile."""
    shutil.rmtree(f"{place}/w", ignore_errors=True)


_BWRAP = (
    "--unshare-user", "--uid", str(_INSIDE), "--gid", str(_INSIDE), "--disable-userns",
    "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL",
    "--dev-bind", _ROOT, "/", "--proc", "/proc", "--clearenv", "--chdir", "/",
)  # fmt: skip


def main(fd: int) -> None:
    """The program. Its first message holds the settings; it works in the folder that it was started in."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    try:
        keeper = Keeper(control, json.loads(control.recv(LARGEST)))
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    with suppress(KeyboardInterrupt, SystemExit):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's affair
        keeper.serve()
