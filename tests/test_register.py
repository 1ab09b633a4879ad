"""The training register and what it refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from branchpoint import register
from branchpoint.advantage import Rloo, Tree
from branchpoint.ledger import Ledger
from branchpoint.noise import Arm, Key, Noise, arm_of
from branchpoint.rollout import Grower, Limits
from branchpoint.sandbox.inprocess import InProcess
from branchpoint.scheduler import Fixed, Flat
from branchpoint.testing.fakes import CounterWorld, FakePolicy
from branchpoint.tree import Branch, Fork, RolloutTree, Seeds, Segments, Turn
from branchpoint.world import Failure, Task, UserError

TASK = Task("count", "counter", seed=5, metadata={"target": 2, "limit": 6})


class Shared(Noise):
    """Pairs the policy's draws as well: what must not be."""

    def branch(self, arm: Arm, *key: Key) -> Noise:
        return Noise(self.seed, self.own, self.clean)


@pytest.mark.parametrize("scheduler", [Flat(roots=2), Fixed(roots=1, expected=2)], ids=["roots", "siblings"])
def test_a_group_with_shared_policy_seeds_is_refused(scheduler: Flat | Fixed) -> None:
    grower = Grower(FakePolicy(restrict=True), InProcess(), scheduler, Limits(turns=6), "paired", Ledger())

    async def several() -> None:
        for seed in range(4):  # the single root may end before its fork
            await grower.grow(CounterWorld, TASK, Shared(seed, seed))

    with pytest.raises(ExceptionGroup) as refused:
        asyncio.run(several())
    found = refused.value.subgroup(UserError)
    assert found is not None
    assert "one policy seed" in str(found.exceptions[0]) + str(getattr(found.exceptions[0], "exceptions", ""))


def turn(reward: float, tokens: int, **info: object) -> Turn:
    zeros = [0.0] * tokens
    return Turn([1], [0] * tokens, zeros, zeros, zeros, reward, info=info)  # type: ignore[arg-type]


def made() -> RolloutTree:
    """A root with a sibling that leaves inside its second action, another root, and one that failed."""
    branches = (
        Branch(0, None, (turn(0.0, 2), turn(1.0, 3, success=True, observed=True)), "done", seeds=Seeds(7, 1, False)),
        Branch(1, Fork(0, 0, 0, 1.0), (turn(0.0, 1, success=True, observed=False),), "done", seeds=Seeds(7, 2, False)),
        Branch(2, Fork(0, 1, 1, 1.0), (turn(0.5, 4, success=False),), "turns", seeds=Seeds(7, 3, False)),
        Branch(3, Fork(0, 0, 0, 1.0), (turn(0.0, 1),), "failed", Failure("grader", "no"), seeds=Seeds(7, 255, False)),
    )
    return RolloutTree(TASK, branches, "000001/0000")


def test_a_line_says_who_a_group_was_and_what_it_was_given() -> None:
    tree = made()
    segments = Segments.of(tree)
    line = register.group(tree, segments, Tree(gamma=1.0).credit(segments), "paired")
    assert (line["key"], line["task"], line["arm"], line["informative"]) == ("000001/0000", "count", "paired", True)
    by = line["branches"]
    assert [b["policy_seed"] for b in by] == ["1", "2", "3", "ff"]
    assert {b["world_seed"] for b in by} == {"7"}
    assert [(b["success"], b["observed"], b["reward"]) for b in by] == [
        (True, True, 1.0),
        (True, False, 0.0),
        (False, None, 0.5),
        (None, None, None),
    ]
    assert by[3]["failure"] == "grader"
    assert by[3]["advantages"] == []
    # Roots: U = (1 + 0.5) / 2 against 0; at the fork inside the action 1 against 0.5; each root weighs 1/2.
    assert by[0]["advantages"] == [[0, 0, 0.75, 0.5], [1, 0, 0.75, 0.5], [1, 1, 0.5, 0.25]]
    assert by[2]["advantages"] == [[1, 0, -0.5, 0.25]]
    assert by[1]["advantages"] == [[0, 0, -0.75, 0.5]]


def test_an_update_in_which_two_trees_share_a_policy_seed_is_refused() -> None:
    one, two = made(), replace(made(), key="000001/0001")
    register.refuse_shared([one])
    with pytest.raises(UserError, match="branch 0 of 000001/0001 and branch 0 of 000001/0000"):
        register.refuse_shared([one, two])


def test_a_group_without_signal_and_an_empty_one_have_lines_too() -> None:
    tree = made()
    lost = replace(tree, branches=(replace(tree.branches[0], stop="failed", failure=Failure("sandbox", "gone")),))
    segments = Segments.of(lost)
    line = register.group(lost, segments, Rloo().credit(segments), "clean")
    assert not line["informative"]
    assert line["branches"][0]["reward"] is None


def test_blocked_groups_alternate_within_an_update_and_between_updates() -> None:
    table = [[arm_of("blocked", update, place) for place in range(4)] for update in range(4)]
    for row in (*table, *zip(*table, strict=True)):
        assert sorted(row) == ["clean", "clean", "independent", "independent"]
    assert arm_of("paired", 3, 1) == "paired"
