"""Sandboxes: what turns a plain environment into one that can be snapshotted and restored.

``forkserver`` (any Python object, by process fork), ``inprocess`` (objects that copy themselves), ``replay`` (objects
that repeat themselves). All three open the same :class:`~branchpoint.world.World` and keep the same contract;
:mod:`branchpoint.testing` checks it.
"""
