"""Landlock: a process limits the files that it may open, and can never widen the limit again. Used only in the zygote.

A ruleset forbids all that the kernel's version (ABI) can forbid; seccomp forbids the rest. The level `ll` is Landlock
and seccomp alone, for pods that forbid user namespaces: code may start threads but no processes, signals only itself
and writes no files (`write_file` puts files into a folder that code may only read).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
from functools import cache

from rayapp.sandbox.local.levels import kernel, rules, seccomp
from rayapp.sandbox.local.levels.level import Place, kill_descendants, make_folder, remove_folder
from rayapp.sandbox.local.levels.limits import Bounds, Limits, Usage, resource_bounds
from rayapp.sandbox.local.levels.visible_files import DEVICES, SYSTEM, View

_EXECUTE, _WRITE, _READ, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_FILE_ONLY = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_FILE_RIGHTS = {0: 0, 1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP, _TCP_SINCE = 0b11, 4
_SCOPES, _SCOPES_SINCE = 0b11, 6
_CONNECT_TCP = 1 << 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_MAKE_DEVICES = 1 << 6 | 1 << 11

READ_ONLY = _EXECUTE | _READ | _READ_DIR
DEVICE = _READ | _WRITE


@cache
def abi() -> int:
    """Return the version (ABI) of this kernel's Landlock; 0 if it is missing, switched off, or forbidden."""
    number = seccomp.number("landlock_create_ruleset")
    try:
        return kernel.syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(1), name="landlock_create_ruleset")
    except OSError:
        return 0


@cache
def file_rights() -> int:
    return _FILE_RIGHTS[min(abi(), max(_FILE_RIGHTS))]


def read_write() -> int:
    """Return all rights on files except the right to make device files."""
    return file_rights() & ~_MAKE_DEVICES


def create_ruleset() -> int:
    """Return the descriptor of a ruleset that forbids everything until `allow`. OSError: the kernel has no Landlock."""
    version = abi()
    if version < 1:
        raise OSError(
            "landlock_create_ruleset: this kernel has no Landlock: use Linux 5.13 or newer with Landlock enabled"
        )
    fields = [file_rights()]
    if version >= _TCP_SINCE:
        fields.append(_TCP)
    if version >= _SCOPES_SINCE:
        fields.append(_SCOPES)
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    number = seccomp.number("landlock_create_ruleset")
    size = ctypes.c_size_t(len(attributes))
    return kernel.syscall(number, attributes, size, ctypes.c_uint32(0), name="landlock_create_ruleset")


def allow(ruleset: int, path: str, rights: int) -> None:
    """Allow these rights on a path and everything beneath it; skip a path that this process can't reach."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            allow_descriptor(ruleset, descriptor, rights)
        finally:
            os.close(descriptor)


def allow_descriptor(ruleset: int, descriptor: int, rights: int) -> None:
    kept = file_rights() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else file_rights() & _FILE_ONLY
    _add_rule(ruleset, _RULE_PATH_BENEATH, struct.pack("<Qi", rights & kept, descriptor))


def allow_port(ruleset: int, port: int) -> None:
    """Allow TCP connections to this port of any address."""
    if abi() < _TCP_SINCE:
        raise OSError("landlock_add_rule: this kernel's Landlock has no rules for TCP: they need Linux 6.7")
    _add_rule(ruleset, _RULE_NET_PORT, struct.pack("<QQ", _CONNECT_TCP, port))


def _add_rule(ruleset: int, kind: int, rule: bytes) -> None:
    number = seccomp.number("landlock_add_rule")
    kernel.syscall(
        number,
        ctypes.c_int(ruleset),
        ctypes.c_int(kind),
        rule,
        ctypes.c_uint32(0),
        name="landlock_add_rule",
    )


def restriction(ruleset: int) -> kernel.Step:
    """Prepare the call that restricts this process and its forks. The process must have no_new_privs set."""
    number = seccomp.number("landlock_restrict_self")
    return kernel.syscall_step(number, ctypes.c_int(ruleset), ctypes.c_uint32(0), name="landlock_restrict_self")


class Landlocked:
    """Isolation level `ll`: Landlock and seccomp alone. `level.Level` describes the methods."""

    name = "ll"
    num_spares = 1
    listener: socket.socket | None = None

    def __init__(self, view: View) -> None:
        self.usage = Usage(-1)
        self._view = view
        self._home = ""
        self._rulesets: dict[tuple[bool, bool], int] = {}  # fields (home, writable) of a `Place` -> descriptor
        # Same key -> calls with which a child confines itself.
        self._steps: dict[tuple[bool, bool], list[kernel.Step]] = {}

    def enter(self) -> None:
        if abi() < 1:
            raise OSError("this kernel has no Landlock: use Linux 5.13 or newer with Landlock enabled")
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
            self._steps[key] = [restriction(ruleset), kernel.CLEAR_CAPABILITIES, closing]

    def confine(self, place: Place) -> None:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if place.home:
            os.chdir(self._home)
        self._closing.fill_in(os.getpid())
        kernel.take(self._steps[place.home, place.home and place.writable])

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        # RLIMIT_NPROC is not used: it counts all processes of the user, which may be many if the sandbox has no user of
        # its own. Seccomp refuses new processes, and `Usage` counts threads.
        return resource_bounds(limits, num_running=None)

    def reset(self) -> None:
        if self._home:
            remove_folder(self._home)
            self._home = ""
            for key in [key for key in self._rulesets if key[0]]:
                os.close(self._rulesets.pop(key))
                del self._steps[key]

    def is_unchanged(self) -> bool:
        # Executions can't write to the folder; only our own code can.
        return bool(self._home) and not os.listdir(self._home)  # noqa: PTH208

    def sweep(self, session: int) -> bool:
        kill_descendants(session)
        return True  # executions can't write to the working folder

    def _new_ruleset(self, place: Place) -> int:
        ruleset = create_ruleset()
        for path in (*SYSTEM, self._view.library, *self._view.shared, *self._view.packages, "/etc/ld.so.cache"):
            allow(ruleset, path, READ_ONLY)
        for device in DEVICES:
            allow(ruleset, f"/dev/{device}", DEVICE)
        if place.home:
            allow(ruleset, self._home, read_write() if place.writable else READ_ONLY)
        return ruleset
