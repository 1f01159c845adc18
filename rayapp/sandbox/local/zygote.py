"""The warm interpreter: forks one confined child per execution, has it watched, and answers with what it wrote.

    provider --packet, memfd(job)--> zygote --fork--> child: candidate code
             <-packet, memfd(out, err, frames)--      | pipes, spliced into the memfd; killed at deadline or flood

Started by `slot.py` as `python -I -S` with an empty environment. It never reads a job or an output into its own memory:
children are forked from that memory, and one candidate must not find there what another computed.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass

from rayapp.sandbox.local import child, wire
from rayapp.sandbox.local.execution import Execution, Stream
from rayapp.sandbox.local.level import Level
from rayapp.sandbox.local.limits import Limits
from rayapp.sandbox.local.usage import Usage

MAX_RESULT_BYTES = 8 << 20
"""All frames of one execution."""
_NUM_STREAMS = 3


@dataclass(slots=True, kw_only=True)
class _Session:
    """A process that runs one stateful job after the other."""

    pid: int
    sources: list[int]
    done: int
    control: socket.socket
    max_processes: int
    seen_as: set[str]
    """Its id in the /proc that `Usage` reads."""

    def close(self) -> None:
        self.control.close()
        for descriptor in (*self.sources, self.done):
            os.close(descriptor)


class Zygote:
    """Serves one provider over one channel until that closes."""

    def __init__(self, channel: socket.socket, level: Level, usage: Usage) -> None:
        self._channel = channel
        self._level = level
        self._usage = usage
        self._session: _Session | None = None
        self._status, self._status_of_child = os.pipe()
        os.set_blocking(self._status, False)

    def serve(self) -> None:
        while True:
            try:
                header, job = wire.receive(self._channel)
            except EOFError:
                return
            if job is None:
                if header.get("reset"):
                    self._reset()
                continue  # else a cancellation that came after its execution had ended
            try:
                self._execute(header, job)
            finally:
                os.close(job)

    def _execute(self, header: dict[str, object], job: int) -> None:
        started = time.monotonic()
        max_output = _integer(header, "max_output_bytes")
        limits = Limits(**header["limits"])  # type: ignore[arg-type]
        deadline = started + float(header["timeout_s"])  # type: ignore[arg-type]
        self._level.prepare(limits.disk_mib, home=bool(header["home"]))
        is_resumed = bool(header["session"]) and self._session is not None
        start = self._resume if header["session"] else self._start
        execution = start(job, limits, max_output, deadline, home=bool(header["home"]))
        try:
            execution.watch(self._channel)
            self._level.sweep(self._session_pid())
            answer = {
                "id": _integer(header, "id"),
                "wait_status": execution.wait_status,
                "stopped": execution.stopped,
                "sizes": [stream.size for stream in execution.streams],
                "starts": [stream.start for stream in execution.streams],
                "duration_s": time.monotonic() - started,
                "status": "." if is_resumed else self._read_status(),
            }
            wire.send(self._channel, answer, execution.target)
        finally:
            os.close(execution.target)
            self._close(execution)

    def _read_status(self) -> str:
        """What the child said before candidate code began; nothing if it was killed before that."""
        try:
            return os.read(self._status, 8192).decode(errors="replace")
        except BlockingIOError:
            return ""

    def _start(self, job: int, limits: Limits, max_output: int, deadline: float, *, home: bool) -> Execution:
        pipes = [os.pipe() for _ in range(_NUM_STREAMS)]
        running = 1 + (self._session.max_processes if self._session else 0)
        pid = self._level.fork()
        if pid == 0:
            out, err, results = (write for _, write in pipes)
            status = self._status_of_child
            child.run(self._level, job, (out, err, results), status, limits, home=home, running=running)
        self._usage.apart = self._session.seen_as if self._session else set()
        sources = _read_ends(pipes)
        return self._execution(pid, sources, limits, max_output, deadline)

    def _resume(self, job: int, limits: Limits, max_output: int, deadline: float, *, home: bool) -> Execution:
        if self._session is None:
            self._session = self._start_session(limits)
        session = self._session
        socket.send_fds(session.control, [b"job"], [job])
        self._usage.apart = set()
        return self._execution(session.pid, session.sources, limits, max_output, deadline, done=session.done)

    def _start_session(self, limits: Limits) -> _Session:
        pipes = [os.pipe() for _ in range(_NUM_STREAMS + 1)]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = self._usage.children()
        pid = self._level.fork()
        if pid == 0:
            out, err, results, done = (write for _, write in pipes)
            status = self._status_of_child
            child.run_session(self._level, theirs.detach(), done, (out, err, results), status, limits)
        theirs.close()
        *sources, done = _read_ends(pipes)
        return _Session(
            pid=pid,
            sources=sources,
            done=done,
            control=ours,
            max_processes=limits.max_processes,
            seen_as=self._usage.children() - before,
        )

    def _execution(
        self, pid: int, sources: list[int], limits: Limits, max_output: int, deadline: float, *, done: int | None = None
    ) -> Execution:
        caps = (max_output, max_output, MAX_RESULT_BYTES)
        starts = (0, max_output, 2 * max_output)
        return Execution(
            pid=pid,
            streams=[Stream(source, start, cap) for source, start, cap in zip(sources, starts, caps, strict=True)],
            target=os.memfd_create("answer", os.MFD_CLOEXEC),
            deadline=deadline,
            limits=limits,
            usage=self._usage,
            done=done,
        )

    def _close(self, execution: Execution) -> None:
        """The pipes of an execution, or those of a session that did not survive it."""
        if execution.done is None:
            for stream in execution.streams:
                os.close(stream.source)
        elif execution.pid == 0 and self._session is not None:
            self._session.close()
            self._session = None

    def _session_pid(self) -> int:
        return self._session.pid if self._session else 0

    def _reset(self) -> None:
        """The sandbox was given back: end its session, forget its files."""
        if self._session is not None:
            os.kill(self._session.pid, signal.SIGKILL)
            os.waitpid(self._session.pid, 0)
            self._session.close()
            self._session = None
        self._level.sweep(0)
        self._level.reset()


def _read_ends(pipes: list[tuple[int, int]]) -> list[int]:
    """Close our copies of the write ends, or the end of the child would not show."""
    for read, write in pipes:
        os.close(write)
        os.set_blocking(read, False)
    return [read for read, _ in pipes]


def _integer(header: dict[str, object], key: str) -> int:
    value = header[key]
    assert isinstance(value, int)
    return value
