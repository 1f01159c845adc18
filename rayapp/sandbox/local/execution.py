"""Watches one execution from the fork to its end: deadline, output caps, memory and processes of the whole tree.

Called by the zygote. What the execution writes goes from its pipes into the answer's memory file inside the kernel, never
through the zygote's own memory: the next execution is forked from that.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field

from rayapp.sandbox.local import wire
from rayapp.sandbox.local.limits import Limits
from rayapp.sandbox.local.usage import Usage

_CHUNK = 1 << 16
_LOOK_EVERY_S = 0.05
"""Between looks at the tree's memory: time enough to write 100 MiB past the limit, and little work for us."""


@dataclass(slots=True)
class Stream:
    """One pipe out of the execution, and where in the answer its bytes go."""

    source: int
    start: int
    limit: int
    size: int = 0

    def drain(self, target: int) -> bool:
        """Move what is there; True when more was written than may be.

        Raises:
            EOFError: every write end is closed.
        """
        while True:
            room = self.limit - self.size
            if room == 0:
                return _has_more(self.source)
            at = self.start + self.size
            try:
                moved = os.splice(
                    self.source, target, min(room, _CHUNK), offset_dst=at, flags=os.SPLICE_F_NONBLOCK
                )
            except BlockingIOError:
                return False
            if moved == 0:
                raise EOFError
            self.size += moved


@dataclass(slots=True, kw_only=True)
class Execution:
    """One process tree doing one job."""

    pid: int
    """Its first process; 0 once that is reaped."""
    streams: list[Stream]
    target: int
    """The answer's memory file."""
    deadline: float
    """By the monotonic clock."""
    limits: Limits
    usage: Usage
    done: int | None = None
    """In a session: a pipe that becomes readable when the job is over and its process goes on."""
    stopped: str | None = None
    wait_status: int = 0
    _open: dict[int, Stream] = field(default_factory=dict)
    _look_at: float = 0.0

    def watch(self, channel: socket.socket) -> None:
        """Until the job is over, by itself or by us. Unless it is in a session, the tree is dead then."""
        poll = select.poll()
        pidfd = os.pidfd_open(self.pid)
        goes_on = False
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        try:
            self._open = {stream.source: stream for stream in self.streams}
            for source in (pidfd, channel.fileno(), *self._open, *(() if self.done is None else (self.done,))):
                poll.register(source, select.POLLIN)
            while self._wait(poll, pidfd, channel):
                pass
            goes_on = self.done is not None and self.stopped is None and bool(self._read_done())
        finally:
            if not goes_on:
                self.kill()
            os.close(pidfd)
        self._drain_all()

    def kill(self) -> None:
        """End the first process and, where it is the init of a pid namespace, everything. Idempotent."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait_status = os.waitpid(self.pid, 0)[1]
            self.pid = 0

    def _wait(self, poll: select.poll, pidfd: int, channel: socket.socket) -> bool:
        """Handle one round of events; False when the execution is over."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            self.stopped = "timeout"
            return False
        events = poll.poll(min(left_s, _LOOK_EVERY_S) * 1000)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            self.stopped = self.usage.excess(self.limits)
            if self.stopped is not None:
                return False
        ready = [source for source, _ in events]
        for source in ready:
            if source in self._open and not self._take(source, poll):
                return False
        if channel.fileno() in ready:
            self._take_cancel(channel)
            return False
        return pidfd not in ready and self.done not in ready

    def _take(self, source: int, poll: select.poll) -> bool:
        try:
            if self._open[source].drain(self.target):
                self.stopped = "output"
                return False
        except EOFError:
            poll.unregister(source)
            del self._open[source]
        return True

    def _take_cancel(self, channel: socket.socket) -> None:
        self.stopped = "killed"
        _, body = wire.receive(channel)
        if body is not None:
            os.close(body)

    def _read_done(self) -> bytes:
        assert self.done is not None
        try:
            return os.read(self.done, 1)
        except BlockingIOError:
            return b""

    def _drain_all(self) -> None:
        """What was in the pipes at the end."""
        for stream in self._open.values():
            try:
                if stream.drain(self.target) and self.stopped is None:
                    self.stopped = "output"
            except EOFError:
                continue


def _has_more(source: int) -> bool:
    events = select.poll()
    events.register(source, select.POLLIN)
    return any(flags & select.POLLIN for _, flags in events.poll(0))
