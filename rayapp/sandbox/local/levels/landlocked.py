"""The level `ll`: Landlock and seccomp alone, for pods whose seccomp profile forbids user namespaces. Zygote only.

No pid namespace, so code may start threads but no processes, and signal nobody but itself. No mounts, so it has nowhere
to write: `write_file` puts files into a folder that it may only read. Network, other processes' limits, shared memory
and keys are refused as at the other levels.
"""

from __future__ import annotations

import os
import signal
import socket

from rayapp.sandbox.local.levels import kernel, landlock, rules, seccomp
from rayapp.sandbox.local.levels.level import Place, kill_descendants, make_folder, remove_folder
from rayapp.sandbox.local.levels.limits import Bounds, Limits, resource_bounds
from rayapp.sandbox.local.levels.usage import Usage
from rayapp.sandbox.local.levels.visible_files import DEVICES, SYSTEM, View


class Landlocked:
    """See `level.Level`."""

    name = "ll"
    num_spares = 1
    listener: socket.socket | None = None

    def __init__(self, view: View) -> None:
        self.usage = Usage(-1)
        self._view = view
        self._home = ""
        self._rulesets: dict[tuple[bool, bool], int] = {}
        """(home, writable) -> descriptor of the ruleset for such a place."""
        self._steps: dict[tuple[bool, bool], list[kernel.Step]] = {}
        """(home, writable) -> the calls with which a child confines itself."""

    def enter(self) -> None:
        if landlock.abi() < 1:
            raise OSError("Landlock is missing on this kernel (5.13 or newer has it, unless it was switched off)")
        os.chdir("/")
        self.usage = Usage.of_this_process()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        self._closing = rules.ClosingAlone()
        seccomp.install(rules.standing())

    def fork(self) -> int:
        return kernel.fork()

    def prepare(self, place: Place) -> None:
        if place.home and not self._home:
            self._home = make_folder("rayapp-sandbox-")
        key = (place.home, place.home and place.writable)
        if key not in self._rulesets:
            ruleset = self._rulesets[key] = self._new_ruleset(place)
            closing = seccomp.installation(self._closing.filter)
            self._steps[key] = [landlock.restriction(ruleset), kernel.CLEAR_CAPABILITIES, closing]

    def confine(self, place: Place) -> None:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if place.home:
            os.chdir(self._home)
        self._closing.fill_in(os.getpid())
        kernel.take(self._steps[place.home, place.home and place.writable])

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        # Processes are refused by seccomp, and threads are counted by `usage.py`: the kernel's own count is of the
        # whole user, whose other processes may be many where we could not take a user of our own.
        return resource_bounds(limits, num_running=None)

    def reset(self) -> None:
        if self._home:
            remove_folder(self._home)
            self._home = ""
            for key in [key for key in self._rulesets if key[0]]:
                os.close(self._rulesets.pop(key))
                del self._steps[key]

    def sweep(self, session: int) -> bool:
        kill_descendants(session)
        return True  # there are none

    def _new_ruleset(self, place: Place) -> int:
        ruleset = landlock.create_ruleset()
        for path in (*SYSTEM, self._view.library, *self._view.shared, *self._view.packages, "/etc/ld.so.cache"):
            landlock.allow(ruleset, path, landlock.READ_ONLY)
        for device in DEVICES:
            landlock.allow(ruleset, f"/dev/{device}", landlock.DEVICE)
        if place.home:
            landlock.allow(ruleset, self._home, landlock.read_write() if place.writable else landlock.READ_ONLY)
        return ruleset
