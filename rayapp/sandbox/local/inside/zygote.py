"""The warm interpreter. It has a confined child forked for each execution, watches the child, and answers with its
output.

The next job most likely resembles the last one, so a child for it is forked and confined in advance; two, if children
can't reach each other. A job starts only when all processes of the job before it are dead.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import time
from collections import deque
from dataclasses import replace

from rayapp.sandbox.local import wire
from rayapp.sandbox.local.inside.child import FILE_KINDS
from rayapp.sandbox.local.inside.execution import Child, Ends, Execution, Stream
from rayapp.sandbox.local.inside.template import Template
from rayapp.sandbox.local.levels.level import Level, Place
from rayapp.sandbox.local.levels.limits import Limits, Use

MAX_RESULT_BYTES = 8 << 20  # all frames of one execution
_SESSION_CPU_S = 600  # all runs of a session together; each run also has its own deadline
_OWN_PROCESSES = 2  # the zygote and its template
# Later children are forked for the folder of the last job; one that doesn't fit the next job is not used.
_FIRST_PLACE = Place(home=False, writable=False, disk_mib=16)


class Zygote:
    """Loop that serves one provider over one channel until the channel closes."""

    def __init__(self, channel: socket.socket, level: Level, *, is_for_images: bool = False) -> None:
        self._channel = channel
        self._is_for_images = is_for_images
        self._usual_place = _FIRST_PLACE
        self._level = level
        self._template = Template.start(level, channel)
        self._usage = level.usage
        self._usage.look_at_children_of(self._template.seen_as)
        self._session: Child | None = None
        self._spares: deque[Child] = deque()
        self._home_is_used = False
        self._next_ends: Ends | None = None

    def serve(self) -> None:
        self._fork_usual_spares()
        while True:
            try:
                header, descriptors = wire.receive(self._channel)
            except EOFError:
                return
            try:
                if header.get("reset"):
                    self._reset()
                    wire.send(self._channel, header)
                elif header.get("own_processes"):
                    wire.send(self._channel, {"own_processes": self._own_processes()})
                elif descriptors:
                    self._execute(header, descriptors)
                # any other message is a cancellation that came after the end of its execution
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _execute(self, header: dict[str, object], descriptors: list[int]) -> None:
        started = time.monotonic()
        limits = Limits(**header["limits"])  # type: ignore[arg-type]
        place = Place(
            home=bool(header["home"]),
            writable=header["kind"] in FILE_KINDS,
            disk_mib=limits.disk_mib,
            image=str(header["image"]),
        )
        if not self._home_is_used and self._spares and self._spares[0].place != place:
            self.forget()  # the folder and children that an earlier sandbox left as new are for another kind of job
        self._home_is_used |= place.home or bool(place.image)
        if not place.writable:
            self._usual_place = place
        is_resumed = bool(header["session"]) and self._session is not None
        ran = self._session_child(place, limits) if header["session"] else self._fresh_child(place)
        self._order(ran, limits, descriptors, is_session=bool(header["session"]))
        if not ran.pid:
            self._template.settle()
        execution = self._execution(ran, limits, _integer(header, "max_output_bytes"))
        execution.started, execution.timeout_s = started, float(header["timeout_s"])  # type: ignore[arg-type]
        execution.is_ready = is_resumed
        if is_resumed:
            self._usage.begin(execution.use, self._others(ran))
        self._next_ends = self._next_ends or Ends()
        try:
            execution.watch(self._channel)
            self._answer(header, execution, time.monotonic() - started)
        finally:
            os.close(execution.target)
        self._clean_up(ran, execution)

    def _order(self, ran: Child, limits: Limits, descriptors: list[int], *, is_session: bool) -> None:
        if is_session:
            limits = replace(limits, cpu_s=_SESSION_CPU_S)
        bounds = self._level.bounds(limits, running=self._num_running())
        order = bounds, is_session, ran.ends.done.token
        with contextlib.suppress(OSError):  # the child died while confining itself; the socket holds its error report
            socket.send_fds(ran.ends.control, [marshal.dumps(order)], descriptors)  # type: ignore[arg-type]

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
        # After the answer, so that the caller need not wait, and before the next job.
        ran.pid = execution.pid
        if ran is not self._session:
            _, is_as_new = self._end(ran.pid)
            ran.ends.close()
            if not is_as_new:
                self._end_spares()
            self._fork_spares(ran.place)
        elif execution.goes_on:
            self._template.end(session=ran.pid)
        else:
            self._end_session()

    def _fresh_child(self, place: Place) -> Child:
        if self._spares and self._spares[0].place != place:
            self._end_spares()
        return self._spares.popleft() if self._spares else self._fork(place)

    def _session_child(self, place: Place, limits: Limits) -> Child:
        self._end_spares()
        if self._session is None:
            self._session = self._fork(place)
            self._template.settle()
            self._session.max_processes = limits.max_processes
        else:
            self._session.forget_what_it_said()
        return self._session

    def _fork_spares(self, place: Place) -> None:
        while len(self._spares) < self._level.num_spares:
            self._spares.append(self._fork(place))

    def _fork(self, place: Place) -> Child:
        ends, self._next_ends = self._next_ends or Ends(), None
        child = Child(ends=ends, place=place)
        self._template.fork(child)
        ends.close_given()
        return child

    def _execution(self, ran: Child, limits: Limits, max_output: int) -> Execution:
        caps = (max_output, max_output, MAX_RESULT_BYTES)
        starts = (0, max_output, 2 * max_output)
        use = Use()
        return Execution(
            pid=ran.pid,
            end=lambda pid: self._end(pid)[0],
            control=ran.ends.control,
            done=ran.ends.done,
            streams=[
                Stream(source, start, cap) for source, start, cap in zip(ran.ends.sources, starts, caps, strict=True)
            ],
            target=os.memfd_create("answer", os.MFD_CLOEXEC),
            limits=limits,
            use=use,
            look=lambda: self._usage.look(use, self._others(ran)),
        )

    def _num_running(self) -> int:
        """Return how many processes count against this user's limit but don't belong to the execution."""
        return _OWN_PROCESSES + len(self._spares) + (self._session.max_processes if self._session else 0)

    def _others(self, running: Child) -> set[int]:
        self._template.settle()
        return {child.pid for child in (*self._spares, self._session) if child is not None and child is not running}

    def _own_processes(self) -> list[int]:
        self._template.settle()
        spares = self._usage.ids_of_children({spare.pid for spare in self._spares})
        return [int(self._usage.id_of_this_process()), int(self._template.seen_as), *spares]

    def _end(self, pid: int) -> tuple[int, bool]:
        return self._template.end(pid, session=self._session.pid if self._session else 0)

    def _end_spares(self) -> None:
        self._template.settle()
        while self._spares:
            spare = self._spares.popleft()
            spare.ends.close()
            self._end(spare.pid)

    def _end_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.ends.close()
            self._template.end(session.pid)

    def _reset(self) -> None:
        # A folder that is as new goes to the next sandbox, with the children that wait.
        if self._home_is_used:
            self._end_session()
            self._home_is_used = False
            if not self._template.is_unchanged():
                self.forget()
            self._fork_usual_spares()

    def _fork_usual_spares(self) -> None:
        if not self._is_for_images:
            self._fork_spares(self._usual_place)

    def forget(self) -> None:
        """End the sandbox's session and every process that can see its files, and remove the files."""
        self._end_spares()
        self._end_session()
        self._template.reset()
        self._home_is_used = False


def _integer(header: dict[str, object], key: str) -> int:
    value = header[key]
    assert isinstance(value, int)
    return value
