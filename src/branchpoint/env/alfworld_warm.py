"""Importing this module gets a process ready for ALFWorld games: packages imported, grammar, rules and index read.

``ForkServer(preload=("branchpoint.env.alfworld_warm",))`` does it once for all environments that are forked from there.
"""

from branchpoint.env import _alfworld_data
from branchpoint.env.alfworld import preload

preload()
_alfworld_data.index()
