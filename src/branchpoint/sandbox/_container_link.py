"""The first process of a container, which runs the commands, and the host's end of its standard streams.

The first process is bash reading jobs from its standard input. Nothing inside its process namespace can kill it, it
needs no new process to kill all others, and a job costs a bash instead of an ``exec`` of the engine (2 ms, not 120).
Standard output carries what commands write, standard error what the host has to know; each job's part of both is framed
by a word that only the host and the first process know.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from branchpoint.sandbox import _shell_state
from branchpoint.world import SandboxFailure

CONTROL = 250
"""The descriptor of shells that leads to the host, out of the way of a script's own."""

STDIN_LIMIT = 32 << 20
"""Bytes of standard input that a command can be given; they lie in the container's shared memory while it runs."""

_INPUT = CONTROL + 1
_GRACE = 5  # hundredths of a second that processes which are about to end get before they count as left
_STUCK = 500

# Read and glob builtins only, since a fork may be impossible. A process counts as living unless it is a zombie.
_FIRST = rf"""
exec {CONTROL}>&2 2>/dev/null {CONTROL + 2}<> <(:)
[[ -w / ]] || chmod u+w /  # Podman leaves that to a capability
alive() {{
    n=0
    for p in /proc/[0-9]*; do
        if [[ $p != /proc/1 ]] && read -r s <"$p/stat"; then
            s=${{s##*) }}
            [[ $s == [ZX]* ]] || n=$((n + 1))
        fi
    done
}}
limits() {{
    oom=0 full=0
    for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [[ ! -r $f ]] || while read -r k v; do [[ $k != oom_kill ]] || oom=$v; done <"$f"
    done
    for f in /sys/fs/cgroup/pids.events /sys/fs/cgroup/pids/pids.events; do
        [[ ! -r $f ]] || while read -r k v; do [[ $k != max ]] || full=$v; done <"$f"
    done
}}
while IFS= read -r mark && read -r count; do
    if ((count)); then
        head -c "$count" >/dev/shm/.stdin
        exec {_INPUT}</dev/shm/.stdin
        rm -f /dev/shm/.stdin
    else
        exec {_INPUT}</dev/null
    fi
    limits; was_oom=$oom was_full=$full
    printf '<%s' "$mark"
    bash --noprofile --norc -c {shlex.quote(_shell_state.BOOT)} bash 2>&1
    code=$? left=0 turn=0
    exec {_INPUT}<&-
    while alive; ((n)); do
        if ((turn == {_GRACE})); then left=$n; fi
        if ((turn >= {_GRACE})); then kill -s KILL -- -1; fi
        if ((turn == {_STUCK})); then break; fi
        turn=$((turn + 1))
        read -r -t 0.01 -u {CONTROL + 2}
    done
    limits
    printf '>%s' "$mark"
    printf '<%s %s %s %s %s %s>' "$mark" "$code" "$left" "$n" "$((oom - was_oom))" "$((full - was_full))" >&{CONTROL}
done
"""
COMMAND = ("bash", "--noprofile", "--norc", "-c", _shell_state.BOOT, "bash")
"""What a container runs as its first process: whatever the host's end sends it, so that ``ps`` shows little."""


class Lost(SandboxFailure):
    """The container's streams ended: it was closed, or died."""


class Expired(Exception):
    """The time was over before the command. ``output`` and ``omitted``: what it wrote until then."""

    def __init__(self, output: bytes, omitted: int) -> None:
        super().__init__("time is over")
        self.output, self.omitted = output, omitted


@dataclass(frozen=True, slots=True)
class Reply:
    """What a job did. ``stuck``: processes that could not be killed. ``oom``, ``full``: how often the limits of memory
    and of processes were hit. ``dump``: what :func:`_shell_state.parse` reads with ``mark``."""

    output: bytes
    omitted: int
    code: int
    left: int
    stuck: int
    oom: int
    full: int
    dump: bytes
    mark: str


class Link:
    """The host's end. One job at a time; after :class:`Expired` the container must be killed and a new link made."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._first = b"%d\n%s" % (len(_FIRST), _FIRST.encode())  # goes out with the first job

    def call(self, command: str, state: bytes, stdin: bytes, *, seconds: float, limit: int) -> Reply:
        """Runs a command line in a state of the shell. Raises Expired, Lost, and ValueError for what cannot be sent."""
        if len(stdin) > STDIN_LIMIT:
            raise ValueError(f"stdin has {len(stdin)} bytes; a command takes up to {STDIN_LIMIT}")
        mark, dump = secrets.token_hex(16), secrets.token_hex(16)
        before = f"exec <&{_INPUT} {_INPUT}<&- {CONTROL + 2}<&-"
        script = _shell_state.script(command, state, mark=dump, fd=CONTROL, before=before)
        deadline = time.monotonic() + seconds
        output = Bounded(limit, f"<{mark}".encode(), f">{mark}".encode())
        control = Tail(4 * _shell_state.LIMIT)
        try:
            job = self._first + f"{mark}\n{len(stdin)}\n".encode() + stdin + script
            self._first = b""
            self._send(job, deadline)
            while True:
                told = control.between(f"<{mark} ".encode(), b">")
                if output.ended and told is not None:
                    code, left, stuck, oom, full = map(int, told.split())
                    text, omitted = output.result()
                    return Reply(text, omitted, code, left, stuck, oom, full, bytes(control.held), dump)
                kind, data = self._frame(deadline)
                (output if kind == 1 else control).add(data)
        except TimeoutError:
            raise Expired(*output.result()) from None
        except OSError as error:
            raise Lost(f"the container's streams broke: {error}") from error

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._stream.settimeout(_until(deadline))
            view = view[self._stream.send(view[: 1 << 16]) :]

    def _frame(self, deadline: float) -> tuple[int, bytes]:
        head = self._take(8, deadline)
        return head[0], self._take(struct.unpack(">I", head[4:])[0], deadline)

    def _take(self, count: int, deadline: float) -> bytes:
        while len(self._buffer) < count:
            self._stream.settimeout(_until(deadline))
            got = self._stream.recv(1 << 16)
            if not got:
                raise Lost("the container ended")
            self._buffer += got
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def close(self) -> None:
        """Ends a call that waits in another thread, too."""
        with suppress(OSError):  # the other end has gone already
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def _until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, bytearray()

    def add(self, data: bytes) -> None:
        self.held += data
        if len(self.held) > 2 * self.limit:
            del self.held[: -self.limit]

    def between(self, begin: bytes, end: bytes) -> bytes | None:
        start = self.held.rfind(begin)
        stop = self.held.find(end, start) if start >= 0 else -1
        return bytes(self.held[start + len(begin) : stop]) if stop >= 0 else None


class Bounded:
    """What a stream holds between two marks: the first and the last bytes, however much there is."""

    def __init__(self, limit: int, begin: bytes, end: bytes) -> None:
        self._begin, self._end = begin, end
        self._head_limit, self._tail_limit = limit - limit // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0
        self._begun = self.ended = False

    def add(self, data: bytes) -> None:
        if self.ended:
            return
        self._tail += data
        if not self._begun:
            at = self._tail.find(self._begin)
            if at < 0:
                del self._tail[: -len(self._begin)]
                return
            self._begun = True
            del self._tail[: at + len(self._begin)]
        at = self._tail.rfind(self._end, max(0, len(self._tail) - len(data) - len(self._end)))
        if at >= 0:
            self.ended = True
            del self._tail[at:]
        room = self._head_limit - len(self._head)
        keep = 0 if self.ended else len(self._end)
        if room > 0:
            moved = self._tail[: min(room, max(0, len(self._tail) - keep))]
            self._head += moved
            del self._tail[: len(moved)]
        if self.ended or len(self._tail) > 2 * self._tail_limit + (1 << 16):
            self._cut(self._tail_limit + keep)

    def _cut(self, limit: int) -> None:
        excess = max(0, len(self._tail) - limit)
        del self._tail[:excess]
        self._dropped += excess

    def result(self) -> tuple[bytes, int]:
        """The bytes, and how many are missing in the middle."""
        if not self._begun:
            return b"", 0
        room = self._head_limit - len(self._head)
        self._head += self._tail[:room]
        del self._tail[:room]
        self._cut(self._tail_limit)
        return bytes(self._head + self._tail), self._dropped
