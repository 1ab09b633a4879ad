"""Compiled games: made once a process, and once at all where there is a cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from branchpoint.env import _textworld_package as package
from branchpoint.env.textworld.dials import Dials
from branchpoint.world import EnvironmentFailure

FORMAT = 2
SECONDS = 300.0
"""The longest that making one game may take; each further one in the same process adds a tenth."""


@dataclass(frozen=True, eq=False)
class Story:
    """A compiled game. ``code``: for the Z-machine. ``logic``: the rules, as the package writes them; ``facts``,
    ``infos``, ``quests``: as in its game files; ``recipe``: (food, cooking, cutting) of each ingredient, if it is about
    cooking; ``walkthrough``: its maker's solution; ``seed``: what it was made from."""

    key: str
    code: bytes
    logic: str
    facts: tuple[Any, ...]
    infos: tuple[Any, ...]
    quests: tuple[Any, ...]
    recipe: tuple[tuple[str, str, str], ...]
    walkthrough: tuple[str, ...]
    max_score: int
    seed: int


class Order(NamedTuple):
    """What is made: the package's name of the kind, its settings as JSON, and how much the objective says."""

    challenge: str
    settings: str
    objective: str

    @classmethod
    def of(cls, dials: Dials) -> Order:
        challenge, settings = dials.challenge()
        return cls(challenge, json.dumps(settings, sort_keys=True), dials.objective)

    def key(self, game: int) -> str:
        """The name of a game in a cache folder."""
        return hashlib.sha256(json.dumps([package.version(), FORMAT, *self, game]).encode()).hexdigest()


def story(dials: Dials) -> Story:
    """The game of a task. Raises EnvironmentFailure when it cannot be made, ImportError without the package."""
    return _story(Order.of(dials), dials.game, dials.cache)


@functools.lru_cache(maxsize=32)
def _story(order: Order, game: int, cache: str | None) -> Story:
    package.player()  # names the extra when it is missing
    raw = _read(_place(order, game, cache)) if cache else None
    if raw is None:
        (raw,) = make(order, [game])
        if cache:
            _write(_place(order, game, cache), raw)
    return _parse(order.key(game), raw)


def prepare(wanted: Iterable[Dials], batch: int = 20) -> None:
    """Make the games that are not in their cache folders, ``batch`` in a process."""
    missing: dict[tuple[Order, str], list[int]] = {}
    for dials in wanted:
        if dials.cache is None:
            raise ValueError("prepare needs tasks with the dial cache, a folder to keep games in")
        order = Order.of(dials)
        if _read(_place(order, dials.game, dials.cache)) is None:
            missing.setdefault((order, dials.cache), []).append(dials.game)
    for (order, cache), games in missing.items():
        for start in range(0, len(games), batch):
            some = games[start : start + batch]
            for game, raw in zip(some, make(order, some), strict=True):
                _write(_place(order, game, cache), raw)


def _place(order: Order, game: int, cache: str) -> Path:
    return Path(cache) / f"{order.key(game)}.story.zst"


def _read(path: Path) -> bytes | None:
    """What was written under the name, unless it is not there or damaged."""
    with contextlib.suppress(OSError, zstandard.ZstdError):
        raw = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        if hashlib.sha256(raw[32:]).digest() == raw[:32]:
            return raw[32:]
    return None


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = zstandard.ZstdCompressor(level=6).compress(hashlib.sha256(raw).digest() + raw)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(packed)
    os.replace(draft.name, path)


def _parse(key: str, raw: bytes) -> Story:
    length = int.from_bytes(raw[:8], "big")
    data = json.loads(raw[8 : 8 + length])
    for name in ("facts", "infos", "quests", "walkthrough"):
        data[name] = tuple(data[name])
    data["recipe"] = tuple(map(tuple, data["recipe"]))
    return Story(key=key, code=raw[8 + length :], **data)


def make(order: Order, games: Sequence[int]) -> list[bytes]:
    """Games as bytes: the length of the JSON, the JSON, the code."""
    with tempfile.TemporaryDirectory(prefix="branchpoint-textworld-") as name:
        folder = Path(name)
        run_maker(order, games, folder)
        return [_packed(folder / str(game)) for game in games]


def _packed(folder: Path) -> bytes:
    game = json.loads((folder / "game.json").read_text())
    kept = {
        "logic": game["KB"]["logic"],
        "facts": game["world"],
        "infos": game["infos"],
        "quests": game["quests"],
        "recipe": game["metadata"].get("ingredients", []),
        **json.loads((folder / "goals.json").read_text()),
    }
    header = json.dumps(kept).encode()
    return len(header).to_bytes(8, "big") + header + (folder / "game.z8").read_bytes()


def run_maker(order: Order, games: Sequence[int], folder: Path, plain: bool = False) -> None:
    """Make games in a process of its own and leave the files of each in a folder of its number in ``folder``, where the
    maker's temporary files are too. ``plain``: as the package makes them (slower, to compare with).

    Raises EnvironmentFailure with what the maker said when it fails or takes too long.
    """
    asked = {"challenge": order.challenge, "settings": json.loads(order.settings), "objective": order.objective}
    surroundings = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    seconds = SECONDS * (1 + len(games) / 10)
    try:
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.build", str(folder)],
            input=json.dumps({**asked, "games": list(games), "plain": plain}),
            env=surroundings,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(f"making {order} took over {seconds:.0f} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["nothing"])[-1]
        raise EnvironmentFailure(f"a game of {order} could not be made; the maker said: {said}") from None
