"""Linux system calls that Python's os module lacks, through ctypes. Isolation levels use them, only inside the zygote.

Each function raises an OSError with the call's name, so that a report can name the step that this node refuses.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_plain_fork = ctypes.PyDLL(None, use_errno=True).fork
AT_FDCWD = -100
_STATX_BASIC_STATS = 0x7FF
STATX_BYTES = 256

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 4, 24, 22
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_SET_SECUREBITS = 38, 47, 28
PR_SET_CHILD_SUBREAPER, PR_SET_MM = 36, 35
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
# Bits NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each with its lock, and the lock of KEEP_CAPS, which stays off.
SECURE_ALL_LOCKED = 0b11101111
_CAP_SETPCAP = 8
_FIRST_FREE = 8
_CAPABILITY_VERSION_3 = 0x20080522


def _check(result: int, call: str, detail: str = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", detail or None)
    return result


def syscall(number: int, *args: int | ctypes._SimpleCData[int] | object, name: str) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *args), name)


def fork() -> int:
    """Fork without Python's fork handlers, which take as long as the fork: they renew the locks of threads and seed
    `random`."""
    pid: int = _plain_fork()
    return pid if pid >= 0 else _check(pid, "fork")


Step = tuple[Callable[..., int], tuple[object, ...], str]  # function, arguments, and the name for messages


def take(steps: Iterable[Step]) -> None:
    """Make these calls in order. Few functions and objects are used, because in a child each use may copy a page."""
    for call, arguments, name in steps:
        if call(*arguments) < 0:
            _check(-1, name)


def syscall_step(number: int, *arguments: object, name: str) -> Step:
    return _libc.syscall, (ctypes.c_long(number), *arguments), name


def prctl_step(option: int, *arguments: object) -> Step:
    padded = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    return _libc.prctl, (ctypes.c_int(option), *padded), f"prctl {option}"


def statx_step(path: str, target: ctypes.Array[ctypes.c_char]) -> Step:
    """Prepare a call that writes the metadata of a path into `target`, a buffer of STATX_BYTES."""
    mask = ctypes.c_uint(_STATX_BASIC_STATS)
    return _libc.statx, (ctypes.c_int(AT_FDCWD), path.encode(), ctypes.c_int(0), mask, target), "statx"


class InodeCounter:
    """Counter with which a tmpfs numbers its files, also gone ones: code could leave a number for the next sandbox."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._next = -1

    def begin(self) -> None:
        """Start at a random number, so that a number does not tell whether the folder was made new."""
        for _ in range(1 + int.from_bytes(os.urandom(1)) % 16):
            self.has_moved()

    def has_moved(self) -> bool:
        """True if files were made since the last call, or if none can be made."""
        try:
            descriptor = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            found = os.fstat(descriptor).st_ino
            os.close(descriptor)
        except OSError:
            found = -1
        wanted, self._next = self._next, found + 1
        return found < 0 or found != wanted


def unshare_step(flags: int) -> Step:
    return _libc.unshare, (ctypes.c_int(flags),), "unshare"


def unshare(flags: int) -> None:
    take([unshare_step(flags)])


def setns_step(descriptor: int, kind: int) -> Step:
    return _libc.setns, (ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns"


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    data = options.encode() if options else None
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data), "mount", target)


def umount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(target.encode(), flags), "umount2", target)


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(new.encode(), old.encode()), "pivot_root", new)


def syncfs(descriptor: int) -> None:
    _check(_libc.syncfs(descriptor), "syncfs")


def prctl(option: int, *args: int | object) -> None:
    values = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    values += [ctypes.c_ulong(0)] * (4 - len(values))
    _check(_libc.prctl(option, *values), f"prctl {option}")


def reserve_descriptors(channel: int) -> int:
    """Occupy the descriptor numbers that each child needs. Return the channel's new number."""
    moved = fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(channel)
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) < _FIRST_FREE:
        pass
    os.close(descriptor)
    return moved


def sethostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def effective_capabilities() -> int:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, data), "capget")
    return int(data[0]) | int(data[3]) << 32


def limit_bounding_set() -> None:
    """Drop all capabilities from the bounding set, so that no program executed later can gain one. A process without
    CAP_SETPCAP can't, and has none to pass on either."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    if effective_capabilities() >> _CAP_SETPCAP & 1:
        prctl(PR_SET_SECUREBITS, SECURE_ALL_LOCKED)
        for capability in range(64):
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except OSError:
                break  # this number is above the kernel's last capability


_header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_nothing = (ctypes.c_uint32 * 6)()


# The ambient set is already empty (`limit_bounding_set`).
CLEAR_CAPABILITIES: Step = (_libc.capset, (_header, _nothing), "capset")
