"""Did the agent do what was asked? By tau-bench's rule: equal databases, and every required output was said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from branchpoint.env.tau.common import TRANSFER
from branchpoint.env.tau.database import Tables, equal
from branchpoint.env.tau.domains import Domain, Problem


@dataclass(frozen=True, slots=True)
class Grade:
    """``database``: it is as the correct calls leave it; ``outputs``: whether each required text was said."""

    database: bool
    outputs: Mapping[str, bool]

    @property
    def success(self) -> bool:
        return self.database and all(self.outputs.values())


def wanted(domain: Domain, problem: Problem) -> Tables:
    """The changes that the correct calls make. A transfer to a human changes nothing and is not played."""
    changes: Tables = {}
    for name, args in problem.actions:
        if name != TRANSFER:
            changes, _ = domain.run(changes, name, args)
    return changes


def grade(domain: Domain, problem: Problem, changes: Tables, replies: Iterable[str]) -> Grade:
    """Grade a finished conversation.

    Outputs are looked for without regard to case, in each reply to the user with its commas taken out (Yao et al.,
    2024, https://arxiv.org/abs/2406.12045; ``calculate_reward`` of the published code).
    """
    said = [reply.lower().replace(",", "") for reply in replies]
    outputs = {output: any(output.lower() in reply for reply in said) for output in problem.outputs}
    return Grade(equal(domain.tables, changes, wanted(domain, problem)), outputs)
