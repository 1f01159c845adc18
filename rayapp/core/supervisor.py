"""Run a program under a supervisor. When the program or the caller ends, it kills all processes of the program.

    our process --pipe to standard input--> supervisor -> program -> processes of any session and group

The pipe closes when our process ends, even by SIGKILL. A script without imports of rayapp, for Python 3.9: `watcher.py`
uses its functions in remote sandboxes.
"""

# Don't import pathlib: its import would take longer than the rest of this script.
# ruff: noqa: PTH123, PTH208
from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ROUND_S = 0.002


def main(command: list[str], *, listens: bool) -> NoReturn:
    adopt_orphans()
    for number in _HANDLED:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the program would inherit it
    pid = os.fork()
    if pid == 0:
        _become(command, listens=listens)
    _wait(pid)
    status = end_tree(pid)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status in _HANDLED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process instead of init's."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _become(command: list[str], *, listens: bool) -> NoReturn:
    if not listens:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND)


def _wait(pid: int) -> None:
    poll = select.poll()
    poll.register(0, 0)  # poll for a hang-up alone, because the program may read the data
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.poll()


def end_tree(program: int, *, most_rounds: int = sys.maxsize) -> int:
    """Kill and reap this process's children, and theirs, until there are none (at most `most_rounds`). Return the exit
    status of `program`, even if it ended before; -9 if it could not be reaped."""
    status = -int(signal.SIGKILL)
    for _ in range(most_rounds):
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == program:
                    status = os.waitstatus_to_exitcode(reaped[1])
        except ChildProcessError:
            break
        time.sleep(_ROUND_S)
    return status


def _children() -> list[int]:
    """Return the children, including zombies, which a signal doesn't harm."""
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
