"""A rollout tree in the terminal: turns, entropies, forks, returns, credit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Lines

from branchpoint.advantage import Credit, Estimator
from branchpoint.store import StoreError, read_trees
from branchpoint.tree import Branch, RolloutTree, Segments


def newest_trees(place: Path) -> Path:
    """The tree file itself, or the last one of a run folder. Raises StoreError."""
    if place.is_file():
        return place
    files = sorted((place / "trees").glob("[0-9]*.jsonl.zst"))
    if not files:
        raise StoreError(f"{place}: holds no trees; give a run folder or a .jsonl.zst file of one")
    return files[-1]


def choose(trees: list[RolloutTree], number: int | None) -> RolloutTree:
    """Tree ``number``, or the most telling one: forks, and outcomes that differ."""
    if number is not None:
        if not 0 <= number < len(trees):
            raise StoreError(f"tree {number}: the file holds trees 0 to {len(trees) - 1}")
        return trees[number]

    def interest(t: RolloutTree) -> tuple[int, int, int]:
        returns = {round(t.total_reward(b.id), 6) for b in t.scored}
        inside = sum(b.fork is not None and (b.fork.turn, b.fork.token) != (0, 0) for b in t.branches)
        return (len(returns) > 1, inside, -sum(len(b.turns) for b in t.branches))

    return max(trees, key=interest)


def estimator(kind: str) -> object:
    """The estimator of that kind with its defaults; None for ``none``. Raises StoreError for an unknown one."""
    if kind == "none":
        return None
    try:
        return TypeAdapter(Estimator).validate_python({"kind": kind})
    except ValidationError:
        raise StoreError(
            f"no estimator {kind!r}; try tree, rloo, grpo, dr_grpo, reinforce, bpo, vineppo, gigpo, tree_grpo or none"
        ) from None


def view(place: Path, number: int | None, credit_of: object, console: Console) -> int:
    """Draw one tree of a run folder or a tree file; returns the exit status 0."""
    trees = list(read_trees(newest_trees(place)))
    draw(choose(trees, number), credit_of, console)
    return 0


def draw(tree: RolloutTree, estimator: object, console: Console) -> None:
    """Print a tree. ``estimator``: anything with ``credit(segments)``, or None to leave the credit out."""
    segments = Segments.of(tree)
    # A critic's values are not in the tree, so neither is the credit that they gave.
    known = estimator is not None and not getattr(estimator, "critic", False)
    credit = estimator.credit(segments) if known else None  # type: ignore[attr-defined]
    failed = [b for b in tree.branches if b.failure is not None]
    head = f"{tree.task.id}   {len(tree.scored)} rollouts"
    head += f", {len(failed)} failed" if failed else ""
    lines = Lines(Text(head, style="bold"), guide_style="dim")
    shown = tree.branches[0].turns[0].shown if tree.branches[0].turns else ""
    lines.add(Text(_clip(shown, 400), style="italic"))
    if len(segments.parent):
        _grow(lines, tree, segments, credit, segments.children(), 0)
    for b in failed:
        failure = b.failure
        assert failure is not None
        lines.add(Text(f"branch {b.id} failed ({failure.kind}): {_clip(failure.message, 100)}", style="red"))
    console.print(lines)
    console.print(Text("H entropy of the first token in nats, A advantage, R return, ⑂ fork", style="dim"))


def _grow(
    lines: Lines,
    tree: RolloutTree,
    segments: Segments,
    credit: Credit | None,
    children: tuple[tuple[int, ...], ...],
    s: int,
) -> None:
    """Write what follows segment ``s``: a chain stays on one level, a fork opens one level a child."""
    while len(children[s]) == 1:
        s = children[s][0]
        lines.add(_line(tree, segments, credit, s))
    for child in children[s]:
        _grow(lines.add(_line(tree, segments, credit, child, fork=True)), tree, segments, credit, children, child)


def _line(tree: RolloutTree, segments: Segments, credit: Credit | None, s: int, fork: bool = False) -> Text:
    b = tree.branches[segments.branch[s]]
    record = b.turns[segments.turn[s] - b.first_turn]
    own = np.flatnonzero(segments.sampled[segments.start[s] : segments.start[s + 1]]) + segments.start[s]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("⑂ " if fork else "", style="cyan")
    text.append(f"{segments.turn[s]:>2} ", style="dim")
    text.append(_clip(record.text, 60), style="bold" if fork else "")
    if len(own):
        text.append(f"  H {segments.entropies[own[0]]:.2f}", style="yellow")
    if credit is not None and len(own) and credit.share[own[0]] > 0:
        a = (credit.up[own[0]] + credit.down[own[0]]) / credit.share[own[0]]
        text.append(f"  A {a:+.2f}", style="green" if a > 0 else "red" if a < 0 else "dim")
    answer = _answer(b, int(segments.turn[s]))
    if answer and not segments.leaf[s]:
        text.append(f"  → {_clip(answer, 48)}", style="dim")
    if segments.leaf[s]:
        total = tree.total_reward(b.id)
        text.append(f"  ● R {total:g} ({b.stop})", style="bold green" if total > 0 else "bold magenta")
    return text


def _answer(b: Branch, turn: int) -> str:
    """What the world said to the action of a turn, as far as this branch recorded it."""
    after = turn + 1 - b.first_turn
    return b.turns[after].shown if after < len(b.turns) else ""


def _clip(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
