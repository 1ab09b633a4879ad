"""The state of a shell between commands: what one bash leaves, the next one has."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from branchpoint.sandbox import _shell_state

MARK = "frame-5f1c"


class Shell:
    """Commands one after another, each in a new bash that starts from the last one's dump."""

    def __init__(self, folder: Path, state: bytes = b"") -> None:
        self.folder, self.state = folder, state
        self.notes: tuple[str, ...] = ()
        self.code = 0

    def __call__(self, command: str, stdin: bytes = b"") -> str:
        read, write = os.pipe()
        dump = bytearray()
        with open(read, "rb") as stream:
            reader = threading.Thread(target=lambda: dump.extend(stream.read()))  # more than a pipe holds
            reader.start()
            out = self._run(command, stdin, write)
            reader.join()
        state, self.notes = _shell_state.parse(bytes(dump), MARK)
        self.state = self.state if state is None else state
        return out

    def _run(self, command: str, stdin: bytes, write: int) -> str:
        script = _shell_state.script(command, self.state, mark=MARK, fd=write)
        try:
            ran = subprocess.run(
                ["bash", "--noprofile", "--norc", "-c", _shell_state.BOOT, "bash"],
                input=script + stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                pass_fds=(write,),
                timeout=20,
                env={"PATH": os.environ["PATH"], "FROM_OUTSIDE": "1"},
            )
        finally:
            os.close(write)
        self.code = ran.returncode
        return ran.stdout.decode(errors="replace")

    def branch(self) -> Shell:
        return Shell(self.folder, self.state)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        ("mkdir -p 'a b/c'; cd 'a b/c'", 'echo "${PWD##*/} ${OLDPWD##*/}"', "c {folder}"),
        ("x='two  words'; y=$'tab\\there\\nline'", 'echo "$x|$y"', "two  words|tab\there\nline"),
        ("export E=1; p=2", "bash -c 'echo ${E-}${p-none}'", "1none"),
        ("a=(1 'b c' 3); a[9]=z; declare -A m=([k]=v ['q r']='s t')", 'echo "${a[1]}${a[9]}${#a[@]}${m[q r]}"', "b cz4s t"),  # noqa: E501
        ("declare -i n=4; declare -r c=5; declare -u up=abc", "n=n+3; (c=6) 2>/dev/null; echo $n $c $up", "7 5 ABC"),
        ("t=1; declare -n ref=t", "ref=8; echo $t", "8"),
        ("f() { echo \"f:$1\"; }; g() { f \"in $1\"; }", "g x", "f:in x"),
        ("f() { echo exported; }; export -f f", "bash -c f", "exported"),
        ("shopt -s extglob; f() { [[ $1 == +(a|b) ]] && echo yes; }", "f abab", "yes"),
        ("shopt -s expand_aliases; alias hi='echo hello'", "hi you", "hello you"),
        ("set -f; set -o pipefail", "echo *; false | true; echo $?", "*\n1"),
        ("set -u", "echo before; echo $undefined; echo after", "before\nbash: line 1: undefined: unbound variable"),
        ("set -e", "echo before; false; echo after", "before"),
        ("umask 027", "umask; touch made; stat -c %a made", "0027\n640"),
        ("IFS=:", 'v=a:b; set -- $v; echo "$2"', "b"),
        ("PATH=/nowhere; unset FROM_OUTSIDE", "echo ${FROM_OUTSIDE-gone} $PATH", "gone /nowhere"),
        ("v=$'\\xff\\xfe end'", "[[ $v == $'\\xff\\xfe end' ]] && echo same", "same"),
        ("v=\"it's \\\"quoted\\\" \\$HOME \\`x\\` \\\\\"", 'echo "$v"', 'it\'s "quoted" $HOME `x` \\'),
        ("printf() { echo mine; }; declare() { echo mine; }", "printf x; unset -f printf declare", "mine"),
        ("v=kept; (exit 3)", "echo $v", "kept"),
        ("v=kept; exit 3", "echo $v", "kept"),
        ("v=kept; set -e; false", "echo $v", "kept"),
        ("v=kept; trap 'echo own' EXIT", "echo $v", "kept"),
        ("v=kept; trap 'echo debug >/dev/null' DEBUG", "echo $v", "kept"),
        ("set -x; v=1", "{ set +x; } 2>/dev/null; echo $v", "1"),
        ("v='猫 🐈'", 'echo "$v"', "猫 🐈"),
    ],
)  # fmt: skip
def test_the_next_shell_goes_on(shell: Shell, first: str, second: str, right: str) -> None:
    shell(first)
    assert shell.notes == ()
    got = shell.branch()(second)
    assert got == shell.branch()(second)
    if "unbound" in right:
        assert got.startswith("before\n")
        assert "undefined: unbound variable" in got
        assert "after" not in got
        return
    assert got.rstrip("\n") == right.replace("{folder}", shell.folder.name)


def test_exit_codes_and_output_are_the_commands_own(shell: Shell) -> None:
    for command, code, output in (
        ("echo hi; false", 1, "hi\n"),
        ("exit 7", 7, ""),
        ("kill -9 $$", -9, ""),
        ("trap 'echo bye' EXIT; echo hi", 0, "hi\nbye\n"),
        ("cat; echo end", 0, "inputend\n"),
        ("echo out; echo err >&2", 0, "out\nerr\n"),
        ("echo 'a'\"'\"'b'", 0, "a'b\n"),
        ("cat <<'END'\nhere $x\nEND", 0, "here $x\n"),
    ):
        assert (shell(command, stdin=b"input"), shell.code) == (output, code), command
    assert shell("if then").startswith("bash: eval: line 1: syntax error")
    assert shell.code != 0
    shell("f() {\n  :\n}; shopt -s extglob")
    assert shell("true\nnowhere").startswith("bash: line 2: nowhere:")  # lines are counted in the command


def test_a_long_chain_keeps_everything(shell: Shell) -> None:
    shell("n=0; f() { n=$((n+1)); }")
    for _ in range(8):
        shell("f; cd .; declare -a list+=($n)")
    assert shell('echo "$n ${list[*]}"') == "8 1 2 3 4 5 6 7 8\n"
    before = shell.state
    shell("true")
    assert shell.state == before  # nothing piles up


def test_branches_of_one_state_are_apart(shell: Shell) -> None:
    shell("v=0")
    one, two = shell.branch(), shell.branch()
    one("v=1")
    two("w=2")
    assert (one("echo $v${w-}"), two("echo $v${w-}"), shell("echo $v${w-}")) == ("1\n", "02\n", "0\n")
    draws = {shell.branch()("echo $RANDOM$RANDOM$RANDOM") for _ in range(3)}
    assert len(draws) == 3  # restored, RANDOM would seed all alike


@pytest.mark.parametrize("ending", ["kill -9 $$", "exec true", "big=$(printf '%02000000d' 0)"])
def test_a_shell_that_leaves_no_state_is_told(shell: Shell, ending: str) -> None:
    shell("v=old")
    shell(f"v=new; {ending}")
    assert len(shell.notes) == 1
    assert "as before the command" in shell.notes[0]
    assert shell("echo $v") == "old\n"


def test_a_lost_working_directory_is_told(shell: Shell) -> None:
    shell("mkdir d; cd d")
    (shell.folder / "d").rmdir()
    shell("true")
    assert "working directory is gone" in shell.notes[0]


def test_a_forged_dump_is_not_the_last_word(shell: Shell) -> None:
    """What a command writes to the descriptor itself, without the mark, changes nothing."""
    shell("v=1; for fd in /proc/self/fd/*; do printf 'x begin\\0Vdeclare v=9\\0x end\\0' >&${fd##*/}; done 2>/dev/null")
    assert shell("echo $v") == "1\n"


def test_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        _shell_state.script("echo \0", b"", mark=MARK, fd=9)
