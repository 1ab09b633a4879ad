"""SWE-bench Verified: rows, logs, commits, images, sdists, and the tasks on release sdists."""

from __future__ import annotations

import hashlib
import http.server
import json
import lzma
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from branchpoint.env import swe
from branchpoint.env.swe import checkout, logs, place, rows, sdists, verified, verify
from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.runner_django import names_of

CLASSIC = {
    "instance_id": "pallets__flask-5014", "repo": "pallets/flask", "base_commit": "a" * 40,
    "patch": diffs.diff("src/a.py", "x = 1\n", "x = 2\n"), "test_patch": diffs.diff("tests/test_a.py", "a\n", "b\n"),
    "problem_statement": "x should be 2", "hints_text": "", "created_at": "2023-03-04T18:36:21Z", "version": "2.3",
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]', "PASS_TO_PASS": "[]", "environment_setup_commit": "b" * 40,
    "difficulty": "<15 min fix",
}  # fmt: skip
NEWER = {
    **CLASSIC,
    "image": "registry/x:1",
    "eval_script": "run it",
    "log_parser": "pytest",
    "eval_type": "pass_and_fail",
}


def test_rows_of_both_shapes_are_read_from_jsonl_and_xz(tmp_path: Path) -> None:
    other = {**NEWER, "instance_id": "b__b-1", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": ["u", "v"]}
    text = json.dumps(CLASSIC) + "\n" + json.dumps(other) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    found = rows.read(tmp_path / "a.jsonl")
    assert found == rows.read(tmp_path / "a.jsonl.xz")
    assert found[0].FAIL_TO_PASS == ("tests/test_a.py::test_x",)
    assert found[0].PASS_TO_PASS == ()
    assert found[1].PASS_TO_PASS == ("u", "v")
    assert (checkout.image_name(found[0]), checkout.image_name(found[1])) == (
        "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest", "registry/x:1",
    )  # fmt: skip


def test_rows_are_read_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([CLASSIC]), tmp_path / "a.parquet")
    assert rows.read(tmp_path / "a.parquet") == (rows.row(CLASSIC),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": None}, "'patch' is missing"),
        ({"test_patch": ""}, "'test_patch' is missing"),
        ({"base_commit": 7}, "'base_commit' is a int"),
        ({"FAIL_TO_PASS": "[1"}, "'FAIL_TO_PASS' holds no JSON"),
        ({"FAIL_TO_PASS": "[]"}, "'FAIL_TO_PASS' is empty"),
        ({"PASS_TO_PASS": [1]}, "'PASS_TO_PASS' is no list"),
        ({"image": "x"}, "'eval_script' is missing"),
    ],
)
def test_a_bad_row_is_named_with_its_field(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**CLASSIC, "instance_id": "ok"}) + "\n" + json.dumps({**CLASSIC, **change}) + "\n")
    with pytest.raises(rows.RowError, match=rf"rows.jsonl, row 2 \(pallets__flask-5014\): field {message}") as caught:
        rows.read(file)
    assert "\n" not in str(caught.value)


def test_a_repeated_id_and_a_line_that_is_no_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps(CLASSIC) + "\n"))
    with pytest.raises(rows.RowError, match="row 2: instance_id 'pallets__flask-5014' is there already"):
        rows.read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps(CLASSIC) + "\n{\n")
    with pytest.raises(rows.RowError, match="line 2: no JSON"):
        rows.read(tmp_path / "a.jsonl")


def test_predictions_have_the_official_fields(tmp_path: Path) -> None:
    assert rows.write_predictions(tmp_path / "p.jsonl", "me", {"a": "diff", "b": ""}) == 2
    assert [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()] == [
        {"instance_id": "a", "model_name_or_path": "me", "model_patch": "diff"},
        {"instance_id": "b", "model_name_or_path": "me", "model_patch": ""},
    ]
    with pytest.raises(rows.RowError, match="twice"):
        rows.write_predictions(tmp_path / "p.jsonl", "me", [("a", ""), ("a", "")])


def test_pytest_logs() -> None:
    log = """
PASSED a.py::test_a
PASSED a.py::test_b[x - y]
FAILED a.py::test_c[1] - AssertionError: assert 1 == 2
ERROR a.py::test_d - boom
XFAIL a.py::test_e
SKIPPED [1] a.py:3: no reason
a.py::test_f SKIPPED
"""
    assert logs.pytest(log) == {
        "a.py::test_a": "passed", "a.py::test_b[x - y]": "passed", "a.py::test_c[1]": "failed",
        "a.py::test_d": "failed", "a.py::test_e": "passed", "a.py::test_f": "skipped",
    }  # fmt: skip


def test_django_logs() -> None:
    log = """
test_a (mod.C) ... ok
test_b (mod.C.test_b) ... FAIL
test_c (mod.C)
It does what it says. ... ok
test_d (mod.C) ... skipped 'no database'
test_e (mod.C) ... Some output
ok
test_f (mod.C) ... expected failure
======
FAIL: test_b (mod.C.test_b)
ERROR: setUpClass (mod.D)
"""
    assert logs.django(log) == {
        "test_a (mod.C)": "passed", "test_b (mod.C)": "failed", "It does what it says.": "passed",
        "test_d (mod.C)": "skipped", "test_e (mod.C)": "passed", "test_f (mod.C)": "passed",
        "setUpClass (mod.D)": "failed",
    }  # fmt: skip


def test_sympy_logs() -> None:
    assert logs.sympy("test_a ok\ntest_b F\ntest_c s\ntest_d f\nother ok\n") == {
        "test_a": "passed", "test_b": "failed", "test_c": "skipped", "test_d": "passed",
    }  # fmt: skip


def test_what_counts_as_resolved() -> None:
    said = {"a": "passed", "b": "skipped", "c": "failed", "d[x y]": "passed", "d[x z]": "failed"}
    assert logs.resolved(["a"], ["b"], said)
    assert not logs.resolved(["b"], [], said)
    assert not logs.resolved(["a"], ["c"], said)
    assert not logs.resolved(["a"], ["missing"], said)
    assert not logs.resolved([], ["a"], said)
    assert logs.resolved(["d[x y"], [], said)  # cut off
    assert not logs.resolved(["d[x"], [], said)


def test_output_is_what_stands_between_the_marks() -> None:
    assert logs.output(f"x\n{logs.START}\ny\n{logs.END}\nz") == "\ny\n"
    with pytest.raises(logs.LogError, match="End Test Output"):
        logs.output(f"x\n{logs.START}\ny")


def test_directives_are_modules_for_django_and_files_elsewhere() -> None:
    test_patch = diffs.diff("tests/a/tests.py", "a\n", "b\n") + diffs.diff("tests/a/x.json", "a\n", "b\n")
    assert checkout.directives(rows.row({**CLASSIC, "test_patch": test_patch})) == ["tests/a/tests.py"]
    django = rows.row({**CLASSIC, "repo": "django/django", "test_patch": test_patch})
    assert checkout.directives(django) == ["a.tests"]


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A small repository and a commit that is not its newest."""
    monkeypatch.setenv("BRANCHPOINT_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "upstream"
    (home / "tests").mkdir(parents=True)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=home, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    git("init", "-q")
    (home / "a.py").write_text("def x():\n    return 1\n")
    (home / "tests" / "test_a.py").write_text("import sys\nsys.path.insert(0, '.')\nimport a\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    (home / "a.py").write_text("later\n")
    git("commit", "-qam", "two")
    return home, commit


def test_the_files_at_base_commit_come_from_a_folder_and_from_a_clone(
    upstream: tuple[Path, str], tmp_path: Path
) -> None:
    home, commit = upstream
    row = rows.row({**CLASSIC, "base_commit": commit})
    assert (checkout.at_commit(row, str(home)) / "a.py").read_text() == "def x():\n    return 1\n"
    cloned = checkout.at_commit(rows.row({**CLASSIC, "repo": "b/b", "base_commit": commit}), home.as_uri())
    assert (cloned / "a.py").read_text() == "def x():\n    return 1\n"
    with pytest.raises(checkout.CheckoutError, match="pallets__flask-5014: git"):
        checkout.at_commit(rows.row({**CLASSIC, "base_commit": "c" * 40}), str(home))
    with pytest.raises(checkout.CheckoutError, match="is no commit id"):
        checkout.at_commit(rows.row({**CLASSIC, "base_commit": "--upload-pack=x"}), str(home))


def test_the_eval_script_runs_hidden_tests_and_puts_the_old_ones_back(upstream: tuple[Path, str]) -> None:
    home, commit = upstream
    old = (home / "tests" / "test_a.py").read_text()
    new = old + "\n\ndef test_x():\n    assert a.x() == 2\n"
    row = rows.row({**CLASSIC, "base_commit": commit, "test_patch": diffs.diff("tests/test_a.py", old, new)})
    subprocess.run(["git", "checkout", "-q", commit], cwd=home, check=True, timeout=60)
    script = checkout.eval_script(row)
    lines = [
        line.replace("/testbed", str(home)).replace("git config --global", "git config --local")
        for line in script.splitlines()
        if "conda" not in line
    ]
    for value, outcome in ((1, "failed"), (2, "passed")):
        (home / "a.py").write_text(f"def x():\n    return {value}\n")
        done = subprocess.run(  # the marks are on standard error, from set -x
            ["bash", "-c", "\n".join(lines)],
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        outcomes = logs.parse(row.repo, logs.output(done.stdout))
        assert outcomes == {"tests/test_a.py::test_x": outcome}
        assert logs.resolved(row.FAIL_TO_PASS, row.PASS_TO_PASS, outcomes) == (outcome == "passed")
        assert (home / "tests" / "test_a.py").read_text() == old


class Cutting(http.server.BaseHTTPRequestHandler):
    """An index whose first answer for the file ends early, and which can go on."""

    data = b""
    digest = ""
    asked: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        if self.path.startswith("/simple/my-project/"):
            page = (
                f'<a href="/files/My_Project-1.0.tar.gz#sha256={self.digest}">x</a><a href="/files/other-1.0.zip">y</a>'
            )
            self._say(200, page.encode(), "text/html")
        elif self.path.startswith("/files/"):
            span = self.headers.get("Range")
            self.asked.append(span)
            start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
            rest = self.data[start:]
            self._say(206 if span else 200, rest if span else rest[: len(rest) // 2], "application/gzip", len(rest))
        else:
            self._say(404, b"", "text/plain")

    def _say(self, status: int, body: bytes, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[sdists.Index, str]]:
    (tmp_path / "my_project-1.0").mkdir()
    (tmp_path / "my_project-1.0" / "a.py").write_bytes(bytes(range(256)) * 2000)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "my_project-1.0", "my_project-1.0")
    Cutting.data = (tmp_path / "x.tar.gz").read_bytes()
    Cutting.digest, Cutting.asked = hashlib.sha256(Cutting.data).hexdigest(), []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield sdists.Index((f"http://127.0.0.1:{server.server_port}/simple",)), Cutting.digest
    server.shutdown()
    server.server_close()


def test_a_transfer_goes_on_where_it_was_cut_and_is_kept(index: tuple[sdists.Index, str], tmp_path: Path) -> None:
    where, digest = index
    found = sdists.fetch("My.Project", "1.0", digest, tmp_path / "cache", where)
    assert sdists.digest(found) == digest
    assert Cutting.asked == [None, f"bytes={len(Cutting.data) // 2}-"]
    assert sdists.fetch("my-project", "1.0", "", tmp_path / "cache", sdists.Index(())) == found  # no index asked
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.suffix == ".part"] == []


def test_another_checksum_or_version_is_refused(index: tuple[sdists.Index, str], tmp_path: Path) -> None:
    where, _ = index
    with pytest.raises(sdists.SdistError, match=r"no source distribution of my-project 1.0 with sha256 000000000000"):
        sdists.fetch("my-project", "1.0", "0" * 64, tmp_path / "cache", where)
    with pytest.raises(sdists.SdistError, match=r"no source distribution of my-project 2.0"):
        sdists.fetch("my-project", "2.0", "", tmp_path / "cache", where)
    Cutting.digest = "1" * 64  # what the index says is not what it sends
    with pytest.raises(sdists.SdistError, match=r"its sha256 is .*, expected 1111"):
        sdists.fetch("my-project", "1.0", "", tmp_path / "cache", where)
    assert not list((tmp_path / "cache").glob("*.tar.gz"))


def test_pips_settings_are_used_variables_first() -> None:
    listing = """
:env:.index-url='https://me:word@a/simple'
global.cert='/c.pem'
global.extra-index-url='https://b/simple https://c/simple'
global.index-url='https://d/simple'
"""
    assert sdists.configured(listing) == sdists.Index(
        ("https://me:word@a/simple", "https://b/simple", "https://c/simple"), (), "/c.pem"
    )


def test_an_archive_that_points_outside_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as packed:
        bad = tarfile.TarInfo("a/../../evil")
        packed.addfile(bad)
    with pytest.raises(tarfile.OutsideDestinationError):
        place.unpack(tmp_path / "x.tar.gz", tmp_path / "there" / "tree")
    assert not (tmp_path / "there" / "tree").exists()
    assert not (tmp_path / "evil").exists()


def test_the_32_tasks_are_named_after_their_release_and_keep_the_official_row() -> None:
    found = verified.releases()
    assert len(found) == 32
    for name, each in found.items():
        official = each.official
        assert name == f"{official.instance_id}@{each.repository.name}-{each.repository.version}"
        assert "not an official score" in each.instance.note
        assert each.instance.FAIL_TO_PASS
        assert not set(each.instance.FAIL_TO_PASS) & set(each.instance.PASS_TO_PASS)
        assert set(diffs.changed(each.instance.patch)) == set(diffs.changed(official.patch))
        ids = {logs.plain(test).rpartition("::")[2] for test in each.instance.FAIL_TO_PASS}
        assert ids <= {logs.plain(test).rpartition("::")[2] for test in official.FAIL_TO_PASS}
    task = swe.tasks("test", source="verified")[0]
    assert "@" in task.id
    with pytest.raises(ValueError, match="split is 'train'"):
        swe.tasks("train", source="verified")


def test_a_test_goes_by_its_method_and_its_docstring() -> None:
    import unittest

    class Case(unittest.TestCase):
        def test_a(self) -> None: ...

        def test_b(self) -> None:
            """What it does.

            And more.
            """

    where = f"{Case.__module__}.{Case.__qualname__}"
    assert names_of(Case("test_a")) == [f"test_a ({where})"]
    assert names_of(Case("test_b")) == [f"test_b ({where})", "What it does."]


def _check(name: str) -> None:
    from branchpoint.command.swe import machines

    pytest.importorskip("branchpoint.sandbox.shell")
    release = next(each for each in verified.releases().values() if each.official.instance_id == name)
    try:
        image = release.image()
    except (sdists.SdistError, place.PlaceError) as error:
        pytest.skip(f"no package index here: {error}")
    try:
        box = machines()
    except Exception as error:
        if not type(error).__module__.startswith("branchpoint."):
            raise
        pytest.skip(f"no shell sandbox here: {error}")
    try:
        verdict = verify.check(release.instance, release.repository.recipe, image, box)
    finally:
        box.close()
    assert verdict.holds, verdict


def test_a_task_on_a_release_holds() -> None:
    _check("pallets__flask-5014")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(each.official.instance_id for each in verified.releases().values()))
def test_every_task_on_a_release_holds(name: str) -> None:
    _check(name)
