"""The interface of isolation levels, called at each point of an execution, and the level that does nothing.

    zygote boot: enter() -> in the template, for each execution: prepare(), fork()
                              -> in the child: confine -> candidate code
                              -> in the template, when it ended: sweep()

`namespaces.py` and `landlock.py` have the levels that isolate. Runs in a zygote and its template only.
"""

# The zygote forks what it has loaded, and pathlib is slower to run in each child, hence os and not pathlib.
# ruff: noqa: PTH102, PTH106
from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rayapp.sandbox.local.levels import kernel
from rayapp.sandbox.local.levels.limits import Bounds, Limits, Usage, resource_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Working folder of an execution, and whether it may write there."""

    home: bool
    """True: the sandbox's own folder, which lasts until `Level.reset`; else a fresh one, if the level has any."""
    writable: bool
    """True if our own code runs, not the candidate's: it may write to the home at every level."""
    disk_mib: int
    image: str = ""
    """Name of the image's tree that is the root of the file system; empty for a view of this machine's system."""


class Level(Protocol):
    """One way to isolate candidate code."""

    name: str
    num_spares: int
    """Children that wait for a job: two if an execution can't reach the waiting one beside it, else one."""
    listener: socket.socket | None
    """Set by `enter` if the level has a loopback: accepts connections made by executions."""
    usage: Usage
    """Set by `enter`: measures the executions' use of resources. The zygote sets whose children to measure."""

    def enter(self) -> None:
        """Enter the level, once, when the zygote starts.

        Raises:
            OSError: this node refuses a step; its strerror names it.
        """

    def fork(self) -> int:
        """Fork, as os.fork does; the child is the root of everything the execution starts."""

    def prepare(self, place: Place) -> None:
        """Make the working folder, before each fork."""

    def confine(self, place: Place) -> None:
        """Give up everything that candidate code must not have; in the child, before it gets its job."""

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        """Return resource limits for the child, computed in the zygote.

        Args:
            running: processes of this level's user that count against its limit but are not the candidate's.
        """

    def reset(self) -> None:
        """Remove the own folder of a released sandbox."""

    def sweep(self, session: int) -> bool:
        """End everything that an execution left, except the session with this process id, if any.

        Returns:
            True if children forked earlier may be given a job, because their place is unchanged.
        """


class Unisolated:
    """No isolation: resource limits only. Runs only if the user set `allow_unisolated: true`."""

    name = "unisolated"
    num_spares = 1
    listener: socket.socket | None = None

    def __init__(self) -> None:
        self.usage = Usage(-1)
        self._home = ""

    def enter(self) -> None:
        self.usage = Usage.of_this_process()

    def fork(self) -> int:
        return kernel.fork()

    def prepare(self, place: Place) -> None:
        if place.home and not self._home:
            self._home = make_folder("rayapp-unisolated-")

    def confine(self, place: Place) -> None:
        os.setsid()
        os.chdir(self._home if place.home else "/tmp")

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        return resource_bounds(limits, num_running=None)

    def reset(self) -> None:
        if self._home:
            remove_folder(self._home)
            self._home = ""

    def sweep(self, session: int) -> bool:
        kill_descendants(session)
        return True  # there are none


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that `kill_descendants` finds them."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(kept: int) -> None:
    """Kill and reap until `kept` is the only child; the kernel makes the killed processes' children ours."""
    while children := set(_children()) - {kept}:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    """Return process ids. Plain calls only: each page the zygote writes to is copied again after every fork."""
    descriptor = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(descriptor, 4096):
            text += part
    finally:
        os.close(descriptor)
    return [int(pid) for pid in text.split()]


def make_folder(prefix: str) -> str:
    """Make a folder that only this user may enter. (The module tempfile would load libraries that each fork copies.)"""
    path = f"/tmp/{prefix}{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def remove_folder(path: str) -> OSError | None:
    """Remove a folder with all content; candidate code may have put anything there.

    Nested folders are moved side by side before they are emptied: no path gets long, and nothing recurses.

    Returns:
        The last error, if any: part of the folder is left then.
    """
    aside, number, problem = f"{path}.gone", 0, None
    with contextlib.suppress(OSError):
        os.mkdir(aside, 0o700)
    waiting = [Path(path)]
    while waiting:
        folder = waiting.pop()
        try:
            folder.chmod(0o700)
            for entry in list(folder.iterdir()):
                if not entry.is_dir() or entry.is_symlink():
                    entry.unlink()
                    continue
                number += 1
                entry.chmod(0o700)
                waiting.append(entry.rename(f"{aside}/{number}"))
            folder.rmdir()
        except OSError as error:
            problem = error
    with contextlib.suppress(OSError):
        os.rmdir(aside)
    return problem
