"""A bash that goes on where the last one ended, so that commands of one machine share a shell that no process holds.

Every command runs in a new bash. Before it, the state of the last one is restored; behind it, the state is dumped with
builtins alone onto a file descriptor, from where the host keeps it as a value beside the files. Kept: working
directory, variables (exported and plain, arrays, attributes), functions, aliases, options, umask. Not kept: jobs,
traps, open descriptors, positional parameters, history, the directory stack, variables declared without a value.

All that is dumped comes from an untrusted shell. The host only splits it at NUL bytes, which no value can hold, and
evaluates it nowhere but in the same machine.
"""

from __future__ import annotations

import shlex
import string

BOOT = 'IFS= \\builtin read -r __bp_n && LC_ALL=C \\builtin read -r -N "$__bp_n" __bp_s && \\builtin eval "$__bp_s"'
"""What ``bash --noprofile --norc -c BOOT bash`` needs to run a :func:`script` from its standard input, which it leaves
behind the script. Read by length, since reading up to a delimiter costs a system call a byte."""

LIMIT = 1 << 20
"""Bytes of state that are kept. A shell with more keeps what it had before."""

_NAMES = " ".join(f'"${{!{c}@}}"' for c in "_" + string.ascii_letters)
# What bash sets itself. RANDOM among them: restored, it would seed all siblings alike.
_OWN = (
    "__bp_*|BASH*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD|RANDOM|SECONDS|"
    "SHELLOPTS|SHLVL|SRANDOM|UID|_"
)
_RAW = "surrogateescape"
_FIXED = (b"login_shell", b"restricted_shell")  # options that no running shell can change


def script(command: str, state: bytes, *, mark: str, fd: int, before: str = "") -> bytes:
    """What :data:`BOOT` reads: a bash script that runs a command in a state and dumps the new one onto ``fd``.

    Args:
        command: a bash command line. Raises ValueError where it holds a NUL, which no bash can take.
        state: what :func:`parse` returned, or empty for a new shell.
        mark: frames the dump; a command that looks for it can forge one, which only its own machine runs.
        before: statements run first, e.g. redirections.
    """
    if "\0" in command:
        raise ValueError("the command holds a NUL character, which bash cannot take")
    settings, _, options = state.partition(b"\0")
    restore = _clear().encode() + b"\n" + settings if settings else b""
    text = b"; ".join(  # in one line, so that bash counts the command's own lines in its messages
        [
            before.encode() or b":",
            b"\\builtin eval " + _line(restore) + b" 2>/dev/null",
            b"\\builtin unset -v __bp_n __bp_s __bp_v",
            b"__bp_dump=" + _line(_dump(mark, fd).encode()),
            b"\\builtin trap '\\builtin eval \"${__bp_dump-}\"' EXIT",
            b"\\builtin eval "
            + _quote((b"\\builtin eval " + _line(options) + b"; " if options else b"") + _encode(command)),
            b'{ __bp_code=$?; \\builtin eval "${__bp_dump-}"; } 2>/dev/null',
            b'\\builtin exit "$__bp_code"\n',
        ]
    )
    return b"%d\n%s" % (len(text), text)


def parse(dump: bytes, mark: str) -> tuple[bytes | None, tuple[str, ...]]:
    """The state that a :func:`script` dumped, for the next one, and what there is to say about it.

    None where there is no whole dump: the shell was killed or replaced itself, or its state exceeds ``LIMIT``; the
    state before the command is then the one to go on with.
    """
    begin, end = f"{mark} begin\0".encode(), f"{mark} end\0".encode()
    start, stop = dump.rfind(begin), dump.rfind(end)
    if start < 0 or stop < start:
        return None, ("the state of the shell is as before the command: it was killed, or replaced itself",)
    body = dump[start + len(begin) : stop]
    if len(body) > LIMIT:
        return None, (f"the state of the shell is as before the command: it holds more than {LIMIT} bytes",)
    records: dict[bytes, list[bytes]] = {}
    for record in body.split(b"\0"):
        records.setdefault(record[:1], []).append(record[1:])
    notes = () if b"L" not in records else ("the working directory is gone; the command ran in that of a new shell",)
    return _restore(records), notes


def _restore(records: dict[bytes, list[bytes]]) -> bytes:
    """Statements in an order that works: patterns before functions that use them, functions before aliases that would
    change them; then, after a NUL, the options, which are set last since they change how everything runs."""

    def first(kind: bytes) -> bytes:
        return records.get(kind, [b""])[0]

    switches = [line for line in first(b"S").splitlines() if not line.endswith(_FIXED)]
    traits = [line for line in first(b"X").splitlines() if not line.startswith(b"declare -f ")]
    settings = [
        b"\\builtin cd -- " + _quote(first(b"W")) + b" || __bp_lost=1",
        *switches,
        first(b"V"),
        first(b"F"),
        *traits,
        b"\\builtin umask " + _quote(first(b"U").strip()),
        first(b"A"),
    ]
    options = [line for line in first(b"O").splitlines() if not line.endswith(b" noexec")]
    return b"\n".join(settings) + b"\n\0" + b"\n".join(options) + b"\n"


def _clear() -> str:
    return f'for __bp_v in {_NAMES}; do case $__bp_v in {_OWN}) ;; *) unset -v "$__bp_v";; esac; done'


def _dump(mark: str, fd: int) -> str:
    """Once: the EXIT trap runs it where the command ended the shell, and finds it done elsewhere."""
    return rf"""{{
unset -v __bp_dump
\builtin trap - DEBUG ERR RETURN
\builtin printf '%s begin\0O' {shlex.quote(mark)}
\builtin set +o
\builtin set +efuvx +o posix
\builtin printf '\0S'; \builtin shopt -p
\builtin printf '\0U'; \builtin umask
\builtin printf '\0W%s\0A' "$PWD"; \builtin alias -p
\builtin printf '\0F'; \builtin declare -f
\builtin printf '\0X'; \builtin declare -F
\builtin printf '\0V'
__bp_all=()
for __bp_v in {_NAMES}; do
    case $__bp_v in {_OWN}) ;; *) __bp_all+=("$__bp_v") ;; esac
done
if ((${{#__bp_all[@]}})); then \builtin declare -p "${{__bp_all[@]}}"; fi
\builtin printf '\0%s\0%s end\0' "${{__bp_lost:+L}}" {shlex.quote(mark)}
}} 2>/dev/null >&{fd}"""


def _encode(command: str) -> bytes:
    """As bytes: undecodable ones as they were, halves of characters, which JSON can hold, as question marks."""
    try:
        return command.encode(errors=_RAW)
    except UnicodeEncodeError:
        return command.encode(errors="replace")


def _line(text: bytes) -> bytes:
    """Text as a bash word without a line break."""
    return b"$'" + text.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\n", b"\\n") + b"'"


def _quote(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\"'\"'") + b"'"
