"""How a fake machine interprets a command line."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from branchpoint.testing._fake_files import Files, Node
from branchpoint.testing._fake_shell import Command, State, assignment, expand
from branchpoint.world import SandboxFailure

_BLOCK = 1 << 16


class Host(Protocol):
    """What a command needs of its machine. ``ended`` is set when the machine is closed."""

    files: Files
    ended: threading.Event

    def read(self, path: str, *, limit: int = ...) -> bytes: ...


class Exit(Exception):
    """The shell ended."""

    def __init__(self, code: int) -> None:
        self.code = code


class Killed(Exception):
    """The shell killed itself."""


class Over(Exception):
    """The time is over."""


class Left(Exception):
    """What nobody waits for goes on."""


class Sink:
    """The first and the last bytes of what is written."""

    def __init__(self, limit: int) -> None:
        self.first, self.last = limit - limit // 2, limit // 2
        self.head, self.tail, self.omitted = b"", b"", 0

    def add(self, data: bytes) -> None:
        room = self.first - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        self.omitted += max(0, len(self.tail) - self.last)
        self.tail = self.tail[len(self.tail) - self.last :] if len(self.tail) > self.last else self.tail

    def result(self) -> tuple[bytes, int]:
        return self.head + self.tail, self.omitted


class Job:
    """A command line that is interpreted. ``left``: what would still run at its end."""

    def __init__(self, machine: Host, state: State, out: Sink, stdin: bytes, deadline: float) -> None:
        self.machine, self.files, self.state, self.out = machine, machine.files, state, out
        self.stdin, self.deadline = stdin, deadline
        self.left = self.code = 0
        self.arguments: tuple[str, ...] = ()
        self.waits = True

    def play(self, commands: Sequence[Command]) -> int:
        """Interprets commands one after the other. Returns the status of the last one."""
        skip = False
        for command in commands:
            if not skip:
                if command.after == "&":
                    self._background(command)
                else:
                    self.code = self._one(command)
            skip = (command.after == "&&" and self.code != 0) or (command.after == "||" and self.code == 0)
        return self.code

    def _background(self, command: Command) -> None:
        """Goes on until something sleeps, and is killed there, since nobody waits for it."""
        state, waits = self.state, self.waits
        self.state, self.waits = state.copy(), False
        try:
            self._one(command)
        except Left:
            self.left += 1
        except Exit:
            pass
        finally:
            self.state, self.waits, self.code = state, waits, 0

    def _one(self, command: Command) -> int:
        if command.kind == "function":
            self.state.functions[command.words[0]] = command.body
            return 0
        if command.kind == "array":
            name, *items = command.words
            self.state.variables[name] = [w for item in items for w in self._expand(item)]
            return 0
        sink = self.out
        try:
            self.out = self._redirected(command)
            if command.kind == "group":
                return self.play(command.body)
            if command.kind == "subshell":
                return self._subshell(command.body)
            return self._simple(command.words)
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else error
            sink.add(f"{command.words[0] if command.words else 'bash'}: {text}\n".encode(errors="surrogateescape"))
            return 1
        finally:
            done, self.out = self.out, sink
            if done is not sink and isinstance(done, _FileSink):
                done.close()

    def _redirected(self, command: Command) -> Sink:
        for kind, word in command.outputs:
            path = self.at(self._expand(word)[0])
            if path == "/dev/null":
                return Sink(0)
            return _FileSink(self.files, path, 0o666 & ~self.state.umask, more=kind == ">>")
        return self.out

    def _subshell(self, body: tuple[Command, ...]) -> int:
        state = self.state
        self.state = state.copy()
        try:
            return self.play(body)
        except Exit as end:
            return end.code
        finally:
            self.state = state

    def _expand(self, word: str) -> list[str]:
        return expand(word, self.state, self.arguments, self.code)

    def _simple(self, raw: Sequence[str]) -> int:
        if all(assignment(word) for word in raw):
            for word in raw:
                self._assign(word)
            return 0
        name, *words = [w for word in raw for w in self._expand(word)] or [""]
        if name in self.state.functions:
            before, self.arguments = self.arguments, tuple(words)
            try:
                return self.play(self.state.functions[name])
            finally:
                self.arguments = before
        found: Callable[[list[str]], int | None] | None = getattr(self, f"do_{_NAMES.get(name, name)}", None)
        if found is None:
            self.out.add(f"bash: {name}: command not found\n".encode(errors="surrogateescape"))
            return 127
        return found(words) or 0

    def _assign(self, word: str) -> str:
        name, text = assignment(word) or (word, "")
        self.state.variables[name] = " ".join(self._expand(text))
        return name

    def at(self, path: str) -> str:
        """An absolute path."""
        return path if path.startswith("/") else f"{self.state.cwd}/{path}"

    def say(self, text: str) -> None:
        self.out.add(text.encode(errors="surrogateescape"))

    def pause(self, seconds: float) -> None:
        """Waits, until the time is over or the machine is closed."""
        if not self.waits:
            raise Left
        left = self.deadline - time.monotonic()
        if self.machine.ended.wait(max(0.0, min(seconds, left))):
            raise SandboxFailure("the machine is closed")
        if seconds >= left:
            raise Over

    # Builtins

    def do_cat(self, words: list[str]) -> None:
        if not words:
            self.out.add(self.stdin)
            self.stdin = b""
        for word in words:
            if word != "--":
                self.out.add(self.machine.read(self.at(word), limit=1 << 40))

    def do_cd(self, words: list[str]) -> None:
        path = self.at(words[-1] if words else "/root")
        if self.files.node(path).kind != "directory":
            raise NotADirectoryError(20, "Not a directory", path)
        self.state.cwd = os.path.normpath(path)

    def do_echo(self, words: list[str]) -> None:
        self.say(" ".join(words) + "\n")

    def do_printf(self, words: list[str]) -> None:
        self.say("".join(words[1:]) if words[0] == "%s" else words[0].replace("\\n", "\n"))

    def do_pwd(self, words: list[str]) -> None:
        self.say(f"{self.state.cwd}\n")

    def do_env(self, words: list[str]) -> None:
        for name in sorted(self.state.exported):
            value = self.state.variables.get(name)
            if isinstance(value, str):
                self.say(f"{name}={value}\n")

    def do_export(self, words: list[str]) -> None:
        for word in words:
            name, _, value = word.partition("=")
            if "=" in word:
                self.state.variables[name] = value
            self.state.exported.add(name)

    def do_unset(self, words: list[str]) -> None:
        for word in words:
            self.state.variables.pop(word, None)
            self.state.exported.discard(word)

    def do_set(self, words: list[str]) -> None:
        (self.state.options.add if words[0] == "-o" else self.state.options.discard)(words[1])

    def do_option(self, words: list[str]) -> int:
        return 0 if words[1] in self.state.options else 1

    def do_umask(self, words: list[str]) -> None:
        if words:
            self.state.umask = int(words[0], 8)
        else:
            self.say(f"{self.state.umask:04o}\n")

    def do_true(self, words: list[str]) -> int:
        return 0

    def do_false(self, words: list[str]) -> int:
        return 1

    def do_exit(self, words: list[str]) -> None:
        raise Exit(int(words[0]) if words else self.code)

    def do_kill(self, words: list[str]) -> None:
        raise Killed

    def do_setsid(self, words: list[str]) -> int:
        return self._simple([f"'{w}'" for w in words])

    def do_sleep(self, words: list[str]) -> None:
        self.pause(float(words[0]))

    def do_yes(self, words: list[str]) -> None:
        while True:
            self.out.add(b"y\n" * (_BLOCK // 2))
            self.pause(0.002)

    def do_head(self, words: list[str]) -> None:
        count, path = int(words[1]), self.at(words[2])
        if path != "/dev/zero":
            self.out.add(self.machine.read(path)[:count])
            return
        for done in range(0, count, _BLOCK):
            self.out.add(bytes(min(_BLOCK, count - done)))

    def do_mkdir(self, words: list[str]) -> None:
        for word in _plain(words):
            if "-p" in words:
                self.files.folders(self.at(word), 0o777 & ~self.state.umask)
            else:
                self.files.put(self.at(word), Node("directory", 0o777 & ~self.state.umask))

    def do_mkfifo(self, words: list[str]) -> None:
        for word in words:
            self.files.put(self.at(word), Node("other", 0o666 & ~self.state.umask))

    def do_rm(self, words: list[str]) -> None:
        for word in _plain(words):
            if "-rf" not in words or self.files.find(self.at(word), follow=False)[2] is not None:
                self.files.remove(self.at(word))

    def do_mv(self, words: list[str]) -> None:
        old, new = _plain(words)
        self.files.move(self.at(old), self.at(new))

    def do_ln(self, words: list[str]) -> None:
        target, name = _plain(words)
        if "-s" in words:
            self.files.put(self.at(name), Node("symlink", 0o777, os.fsencode(target)))
        else:
            self.files.put(self.at(name), self.files.node(self.at(target), follow=False))

    def do_chmod(self, words: list[str]) -> None:
        mode, *names = _plain(words)
        for name in names:
            node = self._free(name)
            node.mode = int(mode, 8)

    def do_chown(self, words: list[str]) -> None:
        owner, name = _plain(words)
        self._free(name).owner = (int(owner.partition(":")[0]), int(owner.partition(":")[2]))

    def do_touch(self, words: list[str]) -> None:
        stamp = int(words[1][1:]) if words[0] == "-d" else int(time.time())
        for name in _plain(words[2:] if words[0] == "-d" else words):
            path = self.at(name)
            if self.files.find(path)[2] is None:
                self.files.write(path, b"", 0o666 & ~self.state.umask)
            self._free(name).time = stamp

    def _free(self, name: str) -> Node:
        node = self.files.node(self.at(name))
        if node.locked:
            raise OSError(30, "Read-only file system", name)
        return node

    def do_find(self, words: list[str]) -> None:
        names = self.files.names()
        for at, node in self.files.walk(self.at(words[0])):
            size = len(node.data)
            held = {
                "y": {"directory": "d", "file": "f", "symlink": "l"}.get(node.kind, "p"), "m": f"{node.mode:o}",
                "U": str(node.owner[0]), "G": str(node.owner[1]), "n": str(names[id(node)]), "T@": f"{node.time}.0",
                "s": str(size), "l": os.fsdecode(node.data) if node.kind == "symlink" else "", "P": at,
            }  # fmt: skip
            self.say(re.sub(r"%(T@|.)", lambda m, held=held: held[m[1]], words[2]).replace("\\0", "\0"))


class _FileSink(Sink):
    """A redirection to a file, which is made at once and filled at the end."""

    def __init__(self, files: Files, path: str, mode: int, more: bool) -> None:
        super().__init__(1 << 40)
        self.files, self.path = files, path
        files.write(path, b"", mode, more)

    def close(self) -> None:
        if self.head:
            self.files.write(self.path, self.head, more=True)


_NAMES = {"[[": "option", "trap": "true", "wait": "true", "nohup": "setsid"}


def _plain(words: list[str]) -> list[str]:
    """Words without options; all behind ``--``."""
    if "--" in words:
        return words[words.index("--") + 1 :]
    return [w for w in words if not w.startswith("-")]
