"""Watches one execution from the fork to its end: the time, output, memory and processes of its whole process tree.

It exceeds its limit of N seconds with N seconds of processor time, or of wall-clock time without its waits for a
processor (which depend on other programs). The kernel moves output from the pipes into the answer's memory file
(splice).
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rayapp.sandbox.local import wire
from rayapp.sandbox.local.levels.level import Place
from rayapp.sandbox.local.levels.limits import MAX_SOCKETS, MIB, Limits, Use, longest_s

READY = b"."
MAX_CONTROL_BYTES = 4096
_CHUNK = 1 << 16
_LISTEN_AFTER_S = 0.005
_LOOK_EVERY_S = 0.05  # between checks of memory; code can exceed its limit by about 100 MiB in this time


@dataclass(slots=True)
class Stream:
    """One output pipe of the execution, and the offset of its bytes in the answer."""

    source: int
    start: int
    limit: int
    size: int = 0

    def drain(self, target: int) -> bool:
        """Move the available bytes to `target`; True if the code wrote too much. EOFError: write ends are closed."""
        while True:
            room = self.limit - self.size
            if room == 0:
                return _has_more(self.source)
            at = self.start + self.size
            try:
                moved = os.splice(self.source, target, min(room, _CHUNK), offset_dst=at, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return False
            if moved == 0:
                raise EOFError
            self.size += moved


@dataclass(slots=True)
class Done:
    """Pipe on which a child reports that it is done: a token, then the exit status.

    Candidate code holds the other end. Code that finds the token in its memory can only end its execution early.
    """

    source: int
    token: bytes
    _heard: bytes = b""

    def hear(self) -> int | None:
        """Return the reported exit status, None without a report. EOFError: the child is dead or has executed a
        program."""
        try:
            heard = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return None
        if not heard:
            raise EOFError
        self._heard += heard
        _, token, status = self._heard.partition(self.token)
        if token and status:
            self._heard = b""
            return status[0]
        self._heard = self._heard[-len(self.token) :]
        return None


@dataclass(slots=True, kw_only=True)
class Execution:
    pid: int  # of the tree's first process; 0 after it is reaped
    end: Callable[[int], int]  # kills and reaps the process with an id, and returns its exit status
    control: _socket.socket  # on which the first process reports that it is ready
    done: Done  # The process itself exits while the answer is sent.
    streams: list[Stream]
    target: int  # the answer's memory file
    limits: Limits
    use: Use
    look: Callable[[], None]  # updates `use`
    started: float = 0.0  # on the monotonic clock
    timeout_s: float = 0.0
    stopped: str | None = None
    exit_code: int = 0  # reported with "done"; else the process's exit status, -N if signal N ended it
    is_ready: bool = False
    is_done: bool = False
    problem: str = ""  # why candidate code could not start
    _open: dict[int, Stream] = field(default_factory=dict)
    _look_at: float = 0.0
    _ends_at: float = 0.0
    _is_listening: bool = False

    @property
    def goes_on(self) -> bool:
        """True if the job has ended but its process goes on, as in a session."""
        return self.is_done and self.pid != 0

    def watch(self, channel: socket.socket) -> None:
        """Watch the job until it ends or is stopped. If it did not report "done", its processes are then dead."""
        poll = select.poll()
        pidfd = os.pidfd_open(self.pid)
        self._look_at, self._ends_at = time.monotonic() + _LOOK_EVERY_S, self.started + self.timeout_s
        try:
            self._open = {stream.source: stream for stream in self.streams}
            for source in (pidfd, channel.fileno(), self.done.source):
                poll.register(source, select.POLLIN)
            while self._wait(poll, pidfd, channel):
                pass
        finally:
            if not self.is_done:
                self._kill()
            os.close(pidfd)
        self._drain_all()
        if self.stopped == "output":
            self._kill()
        if not self.is_ready:
            self._hear_ready()
        if not self.is_ready and not self.problem:
            self.problem = f"it ended with exit code {self.exit_code} before it was ready"

    def _kill(self) -> None:
        # If it is pid 1 of a pid namespace, the kernel kills the whole tree.
        if self.pid:
            self.exit_code = self.end(self.pid)
            self.pid = 0
            self.is_done = False

    def _wait(self, poll: select.poll, pidfd: int, channel: socket.socket) -> bool:
        """Wait for events and handle them. Return False when the execution is over."""
        left_s = max(0.0, self._ends_at - time.monotonic())
        events = poll.poll(min(left_s, _LOOK_EVERY_S if self._is_listening else _LISTEN_AFTER_S) * 1000)
        if not events and not self._is_listening:
            self._begin_to_listen(poll)
        ready = [source for source, _ in events]
        for source in ready:
            if source in self._open and not self._take(source, poll):
                return False
        if self.done.source in ready:
            self._hear_done(poll)
        if channel.fileno() in ready:
            self._take_cancel(channel)
            return False
        # First check whether the execution has ended: the zygote may have waited for a processor past the deadline.
        return pidfd not in ready and not self.is_done and not self._has_to_end()

    def _begin_to_listen(self, poll: select.poll) -> None:
        # Most executions end earlier, with all output still in the pipes: waking up for each line would cost processor
        # time.
        self._is_listening = True
        for source in self._open:
            poll.register(source, select.POLLIN)

    def _has_to_end(self) -> bool:
        now = time.monotonic()
        if now < min(self._look_at, self._ends_at):
            return False
        self.look()
        self._look_at = now + _LOOK_EVERY_S
        self._ends_at = self.started + min(self.timeout_s + self.use.waited_s, longest_s(self.timeout_s))
        self.stopped = self._excess(now)
        return self.stopped is not None

    def _excess(self, now: float) -> str | None:
        use, limits = self.use, self.limits
        if use.num_threads > limits.max_processes:
            return "processes"
        if use.memory_bytes > limits.memory_mib * MIB or use.num_sockets > MAX_SOCKETS:
            return "memory"
        if now >= self._ends_at or use.cpu_s >= self.timeout_s:
            return "timeout"
        return None

    def _hear_ready(self) -> None:
        # The child closed its end before candidate code began, so the code can't send this report.
        with contextlib.suppress(OSError):
            said = self.control.recv(MAX_CONTROL_BYTES)
            self.is_ready = said == READY
            self.problem = "" if self.is_ready else said.decode(errors="replace")

    def _hear_done(self, poll: select.poll) -> None:
        try:
            status = self.done.hear()
        except EOFError:
            poll.unregister(self.done.source)
        else:
            self.is_done = status is not None
            self.exit_code = status or 0

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
        _, descriptors = wire.receive(channel)
        for descriptor in descriptors:
            os.close(descriptor)

    def _drain_all(self) -> None:
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


_NUM_STREAMS = 3


class Ends:
    """Pipes and control socket, made while another child runs, so that the next fork need not wait for them."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(_NUM_STREAMS + 1)]
        self.control, self._theirs = _socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        *self.sources, done = (read for read, _ in pipes)
        os.set_blocking(done, False)  # splice reads from the other pipes, and does not block
        self.control.setblocking(False)
        self.done = Done(done, os.urandom(16))
        # Ends of the child, in the order of `child.DESCRIPTORS`.
        self.given = (*(write for _, write in pipes), self._theirs.fileno())

    def close_given(self) -> None:
        """Close this process's copies of the child's ends: while they are open, the pipes never report end of file."""
        self._theirs.close()
        for descriptor in self.given[:-1]:
            os.close(descriptor)

    def close(self) -> None:
        self.control.close()
        for source in (*self.sources, self.done.source):
            os.close(source)


@dataclass(slots=True, kw_only=True)
class Child:
    ends: Ends
    place: Place
    pid: int = 0  # 0 while the child is being forked, and after it is reaped
    max_processes: int = 0  # processes and threads; set only for a session

    def forget_what_it_said(self) -> None:
        """Discard data that arrived between two jobs of a session: only candidate code can have written it."""
        with contextlib.suppress(EOFError):
            while self.ends.done.hear() is not None:
                pass
