"""The interface of isolation levels, and the level without isolation. It runs only in a zygote and its template:

zygote boot: enter() -> in the template, for each execution: prepare(), fork()
-> in the child: confine -> candidate code -> in the template, when it ended: sweep()
"""

# Each child runs this code, where pathlib would be slower, so it uses os and not pathlib.
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
    """Working folder of an execution, the right to write there, and the root of its file system."""

    home: bool  # the sandbox's own folder, which lasts until `Level.reset`; False for a fresh one
    writable: bool  # rayapp's own code, which may write to the home at every level
    disk_mib: int
    image: str = ""  # image tree that is the root; empty for a view of this machine's system


class Level(Protocol):
    """One way to isolate candidate code."""

    name: str
    num_spares: int  # children forked in advance: two if an execution can't reach a waiting child
    listener: socket.socket | None  # accepts connections of executions; `enter` sets it if the level has a loopback
    usage: Usage  # `enter` makes it; the zygote then sets the process whose children it measures

    def enter(self) -> None:
        """Enter the level, once. An OSError's strerror names the step that this node refuses."""

    def fork(self) -> int:
        """Fork like os.fork. The child becomes the root of the execution's process tree."""

    def prepare(self, place: Place) -> None:
        """Make the working folder. Called before each fork."""

    def confine(self, place: Place) -> None:
        """Give up every right that candidate code must not have. Called in the child, before it gets its job."""

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        """Return the child's limits; `running` processes count against the user's limit but are not the candidate's."""

    def reset(self) -> None:
        """Remove the folder of the sandbox that was released."""

    def is_unchanged(self) -> bool:
        """True if executions have left no trace in the sandbox's folder. Called when no execution runs."""

    def sweep(self, session: int) -> bool:
        """End every process that an execution left, except `session` (0: none). True if children forked earlier can
        still be used, because their working folder is unchanged."""


class Unisolated:
    """Resource limits alone: used only if the config has `allow_unisolated: true`."""

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

    def is_unchanged(self) -> bool:
        return False

    def sweep(self, session: int) -> bool:
        kill_descendants(session)
        return True  # this level has no private working folder that could have changed


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that `kill_descendants` finds them."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(kept: int) -> None:
    """Kill and reap children until `kept` is the only one left. Children of a killed process come here
    (`adopt_orphans`)."""
    while children := set(_children()) - {kept}:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    # Few pages are written to: each is copied again after every fork.
    descriptor = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(descriptor, 4096):
            text += part
    finally:
        os.close(descriptor)
    return [int(pid) for pid in text.split()]


def make_folder(prefix: str) -> str:
    """Make a folder that only this user may enter. `tempfile` would load libraries into each fork."""
    path = f"/tmp/{prefix}{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def remove_folder(path: str) -> OSError | None:
    """Remove a folder with everything in it. Return the last error if a part is left.

    Nested folders are first moved to the top, so that no path is too long and no recursion too deep.
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
