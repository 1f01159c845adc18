"""The descriptors between the zygote and one child, and what the zygote knows of that child. Called by the zygote."""

from __future__ import annotations

import _socket
import contextlib
import os
import socket
from dataclasses import dataclass

from rayapp.sandbox.local.inside.execution import Done
from rayapp.sandbox.local.levels.level import Place

_NUM_STREAMS = 3


class Ends:
    """Pipes for stdout, stderr, results and "done", and a control socket.

    They are made ahead, while a child runs, so that whoever waits for the next fork does not wait for them too."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(_NUM_STREAMS + 1)]
        self.control, self._theirs = _socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        *self.sources, done = (read for read, _ in pipes)
        os.set_blocking(done, False)  # the others are read by splice, which does not block
        self.control.setblocking(False)
        self.done = Done(done, os.urandom(16))
        self.given = (*(write for _, write in pipes), self._theirs.fileno())
        """The child's ends, in the order of `child.DESCRIPTORS`."""

    def close_given(self) -> None:
        """Close our copies of the child's ends: else the end of the child would not show."""
        self._theirs.close()
        for descriptor in self.given[:-1]:
            os.close(descriptor)

    def close(self) -> None:
        """Close our own ends."""
        self.control.close()
        for source in (*self.sources, self.done.source):
            os.close(source)


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that waits for a job, or runs one."""

    ends: Ends
    place: Place
    """The folder it works in, and what it may write."""
    pid: int = 0
    """0 while it is being forked, and again when it is reaped."""
    max_processes: int = 0
    """Limit of processes and threads; set for a session only."""

    def forget_what_it_said(self) -> None:
        """Drop what came between two jobs of a session: only candidate code can have written it."""
        with contextlib.suppress(EOFError):
            while self.ends.done.hear() is not None:
                pass
