"""The shipped conformance suite: does a world, a sandbox, a machine or a policy keep its contract?

Each check returns a :class:`Report` that can be printed, shown by a command line or asserted::

    print(check_env(make, task))
    print(check_machine(ShellMachines))
    (await check_sandbox(ForkServer)).assert_ok()
    (await check_policy(policy)).assert_ok()

Nothing is raised but by ``assert_ok``. The fakes of :mod:`branchpoint.testing.fakes` and
:mod:`branchpoint.testing.fake_machine` pass, and are re-exported here.
"""

from branchpoint.testing.environment import check_env
from branchpoint.testing.fake_machine import FakeMachines
from branchpoint.testing.fakes import CoinWorld, CounterWorld, FakePolicy, FakeSession, ProbeWorld
from branchpoint.testing.machine import check_machine
from branchpoint.testing.policy import check_policy
from branchpoint.testing.report import Report, Result
from branchpoint.testing.sandbox import check_sandbox

__all__ = [
    "CoinWorld",
    "CounterWorld",
    "FakeMachines",
    "FakePolicy",
    "FakeSession",
    "ProbeWorld",
    "Report",
    "Result",
    "check_env",
    "check_machine",
    "check_policy",
    "check_sandbox",
]
