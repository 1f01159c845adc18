"""What an isolation level does at each point of an execution, and the level that does nothing.

    zygote boot: enter() -> for each execution: fork() -> in the child: confine(limits) -> candidate code
                                                       -> in the zygote, when it ended: sweep()

`namespaces.py` and `landlocked.py` have the levels that isolate. Runs in the zygote only.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from rayapp.sandbox.local import kernel

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    cpu_s: int
    memory_mib: int
    """Address space beyond what the warm interpreter has mapped already."""
    disk_mib: int
    """Of its private tmpfs, and of one file."""
    max_processes: int
    """Processes and threads."""
    max_open_files: int = 128


class Level(Protocol):
    """How candidate code is kept in."""

    name: str

    def enter(self) -> None:
        """Once, when the zygote starts.

        Raises:
            OSError: this node refuses a step; its strerror names it.
        """

    def fork(self) -> int:
        """As os.fork; the child is the root of everything the execution starts."""

    def confine(self, limits: Limits, *, home: bool, writable: bool) -> None:
        """In the child, before candidate code: give up everything it must not have.

        Args:
            home: work in the sandbox's own folder; else in a fresh one, where the level has any.
            writable: our own code runs, not the candidate's: it may write to the home at every level.
        """

    def prepare_home(self, disk_mib: int) -> None:
        """Before the first execution with `home`: make the sandbox's own folder."""

    def reset(self) -> None:
        """The sandbox was given back: its own folder is gone."""

    def sweep(self) -> None:
        """After an execution: nothing of it is left."""


class Unisolated:
    """No isolation: resource limits only. Runs only where the user spelled out `allow_unisolated: true`."""

    name = "unisolated"

    def __init__(self) -> None:
        self._home = ""

    def enter(self) -> None:
        adopt_orphans()

    def fork(self) -> int:
        return os.fork()

    def confine(self, limits: Limits, *, home: bool, writable: bool) -> None:
        os.setsid()
        os.chdir(self._home if home else tempfile.gettempdir())
        set_limits(limits, num_running=None)

    def prepare_home(self, disk_mib: int) -> None:
        if not self._home:
            self._home = tempfile.mkdtemp(prefix="rayapp-unisolated-")

    def reset(self) -> None:
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = ""

    def sweep(self) -> None:
        kill_descendants()


def set_limits(limits: Limits, *, num_running: int | None) -> None:
    """Resource limits of this process and all it starts; lowered hard, so nothing can raise them again.

    Args:
        num_running: processes of this user id that run already and count against its limit; None leaves it out.
    """
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, mapped_bytes() + limits.memory_mib * MIB),
        (resource.RLIMIT_FSIZE, limits.disk_mib * MIB),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, 128),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (value, value))
    if num_running is not None:
        most = num_running + limits.max_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


@cache
def mapped_bytes() -> int:
    """Address space of the warm interpreter, measured at boot: every execution is forked from it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def adopt_orphans() -> None:
    """Descendants whose parent died become this process's children, so that `kill_descendants` finds them."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill and reap until there is no child left; the kernel hands us the children of those we killed."""
    while True:
        for child in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
