"""The warm interpreter: forks one confined child per execution, has it watched, and answers with what it wrote.

    provider --packet, memfd(job)--> zygote --fork--> child: candidate code
             <-packet, memfd(out, err, frames)--      | pipes, spliced into the memfd; killed at deadline or flood

Started by `slot.py` as `python -I -S` with an empty environment. It never reads a job or an output into its own memory:
children are forked from that memory, and one candidate must not find there what another computed. While nobody waits
it forks the child for the next job, which is most likely like the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Hashable
from dataclasses import dataclass

from rayapp.sandbox.local import child, files, wire
from rayapp.sandbox.local.execution import Done, Execution, Stream
from rayapp.sandbox.local.level import Level, Place
from rayapp.sandbox.local.limits import Limits
from rayapp.sandbox.local.usage import Usage

MAX_RESULT_BYTES = 8 << 20
"""All frames of one execution."""
_NUM_STREAMS = 3
_USUAL_DISK_MIB = 16
"""Guess for the first execution; wrong ones cost a fork."""


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that waits for a job, or runs one."""

    pid: int
    sources: list[int]
    """Read ends of its stdout, stderr and results."""
    control: socket.socket
    done: Done
    fit: Hashable
    """What `Level.prepare` said about the place that it was confined for."""
    max_processes: int = 0
    seen_as: frozenset[str] = frozenset()
    """Its id in the /proc that `Usage` reads; of a session only."""

    def forget_what_it_said(self) -> None:
        """Between two jobs of a session only candidate code speaks."""
        with contextlib.suppress(EOFError):
            while self.done.hear() is not None:
                pass

    def end(self) -> None:
        """Kill it, unless it is dead and reaped already, and close our ends."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.control.close()
        for source in (*self.sources, self.done.source):
            os.close(source)


class Zygote:
    """Serves one provider over one channel until that closes."""

    def __init__(self, channel: socket.socket, level: Level, usage: Usage) -> None:
        self._channel = channel
        self._level = level
        self._usage = usage
        self._session: Child | None = None
        self._spare: Child | None = None

    def serve(self) -> None:
        self._spare = self._fork(Place(home=False, writable=False, disk_mib=_USUAL_DISK_MIB))
        while True:
            try:
                header, descriptors = wire.receive(self._channel)
            except EOFError:
                return
            try:
                if header.get("reset"):
                    self._reset()
                elif descriptors:
                    self._execute(header, descriptors)
                # else: a cancellation that came after its execution had ended
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _execute(self, header: dict[str, object], descriptors: list[int]) -> None:
        started = time.monotonic()
        limits = Limits(**header["limits"])  # type: ignore[arg-type]
        place = Place(home=bool(header["home"]), writable=header["kind"] in files.KINDS, disk_mib=limits.disk_mib)
        is_resumed = bool(header["session"]) and self._session is not None
        ran = self._session_child(place, limits) if header["session"] else self._fresh_child(place)
        order = {"limits": header["limits"], "session": header["session"], "running": self._num_running()}
        deadline = started + float(header["timeout_s"])  # type: ignore[arg-type]
        execution = self._execution(ran, limits, _integer(header, "max_output_bytes"), deadline)
        execution.is_ready = is_resumed
        try:
            with contextlib.suppress(OSError):  # it died while it was confined; what it said of that is waiting
                socket.send_fds(ran.control, [json.dumps(order).encode()], descriptors)
            execution.watch(self._channel)
            self._answer(header, execution, time.monotonic() - started)
        finally:
            os.close(execution.target)
            self._clean_up(ran, execution)
        if not header["session"]:
            self._spare = self._fork(place)

    def _answer(self, header: dict[str, object], execution: Execution, duration_s: float) -> None:
        answer: dict[str, object] = {
            "id": _integer(header, "id"),
            "exit_code": execution.exit_code,
            "stopped": execution.stopped,
            "problem": execution.problem,
            "sizes": [stream.size for stream in execution.streams],
            "starts": [stream.start for stream in execution.streams],
            "duration_s": duration_s,
        }
        wire.send(self._channel, answer, execution.target)

    def _clean_up(self, ran: Child, execution: Execution) -> None:
        """After the answer, so that nobody waits for it; before the next execution, so that nothing meets it."""
        ran.pid = execution.pid
        if ran is not self._session:
            ran.end()
        elif not execution.goes_on:
            ran.end()
            self._session = None
        self._level.sweep(self._session.pid if self._session else 0)

    def _fresh_child(self, place: Place) -> Child:
        spare, self._spare = self._spare, None
        self._usage.apart = self._session.seen_as if self._session else frozenset()
        if spare is not None:
            if spare.fit == self._level.prepare(place):
                return spare
            spare.end()
        return self._fork(place)

    def _session_child(self, place: Place, limits: Limits) -> Child:
        self._end_spare()
        self._usage.apart = frozenset()
        if self._session is None:
            before = self._usage.children()
            self._session = self._fork(place)
            self._session.max_processes = limits.max_processes
            self._session.seen_as = frozenset(self._usage.children() - before)
        else:
            self._session.forget_what_it_said()
        return self._session

    def _fork(self, place: Place) -> Child:
        fit = self._level.prepare(place)
        pipes = [os.pipe() for _ in range(_NUM_STREAMS + 1)]
        token = os.urandom(16)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = self._level.fork()
        if pid == 0:
            ours.detach()
            child.run(self._level, place, [write for _, write in pipes], theirs, token)
        theirs.close()
        for _, write in pipes:
            # Our copies of the write ends, or the end of the child would not show.
            os.close(write)
        os.set_blocking(pipes[-1][0], False)  # the others are read by splice, which does not block
        ours.setblocking(False)
        *sources, done = (read for read, _ in pipes)
        return Child(pid=pid, sources=sources, control=ours, done=Done(done, token), fit=fit)

    def _execution(self, ran: Child, limits: Limits, max_output: int, deadline: float) -> Execution:
        caps = (max_output, max_output, MAX_RESULT_BYTES)
        starts = (0, max_output, 2 * max_output)
        return Execution(
            pid=ran.pid,
            control=ran.control,
            done=ran.done,
            streams=[Stream(source, start, cap) for source, start, cap in zip(ran.sources, starts, caps, strict=True)],
            target=os.memfd_create("answer", os.MFD_CLOEXEC),
            deadline=deadline,
            limits=limits,
            usage=self._usage,
        )

    def _num_running(self) -> int:
        """Processes beside the execution that count against the limit of this user."""
        return 1 + (self._session.max_processes if self._session else 0)

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _reset(self) -> None:
        """The sandbox was given back: end its session, forget its files."""
        if self._session is not None:
            self._session.end()
            self._session = None
            self._end_spare()
            self._level.sweep(0)
        self._level.reset()


def _integer(header: dict[str, object], key: str) -> int:
    value = header[key]
    assert isinstance(value, int)
    return value
