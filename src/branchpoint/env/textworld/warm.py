"""Importing this module gets a process ready for TextWorld games: the package is imported, and
the rules of all kinds of games are read.

``ForkServer(preload=("branchpoint.env.textworld.warm",))`` does it once for all environments that are forked there.
"""

from branchpoint.env.textworld import preload

preload()
