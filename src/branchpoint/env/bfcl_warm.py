"""Importing this module reads the tasks and imports the simulators: once for all worlds that are forked from there."""

from branchpoint.env.bfcl import preload

preload()
