"""A plain fork(2) of a process that has one thread."""

from __future__ import annotations

import ctypes
import os

_C = ctypes.PyDLL(None, use_errno=True)


def fork() -> int:
    """As ``os.fork``, without Python's at-fork hooks: the child is an exact copy. Raises OSError when it is refused.

    The hooks repair what other threads may have held (there are none: the guard has looked) and give ``random`` a new
    seed (which a copy must not get). They write to some 150 pages, each copied by a page fault: most of the time that
    an ``os.fork`` and its child take. What C libraries registered with ``pthread_atfork`` does run.
    """
    pid: int = _C.fork()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid
