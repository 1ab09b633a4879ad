"""Mutations, diffs, and what makes a task of them."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchpoint.env.swe import inject, mutate, patch, sources
from branchpoint.env.swe.repositories import REPOSITORIES

SOURCE = textwrap.dedent(
    '''
    import os


    def f(a, b, flag=True):
        """Text with a < b and 1 + 1."""
        if a < b and not flag:
            return a + b
        while a != 3:
            a -= 1
            os.remove(a, b)
        return (a) <= (b), "é", a is None, 7
    '''
).encode()


def test_the_mutations_of_a_small_function_are_these() -> None:
    found = {(m.kind, m.old.decode(), m.new.decode()) for m in mutate.mutations(SOURCE)}
    assert found == {
        ("comparison", "<", "<="), ("connective", "and", "or"), ("condition", "a < b and not flag",
         "not (a < b and not flag)"), ("return", "return a + b", "return None"), ("operator", "+", "-"),
        ("comparison", "!=", "=="), ("condition", "a != 3", "not (a != 3)"), ("constant", "3", "4"),
        ("constant", "3", "2"), ("statement", "a -= 1", "pass"), ("constant", "1", "2"), ("constant", "1", "0"),
        ("statement", "os.remove(a, b)", "pass"), ("arguments", "a, b", "b, a"),
        ("return", 'return (a) <= (b), "é", a is None, 7', "return None"), ("comparison", "<=", "<"),
        ("comparison", "is", "is not"), ("constant", "7", "8"), ("constant", "7", "6"),
    }  # fmt: skip


def test_every_mutation_changes_the_program_and_goes_back() -> None:
    source = Path(mutate.__file__).read_bytes()
    tree = ast.dump(ast.parse(source))
    for m in mutate.mutations(source)[::2]:
        changed = m.apply(source)
        assert ast.dump(ast.parse(changed)) != tree
        assert m.undo().apply(changed) == source
        assert source.splitlines()[m.line - 1] != changed.splitlines()[m.line - 1]
    with pytest.raises(ValueError, match="does not stand"):
        mutate.mutations(source)[0].undo().apply(source)


def test_mutations_of_no_python_are_none() -> None:
    assert mutate.mutations(b"def f(:") == ()
    assert mutate.mutations(b"# coding: latin-1\ndef f(): return '\xe9'") == ()


texts = st.lists(st.sampled_from(["a\n", "b\n", "\n", "c\r\n", "é\n", "-- x\n", "@@ y\n"]), max_size=12).map("".join)
endings = st.tuples(texts, st.sampled_from(["", "end"])).map("".join)


@given(endings, endings, st.integers(0, 3))
def test_a_diff_applies_and_its_reverse_undoes_it(before: str, after: str, context: int) -> None:
    made = patch.diff("d/f.txt", before, after, context)
    if before == after:
        assert made == ""
        return
    assert patch.apply(made, lambda _: before) == {"d/f.txt": after}
    assert patch.apply(patch.reverse(made), lambda _: after) == {"d/f.txt": before}


@given(endings.filter(bool))
def test_files_are_made_and_removed(text: str) -> None:
    made = patch.diff("f", None, text)
    assert patch.apply(made, lambda _: None) == {"f": text}
    assert patch.apply(patch.reverse(made), lambda _: text) == {"f": None}
    assert patch.changed(made) == {"f": "made"}


def test_diffs_agree_with_patch(tmp_path: Path) -> None:
    before, after = "".join(f"{i}\n" for i in range(40)), "".join(f"{i}\n" for i in range(40) if i not in (7, 30)) + "z"
    (tmp_path / "f").write_text(before)
    done = subprocess.run(["patch", "-p1", "-d", tmp_path], input=patch.diff("f", before, after).encode(), check=True,
                          capture_output=True, timeout=10)  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == after


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n", "does not apply"),
        ("--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+y\n", "no such file"),
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+y\n", "there already"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n", "shorter"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n*a\n", "in the middle"),
        ("rename from f\n", "not supported"),
        ("hello\n", "names no file"),
    ],
)
def test_diffs_that_cannot_be_applied_say_why(text: str, why: str) -> None:
    with pytest.raises(patch.PatchError, match=why):
        patch.apply(text, lambda path: "a\n" if path == "f" else None)


def test_a_hunk_goes_where_its_lines_stand_nearest() -> None:
    text = "--- a/f\n+++ b/f\n@@ -4 +4 @@\n-x\n+y\n"
    assert patch.apply(text, lambda _: "x\na\nb\nc\nx\n") == {"f": "x\na\nb\nc\ny\n"}


def test_the_shipped_tasks_are_whole() -> None:
    vetted = inject.load(sources.DATA / "injected.jsonl.xz")
    instances = [instance for each in vetted for instance in each.instances()]
    assert len(instances) >= 400
    assert len(vetted) >= 8
    assert len({instance.instance_id for instance in instances}) == len(instances)
    assert {instance.split for instance in instances} == {"train", "validation", "test"}
    for each in vetted:
        assert each.sha256 == REPOSITORIES[each.name].sha256
    for instance in instances:
        fail, keep = set(instance.FAIL_TO_PASS), set(instance.PASS_TO_PASS)
        assert fail
        assert not fail & keep
        assert len(keep) >= len(fail)
        assert patch.changed(instance.bug) == patch.changed(instance.patch)
        back = {tuple(h.after for h in f.hunks) for f in patch.parse(instance.patch)}
        assert back == {tuple(h.before for h in f.hunks) for f in patch.parse(instance.bug)}
