"""The process that candidate code runs in: from the fork to the exit. Called by the zygote, in the child only.

    fork -> descriptors 1-4 -> confine -> wait for a job -> limits -> "ready" -> candidate -> "done" -> os._exit

It is forked and confined before its job is known, so that a job finds it waiting. On the control socket it says
"ready", and closes it before candidate code begins: without "ready" the sandbox failed, after it whatever follows is
the code's doing. "Done", with the exit status, goes to a pipe of its own, so that the answer need not wait for the
process to exit.
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from rayapp.sandbox import harness
from rayapp.sandbox.local import files
from rayapp.sandbox.local.execution import MAX_CONTROL_BYTES, READY
from rayapp.sandbox.local.level import Level, Place
from rayapp.sandbox.local.limits import Limits
from rayapp.sandbox.local.wire import read_memory_file

RESULT_FD, _DONE_FD = 3, 4
_SESSION_CPU_S = 600
"""Of all runs in one session together; each run has its own deadline."""
_MAX_FD = 1 << 16

Job = dict[str, object]


def run(level: Level, place: Place, pipes: Sequence[int], control: socket.socket, token: bytes) -> NoReturn:
    """Wait for a job, run it, and end; in a session, wait for the next one instead.

    Args:
        pipes: write ends for stdout, stderr, results and "done".
        control: jobs come in here.
        token: goes before the status on the last pipe; see `execution.Done`.
    """
    try:
        _take_descriptors(*pipes)
        level.confine(place)
        _close_all_but(control.fileno())
        job = _next_job(control)
        level.limit(_limits_of(job), running=int(str(job["running"])))
        _set_input(job)
    except BaseException as error:  # boundary: whatever fails before candidate code is the sandbox's failure
        control.send(harness.describe(error).encode("utf-8", "replace")[:MAX_CONTROL_BYTES])
        os._exit(1)
    if job["session"]:
        _serve(job, control, token)
    status = 1
    control.send(READY)
    control.close()
    try:
        status = _run(job)
    finally:
        _flush()
        os.write(_DONE_FD, token + bytes([status & 0xFF]))
        # No interpreter shutdown: atexit handlers and daemon threads of the candidate have nothing more to say.
        os._exit(status)


def _serve(job: Job, control: socket.socket, token: bytes) -> NoReturn:
    """One script after the other in the same names, until killed."""
    names = harness.main_names()
    control.send(READY)
    while True:
        sys.stdin = io.TextIOWrapper(io.FileIO(os.dup(0)))
        status = harness.run_script(str(job["code"]), names, send)
        _flush()
        os.write(_DONE_FD, token + bytes([status]))
        job = _next_job(control)
        _set_input(job)


def _next_job(control: socket.socket) -> Job:
    """The packet has the limits; the job is in the first memory file, standard input in the second, if there is one."""
    packet, descriptors, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 2)
    if not descriptors:
        os._exit(0)  # the zygote has closed its end: there will be no job
    job: Job = json.loads(read_memory_file(descriptors[0]))
    os.close(descriptors[0])
    return {**job, **json.loads(packet), "stdin": descriptors[1] if len(descriptors) > 1 else -1}


def _limits_of(job: Job) -> Limits:
    limits = Limits(**job["limits"])  # type: ignore[arg-type]
    if job["session"]:
        return Limits(
            cpu_s=_SESSION_CPU_S,
            memory_mib=limits.memory_mib,
            disk_mib=limits.disk_mib,
            max_processes=limits.max_processes,
        )
    return limits


def _set_input(job: Job) -> None:
    """Standard input, which is /dev/null unless there is some, and the environment, which is empty until now."""
    stdin = job["stdin"]
    assert isinstance(stdin, int)
    if stdin >= 0:
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.close(stdin)
    if env := job.get("env"):
        os.environ.update(env)  # type: ignore[call-overload]


def _take_descriptors(*pipes: int) -> None:
    """Put the pipes at 1 to 4, which the zygote keeps free for this."""
    for target, pipe in enumerate(pipes, start=1):
        # The results and "done" close on exec: a command that the candidate starts has no business with them.
        os.dup2(pipe, target, inheritable=target < RESULT_FD)


def _close_all_but(kept: int) -> None:
    os.closerange(_DONE_FD + 1, kept)
    os.closerange(kept + 1, _MAX_FD)


def send(payload: bytes) -> None:
    """Write one frame, whole: 4 bytes of length, then the payload."""
    view = memoryview(struct.pack("<I", len(payload)) + payload)
    while view:
        view = view[os.write(RESULT_FD, view) :]


def _run(job: Job) -> int:
    """Returns the exit status."""
    kind = job["kind"]
    if kind == "calls":
        inputs = job["inputs"]
        assert isinstance(inputs, list)
        harness.run_calls(str(job["code"]), str(job["function"]), inputs, send)
        return 0
    if kind == "command":
        return _execute(job)
    if kind in files.KINDS:
        return files.run(job, send)
    status = harness.run_script(str(job["code"]), harness.main_names(), send)
    _join_threads()
    return status


def _execute(job: Job) -> int:
    argv = job["argv"]
    assert isinstance(argv, list)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 126 if isinstance(error, PermissionError) else 127


def _join_threads() -> None:
    """As at the end of any script, where Python waits for threads that are no daemons."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # boundary: the candidate may have replaced or closed it
            continue
