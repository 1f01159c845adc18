"""Seccomp rules: the system calls that candidate code may not make, and the reasons.

Known calls that this module doesn't name are allowed: an allowlist would break honest code with the next libc. Calls
newer than the table in `seccomp.py` are refused, so that a new kernel adds no way out of the sandbox.
"""

from __future__ import annotations

import errno
import os
import signal

from rayapp.sandbox.local.levels import kernel
from rayapp.sandbox.local.levels.seccomp import (
    INSTRUCTION,
    PERMIT,
    Block,
    both,
    dies_with,
    every,
    no_effect,
    not_masked,
    not_with,
    null_pointer,
    only_with,
    pairs,
    program,
    refuse,
    refused_or,
    where,
    with_bits,
    without_bits,
)

_INIT = 1
_CLONE_THREAD = 0x00010000
_CLONE_NEWTIME = 0x80
_NAMESPACES = 0x7E020000 | _CLONE_NEWTIME
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xB
_AF_INET, _IPPROTO_TCP, _SOL_SOCKET = 2, 6, 1
# SO_SNDBUF, SO_RCVBUF and their FORCE: a socket's buffer is kernel memory that no limit counts
_BUFFER_SIZES = (7, 8, 32, 33)
# Options that HTTP clients use. For sockets: reuse, type, errors, keepalive, linger, peer, timeouts. For TCP: no delay,
# keepalive, quick acknowledgements.
_OPTIONS = {_SOL_SOCKET: (2, 3, 4, 9, 13, 17, 20, 21, 30, 38, 39), _IPPROTO_TCP: (1, 4, 5, 6, 12, 18)}
_READABLE_OPTIONS = {**_OPTIONS, _SOL_SOCKET: (*_OPTIONS[_SOL_SOCKET], *_BUFFER_SIZES[:2])}
_SIOC, _SIOC_MASK = 0x8900, 0xFF00
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902
_FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x401C5820
_F_SETLK, _F_SETLKW, _F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 6, 7, 8, 10, 15
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW = 1024, 1026, 1031, 37, 38
_PR_SCHED_CORE = 62
# Options for outliving and adopting processes, core dumps, memory layout and core scheduling.
_PRCTL_NEVER = (
    kernel.PR_SET_PDEATHSIG,
    kernel.PR_SET_DUMPABLE,
    kernel.PR_SET_CHILD_SUBREAPER,
    kernel.PR_SET_MM,
    _PR_SCHED_CORE,
)

_NEVER = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd",
    "socket", "connect", "bind", "listen", "accept", "accept4", "open_by_handle_at", "name_to_handle_at", "bpf",
    "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "add_key",
    "request_key", "keyctl", "shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop",
    "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink", "memfd_secret", "init_module", "finit_module",
    "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl",
    "quotactl_fd", "syslog", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname",
    "setdomainname", "iopl", "ioperm", "modify_ldt", "uselib", "vhangup", "personality", "lookup_dcookie",
    "fanotify_init", "fanotify_mark", "inotify_init", "inotify_init1", "mknod", "mknodat", "ioprio_set",
    "migrate_pages", "move_pages", "mbind", "set_mempolicy", "set_mempolicy_home_node", "vmsplice",
    "lsm_set_self_attr", "statmount", "listmount", "io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents",
    "io_pgetevents", "flock",
)  # fmt: skip
"""Other processes' memory; the network; files opened by handle; kernel subsystems with many past security holes; keys;
shared memory, which no limit counts; contexts (io_setup, inotify) of which the machine has a fixed number; locks on
files that the caller can't write; administration."""

# Code can write only to files in memory. On other files these calls would make all processes wait for the disk.
_NO_EFFECT = ("sync", "syncfs", "fsync", "fdatasync", "sync_file_range", "msync", "fadvise64")

_ZYGOTE_ONLY = (
    "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "unshare", "setns", "pidfd_open", "pidfd_send_signal", "memfd_create",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups",
    "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "setsid", "sendmsg", "sendmmsg",
)  # fmt: skip
"""Calls that start an execution. No limit counts the memory of memory files (memfd_create). Processor time is shared
among sessions (setsid): fourteen sessions would get fourteen shares. Descriptors in flight (sendmsg) count for the
user: above RLIMIT_NOFILE the zygote could send none. `send` and `sendto` stay allowed."""

_OWNERS_ONLY = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes",
    "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr",
    "fremovexattr", "removexattrat", "file_setattr", "truncate",
)  # fmt: skip
"""Calls for a file's owner. In a pod the owner is the user of the whole run, and Landlock has no rule for mode, owner,
times and attributes, nor, below ABI 3 (Linux 6.2), for truncation."""


def standing(machine: str | None = None, *, has_loopback: bool = False) -> bytes:
    """Build the filter of the zygote, which every execution inherits; `machine`: architecture, e.g. aarch64 (None: this
    one)."""
    rules: dict[str, Block] = {name: refuse() for name in _NEVER}
    rules["socketpair"] = both((0, _AF_UNIX), (1, _SOCK_STREAM), _SOCK_TYPE_MASK)
    # Allow pairs of stream sockets (type 1) and of sequenced packets (5), which are equal under the mask. A socket of a
    # datagram pair could send to any socket by name.
    rules["sendto"] = null_pointer(4)
    rules["setsockopt"] = where(1, _SOL_SOCKET, not_with(2, *_BUFFER_SIZES))
    rules["ioctl"] = not_with(1, _TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP, _FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR)
    # Refuse signal-driven I/O: it can send any signal to any process of this uid, past every rule about kill. Also
    # refuse watching, leasing and locking other users' files, and larger pipe buffers, whose sum the kernel limits for
    # each user. SQLite's locks have no effect: code in other sandboxes sees locks of files that all share, such as
    # /dev/null, and so the runs of a verdict could compare what each of them sees.
    fcntl = not_with(
        1, _F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW
    )
    rules["fcntl"] = refused_or(where(1, _F_SETLK, no_effect()), refused_or(where(1, _F_SETLKW, no_effect()), fcntl))
    if has_loopback:
        rules |= _client_of_tcp(rules["ioctl"])
    rules |= {name: no_effect() for name in _NO_EFFECT}
    # Refuse timers: each takes one of the user's queued signals, whose number is limited. Programs fall back to
    # alarm().
    rules["timer_create"] = refuse(errno.ENOSYS)
    for name in ("sched_setparam", "sched_setscheduler", "sched_setattr", "sched_setaffinity", "prlimit64"):
        # Allow only process id 0, the caller: candidate code must not change the zygote's limits and priority.
        rules[name] = only_with(0, 0)
    rules["setpriority"] = both((0, 0), (1, 0))
    # Refuse clone3, whose flags are in memory, which a filter can't read. libc falls back to clone.
    rules["clone3"] = refuse(errno.ENOSYS)
    return program(rules, unknown=refuse(errno.ENOSYS), machine=machine)


def _client_of_tcp(ioctl: Block) -> dict[str, Block]:
    """Return rules that forbid listening, MPTCP (Landlock's TCP rules don't cover it) and queries of network
    interfaces."""
    any_bit = 0xFFFFFFFF
    return {
        "socket": every((0, any_bit, (_AF_INET,)), (1, 0xF, (_SOCK_STREAM,)), (2, any_bit, (0, _IPPROTO_TCP))),
        "connect": PERMIT,
        "setsockopt": pairs(1, 2, _OPTIONS),
        "getsockopt": pairs(1, 2, _READABLE_OPTIONS),
        "ioctl": refused_or(not_masked(1, _SIOC_MASK, _SIOC), ioctl),
    }


# In an image these do nothing and succeed: all files belong to one user, and installers expect to be root.
_OWNERS = ("chown", "lchown", "fchown", "fchownat")


def closing(*, own_pid: int | None = None, is_of_image: bool = False, machine: str | None = None) -> bytes:
    """Build the filter of one execution, which is added to the zygote's filter.

    `own_pid`: process id of an execution without a pid namespace, which may signal only itself and start only threads.
    """
    rules: dict[str, Block] = {name: refuse() for name in _ZYGOTE_ONLY}
    rules["prctl"] = not_with(0, *_PRCTL_NEVER)
    rules["clone"] = without_bits(0, _NAMESPACES)
    if is_of_image:
        rules |= {name: no_effect() for name in _OWNERS}
    if own_pid is None:
        # Kill a process that sends SIGKILL to itself: in pid 1 of a namespace the kernel would ignore the signal.
        rules["kill"] = dies_with((0, _INIT), (1, signal.SIGKILL))
        rules["tgkill"] = dies_with((0, _INIT), (2, signal.SIGKILL))
        # Allow seteuid() and setegid(), which GNU make calls with its own user and group before it starts a program
        # (POSIX_SPAWN_RESETIDS). Without capabilities the kernel permits no other user.
        unchanged = (0xFFFFFFFF, (0xFFFFFFFF,))
        rules |= dict.fromkeys(("setresuid", "setresgid"), every((0, *unchanged), (2, *unchanged)))
    else:
        rules |= _alone(own_pid)
    return program(rules, machine=machine)


class ClosingAlone:
    """Filter of `closing` for executions without a pid namespace. Building it costs more than a fork, so each child
    only writes its process id into it."""

    _ANY_PID = 0x7FFFFFF1  # above the kernel's largest process id

    def __init__(self) -> None:
        self.filter = bytearray(closing(own_pid=self._ANY_PID))
        sizes = range(0, len(self.filter), INSTRUCTION.size)
        self._places = [at + 4 for at in sizes if INSTRUCTION.unpack_from(self.filter, at)[3] == self._ANY_PID]

    def fill_in(self, own_pid: int) -> None:
        number = own_pid.to_bytes(4, "little")
        for place in self._places:
            self.filter[place : place + 4] = number


def _alone(own_pid: int) -> dict[str, Block]:
    no_more = refuse(errno.EAGAIN)
    # Below Landlock ABI 3 a file can be truncated by opening it for reading, without the right to write.
    truncating = os.O_ACCMODE | os.O_TRUNC, os.O_TRUNC
    return {
        **{name: refuse() for name in _OWNERS_ONLY},
        "open": not_masked(1, *truncating),
        "openat": not_masked(2, *truncating),
        "openat2": refuse(errno.ENOSYS),  # the flags of openat2 are in memory, which a filter can't read
        "kill": only_with(0, own_pid),
        "tgkill": only_with(0, own_pid),
        "rt_sigqueueinfo": only_with(0, own_pid),
        "rt_tgsigqueueinfo": only_with(0, own_pid),
        "tkill": refuse(),
        "fork": no_more,
        "vfork": no_more,
        "clone": with_bits(0, _CLONE_THREAD, forbidden=_NAMESPACES, number=errno.EAGAIN),
    }
