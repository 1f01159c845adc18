"""What an isolation level does at each point of an execution, and the level that does nothing.

    zygote boot: enter() -> for each execution: fork() -> in the child: confine, limit -> candidate code
                                                       -> in the zygote, when it ended: sweep()

`namespaces.py` and `landlocked.py` have the levels that isolate. Runs in the zygote only.
"""

# The zygote forks what it has loaded, and pathlib is slower to run in each child, hence os and not pathlib.
# ruff: noqa: PTH102, PTH106
from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rayapp.sandbox.local import kernel
from rayapp.sandbox.local.limits import Limits, set_limits
from rayapp.sandbox.local.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an execution works."""

    home: bool
    """In the sandbox's own folder, which lasts until `Level.reset`; else in a fresh one, where the level has any."""
    writable: bool
    """Our own code runs, not the candidate's: it may write to the home at every level."""
    disk_mib: int


class Level(Protocol):
    """How candidate code is kept in."""

    name: str
    usage: Usage
    """Set by `enter`: how much the executions of this zygote use."""

    def enter(self) -> None:
        """Once, when the zygote starts.

        Raises:
            OSError: this node refuses a step; its strerror names it.
        """

    def fork(self) -> int:
        """As os.fork; the child is the root of everything the execution starts."""

    def prepare(self, place: Place) -> Hashable:
        """Before each fork, in the zygote: make the place to work in.

        Returns:
            something equal for as long as a child confined for one place is as good as new for another.
        """

    def confine(self, place: Place) -> None:
        """In the child, before it gets its job: give up everything that candidate code must not have."""

    def limit(self, limits: Limits, *, running: int) -> None:
        """In the child, before candidate code.

        Args:
            running: processes of this level's user that count against its limit without being the candidate's.
        """

    def reset(self) -> None:
        """The sandbox was given back: its own folder is gone."""

    def sweep(self, session: int) -> None:
        """After an execution: nothing of it is left, nor of anything but the session with this process id, if any."""


class Unisolated:
    """No isolation: resource limits only. Runs only where the user spelled out `allow_unisolated: true`."""

    name = "unisolated"

    def __init__(self) -> None:
        self.usage = Usage(-1)
        self._home = ""

    def enter(self) -> None:
        adopt_orphans()
        self.usage = Usage.of_this_process()

    def fork(self) -> int:
        return os.fork()

    def prepare(self, place: Place) -> Hashable:
        if place.home and not self._home:
            self._home = make_folder("rayapp-unisolated-")
        return place.home, self._home

    def confine(self, place: Place) -> None:
        os.setsid()
        os.chdir(self._home if place.home else "/tmp")

    def limit(self, limits: Limits, *, running: int) -> None:
        set_limits(limits, num_running=None)

    def reset(self) -> None:
        if self._home:
            remove_folder(self._home)
            self._home = ""

    def sweep(self, session: int) -> None:
        kill_descendants(session)


def adopt_orphans() -> None:
    """Descendants whose parent died become this process's children, so that `kill_descendants` finds them."""
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
    """With all that is in it; candidate code may have put anything there."""
    for folder, names, files in os.walk(path, topdown=False):
        for name in (*names, *files):
            entry = Path(folder, name)
            with contextlib.suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with contextlib.suppress(OSError):
        os.rmdir(path)
