"""The warm interpreter: forks one confined child per execution, watches it, and answers with what it wrote.

    provider --packet, memfd(job)--> zygote --fork--> child: candidate code
             <-packet, memfd(out, err, frames)--      | pipes, spliced into the memfd; killed at deadline or flood

Started by `slot.py` as `python -I -S` with an empty environment. It never reads a job nor an output into its own memory:
children are forked from that memory, and one candidate must not find there what another computed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field

from rayapp.sandbox.local import child, wire
from rayapp.sandbox.local.level import Level, Limits

MAX_RESULT_BYTES = 8 << 20
"""All frames of one execution."""
_CHUNK = 1 << 16
_NUM_STREAMS = 3


@dataclass(slots=True)
class _Stream:
    """One pipe out of the child, and where in the answer's memfd its bytes go."""

    source: int
    start: int
    limit: int
    size: int = 0

    def drain(self, target: int) -> bool:
        """Move what is there; True when the child wrote more than it may.

        Raises:
            EOFError: every write end is closed.
        """
        while True:
            room = self.limit - self.size
            if room == 0:
                return _has_more(self.source)
            try:
                # Through the kernel only: see the module's docstring.
                moved = os.splice(
                    self.source,
                    target,
                    min(room, _CHUNK),
                    offset_dst=self.start + self.size,
                    flags=os.SPLICE_F_NONBLOCK,
                )
            except BlockingIOError:
                return False
            if moved == 0:
                raise EOFError
            self.size += moved


@dataclass(slots=True)
class Execution:
    """One child from fork to reaping."""

    pid: int
    streams: list[_Stream]
    target: int
    deadline: float
    stopped: str | None = None
    wait_status: int = 0
    _open: dict[int, _Stream] = field(default_factory=dict)

    def watch(self, channel: socket.socket) -> None:
        """Until the child is dead and its pipes are empty."""
        poll = select.poll()
        pidfd = os.pidfd_open(self.pid)
        try:
            self._open = {stream.source: stream for stream in self.streams}
            for source in (pidfd, channel.fileno(), *self._open):
                poll.register(source, select.POLLIN)
            while self._wait(poll, pidfd, channel):
                pass
        finally:
            self.kill()
            os.close(pidfd)
        self._drain_all()

    def kill(self) -> None:
        """End the child and, where it is the init of a pid namespace, everything it started. Idempotent."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait_status = os.waitpid(self.pid, 0)[1]
            self.pid = 0

    def _wait(self, poll: select.poll, pidfd: int, channel: socket.socket) -> bool:
        """Handle one round of events; False when the execution is over."""
        left_ms = (self.deadline - time.monotonic()) * 1000
        events = poll.poll(left_ms) if left_ms > 0 else []
        if not events:
            self.stopped = "timeout"
            return False
        ready = [source for source, _ in events]
        for source in ready:
            if source in self._open and not self._take(source, poll):
                return False
        if channel.fileno() in ready:
            self._take_cancel(channel)
            return False
        return pidfd not in ready

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

    def _drain_all(self) -> None:
        """What was in the pipes when the child died."""
        for stream in self._open.values():
            try:
                if stream.drain(self.target) and self.stopped is None:
                    self.stopped = "output"
            except EOFError:
                continue


class Zygote:
    """Serves one provider over one channel until that closes."""

    def __init__(self, channel: socket.socket, level: Level) -> None:
        self._channel = channel
        self._level = level

    def serve(self) -> None:
        while True:
            try:
                header, job = wire.receive(self._channel)
            except EOFError:
                return
            if job is None:
                if header.get("reset"):
                    self._level.reset()
                continue  # else a cancellation that came after its execution had ended
            try:
                self._execute(header, job)
            finally:
                os.close(job)

    def _execute(self, header: dict[str, object], job: int) -> None:
        started = time.monotonic()
        number, max_output = _integer(header, "id"), _integer(header, "max_output_bytes")
        limits = Limits(**header["limits"])  # type: ignore[arg-type]
        home = header["home"] is True
        if home:
            self._level.prepare_home(limits.disk_mib)
        deadline = started + float(header["timeout_s"])  # type: ignore[arg-type]
        execution = self._start(job, limits, max_output, deadline, home=home)
        try:
            execution.watch(self._channel)
            self._level.sweep()
            answer = {
                "id": number,
                "wait_status": execution.wait_status,
                "stopped": execution.stopped,
                "sizes": [stream.size for stream in execution.streams],
                "starts": [stream.start for stream in execution.streams],
                "duration_s": time.monotonic() - started,
            }
            wire.send(self._channel, answer, execution.target)
        finally:
            for descriptor in (execution.target, *(stream.source for stream in execution.streams)):
                os.close(descriptor)

    def _start(self, job: int, limits: Limits, max_output: int, deadline: float, *, home: bool) -> Execution:
        pipes = [os.pipe() for _ in range(_NUM_STREAMS)]
        pid = self._level.fork()
        if pid == 0:
            out, err, results = (write for _, write in pipes)
            child.run(self._level, job, (out, err, results), limits, home=home)
        for _, write in pipes:
            os.close(write)
        caps = (max_output, max_output, MAX_RESULT_BYTES)
        starts = (0, max_output, 2 * max_output)
        streams = [
            _Stream(source=read, start=start, limit=cap)
            for (read, _), start, cap in zip(pipes, starts, caps, strict=True)
        ]
        for stream in streams:
            os.set_blocking(stream.source, False)
        return Execution(pid=pid, streams=streams, target=os.memfd_create("answer", os.MFD_CLOEXEC), deadline=deadline)


def _has_more(source: int) -> bool:
    events = select.poll()
    events.register(source, select.POLLIN)
    return any(flags & select.POLLIN for _, flags in events.poll(0))


def _integer(header: dict[str, object], key: str) -> int:
    value = header[key]
    assert isinstance(value, int)
    return value
