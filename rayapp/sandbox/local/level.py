"""What an isolation level does at each point of an execution, and the level that does nothing.

    zygote boot: enter() -> for each execution: fork() -> in the child: confine(limits) -> candidate code
                                                       -> in the zygote, when it ended: sweep()

`namespaces.py` and `landlocked.py` have the levels that isolate. Runs in the zygote only.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Protocol

from rayapp.sandbox.local import kernel
from rayapp.sandbox.local.limits import Limits, set_limits
from rayapp.sandbox.local.usage import Usage

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

    def confine(self, limits: Limits, *, home: bool, writable: bool, running: int) -> None:
        """In the child, before candidate code: give up everything it must not have.

        Args:
            home: work in the sandbox's own folder; else in a fresh one, where the level has any.
            writable: our own code runs, not the candidate's: it may write to the home at every level.
            running: processes of this level's user that count against its limit without being the candidate's.
        """

    def prepare(self, disk_mib: int, *, home: bool) -> None:
        """Before each fork, in the zygote: make the folder that the execution will work in."""

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

    def confine(self, limits: Limits, *, home: bool, writable: bool, running: int) -> None:
        os.setsid()
        os.chdir(self._home if home else tempfile.gettempdir())
        set_limits(limits, num_running=None)

    def prepare(self, disk_mib: int, *, home: bool) -> None:
        if home and not self._home:
            self._home = tempfile.mkdtemp(prefix="rayapp-unisolated-")

    def reset(self) -> None:
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = ""

    def sweep(self, session: int) -> None:
        kill_descendants(session)


def adopt_orphans() -> None:
    """Descendants whose parent died become this process's children, so that `kill_descendants` finds them."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(kept: int) -> None:
    """Kill and reap until `kept` is the only child; the kernel hands us the children of those we killed."""
    while children := {int(child) for child in Path("/proc/thread-self/children").read_text().split()} - {kept}:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
