"""The level `ll`: Landlock and seccomp alone, for pods whose seccomp profile forbids user namespaces. Zygote only.

No pid namespace, so code may start threads but no processes, and signal nobody but itself. No mounts, so it has nowhere
to write: `write_file` puts files into a folder that it may only read. Network, other processes' limits, shared memory
and keys are refused as at the other levels.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

from rayapp.sandbox.local import kernel, landlock, rules, seccomp
from rayapp.sandbox.local.level import adopt_orphans, kill_descendants
from rayapp.sandbox.local.limits import Limits, set_limits
from rayapp.sandbox.local.usage import Usage
from rayapp.sandbox.local.view import DEVICES, SYSTEM, View


class Landlocked:
    """See `level.Level`."""

    name = "ll"

    def __init__(self, view: View) -> None:
        self.usage = Usage(-1)
        self._view = view
        self._home = ""

    def enter(self) -> None:
        if landlock.abi() < 1:
            raise OSError("Landlock is missing on this kernel (5.13 or newer has it, unless it was switched off)")
        os.chdir("/")
        adopt_orphans()
        self.usage = Usage.of_this_process()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(rules.standing())

    def fork(self) -> int:
        return os.fork()

    def confine(self, limits: Limits, *, home: bool, writable: bool, running: int) -> None:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        ruleset = self._ruleset(writable=writable and home)
        if home:
            os.chdir(self._home)
        landlock.restrict_self(ruleset)
        # Processes are refused by seccomp. Counting threads is left out: the count is of the whole uid, whose other
        # processes may be many where we could not take a uid of our own.
        set_limits(limits, num_running=None)
        kernel.clear_capabilities()
        seccomp.install(rules.closing(own_pid=os.getpid()))

    def prepare(self, disk_mib: int, *, home: bool) -> None:
        if home and not self._home:
            self._home = tempfile.mkdtemp(prefix="rayapp-sandbox-")

    def reset(self) -> None:
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = ""

    def descriptors(self) -> tuple[int, ...]:
        return (self._ruleset,)

    def sweep(self, session: int) -> None:
        kill_descendants(session)

    def _ruleset(self, *, writable: bool) -> int:
        ruleset = landlock.create_ruleset()
        for path in (*SYSTEM, self._view.library, *self._view.shared, *self._view.packages, "/etc/ld.so.cache"):
            landlock.allow(ruleset, path, landlock.READ_ONLY)
        for device in DEVICES:
            landlock.allow(ruleset, f"/dev/{device}", landlock.DEVICE)
        if self._home:
            landlock.allow(ruleset, self._home, landlock.read_write() if writable else landlock.READ_ONLY)
        return ruleset
