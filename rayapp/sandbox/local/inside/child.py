"""The process that candidate code runs in: from the fork to the exit. Called by the template, in the child only.

    fork -> confine -> wait for a job -> limits -> "ready" -> candidate -> "done" -> os._exit

It is forked and confined before its job is known, so that a job finds it waiting. On the control socket it says
"ready", and closes it before candidate code begins: without "ready" the sandbox failed, after it whatever follows is
the code's doing. "Done", with the exit status, goes to a pipe of its own, so that the answer need not wait for the
process to exit.
"""

from __future__ import annotations

import _socket
import io
import marshal
import os
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rayapp.sandbox.local.inside import files
from rayapp.sandbox.local.inside.execution import MAX_CONTROL_BYTES, READY
from rayapp.sandbox.local.levels.level import Level, Place
from rayapp.sandbox.local.levels.limits import Bounds, lower
from rayapp.sandbox.local.wire import memory_file, read_memory_file
from rayapp.sandbox.verdict import harness

DESCRIPTORS = (1, 2, 3, 4, 5)
"""Numbers that a child's descriptors get: the template keeps them free, and the kernel gives out the lowest."""
_STREAM_FDS = DESCRIPTORS[:2]
"""Standard output and error. Only these stay open in a command that the candidate executes."""
_RESULT_FD, _DONE_FD, _CONTROL_FD = DESCRIPTORS[2:]
_JOB_FD = _CONTROL_FD + 1
"""The first number that is free in a child, and so the number of the job's memory file; standard input is the next."""
_TWO_FDS = 2 * 4
"""Bytes of two descriptors in a control message."""
_MAX_FD = 1 << 16
_SPACE = socket.CMSG_SPACE(_TWO_FDS)
_MAX_ORDER_BYTES = 400
"""Size of the buffer that Python makes for each read: small, so that it does not disturb the heap."""

Job = tuple[str, Mapping[str, str], tuple[object, ...]]
"""Kind, environment, and what the kind needs: see `_run`."""
Order = tuple[Bounds, bool, bytes]
"""The zygote's order with a job: resource limits, whether it begins a session, the token before a status."""
_HARMLESS: Order = ((resource.RLIMIT_MEMLOCK, 0),), False, b""
_REHEARSALS = 10
_CODE = """
import math
def f(items):
    found = {}
    for index, item in enumerate(sorted(map(str, items))):
        found[index] = item.upper() if len(item) > 1 else [item]
    return found, math.inf
print("{}")
"""
_PIECES: tuple[Job, ...] = (("calls", {}, (_CODE, "f", ['[[1, 2.5, null, "a"]]'])), ("script", {}, (_CODE,)))
_seed: Callable[[], None] = super(random.Random, random.seed.__self__).seed  # type: ignore[attr-defined]
"""Seeds the generator behind the functions of `random`, without `random.seed`'s own checks."""


def run(level: Level, place: Place, control: _socket.socket) -> NoReturn:
    """Wait for a job, run it, and end; in a session, wait for the next one instead."""
    status = 1
    try:
        _confine(level, place, control)
        status = _obey(control)
    finally:
        # Skip the interpreter's shutdown, which would run the candidate's atexit handlers.
        os._exit(status)


def _confine(level: Level, place: Place, control: _socket.socket) -> None:
    try:
        level.confine(place)
        os.closerange(_JOB_FD, _MAX_FD)
        _seed()
    except BaseException as error:  # boundary: see `_give_up`
        _give_up(control, error)


def rehearse(control: _socket.socket) -> None:
    """Run sample jobs as a child would, in the template itself and once, so that each child writes to fewer pages.

    CPython prepares itself as it runs code: it specializes bytecode, fills caches, makes objects on their first use,
    takes memory for them. All of that writes to memory. What the template has done before it forks, its children find
    done; what it has not, each child does anew, and every page that it writes to is copied for it alone. After some
    repetitions (`_REHEARSALS`) nothing more changes. The streams go to /dev/null meanwhile; modules that the sample
    jobs imported, and where they looked for them, are forgotten.
    """
    modules, path = dict(sys.modules), list(sys.path)
    with Path(os.devnull).open("w") as nowhere:
        for piece in _PIECES * _REHEARSALS:
            for descriptor in DESCRIPTORS:
                os.dup2(nowhere.fileno(), descriptor)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                os.dup2(theirs.fileno(), _CONTROL_FD)
                job = memory_file(marshal.dumps(piece))  # type: ignore[arg-type]
                socket.send_fds(ours, [marshal.dumps(_HARMLESS)], [job])
                os.close(job)
                _obey(control)
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.path[:] = path
    sys.modules["__main__"] = modules["__main__"]


def _obey(control: _socket.socket) -> int:
    """Do one job, from its arrival until "done". Returns the exit status."""
    try:
        for stream in _STREAM_FDS:
            os.set_inheritable(stream, True)
        job, (bounds, is_session, token) = _next_job(control)
        lower(bounds)
        _set_environment(job)
    except BaseException as error:  # boundary: see `_give_up`
        _give_up(control, error)
    if is_session:
        _serve(job, control, token)
    status = 1
    control.send(READY)
    os.close(_CONTROL_FD)
    try:
        status = _run(job)
    finally:
        _flush()
        os.write(_DONE_FD, token + bytes((status & 0xFF,)))
    return status


def _give_up(control: _socket.socket, error: BaseException) -> NoReturn:
    """Report an error from before candidate code, which is the sandbox's failure, and end."""
    control.send(harness.describe(error).encode("utf-8", "replace")[:MAX_CONTROL_BYTES])
    os._exit(1)


def _serve(job: Job, control: _socket.socket, token: bytes) -> NoReturn:
    """Serve a session: run one script after the other in the same names, until killed."""
    names = harness.main_names()
    control.send(READY)
    while True:
        sys.stdin = io.TextIOWrapper(io.FileIO(os.dup(0)))
        status = harness.run_script(str(job[2][0]), names, send)
        _flush()
        os.write(_DONE_FD, token + bytes((status,)))
        job, _ = _next_job(control)
        _set_environment(job)


def _next_job(control: _socket.socket) -> tuple[Job, Order]:
    """Wait for a job. The packet holds the order; the first memory file the job, a second one standard input."""
    packet, ancillary, _, _ = control.recvmsg(_MAX_ORDER_BYTES, _SPACE)
    if not ancillary:
        os._exit(0)  # the zygote has closed its end: there will be no job
    data = ancillary[0][2]
    job_fd = int.from_bytes(data[:4], sys.byteorder)
    job = marshal.loads(read_memory_file(job_fd))
    os.close(job_fd)
    if len(data) == _TWO_FDS:
        _set_input(int.from_bytes(data[4:], sys.byteorder))
    return job, marshal.loads(packet)


def _set_input(stdin: int) -> None:
    """Make this memory file standard input, which is /dev/null otherwise."""
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.close(stdin)


def _set_environment(job: Job) -> None:
    """Add the job's variables to the environment, which held only `harness.HASH_SEED` until now."""
    if job[1]:
        os.environ.update(job[1])


def send(payload: bytes) -> None:
    """Write one frame, whole: 4 bytes of length, then the payload."""
    view = memoryview(len(payload).to_bytes(4, "little") + payload)
    while view:
        view = view[os.write(_RESULT_FD, view) :]


def _run(job: Job) -> int:
    """Run the job by its kind. Returns the exit status."""
    kind, _, given = job
    if kind == "calls":
        code, function, inputs = given
        harness.run_calls(code, function, inputs, send)  # type: ignore[arg-type]
        return 0
    if kind == "command":
        return _execute(given)  # type: ignore[arg-type]
    if kind in files.KINDS:
        return files.run(*given, send)  # type: ignore[arg-type, call-arg]
    status = harness.run_script(given[0], harness.main_names(), send)  # type: ignore[arg-type]
    _join_threads()
    return status


def _execute(argv: Sequence[str]) -> int:
    try:
        os.execvpe(argv[0], list(argv), os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 126 if isinstance(error, PermissionError) else 127


def _join_threads() -> None:
    """Wait for threads that are no daemons, as Python does at the end of any script."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # boundary: the candidate may have replaced or closed it
            continue
