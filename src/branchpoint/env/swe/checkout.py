"""Repositories at ``base_commit``: from a git clone or mirror, or in the official image of an instance."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.logs import END, START
from branchpoint.env.swe.place import cache, unpack
from branchpoint.env.swe.rows import Row
from branchpoint.env.swe.task import ROOT
from branchpoint.sandbox.machine import Image
from branchpoint.world import UserError

_SECONDS = 900
_PYTEST = "pytest -rA"
COMMANDS: Mapping[str, str] = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
}
"""Test commands by repository; ``pytest -rA`` for all others. A row of the newer shape brings its own script."""


class CheckoutError(UserError):
    """A commit that cannot be had."""


def at_commit(row: Row, source: str = "") -> Path:
    """The repository's files at ``base_commit``, kept in the cache; treat the folder as read-only.

    ``source`` is anything that git clones from, such as the folder of a mirror; default: GitHub. Raises CheckoutError.
    """
    if not re.fullmatch(r"[0-9a-f]{7,64}", row.base_commit):
        raise CheckoutError(f"{row.instance_id}: base_commit {row.base_commit!r} is no commit id")
    place = cache() / "commits" / f"{row.repo.replace('/', '__')}-{row.base_commit}"
    if place.is_dir():
        return place
    mirror = _mirror(row, source or f"https://github.com/{row.repo}.git")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as beside:
        archive = Path(beside) / "tree.tar"
        _git(row, "-C", str(mirror), "archive", "--prefix=tree/", f"--output={archive}", row.base_commit)
        unpack(archive, place)
    return place


def _mirror(row: Row, source: str) -> Path:
    """A bare clone that has the commit: the source itself where it is a folder, else one in the cache."""
    if Path(source).is_dir():
        return Path(source)
    mirror = cache() / "mirrors" / f"{row.repo.replace('/', '__')}.git"
    if not mirror.is_dir():
        mirror.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=mirror.parent))
        try:
            _git(row, "clone", "--quiet", "--bare", "--", source, str(beside / "git"))
            (beside / "git").rename(mirror)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    elif _run("-C", str(mirror), "cat-file", "-e", f"{row.base_commit}^{{commit}}").returncode:
        _git(row, "-C", str(mirror), "fetch", "--quiet", "--", source, "+refs/heads/*:refs/heads/*")
    return mirror


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *arguments],
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise CheckoutError("git is not installed; install it, or use tasks on release sdists") from None
    except subprocess.TimeoutExpired:
        raise CheckoutError(f"git {arguments[0]} took over {_SECONDS} s") from None


def _git(row: Row, *arguments: str) -> None:
    done = _run(*arguments)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckoutError(f"{row.instance_id}: git: {last}")


def image_name(row: Row) -> str:
    """The official image of an instance."""
    name = row.instance_id.lower().replace("__", "_1776_")
    return row.image or f"swebench/sweb.eval.x86_64.{name}:latest"


def image(row: Row) -> Image:
    """The image to start a container from: the repository at ``/testbed``, its packages in the conda environment."""
    folders = ("/opt/miniconda3/envs/testbed/bin", "/opt/miniconda3/bin")
    path = ":".join([*folders, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
    return Image(image_name(row), {}, {}, {"PATH": path, "LANG": "C.UTF-8"}, ROOT)


def eval_script(row: Row) -> str:
    """The bash script that puts the hidden tests in place and runs them between the two marks: the row's own, or for a
    classic row one built like it. :func:`branchpoint.env.swe.logs.parse` reads what it prints."""
    if row.eval_script:
        return row.eval_script
    changed = diffs.changed(row.test_patch)
    old = " ".join(shlex.quote(path) for path, kind in changed.items() if kind != "made")
    restore = f"git checkout {shlex.quote(row.base_commit)} {old}" if old else ":"
    mark = "EOF_114329324912"
    if mark in row.test_patch:
        raise CheckoutError(f"{row.instance_id}: test_patch holds the line that ends it, {mark}")
    test = f"{COMMANDS.get(row.repo, _PYTEST)} {' '.join(map(shlex.quote, directives(row)))}"
    return "\n".join([
        "#!/bin/bash", "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate", "conda activate testbed", f"cd {ROOT}",
        f"git config --global --add safe.directory {ROOT}", restore,
        f"git apply -v - <<'{mark}'", row.test_patch.rstrip("\n"), mark,
        f": '{START}'", test, f": '{END}'", restore, "",
    ])  # fmt: skip


def directives(row: Row) -> list[str]:
    """What the test command is asked to run: the test files of ``test_patch``; for Django their modules."""
    data = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst")
    paths = [p for p, kind in diffs.changed(row.test_patch).items() if kind != "removed" and not p.endswith(data)]
    if row.repo != "django/django":
        return paths
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in paths]
