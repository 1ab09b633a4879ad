"""The shipped conformance suite: does a world, a sandbox or a policy keep its contract?

Each check returns a :class:`Report` that can be printed, shown by a command line or asserted::

    print(check_env(make, task))
    (await check_sandbox(ForkServer)).assert_ok()
    (await check_policy(policy)).assert_ok()

Nothing is raised but by ``assert_ok``. The fakes of :mod:`branchpoint.testing.fakes` pass, and are re-exported here.
"""

from branchpoint.testing.environment import check_env
from branchpoint.testing.fakes import CoinWorld, CounterWorld, FakePolicy, FakeSession, ProbeWorld
from branchpoint.testing.policy import check_policy
from branchpoint.testing.report import Report, Result
from branchpoint.testing.sandbox import check_sandbox

__all__ = [
    "CoinWorld",
    "CounterWorld",
    "FakePolicy",
    "FakeSession",
    "ProbeWorld",
    "Report",
    "Result",
    "check_env",
    "check_policy",
    "check_sandbox",
]
