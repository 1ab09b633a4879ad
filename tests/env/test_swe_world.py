"""The world in the shell sandbox: actions, observations, snapshots, the menu; injection on a tiny package."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import swe_kit as kit

from branchpoint.command import build
from branchpoint.config import parse
from branchpoint.env import swe
from branchpoint.env.swe import actions, inject, patch, place, sources
from branchpoint.env.swe.rehearsal import Rehearsal
from branchpoint.env.swe.task import ROOT, Instance, Repository
from branchpoint.noise import Noise
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.sandbox.machine import Housed, MachineSandbox
from branchpoint.testing import check_env
from branchpoint.train import Course
from branchpoint.world import EnvironmentFailure, Step, Task

BUG = patch.diff("calc/__init__.py", kit.CODE, kit.BROKEN)
INSTANCE = dataclasses.replace(kit.INSTANCE, bug=BUG, patch=patch.reverse(BUG), split="train")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tree = kit.repository(tmp_path_factory.mktemp("repository"))
    return tree, kit.tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture(autouse=True)
def source(parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = sources.Source(lambda: {INSTANCE.instance_id: INSTANCE}, lambda _: kit.RECIPE, lambda _: kit.image(*parts))
    find = sources.find
    monkeypatch.setattr(sources, "find", lambda name: own if name == "tiny" else find(name))
    monkeypatch.setenv("BRANCHPOINT_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[MachineSandbox]:
    made = MachineSandbox(kit.machines())
    yield made
    made.close()


def task(**dials: Any) -> Task:
    return swe.tasks("train", source="tiny", **dials)[0]


async def played(env: Any, *told: str) -> list[Step]:
    return [await env.step(action) for action in told]


def test_an_episode_with_every_action(sandbox: MachineSandbox) -> None:
    async def episode() -> None:
        env = await sandbox.open(swe.make, task(), Noise(0))
        first = await env.reset()
        assert "total() is wrong" in first.observation
        assert first.actions == ()
        view, search, gone, bad, edit, twice, made, run, kept = await played(
            env,
            "view calc/__init__.py 3 4",
            "search 'result -= ' calc",
            "view tests/test_calc.py",
            "dance",
            actions.edit("calc/__init__.py", "result -= item", "result += item"),
            actions.edit("calc/__init__.py", "items", "things"),
            actions.edit("notes.txt", "", "remember"),
            "run cat notes.txt; echo odd >&2; false",
            "view ../etc/passwd",
        )
        assert view.observation == "    3     for item in items:\n    4         result -= item\n(9 lines in all)"
        assert search.observation == "calc/__init__.py:4:        result -= item"
        assert gone.observation == "view: tests/test_calc.py: no such file"  # hidden
        assert bad.observation == "unknown action 'dance'; use one of run, view, search, edit, submit"
        assert edit.observation == "edited calc/__init__.py, line 4"
        assert "stands 4 times" in twice.observation
        assert made.observation == "made notes.txt"
        assert run.observation == "remember\nodd\n[exit status 1]"
        assert "outside /testbed" in kept.observation
        assert [s.info["valid"] for s in (gone, bad, edit, twice, run, kept)] == [
            False,
            False,
            True,
            False,
            True,
            False,
        ]
        last = await env.step("submit")
        assert (last.reward, last.done, last.info["success"]) == (1.0, True, True)
        assert last.info["fail_to_pass"] == [1, 1]
        assert last.info["dropped"] == {}
        await env.close()

    asyncio.run(episode())


def test_siblings_of_a_snapshot_repair_apart(sandbox: MachineSandbox) -> None:
    async def tree() -> tuple[Step, Step]:
        env = await sandbox.open(swe.make, task(), Noise(0))
        await env.reset()
        await env.step("run echo one > shared")
        snapshot = await env.snapshot()
        one, two = await snapshot.restore(Noise(1)), await snapshot.restore(Noise(2))
        await one.step(actions.edit("calc/__init__.py", "result -= item", "result += item"))
        assert (await two.step("run cat shared; grep -c 'result += item' calc/__init__.py")).observation.startswith(
            "one\n0"
        )
        ends = await one.step("submit"), await two.step("submit")
        for each in (env, one, two):
            await each.close()
        await snapshot.discard()
        return ends

    one, two = asyncio.run(tree())
    assert (one.reward, two.reward) == (1.0, 0.0)
    assert two.info["steps"] == 3


def test_the_expert_makes_the_reference_repair(sandbox: MachineSandbox) -> None:
    async def episode() -> Step:
        env = await sandbox.open(swe.make, task(tests="visible"), Noise(0))
        step, agent = await env.reset(), swe.expert(task())
        seen = []
        while not step.done:
            seen.append(agent.act(step))
            step = await env.step(seen[-1])
        assert [action.split()[0] for action in seen] == ["search", "view", "edit", "run", "submit"]
        await env.close()
        return step

    assert asyncio.run(episode()).reward == 1.0


def test_the_warm_start_of_a_run_is_played_in_its_sandbox(sandbox: MachineSandbox) -> None:
    """In style text no episodes are shipped, and a world without a machine could not play any."""
    settings = {"name": "swe", "options": {"source": "tiny", "tests": "visible"}, "train": {"split": "train"}}
    config = parse({"envs": [settings], "model": {"name": "small", "warm_start": {"episodes": 3}}, "sandbox": "shell"})
    lesson = Course("swe", swe.make, (task(tests="visible"),), ())
    ((played_on, turns),) = build.transcripts(config, (lesson,), sandbox)
    assert played_on.id == task().id
    assert [action.split()[0] for _, action in turns] == ["search", "view", "edit", "run", "submit"]
    assert "3 passed" in turns[-1][0].observation
    with pytest.raises(EnvironmentFailure, match="needs a machine"):
        next(build.transcripts(config, (lesson,), InProcess()))


def test_the_world_in_a_machine_keeps_the_contract(sandbox: MachineSandbox) -> None:
    plan = ("view calc/__init__.py", "search result", "run ls; cd /", "run pwd", "edit x\nbad", "submit")
    report = check_env(lambda made: Housed(swe.make(made), sandbox.machines), task(), actions=plan)
    report.assert_ok()
    assert sum(result.status == "ok" for result in report.results) >= 10


OLD_TESTS = kit.TESTS[: kit.TESTS.index("def test_total")] + kit.TESTS[kit.TESTS.index("def test_empty") :]
PATCHED = dataclasses.replace(INSTANCE, test_patch=patch.diff("tests/test_calc.py", OLD_TESTS, kit.TESTS))


@pytest.mark.parametrize(("instance", "shown"), [(INSTANCE, "conftest.py"), (PATCHED, "conftest.py\ntest_calc.py\n0")])
def test_files_of_failing_tests_are_hidden_unless_a_patch_brings_the_tests(
    instance: Instance, shown: str, sandbox: MachineSandbox, parts: tuple[Path, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A file that the patch changes is shown as it is at the commit; what else it tests is no secret."""
    tree = kit.repository(
        tmp_path / "tree", {**kit.FILES, "tests/test_calc.py": OLD_TESTS} if instance.test_patch else kit.FILES
    )
    own = sources.Source(
        lambda: {instance.instance_id: instance}, lambda _: kit.RECIPE, lambda _: kit.image(tree, parts[1])
    )
    monkeypatch.setattr(sources, "find", lambda _: own)

    async def episode() -> None:
        env = await sandbox.open(swe.make, task(), Noise(0))
        await env.reset()
        seen, _, last = await played(
            env,
            "run ls tests; grep -c test_total tests/test_calc.py 2> /dev/null; true",
            actions.edit("calc/__init__.py", "result -= item", "result += item"),
            "submit",
        )
        assert seen.observation == shown
        assert (last.reward, last.info["fail_to_pass"], last.info["pass_to_pass"]) == (1.0, [1, 1], [2, 2])
        assert last.info["dropped"] == {}
        await env.close()

    asyncio.run(episode())


def test_the_menu_offers_the_repair_and_a_rehearsal_tells_what_the_world_does(sandbox: MachineSandbox) -> None:
    async def episode() -> None:
        chosen = task(style="compact", max_steps=20)
        env, rehearsal = await sandbox.open(swe.make, chosen, Noise(0)), Rehearsal(chosen)
        real, same = await env.reset(), rehearsal.reset()
        assert real.observation == same.observation
        assert len(real.actions) == 10
        agent = swe.expert(chosen)
        while not real.done:
            assert (real.observation, real.actions) == (same.observation, same.actions)
            action = agent.act(real)
            real, same = await env.step(action), rehearsal.step(action)
        assert (real.reward, same.reward) == (1.0, 1.0)
        await env.close()

    asyncio.run(episode())


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("run ls -l\ncat x", actions.Action("run", "ls -l\ncat x")),
        ("```bash\nrun ls\n```", actions.Action("run", "ls")),
        ("view a.py", actions.Action("view", path="a.py")),
        ("view a.py 3 9", actions.Action("view", path="a.py", first=3, last=9)),
        ("search 'a b' src", actions.Action("search", "a b", "src")),
        ("search x", actions.Action("search", "x", ".")),
        (actions.edit("a b.py".replace(" ", ""), "x\n  y", ""), actions.Action("edit", "", "ab.py", "x\n  y")),
        ("submit", actions.Action("submit")),
    ],
)
def test_actions_are_read(text: str, action: actions.Action) -> None:
    assert actions.parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["", "run", "view", "view a 1", "view a 3 2", "view a 0 2", "search", "search 'a", "edit a", "submit now", "{",
     "a\0", "x" * 200_000, "edit a\n<<<<<<< SEARCH\nx\n>>>>>>> REPLACE"],
)  # fmt: skip
def test_bad_actions_are_answered_with_one_line(text: str) -> None:
    read = actions.parse(text)
    assert read.name == "bad"
    assert read.text
    assert "\n" not in read.text
    assert len(read.text) < 200


def test_tasks_are_deterministic_and_bad_dials_are_named() -> None:
    assert task().id == "swe/calc__1-0"
    for dials, why in (
        ({"style": "loud"}, "style is 'loud'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"style": "compact", "tests": "hidden"}, "set tests"),
        ({"repos": ["x"]}, "repos names 'x'"),
        ({"n": 5}, "n is 5"),
        ({"source": "nowhere"}, "source is 'nowhere'"),
    ):
        settings: dict[str, Any] = {"source": "tiny", **dials}
        with pytest.raises(ValueError, match=why):
            swe.tasks("train", **settings)
    with pytest.raises(ValueError, match="split is 'test'"):
        swe.tasks("test", source="tiny")


def test_injection_keeps_what_tests_notice_goes_on_and_does_not_depend_on_jobs(
    sandbox: MachineSandbox, parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository("calc", "1", "calc-1.tar.gz", "0" * 64, "MIT", "calc", kit.RECIPE)
    monkeypatch.setattr(place, "tree", lambda _: parts[0])
    image, machines = kit.image(*parts), sandbox.machines
    monkeypatch.setattr(place, "image", lambda *_: image)
    monkeypatch.setattr(inject, "BASELINE_RUNS", 2)

    def make(count: int, jobs: int, name: str) -> inject.Vetted:
        assert inject.inject([repository], machines, count, tmp_path / name, 0, jobs, print) == count
        assert not (tmp_path / f"{name}.part").exists()
        (vetted,) = inject.load(tmp_path / name)
        return vetted

    with pytest.raises(inject.InjectError, match="no more mutants"):
        make(100, 2, "one.jsonl")
    with monkeypatch.context() as known:  # every verdict is there already
        known.setattr(inject, "_run", None)
        one = make(2, 1, "one.jsonl")
    assert one == make(2, 2, "two.jsonl")
    assert (one.tests, one.flaky) == (tuple(f"tests/test_calc.py::test_{n}" for n in ("empty", "largest", "total")), ())
    for instance in one.instances():
        assert len(instance.FAIL_TO_PASS) == 1
        assert {*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS} == set(one.tests)
        broken = patch.apply(instance.bug, lambda _: kit.CODE)
        assert patch.apply(instance.patch, lambda path, b=broken: b[path]) == {"calc/__init__.py": kit.CODE}


def test_rows_in_swe_bench_s_own_form_are_read() -> None:
    row = {**INSTANCE.to_json(), "FAIL_TO_PASS": '["a"]', "PASS_TO_PASS": "[]", "hints_text": "", "created_at": "x"}
    read = Instance.of(row)
    assert (read.FAIL_TO_PASS, read.PASS_TO_PASS, read.repo) == (("a",), (), "calc")
    assert ROOT == "/testbed"
