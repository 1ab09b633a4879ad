"""Branching under shared luck against exact numbers (see docs/howto/pairing.md), through the library's own code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchpoint.advantage import DrGrpo
from branchpoint.probe.cases import Design
from branchpoint.probe.paired import Lucky, Roots, additive, bandit, counting, group_trace, reversing, trace

ORACLES = json.loads((Path(__file__).parent / "pairing.json").read_text(encoding="utf-8"))
NONE, COIN, HALF = (0.0,), (1.0, -1.0), (0.5, -0.5)
FAMILIES: dict[str, Lucky] = {
    "E1": additive([0.1, 0.1, 0.1, 1.0], [NONE, NONE, NONE, COIN]),
    "E2": additive([1.0, 0.1, 0.1, 0.1], [NONE, NONE, NONE, COIN]),
    "E3": additive([0.25] * 4, [HALF] * 4),
    "E4": counting(4, 0.6, 2, 0.3),
    "E5": counting(4, 0.9, 4, 0.1),
    "E6": reversing([0.25] * 3, 0.6),
}
SHARING: dict[str, Any] = {"indep": "independent", "sib": "siblings", "all": "paired"}
CASES = [(family, key) for family, numbers in ORACLES["E"].items() for key in numbers]
FAST = [c for c in CASES if c[1].startswith("flat") or (c[0] in ("E1", "E6") and c[1].startswith("t=(3,) K=(2,)"))]


def design(key: str) -> tuple[Design, Any]:
    found = re.fullmatch(r"(?:flat|t=\(([\d, ]*)\) K=\(([\d, ]*)\)) (\w+)", key)
    assert found is not None
    times, widths = (tuple(int(x) for x in (text or "").split(",") if x.strip()) for text in found.group(1, 2))
    return Design(times, widths, True), SHARING[found[3]]


@pytest.mark.parametrize(
    ("family", "key"), [pytest.param(*c, marks=[] if c in FAST else [pytest.mark.slow]) for c in CASES]
)
def test_traces_of_designs_under_shared_luck(family: str, key: str) -> None:
    """At 32 steps, with the better of the baselines root, half and nearest."""
    found = min(trace(FAMILIES[family], *_split(key, gamma), budget=32) for gamma in (0.0, 0.5, 1.0))
    assert found == pytest.approx(ORACLES["E"][family][key], abs=1e-12)


def _split(key: str, gamma: float) -> tuple[Design, float, Any]:
    made, sharing = design(key)
    return made, gamma, sharing


@pytest.mark.parametrize("family", ["E1", "E5", "E6"])
def test_sharing_luck_leaves_the_mean_gradient_as_it_is(family: str) -> None:
    lucky = FAMILIES[family]
    for made in (Design((), (), True), Design((2,), (2,), True)):
        given = sum(q * Roots.of(mdp, made, 0.5).mean for q, mdp in lucky.outcomes)
        np.testing.assert_allclose(given, lucky.marginal.gradient, rtol=0, atol=1e-14)
        np.testing.assert_allclose(Roots.of(lucky.marginal, made, 0.5).mean, lucky.marginal.gradient, atol=1e-14)


@pytest.mark.parametrize("name", ORACLES["D"])
def test_flat_groups_paired_or_not(name: str) -> None:
    """Eq. 5 (one-sided flips) and any table of luck and actions, with the group mean as baseline."""
    case, size = ORACLES["D"][name], int(re.findall(r"G(\d)", name)[0])
    if "table" in case:
        lucky = bandit(list(zip(*case["table"], strict=True)), case["pw"], case["pi"])  # rows are actions
    else:
        q = float(re.findall(r"\|q([\d.]+)", name)[0])
        lucky = bandit([[0.0] * len(case["r"]), case["r"]], [q, 1 - q], case["pi"])
    assert group_trace(lucky, size, DrGrpo(), paired=False) == pytest.approx(case["indep"], abs=1e-12)
    assert group_trace(lucky, size, DrGrpo(), paired=True) == pytest.approx(case["paired"], abs=1e-12)
    if "lhs" in case:  # the sign of the general condition
        helps = case["paired"] < case["indep"] - 1e-12
        assert helps == (case["lhs"] < case["rhs"] - 1e-12)
