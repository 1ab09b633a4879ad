"""What a machine needs of this computer to run a repository's tests: its tree, an interpreter, the packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from branchpoint.env.swe.task import ROOT, Recipe, Repository
from branchpoint.sandbox.machine import Image
from branchpoint.world import UserError

TOOLS = "/opt/tools"
"""Where a machine finds the packages of a recipe."""
RESULTS = "/results"
"""Where a grading machine keeps the test results."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")
_INSTALL_SECONDS = 600


class PlaceError(UserError):
    """Something that a repository needs cannot be had here."""


def cache() -> Path:
    """The cache folder of this environment: ``$BRANCHPOINT_CACHE/swe``, else ``~/.cache/branchpoint/swe``."""
    base = os.environ.get("BRANCHPOINT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base) if base else Path(home).expanduser() / "branchpoint") / "swe"


def tree(repository: Repository) -> Path:
    """The unpacked source distribution, fetched when it is not in the cache. Treat it as read-only.

    Raises PlaceError (or the error of :mod:`~branchpoint.env.swe.sdists`) when it cannot be had.
    """
    from branchpoint.env.swe import sdists

    place = cache() / "trees" / f"{repository.name}-{repository.version}-{repository.sha256[:12]}"
    if not place.is_dir():
        archive = sdists.fetch(repository.name, repository.version, repository.sha256, cache() / "sdists")
        unpack(archive, place)
    return place


def unpack(archive: Path, place: Path) -> None:
    """The one folder of a source distribution, as ``place``; complete or not there at all. Raises PlaceError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as beside:
        with tarfile.open(archive) as packed:
            packed.extractall(beside, filter="data")  # refuses what points outside
        tops = list(Path(beside).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise PlaceError(f"{archive.name} holds {len(tops)} entries at its top; expected one folder")
        _settle(tops[0], place)


def tools(requirements: Sequence[str]) -> Path:
    """A folder with the packages, installed by pip unless they are in the cache. Raises PlaceError in pip's words."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256("\n".join([version, *sorted(requirements)]).encode()).hexdigest()[:16]
    place = cache() / "tools" / key
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as beside:
        target = Path(beside) / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        try:
            done = subprocess.run(
                [*command, "--target", str(target), *requirements],
                capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise PlaceError(f"pip install {' '.join(requirements)} took over {_INSTALL_SECONDS} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise PlaceError(f"pip install {' '.join(requirements)} failed: {last}")
        _settle(target, place)
    return place


def _settle(built: Path, place: Path) -> None:
    """Moves a finished folder into place; another process may have been first."""
    try:
        os.rename(built, place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(built)


def python(recipe: Recipe) -> str:
    """The interpreter's path in the machine: the real file, since a virtual environment is not there."""
    return recipe.python or os.path.realpath(sys.executable)


def image(recipe: Recipe, root: Path) -> Image:
    """The image that an agent works in: the tree at ``/testbed``, packages and interpreter read-only."""
    binds = {TOOLS: tools(recipe.requirements)} if recipe.requirements else {}
    home = os.path.realpath(sys.base_prefix)
    if not recipe.python and not home.startswith(tuple(f"{place}/" for place in _SYSTEM)):
        binds[home] = Path(home)
    paths = [str(Path(ROOT, path)) for path in recipe.paths] + ([TOOLS] if recipe.requirements else [])
    folders = [str(Path(python(recipe)).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": ":".join(dict.fromkeys(folders)),
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": " ".join(["-p no:cacheprovider", *(f"-p {name}" for name in recipe.plugins)]),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
    }
    return Image("host", {ROOT: root}, binds, {**environment, **recipe.environment}, ROOT)


def grading(agent: Image, empty: Path | None = None) -> Image:
    """The image that hidden tests run in: the agent's, with a place for the results."""
    results = empty or cache() / "empty"
    results.mkdir(parents=True, exist_ok=True)
    return Image(agent.base, {**agent.trees, RESULTS: results}, agent.binds, agent.environment, agent.workdir)
