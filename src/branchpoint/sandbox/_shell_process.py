"""What the keeper asks the kernel about messages and processes."""

from __future__ import annotations

import array
import os
import socket

LARGEST = 1 << 17
"""Bytes of a message."""


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors, closed on exec from the first (``socket.recv_fds`` forgets its flags)."""
    fds = array.array("i")
    data, more, _, _ = control.recvmsg(LARGEST, socket.CMSG_LEN(8 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in more:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def mine(pid: int) -> bool:
    """Whether a process is a child of this one, living or waiting to be reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
