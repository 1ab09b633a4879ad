"""Checks of repository tasks: the reference repair resolves one, nothing does not, nor does a breaking change."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from branchpoint.env.swe import grade, sources
from branchpoint.env.swe import patch as diffs
from branchpoint.env.swe.task import ROOT, Instance, Recipe
from branchpoint.sandbox.machine import Change, Image, Machines
from branchpoint.world import BranchFailure, UserError


@dataclass(frozen=True, slots=True)
class Verdict:
    """``before``: FAIL_TO_PASS tests that pass before the repair (0 is right). ``after``: how many of both lists pass
    with it, ``total`` of how many. ``empty`` and ``broken``: whether the grader turned down no change at all, and the
    repair plus a change that breaks a PASS_TO_PASS test (``lost`` of them fail). ``trouble``: why there is none."""

    instance_id: str
    before: int = 0
    after: int = 0
    total: int = 0
    empty: bool = False
    broken: bool = False
    lost: int = 0
    trouble: str = ""

    @property
    def holds(self) -> bool:
        """Whether all conditions do."""
        complete = self.before == 0 and 0 < self.total == self.after
        return complete and self.empty and self.broken and self.lost > 0 and not self.trouble


def changes(patch: str, base: Path) -> dict[str, Change]:
    """What a diff makes of a tree, as an agent's machine would report it. Raises PatchError."""

    def held(path: str) -> str | None:
        return (base / path).read_bytes().decode() if (base / path).is_file() else None

    after = diffs.apply(patch, held)
    return {
        f"{ROOT}/{path}": Change("deleted") if text is None else Change("file", text.encode(), 0o644)
        for path, text in after.items()
    }


def breaking(found: dict[str, Change]) -> Iterator[dict[str, Change]]:
    """The same changes with one more each time: a function of a changed module raises. Larger functions first."""
    for path, change in found.items():
        if change.data is None or not path.endswith(".py"):
            continue
        text = change.data.decode()
        bodies = [
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name[:2] != "__"
        ]
        bodies.sort(key=lambda node: (node.end_lineno or 0) - node.lineno, reverse=True)
        for node in bodies:
            first = node.body[0]
            if first.lineno == node.lineno:
                continue
            rows = text.splitlines(keepends=True)
            rows.insert(first.lineno - 1, " " * first.col_offset + "raise RuntimeError('broken on purpose')\n")
            yield {**found, path: Change("file", "".join(rows).encode(), change.mode)}
        rows = text + "\nraise RuntimeError('broken on purpose')\n"
        yield {**found, path: Change("file", rows.encode(), change.mode)}


def check(instance: Instance, recipe: Recipe, image: Image, machines: Machines, tries: int = 4) -> Verdict:
    """The verdict on one task. Raises GraderFailure where the tests cannot be run."""
    repaired = changes(instance.patch, image.trees[ROOT])

    def graded(found: dict[str, Change]) -> grade.Report:
        return grade.grade(instance, recipe, image, found, machines.start)

    empty, full = graded({}), graded(repaired)
    broken = full
    # The last change breaks the whole module; the ones before it break a function that a test may not reach.
    for found in _some(list(breaking(repaired)), tries):
        broken = graded(found)
        if broken.pass_to_pass[0] < broken.pass_to_pass[1]:
            break
    return Verdict(
        instance.instance_id,
        before=empty.fail_to_pass[0],
        after=full.fail_to_pass[0] + full.pass_to_pass[0],
        total=full.fail_to_pass[1] + full.pass_to_pass[1],
        empty=not empty.resolved,
        broken=not broken.resolved,
        lost=broken.pass_to_pass[1] - broken.pass_to_pass[0],
        trouble=full.trouble,
    )


def _some(found: list[dict[str, Change]], tries: int) -> list[dict[str, Change]]:
    return found if len(found) <= tries else [*found[: tries - 1], found[-1]]


def verify(
    source: str, names: Iterable[str], machines: Machines, jobs: int, part: Path | None, say: Callable[[Verdict], None]
) -> list[Verdict]:
    """The verdicts on tasks of a source, in order. Verdicts that hold are kept in ``part`` and not asked again."""
    held = _held(part)

    def one(name: str) -> Verdict:
        if name in held:
            return held[name]
        try:
            found = sources.find(source)
            instance = sources.instance(source, name)
            done = check(instance, found.recipe(instance), found.image(instance), machines)
        except (BranchFailure, UserError, SyntaxError) as error:
            done = Verdict(name, trouble=" ".join(str(error).split()))
        if part is not None and done.holds:
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(done)) + "\n")
        return done

    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(one, names):
            say(verdict)
            verdicts.append(verdict)
    return verdicts


def _held(part: Path | None) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    for line in part.read_text("utf-8").splitlines() if part is not None and part.exists() else ():
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError):
            continue  # a line that was cut
        found[verdict.instance_id] = verdict
    return found
