"""The process that candidate code runs in: from the fork to the exit. Called by the zygote, in the child only.

    fork -> descriptors 0-3 -> read the job -> confine -> tell that it is ready -> close all else -> candidate -> os._exit

"Ready" goes to the zygote on a pipe of its own, closed before candidate code begins. Without it the sandbox failed; after it
whatever follows is the code's doing. On the result pipe the code could read it back, through /proc/self/fd, and so pass off
its own failure as the sandbox's.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import socket
import struct
import sys
from dataclasses import replace
from typing import NoReturn

from rayapp.sandbox import harness
from rayapp.sandbox.local import files
from rayapp.sandbox.local.level import Level
from rayapp.sandbox.local.limits import Limits
from rayapp.sandbox.local.wire import read_memory_file

RESULT_FD = 3
_CONTROL_FD, _DONE_FD = 4, 5
"""In a session only."""
READY = b"."
_SESSION_CPU_S = 600
"""Of all runs in one session together; each run has its own deadline."""
_MAX_FD = 1 << 16

Job = dict[str, object]


def run(
    level: Level, job_fd: int, pipes: tuple[int, int, int], status_fd: int, limits: Limits, *, home: bool, running: int
) -> NoReturn:
    """Run the job in this process and end it.

    Args:
        pipes: write ends for stdout, stderr and results.
        status_fd: write end on which to say that candidate code begins, or why it can't.
        home: run in the sandbox's own folder.
        running: processes that count against the limit without being this execution's.
    """
    status = 1
    try:
        _take_descriptors(*pipes)
        job: Job = json.loads(read_memory_file(job_fd))
        prepare(job)
        level.confine(limits, home=home, writable=job["kind"] in files.KINDS, running=running)
    except BaseException as error:  # boundary: whatever fails before candidate code is the sandbox's failure
        _fail(status_fd, error)
    os.write(status_fd, READY)
    os.closerange(RESULT_FD + 1, _MAX_FD)
    try:
        status = run_job(job)
    finally:
        flush()
        # No interpreter shutdown: atexit handlers and threads of the candidate have nothing more to say.
        os._exit(status)


def run_session(
    level: Level, control_fd: int, done_fd: int, pipes: tuple[int, int, int], status_fd: int, limits: Limits
) -> NoReturn:
    """Run one script after the other in the same names, until killed.

    Args:
        pipes, status_fd: as in `run`.
        control_fd: a socket on which jobs arrive.
        done_fd: a pipe that gets one byte at the end of each.
    """
    try:
        _take_descriptors(*pipes)
        prepare({})
        level.confine(replace(limits, cpu_s=_SESSION_CPU_S), home=True, writable=False, running=1)
        os.dup2(control_fd, _CONTROL_FD, inheritable=False)
        os.dup2(done_fd, _DONE_FD, inheritable=False)
        control = socket.socket(fileno=_CONTROL_FD)
    except BaseException as error:  # boundary: as in `run`
        _fail(status_fd, error)
    os.write(status_fd, READY)
    os.closerange(_DONE_FD + 1, _MAX_FD)
    names = harness.main_names()
    while True:
        job = _next_job(control)
        os.environ.update(job["env"])  # type: ignore[arg-type]
        sys.stdin = io.StringIO(str(job["stdin"]))
        harness.run_script(str(job["code"]), names, send)
        flush()
        os.write(_DONE_FD, b".")


def _fail(status_fd: int, error: BaseException) -> NoReturn:
    # At most PIPE_BUF bytes: written whole or not at all, and never blocking.
    os.write(status_fd, harness.describe(error).encode("utf-8", "replace")[:4096])
    os._exit(1)


def _next_job(control: socket.socket) -> Job:
    _, descriptors, _, _ = socket.recv_fds(control, 16, 1)
    if not descriptors:
        os._exit(0)
    try:
        job: Job = json.loads(read_memory_file(descriptors[0]))
    finally:
        os.close(descriptors[0])
    return job


def send(payload: bytes) -> None:
    """Write one frame, whole: 4 bytes of length, then the payload."""
    view = memoryview(struct.pack("<I", len(payload)) + payload)
    while view:
        view = view[os.write(RESULT_FD, view) :]


def _take_descriptors(*pipes: int) -> None:
    """Put the pipes at 1, 2 and 3, which the zygote keeps free for this."""
    for target, pipe in enumerate(pipes, start=1):
        # The result pipe closes on exec: a command that the candidate starts has no business with it.
        os.dup2(pipe, target, inheritable=target != RESULT_FD)


def prepare(job: Job) -> None:
    """Standard input, which is /dev/null already, and the environment, which is empty already."""
    if stdin := job.get("stdin"):
        _give_stdin(str(stdin).encode("utf-8", "surrogatepass"))
    if env := job.get("env"):
        os.environ.update(env)  # type: ignore[call-overload]


def _give_stdin(data: bytes) -> None:
    source = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(source, view) :]
    os.lseek(source, 0, os.SEEK_SET)
    # Sealed: it is memory of this machine that no limit of the candidate covers.
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(source, fcntl.F_ADD_SEALS, seals)
    os.dup2(source, 0)
    os.close(source)


def run_job(job: Job) -> int:
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
    return harness.run_script(str(job["code"]), harness.main_names(), send)


def _execute(job: Job) -> int:
    argv = job["argv"]
    assert isinstance(argv, list)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 126 if isinstance(error, PermissionError) else 127


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue
