"""Landlock: which files a process may still open, decided by itself and never widened again. Used by the isolation
levels.

What a ruleset can forbid depends on the kernel (its ABI): 1 files, 2 moving between directories, 3 truncating, 4 TCP,
5 ioctl on devices, 6 signals and abstract sockets out of the sandbox. Everything the kernel knows is forbidden; seccomp
covers what an older one does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from functools import cache

from rayapp.sandbox.local.levels import kernel, syscalls

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
    """Version of Landlock on this kernel; 0 where it is missing, switched off, or forbidden."""
    number = syscalls.number("landlock_create_ruleset")
    try:
        return kernel.syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(1), name="landlock_create_ruleset")
    except OSError:
        return 0


@cache
def file_rights() -> int:
    """Everything this kernel's Landlock can forbid on files."""
    return _FILE_RIGHTS[min(abi(), max(_FILE_RIGHTS))]


def read_write() -> int:
    """All rights on files except making device files."""
    return file_rights() & ~_MAKE_DEVICES


def create_ruleset() -> int:
    """A descriptor of a ruleset that forbids everything; `allow` makes exceptions.

    Raises:
        OSError: this kernel has no Landlock.
    """
    version = abi()
    if version < 1:
        raise OSError("landlock_create_ruleset: this kernel has no Landlock (5.13 or newer, and not switched off)")
    fields = [file_rights()]
    if version >= _TCP_SINCE:
        fields.append(_TCP)
    if version >= _SCOPES_SINCE:
        fields.append(_SCOPES)
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    number = syscalls.number("landlock_create_ruleset")
    size = ctypes.c_size_t(len(attributes))
    return kernel.syscall(number, attributes, size, ctypes.c_uint32(0), name="landlock_create_ruleset")


def allow(ruleset: int, path: str, rights: int) -> None:
    """Allow these rights on a path and all beneath it; one that we can't reach ourselves is left out."""
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
    """Allow TCP connections to this port, whatever the address.

    Raises:
        OSError: this kernel's Landlock has no rules for TCP.
    """
    if abi() < _TCP_SINCE:
        raise OSError("landlock_add_rule: this kernel's Landlock has no rules for TCP (6.7 or newer)")
    _add_rule(ruleset, _RULE_NET_PORT, struct.pack("<QQ", _CONNECT_TCP, port))


def _add_rule(ruleset: int, kind: int, rule: bytes) -> None:
    number = syscalls.number("landlock_add_rule")
    kernel.syscall(
        number,
        ctypes.c_int(ruleset),
        ctypes.c_int(kind),
        rule,
        ctypes.c_uint32(0),
        name="landlock_add_rule",
    )


def restriction(ruleset: int) -> kernel.Step:
    """Applies a ruleset to the process that takes this step, and all it will fork. Needs no_new_privs."""
    number = syscalls.number("landlock_restrict_self")
    return kernel.syscall_step(number, ctypes.c_int(ruleset), ctypes.c_uint32(0), name="landlock_restrict_self")
