"""Run a program under a supervisor, which kills everything the program started when it or the caller ends.

    our process --pipe to standard input--> supervisor -> program -> processes of any session and group

The pipe closes when our process ends, even by SIGKILL. The supervisor is a script without imports of rayapp, so that it
starts in milliseconds: `python -I -S supervisor.py [--listens] COMMAND…` (see `programs.kept`). With --listens, the
program reads the pipe.
"""

# No pathlib: importing it would take longer than all the rest.
# ruff: noqa: PTH123, PTH208
from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(command: list[str], *, listens: bool) -> NoReturn:
    # Orphaned descendants become our children instead of init's.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _HANDLED:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the program would inherit it
    pid = os.fork()
    if pid == 0:
        _become(command, listens=listens)
    status = _wait(pid)
    _kill_all()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status in _HANDLED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _become(command: list[str], *, listens: bool) -> NoReturn:
    if not listens:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND)


def _wait(pid: int) -> int:
    """Return the program's exit status. Kill the program if the caller's end of the pipe closes first."""
    poll = select.poll()
    poll.register(0, 0)  # only for hang-up: the program may read the data
    program = os.pidfd_open(pid)
    poll.register(program, select.POLLIN)
    ready = dict(poll.poll())
    if 0 in ready and program not in ready:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_all() -> None:
    """Kill children until there are none: the children of each killed process become ours."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the pids of this process's children, including zombies, which a signal doesn't harm."""
    own = str(os.getpid())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[1:] if given[0] == "--listens" else given, listens=given[0] == "--listens")
