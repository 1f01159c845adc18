"""Program that a child of the zygote executes (execve) in the Python of a sandbox's image, to run the job's code.

It uses only the standard library of Python 3.9 or newer. File descriptors have the numbers in `child.DESCRIPTORS`.
"""

from __future__ import annotations

import io
import marshal
import os
import socket
import sys
from typing import Any

RESULT_FD, DONE_FD, CONTROL_FD, JOB_FD = 3, 4, 5, 6
# Program on the command line, which reads the job and runs it.
_BEGIN = """import marshal, os, sys
sys.path[:] = [folder for folder in sys.path if folder]
job = marshal.loads(os.pread(6, os.fstat(6).st_size, 0))
os.close(6)
names, harness = {"__name__": "rayapp_guest"}, {"__name__": "rayapp_harness"}
exec(compile(job[2][2], "<guest>", "exec"), names)
exec(compile(job[2][3], "<harness>", "exec"), harness)
names["main"](job, harness)
"""


def arguments(python: str, harness: str, kind: str, given: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments of a job whose kind is `child.GUEST`."""
    with open(__file__) as own:  # noqa: PTH123
        return python, _BEGIN, own.read(), harness, kind, given


def main(job: Any, harness: Any) -> None:
    """Run the job, and in a session all later jobs. Never return."""
    kind, given = job[2][4:6]
    status = 1
    try:
        if kind == "session":
            _serve(given, harness)
        if kind == "calls":
            code, function, inputs = given
            harness["run_calls"](code, function, inputs, _send)
            status = 0
        else:
            status = harness["run_script"](given[0], harness["main_names"](), _send)
            harness["end_script"]()
    finally:
        harness["flush"]()
        os._exit(status)


def _serve(given: Any, harness: Any) -> None:
    token, control, names = bytes.fromhex(sys.argv[1]), socket.socket(fileno=CONTROL_FD), harness["main_names"]()
    while True:
        sys.stdin = io.TextIOWrapper(io.FileIO(os.dup(0)))
        status = harness["run_script"](given[0], names, _send)
        harness["flush"]()
        os.write(DONE_FD, token + bytes((status,)))
        _, received, _, _ = control.recvmsg(400, socket.CMSG_SPACE(8))
        if not received:
            os._exit(0)
        data = received[0][2]
        job_fd = int.from_bytes(data[:4], sys.byteorder)
        job = marshal.loads(os.pread(job_fd, os.fstat(job_fd).st_size, 0))
        os.close(job_fd)
        if len(data) == 8:
            stdin = int.from_bytes(data[4:], sys.byteorder)
            os.lseek(stdin, 0, os.SEEK_SET)
            os.dup2(stdin, 0)
            os.close(stdin)
        given = job[2][5]


def _send(payload: bytes) -> None:
    view = memoryview(len(payload).to_bytes(4, "little") + payload)
    while view:
        view = view[os.write(RESULT_FD, view) :]
