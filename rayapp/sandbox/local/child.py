"""The process that candidate code runs in: from the fork to the exit. Called by the zygote, in the child only.

    fork -> descriptors 0-3, everything else closed -> read the job -> confine -> frame "ready" -> candidate -> os._exit

The frame "ready" is the first one on the result pipe. Candidate code can't have written it, so a pipe without it means
that the sandbox failed, and one with it that whatever follows is the code's doing.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
from typing import NoReturn

from rayapp.sandbox import harness
from rayapp.sandbox.local.level import Level, Limits
from rayapp.sandbox.local.wire import read_memory_file

RESULT_FD = 3
_SPARE_FD = 64
"""Above everything the zygote has open when it forks, below RLIMIT_NOFILE."""


def run(level: Level, job_fd: int, pipes: tuple[int, int, int], limits: Limits, tmp: str | None) -> NoReturn:
    """Run the job in this process and end it.

    Args:
        pipes: write ends for stdout, stderr and results.
    """
    status = 1
    try:
        job = json.loads(read_memory_file(job_fd))
        _take_descriptors(*pipes)
        _give_stdin(job.get("stdin", "").encode("utf-8", "surrogatepass"))
        os.environ.clear()
        os.environ.update(job.get("env", {}))
        level.confine(limits, tmp)
    except BaseException as error:  # boundary: whatever fails before candidate code is the sandbox's failure
        send(harness.frame("setup", harness.describe(error)))
        os._exit(status)
    send(harness.frame("ready"))
    try:
        status = _run_job(job)
    finally:
        _flush()
        # No interpreter shutdown: atexit handlers and threads of the candidate have nothing more to say.
        os._exit(status)


def send(payload: bytes) -> None:
    """One frame on the result pipe: 4 bytes of length, then the payload."""
    view = memoryview(struct.pack("<I", len(payload)) + payload)
    while view:
        view = view[os.write(RESULT_FD, view) :]


def _take_descriptors(*pipes: int) -> None:
    """Put the pipes at 1, 2 and 3 and close all else: nothing of the zygote's may be open in candidate code."""
    spares = [fcntl.fcntl(pipe, fcntl.F_DUPFD, _SPARE_FD) for pipe in pipes]
    for target, spare in enumerate(spares, start=1):
        # The result pipe closes on exec: a command that the candidate starts has no business with it.
        os.dup2(spare, target, inheritable=target != RESULT_FD)
    os.closerange(RESULT_FD + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 65536 else 65536)


def _give_stdin(data: bytes) -> None:
    if not data:
        source = os.open(os.devnull, os.O_RDONLY)
    else:
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


def _run_job(job: dict[str, object]) -> int:
    """Returns the exit status."""
    code = str(job["code"])
    if job["kind"] == "calls":
        inputs = job["inputs"]
        assert isinstance(inputs, list)
        harness.run_calls(code, str(job["function"]), inputs, send)
        return 0
    return harness.run_script(code, harness.main_names(), send)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: PERF203  (boundary: the candidate may have replaced or closed it)
            continue
