"""Makes repository tasks by bug injection: every mutant is run, and kept when tests notice it and most still pass."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from branchpoint.env.swe import grade, mutate, place, results
from branchpoint.env.swe.repositories import split_of
from branchpoint.env.swe.task import Instance, Repository
from branchpoint.noise import Noise
from branchpoint.sandbox.machine import Machine, Machines
from branchpoint.world import BranchFailure, UserError

BASELINE_RUNS = 5
_MOST_FAILING = 0.5
_SECONDS = 60.0  # a mutant that needs longer than this for a test run hangs
Say = Callable[[str], None]


class InjectError(UserError):
    """Tasks that cannot be made."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A mutant that tests notice. ``lost``: the tests that fail with it, as places in the repository's list."""

    number: int
    path: str
    kind: str
    line: int
    where: str
    patch: str
    reverse: str
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vetted:
    """A repository with its bugs. ``tests``: what passed in all baseline runs; ``flaky``: what passed in some only."""

    name: str
    version: str
    sdist: str
    sha256: str
    licence: str
    tests: tuple[str, ...]
    flaky: tuple[str, ...]
    bugs: tuple[Bug, ...]

    def instances(self) -> Iterator[Instance]:
        """The tasks, in SWE-bench's terms."""
        for bug in self.bugs:
            lost = frozenset(bug.lost)
            fail = tuple(self.tests[i] for i in bug.lost)
            keep = tuple(test for i, test in enumerate(self.tests) if i not in lost)
            yield Instance(
                instance_id=f"{self.name}__{self.version}-{bug.number}",
                repo=self.name,
                version=self.version,
                patch=bug.reverse,
                FAIL_TO_PASS=fail,
                PASS_TO_PASS=keep,
                problem_statement=statement(self, fail),
                bug=bug.patch,
                base_commit=f"sdist:{self.sha256}",
                split=split_of(self.name),
                note=f"{bug.kind} in {bug.where}, {bug.path}:{bug.line}",
            )

    @classmethod
    def of(cls, data: dict[str, Any]) -> Vetted:
        """From JSON."""
        bugs = tuple(Bug(**{**bug, "lost": tuple(bug["lost"])}) for bug in data["bugs"])
        return cls(**{**data, "tests": tuple(data["tests"]), "flaky": tuple(data["flaky"]), "bugs": bugs})


def statement(vetted: Vetted, failing: Sequence[str]) -> str:
    """What the agent is told: which behaviours broke, by the names of tests, not where."""
    shown = "\n".join(f"- {test}" for test in failing[:5])
    more = f"\n- and {len(failing) - 5} more" if len(failing) > 5 else ""
    return (
        f"{vetted.name} {vetted.version} misbehaves since its last change. These tests used to pass and now fail:\n"
        f"{shown}{more}\nFind the cause in the source of the package and repair it. The tests are right."
    )


def candidates(repository: Repository, tree: Path, seed: int) -> list[tuple[int, str, mutate.Mutation]]:
    """All mutations of a repository's source with their numbers, in an order keyed by the seed."""
    source = tree / repository.source
    paths = [source] if source.is_file() else sorted(source.rglob("*.py"))
    found: list[tuple[str, mutate.Mutation]] = []
    for path in paths:
        name = str(path.relative_to(tree))
        if not repository.recipe.is_test(name) and path.name not in grade.PROTECTED:
            found += [(name, m) for m in mutate.mutations(path.read_bytes())]
    order = Noise(seed).at("swe", "inject", repository.name, repository.version).permutation(len(found))
    return [(int(i), *found[int(i)]) for i in order]


def baseline(repository: Repository, machines: Machines, jobs: int = 1) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that pass in every one of five runs on the untouched repository, and those that pass in some only.

    Raises InjectError when a run does not count or nothing passes.
    """
    tree = place.tree(repository)

    def once(_: int) -> results.Results:
        return _run(repository, tree, machines, {}, repository.recipe.seconds)

    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(once, range(BASELINE_RUNS)))
    for done in runs:
        if done.trouble:
            raise InjectError(f"{repository.name}: a run of the untouched tests does not count: {done.trouble}")
    passed = [done.passed() for done in runs]
    stable = frozenset.intersection(*passed)
    if not stable:
        raise InjectError(f"{repository.name}: no test passes in all {BASELINE_RUNS} runs")
    # By name: a suite that draws parameters from a set has another order in every process.
    return tuple(sorted(stable)), tuple(sorted(frozenset.union(*passed) - stable))


def _run(
    repository: Repository, tree: Path, machines: Machines, files: dict[str, bytes | None], seconds: float
) -> results.Results:
    image = place.grading(place.image(repository.recipe, tree))
    machine: Machine = machines.start(image)
    try:
        grade.prepare(machine, files)
        return results.run(machine, replace(repository.recipe, seconds=seconds))
    finally:
        machine.close()


def judge(
    repository: Repository, machines: Machines, tests: Sequence[str], number: int, path: str, mutation: mutate.Mutation
) -> Bug | None:
    """The bug, if at least one stable test fails with it and at most half of them do, and if its reverse patch gives
    the file of the baseline back, byte by byte; else None."""
    tree = place.tree(repository)
    before = (tree / path).read_bytes()
    after = mutation.apply(before)
    patch, reverse = mutate.diffs(path, before, mutation)
    if grade.diffs.apply(reverse, lambda _: after.decode())[path] != before.decode():
        raise InjectError(f"{repository.name}: the reverse patch of mutant {number} does not undo it")
    done = _run(repository, tree, machines, {path: after}, min(repository.recipe.seconds, _SECONDS))
    if done.trouble:
        return None
    passed = done.passed()
    lost = tuple(i for i, test in enumerate(tests) if test not in passed)
    if not lost or len(lost) > _MOST_FAILING * len(tests):
        return None
    return Bug(number, path, mutation.kind, mutation.line, mutation.where, patch, reverse, lost)


def vet(repository: Repository, machines: Machines, quota: int, seed: int, jobs: int, part: Path, say: Say) -> Vetted:
    """A repository with up to ``quota`` bugs: the first in the seed's order that qualify, whatever ``jobs`` is.

    Verdicts go to ``part`` as they come, and those that are there are not asked again.
    """
    tree = place.tree(repository)
    known = _known(part)
    if "tests" in known:
        tests, flaky = tuple(known["tests"]), tuple(known["flaky"])
    else:
        tests, flaky = baseline(repository, machines, jobs)
        _note(part, {"tests": tests, "flaky": flaky})
    todo = iter(candidates(repository, tree, seed))
    bugs: list[Bug] = []
    asked = 0

    def verdict(candidate: tuple[int, str, mutate.Mutation]) -> Bug | None:
        number, path, mutation = candidate
        if str(number) in known:
            held = known[str(number)]
            return None if held is None else Bug(**{**held, "lost": tuple(held["lost"])})
        try:
            bug = judge(repository, machines, tests, number, path, mutation)
        except BranchFailure as error:
            say(f"{repository.name}: mutant {number} left out: {error}")
            bug = None
        _note(part, {str(number): None if bug is None else asdict(bug)})
        return bug

    with ThreadPoolExecutor(jobs) as pool:
        while len(bugs) < quota and (batch := list(islice(todo, 2 * jobs))):
            asked += len(batch)
            bugs += [bug for bug in pool.map(verdict, batch) if bug is not None]
    bugs = bugs[:quota]
    say(f"{repository.name} {repository.version}: {len(tests)} tests, {len(bugs)} bugs of {asked} mutants")
    r = repository
    return Vetted(r.name, r.version, r.sdist, r.sha256, r.licence, tests, flaky, tuple(bugs))


def _known(part: Path) -> dict[str, Any]:
    """What an earlier run wrote down; a last line that was cut is left out."""
    found: dict[str, Any] = {}
    for line in part.read_text("utf-8").splitlines() if part.exists() else ():
        try:
            found |= json.loads(line)
        except ValueError:
            break
    return found


def _note(part: Path, entry: dict[str, Any]) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")  # one write of one line, from any thread


def inject(
    repositories: Sequence[Repository], machines: Machines, count: int, out: Path, seed: int, jobs: int, say: Say
) -> int:
    """Makes ``count`` tasks, shared evenly among repositories, and writes them to ``out`` when all are there.

    What a repository cannot give, later ones make up for. Progress lies in the folder ``OUT.part`` until then, so that
    a second call goes on. Returns the number of tasks. Raises InjectError when the mutants do not suffice.
    """
    progress = out.with_name(f"{out.name}.part")
    done: list[Vetted] = []
    for i, repository in enumerate(repositories):
        made = sum(len(vetted.bugs) for vetted in done)
        quota = -(-(count - made) // (len(repositories) - i))
        part = progress / f"{repository.name}-{repository.sha256[:12]}-{seed}.jsonl"
        if quota > 0:
            done.append(vet(repository, machines, quota, seed, jobs, part, say))
    made = sum(len(vetted.bugs) for vetted in done)
    if made < count:
        raise InjectError(f"only {made} of {count} tasks: there are no more mutants; name more repositories")
    write(done, out)
    for part in progress.glob("*.jsonl"):
        part.unlink()
    progress.rmdir()
    return made


def write(vetted: Iterable[Vetted], out: Path) -> None:
    """One repository a line; xz when the name ends so. The file is there as a whole or not at all."""
    text = "".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in vetted).encode()
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(lzma.compress(text, preset=9) if out.suffix == ".xz" else text)
    os.replace(beside, out)


def load(file: Path) -> tuple[Vetted, ...]:
    """What :func:`write` wrote. Raises InjectError for a file that holds something else."""
    try:
        raw = file.read_bytes()
        text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode()
        return tuple(Vetted.of(json.loads(line)) for line in text.splitlines())
    except (OSError, lzma.LZMAError, ValueError, TypeError, KeyError) as error:
        raise InjectError(f"{file}: no file of tasks ({error}); make one with: branchpoint swe inject") from error
