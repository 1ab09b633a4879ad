"""The checker of oracle files: the shipped numbers, numbers that are wrong, and files that are not oracles."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from exact_kit import ORACLES

from branchpoint.probe.oracles import check
from branchpoint.probe.tabular import MalformedOracle


def write(path: Path, content: Any) -> Path:
    file = path / "oracles.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def processes(*names: str, **sections: tuple[str, ...]) -> dict[str, Any]:
    """Some of the shipped processes, with the entries of their sections whose key contains one of the words."""
    out = {}
    for name in names:
        entry = dict(ORACLES["mdps"][name])
        for section in ("tree", "bpo"):
            words = sections.get(section, ())
            entry[section] = {k: v for k, v in entry[section].items() if any(w in k for w in words)}
        out[name] = entry
    return out


def assert_agrees(path: Path, raw: dict[str, Any], at_least: int) -> None:
    lines: list[str] = []
    report = check(write(path, raw), lines.append)
    assert [line for line in lines[:-1] if not line.startswith("ok")] == []
    assert report.status == 0
    assert len(lines) == len(report.lines) + 1
    assert len(report.lines) >= at_least
    assert "0 differ" in lines[-1]


def test_covariance_traces(tmp_path: Path) -> None:
    """The group formula for B = 1, 2, 3, 4, 8, and explicit groups of 2 and 3 trees, against the table."""
    designs = ("nested t=[] K=[] root", "nested t=[1] K=[2]", "nested t=[1] K=[3] mix")
    raw = {"mdps": processes("two_step", "two_step_pA0.7", "M2", tree=designs)}
    assert_agrees(tmp_path, raw, 100)


def test_covariance_traces_of_nested_and_caterpillar_trees(tmp_path: Path) -> None:
    designs = ("t=[] K=[] near", "nested t=[2] K=[2] ", "nested t=[1, 2] K=[2, 2]", "caterpillar t=[1, 2] K=[2, 2]")
    raw = {"mdps": processes("M3", tree=designs)}
    assert_agrees(tmp_path, raw, 50)


def test_covariance_traces_with_chance(tmp_path: Path) -> None:
    raw = {"mdps": processes("M1", tree=("nested t=[] K=[] root", "nested t=[1] K=[2] mix"))}
    assert_agrees(tmp_path, raw, 14)


def test_bpo_moments(tmp_path: Path) -> None:
    raw = {"mdps": processes("two_step", "M2", "M3", bpo=("lam=1.0", "lam=0.0"))}
    assert_agrees(tmp_path, raw, 80)


def test_theorem_2(tmp_path: Path) -> None:
    raw = {"mdps": processes("M2", "M3"), "thm2": [e for e in ORACLES["thm2"] if e["mdp"] != "M1" and e["K"] < 4]}
    assert_agrees(tmp_path, raw, 20)


def test_look_ahead_biases(tmp_path: Path) -> None:
    names = ("LA1-action", "LA2-return-additive", "LA3-return-interacting", "M3")
    raw = {
        "mdps": processes(*names),
        "A_select": {k: v for k, v in ORACLES["A_select"].items() if not k.startswith("M1")},
    }
    assert_agrees(tmp_path, raw, 150)


def test_invalid_choices_are_as_biased_as_stated(tmp_path: Path) -> None:
    section = {k: v for k, v in ORACLES["B_invalid"].items() if k.startswith(("M3", "M1|fixed t=1,K=2"))}
    assert_agrees(tmp_path, {"mdps": processes("M1", "M3"), "B_invalid": section}, 80)


@pytest.mark.slow
def test_invalid_choices_with_forks_that_depend_on_the_outcome(tmp_path: Path) -> None:
    section = {k: v for k, v in ORACLES["B_invalid"].items() if k.startswith("M1|state rule")}
    assert_agrees(tmp_path, {"mdps": processes("M1"), "B_invalid": section}, 21)


@pytest.mark.slow
def test_the_whole_shipped_file() -> None:
    report = check()
    assert report.status == 0, str(report)
    assert len(report.lines) >= 1450


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    raw = {"mdps": processes("two_step", tree=("nested t=[1] K=[2] root",))}
    wrong = copy.deepcopy(raw)
    wrong["mdps"]["two_step"]["tree"]["nested t=[1] K=[2] root"]["trcov"]["2"] += 1e-6
    lines: list[str] = []
    report = check(write(tmp_path, wrong), lines.append)
    assert report.status == 1
    assert report.failed == 2  # by the formula, and by enumerating the groups
    bad = [line for line in lines if line.startswith("DIFFERS")]
    assert len(bad) == 2
    assert all("mdps.two_step.tree.nested t=[1] K=[2] root | tr Cov, B=2" in line for line in bad)
    assert "2 differ; worst difference 1.0e-06" in lines[-1]
    raw["mdps"]["two_step"]["grad"][0] += 0.1
    assert check(write(tmp_path, raw)).status == 1


def test_nothing_to_check_is_not_a_success(tmp_path: Path) -> None:
    report = check(write(tmp_path, {"note": "empty"}))
    assert report.status == 1
    assert "nothing to check" in str(report)


GOOD = processes("two_step")


def broken(**change: Any) -> dict[str, Any]:
    return {"mdps": {"m": {**GOOD["two_step"], **change}}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ({"mdps": [1]}, "mdps: expected dict, found list"),
        ({"mdps": {"m": {"pi": []}}}, "mdps.m: field 'trans' is missing"),
        (broken(pi=[[0.5, 0.6], [0.5, 0.5], [0.5, 0.5]]), "state 0: pi sums to 1.1"),
        (broken(pi=[[0.5, 0.5]]), "one entry for each state"),
        (broken(pi="abc"), "mdps.m: "),
        (broken(trans=[[[[1.0, 0.0, 0]], [[1.0, 0.0, -1]]]], pi=[[0.5, 0.5]], block=[0]), "reached from itself"),
        (broken(trans=[[[[1.0, 0.0, 7]], [[1.0, 0.0, -1]]]], pi=[[0.5, 0.5]], block=[0]), "outside -1..0"),
        (broken(grad=[0.0]), "mdps.m.grad: 1 numbers where 6 are due"),
        (broken(J="x"), "mdps.m.J"),
        (broken(tree={"bushy t=[1] K=[2] root": {}}), "'bushy t=\\[1\\] K=\\[2\\] root' is not of a known form"),
        (broken(tree={"nested t=[1] K=[] root": {}}), "as many times as widths"),
        (broken(tree={"nested t=[x] K=[2] root": {}}), "not a list of whole numbers"),
        (broken(bpo={"t=[1] K=2": {}}), "not of a known form"),
        ({"mdps": GOOD, "thm2": [{"mdp": "M9", "t": 0, "K": 2}]}, "process 'M9' is not among mdps"),
        ({"mdps": GOOD, "thm2": [{"t": 0}]}, "thm2\\[0\\]: field 'mdp' is missing"),
        ({"mdps": GOOD, "A_select": {"two_step|best": {}}}, "not of a known form"),
        ({"mdps": GOOD, "A_select": {"two_step|top-1": {"x": 1}}}, "field 'x' is unknown"),
        ({"mdps": GOOD, "B_invalid": {"two_step|fixed t=1,K=2|odd": {}}}, "unknown; known are mass"),
        (broken(tree={"nested t=[1] K=[2] root": 3}), "not in the expected form"),
    ],
)
def test_malformed_files_say_so_in_one_line(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(MalformedOracle, match=says) as caught:
        check(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(MalformedOracle, match=r"nothing\.json: No such file"):
        check(tmp_path / "nothing.json")
