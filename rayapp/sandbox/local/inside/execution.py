"""Watches one execution from the fork to its end: its time, output caps, memory and processes of the whole tree.

Its time is up when the tree has used as much processor time as its limit allows, or when as much time has passed,
waiting for a processor left out: how long code takes by the clock alone depends on its neighbours.

Called by the zygote. What the execution writes goes from its pipes into the answer's memory file inside the kernel.
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
from rayapp.sandbox.local.levels.limits import MIB, Limits, longest_s
from rayapp.sandbox.local.levels.usage import Use

READY = b"."
MAX_CONTROL_BYTES = 4096
_CHUNK = 1 << 16
_LISTEN_AFTER_S = 0.005
_LOOK_EVERY_S = 0.05
"""Seconds between looks at the tree's memory. Code can write 100 MiB past its limit meanwhile; more looks cost more."""


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
                moved = os.splice(self.source, target, min(room, _CHUNK), offset_dst=at, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return False
            if moved == 0:
                raise EOFError
            self.size += moved


@dataclass(slots=True)
class Done:
    """The pipe on which a child says that it is through, with a token before the status.

    Candidate code has the other end, and could find the token in its own memory. All it can do with it is to end early;
    without it, writing to every descriptor there is does not even do that.
    """

    source: int
    token: bytes
    _heard: bytes = b""

    def hear(self) -> int | None:
        """The exit status, if that has been said.

        Raises:
            EOFError: closed; it has executed another program, or is dead.
        """
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
    """One process tree doing one job."""

    pid: int
    """Its first process; 0 once that is reaped."""
    end: Callable[[int], int]
    """Kills and reaps that process, and says how it ended."""
    control: _socket.socket
    """Socket on which its first process says that it is ready."""
    done: Done
    """Pipe on which it says that it is done; it exits while the answer is on its way."""
    streams: list[Stream]
    target: int
    """The answer's memory file."""
    limits: Limits
    use: Use
    look: Callable[[], None]
    """Brings `use` up to date."""
    started: float = 0.0
    """Time of its start on the monotonic clock."""
    timeout_s: float = 0.0
    stopped: str | None = None
    exit_code: int = 0
    """The status it reported with "done", else that of its process; negative is the signal that ended it."""
    is_ready: bool = False
    is_done: bool = False
    problem: str = ""
    """Why candidate code could not begin."""
    _open: dict[int, Stream] = field(default_factory=dict)
    _look_at: float = 0.0
    _ends_at: float = 0.0
    _is_listening: bool = False

    @property
    def goes_on(self) -> bool:
        """True when the job is over and its process lives, as in a session."""
        return self.is_done and self.pid != 0

    def watch(self, channel: socket.socket) -> None:
        """Return when the job is over, by itself or ended by us. Its processes are dead then, unless it reported
        "done"."""
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
            self.problem = f"it ended before it was ready, with {self.exit_code}"

    def _kill(self) -> None:
        """End the first process and, where it is the init of a pid namespace, everything. Idempotent."""
        if self.pid:
            self.exit_code = self.end(self.pid)
            self.pid = 0
            self.is_done = False

    def _wait(self, poll: select.poll, pidfd: int, channel: socket.socket) -> bool:
        """Handle one round of events; False when the execution is over."""
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
        # Ask first whether it has ended: this process may itself have waited for a processor past the deadline.
        return pidfd not in ready and not self.is_done and not self._has_to_end()

    def _begin_to_listen(self, poll: select.poll) -> None:
        """Watch the output pipes from now on. Not from the start: most executions end before, with all output still in
        their pipes, and waking for each line would take the processor from them."""
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
        if use.memory_bytes > limits.memory_mib * MIB:
            return "memory"
        if now >= self._ends_at or use.cpu_s >= self.timeout_s:
            return "timeout"
        return None

    def _hear_ready(self) -> None:
        """Read what the child said before candidate code began; it closed its end then, so nothing can come later."""
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
        """Read what is left in the pipes at the end."""
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
