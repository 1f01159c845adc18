"""The interface of isolation levels, called at each point of an execution, and the level that does nothing.

    zygote boot: enter() -> in the template, for each execution: prepare(), fork()
                              -> in the child: confine -> candidate code
                              -> in the template, when it ended: sweep()

`namespaces.py` and `landlocked.py` have the levels that isolate. Runs in a zygote and its template only.
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
from rayapp.sandbox.local.levels.limits import Bounds, Limits, resource_bounds
from rayapp.sandbox.local.levels.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an execution works, and whether it may write there."""

    home: bool
    """In the sandbox's own folder, which lasts until `Level.reset`; else in a fresh one, where the level has any."""
    writable: bool
    """Our own code runs, not the candidate's: it may write to the home at every level."""
    disk_mib: int


class Level(Protocol):
    """One way to keep candidate code in."""

    name: str
    num_spares: int
    """Children that wait for a job: two where an execution can't reach the one that waits beside it, else one."""
    listener: socket.socket | None
    """Set by `enter`, where the level has a loopback: who takes it accepts what executions connect."""
    usage: Usage
    """Set by `enter`: how much the executions use. Whose children they are is for the zygote to say."""

    def enter(self) -> None:
        """Once, when the zygote starts.

        Raises:
            OSError: this node refuses a step; its strerror names it.
        """

    def fork(self) -> int:
        """Fork, as os.fork does; the child is the root of everything the execution starts."""

    def prepare(self, place: Place) -> None:
        """Before each fork: make the place to work in."""

    def confine(self, place: Place) -> None:
        """In the child, before it gets its job: give up everything that candidate code must not have."""

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        """Resource limits for the child, worked out in the zygote.

        Args:
            running: processes of this level's user that count against its limit without being the candidate's.
        """

    def reset(self) -> None:
        """Remove the sandbox's own folder: it was given back."""

    def sweep(self, session: int) -> bool:
        """End everything that an execution left, except the session with this process id, if any.

        Returns:
            True if children forked before may be given a job, as their place is unchanged.
        """


class Unisolated:
    """No isolation: resource limits only. Runs only where the user spelled out `allow_unisolated: true`."""

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
    """Kill and reap until `kept` is the only child; the kernel hands us the children of those we killed."""
    while children := set(_children()) - {kept}:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    """Process ids. Read in the plainest way: each page the zygote writes to is copied anew after every fork."""
    descriptor = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(descriptor, 4096):
            text += part
    finally:
        os.close(descriptor)
    return [int(pid) for pid in text.split()]


def make_folder(prefix: str) -> str:
    """A new folder that only this user may enter. (The module tempfile would bring in libraries that each fork
    copies.)"""
    path = f"/tmp/{prefix}{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def remove_folder(path: str) -> None:
    """Remove a folder and all that is in it; candidate code may have put anything there."""
    for folder, names, files in os.walk(path, topdown=False):
        for name in (*names, *files):
            entry = Path(folder, name)
            with contextlib.suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with contextlib.suppress(OSError):
        os.rmdir(path)
