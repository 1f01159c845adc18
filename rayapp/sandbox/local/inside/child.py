"""The process in which candidate code runs: fork -> confine -> wait for a job -> limits -> "ready" -> code -> "done".

It is confined before its job is known, so that a job need not wait for a fork. If it ends before "ready", the sandbox
has failed; a later end is due to the code. "done" has a pipe of its own: the answer need not wait for the exit.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rayapp.sandbox.local.inside.execution import MAX_CONTROL_BYTES, READY
from rayapp.sandbox.local.levels.level import Level, Place
from rayapp.sandbox.local.levels.limits import Bounds, lower
from rayapp.sandbox.local.wire import memory_file, read_memory_file
from rayapp.sandbox.verdict import harness

# This code runs in each child, where the first use of a function copies pages of memory, so it uses os and not pathlib.
# ruff: noqa: PTH103, PTH120, PTH123


FILE_KINDS = ("write", "read")
GUEST = "guest"


def run_file_request(path: str, given: bytes | int, emit: Callable[[bytes], None]) -> int:
    """Read or write one file, confined like the candidate, so that symbolic links can't lead outside. `given` has the
    bytes to write, or the maximum number of bytes to read."""
    try:
        if isinstance(given, bytes):
            _write(path, given)
        else:
            _read(path, given)
    except OSError as error:
        emit(harness.frame("failed", f"{type(error).__name__}: {error.strerror}: {path}", 1))
        return 1
    emit(harness.frame("exited", 0))
    return 0


def _write(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str, max_bytes: int) -> None:
    # Open without blocking: candidate code may have put a named pipe there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while max_bytes > 0 and (data := os.read(descriptor, min(max_bytes, 1 << 16))):
            max_bytes -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]
    finally:
        os.close(descriptor)


# Numbers of a child's pipes and socket. The template keeps them free: a received descriptor gets the lowest free
# number.
DESCRIPTORS = (1, 2, 3, 4, 5)
_STREAM_FDS = DESCRIPTORS[:2]  # stay open in commands that the candidate executes
_RESULT_FD, _DONE_FD, _CONTROL_FD = DESCRIPTORS[2:]
_JOB_FD = _CONTROL_FD + 1  # of the job's memory file; standard input gets the next number
_TWO_FDS = 2 * 4  # in a socket's control message
_MAX_FD = 1 << 16
_SPACE = socket.CMSG_SPACE(_TWO_FDS)
_MAX_ORDER_BYTES = 400  # a small buffer changes few pages of the heap

# Kind, environment, arguments for the kind (see `_run`), and working folder (empty: the level chooses it).
Job = tuple[str, Mapping[str, str], tuple[object, ...], str]
Order = tuple[Bounds, bool, bytes]  # limits, True if the job begins a session, the token to send with the status
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
_PIECES: tuple[Job, ...] = (
    ("calls", {}, (_CODE, "f", ['[[1, 2.5, null, "a"]]']), ""),
    ("script", {}, (_CODE,), ""),
)
# Seeds `random` without the checks of `random.seed`.
_seed: Callable[[], None] = super(random.Random, random.seed.__self__).seed  # type: ignore[attr-defined]


def run(level: Level, place: Place, control: _socket.socket) -> NoReturn:
    """Run one job and end the process; in a session, wait for the next job instead."""
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
    except BaseException as error:  # boundary: `_give_up` reports the error as a failure of the sandbox
        _give_up(control, error)


def rehearse(control: _socket.socket) -> None:
    """Run sample jobs in the template itself, so that each child writes to (and so copies) fewer pages of memory.

    When CPython runs code for the first times, it specializes bytecode, fills caches and allocates objects. After
    `_REHEARSALS` repetitions nothing more changes.
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
    try:
        for stream in _STREAM_FDS:
            os.set_inheritable(stream, True)
        job, (bounds, is_session, token) = _next_job(control)
        lower(bounds)
        _set_environment(job)
    except BaseException as error:  # boundary: `_give_up` reports the error as a failure of the sandbox
        _give_up(control, error)
    if is_session:
        _serve(job, control, token)
    if job[0] == GUEST:
        control.send(READY)
        os.close(_CONTROL_FD)
        _become_guest(job, token)
    status = 1
    control.send(READY)
    os.close(_CONTROL_FD)
    try:
        status = _run(job)
    finally:
        harness.flush()
        os.write(_DONE_FD, token + bytes((status & 0xFF,)))
    return status


def _give_up(control: _socket.socket, error: BaseException) -> NoReturn:
    control.send(harness.describe(error).encode("utf-8", "replace")[:MAX_CONTROL_BYTES])
    os._exit(1)


def _serve(job: Job, control: _socket.socket, token: bytes) -> NoReturn:
    if job[0] == GUEST:
        control.send(READY)
        os.set_inheritable(_DONE_FD, True)
        os.set_inheritable(_CONTROL_FD, True)
        _become_guest(job, token)
    names = harness.main_names()
    control.send(READY)
    while True:
        sys.stdin = io.TextIOWrapper(io.FileIO(os.dup(0)))
        status = harness.run_script(str(job[2][0]), names, send)
        harness.flush()
        os.write(_DONE_FD, token + bytes((status,)))
        job, _ = _next_job(control)
        _set_environment(job)


def _next_job(control: _socket.socket) -> tuple[Job, Order]:
    """Wait for a packet: it brings the order and two memory files, the job and the standard input."""
    packet, ancillary, _, _ = control.recvmsg(_MAX_ORDER_BYTES, _SPACE)
    if not ancillary:
        os._exit(0)  # the zygote has closed its end, so no job will come
    data = ancillary[0][2]
    job_fd = int.from_bytes(data[:4], sys.byteorder)
    job = marshal.loads(read_memory_file(job_fd))
    if job[0] != GUEST:
        os.close(job_fd)
    if len(data) == _TWO_FDS:
        _set_input(int.from_bytes(data[4:], sys.byteorder))
    return job, marshal.loads(packet)


def _set_input(stdin: int) -> None:
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.close(stdin)


def _set_environment(job: Job) -> None:
    if job[1]:
        os.environ.update(job[1])
    if job[3]:
        try:
            os.chdir(job[3])
        except FileNotFoundError:
            os.makedirs(job[3])
            os.chdir(job[3])


def send(payload: bytes) -> None:
    """Write one frame: 4 bytes of length, then the payload."""
    view = memoryview(len(payload).to_bytes(4, "little") + payload)
    while view:
        view = view[os.write(_RESULT_FD, view) :]


def _run(job: Job) -> int:
    kind, _, given, _ = job
    if kind == "calls":
        code, function, inputs = given
        harness.run_calls(code, function, inputs, send)  # type: ignore[arg-type]
        return 0
    if kind == "command":
        return _execute(given)  # type: ignore[arg-type]
    if kind in FILE_KINDS:
        return run_file_request(*given, send)  # type: ignore[arg-type, call-arg]
    status = harness.run_script(given[0], harness.main_names(), send)  # type: ignore[arg-type]
    harness.end_script()
    return status


def _become_guest(job: Job, token: bytes) -> NoReturn:
    """Execute the image's own Python, whose program (`guest.py`) reads the job from the memory file."""
    for descriptor in (_RESULT_FD, _JOB_FD):
        os.set_inheritable(descriptor, True)
    argv = [str(job[2][0]), "-s", "-c", str(job[2][1]), token.hex()]
    os._exit(_execute(argv))


def _execute(argv: Sequence[str]) -> int:
    try:
        os.execvpe(argv[0], list(argv), os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 126 if isinstance(error, PermissionError) else 127
