"""Builds seccomp filters, as classic BPF, and installs them; `rules.py` lists the calls that they refuse.

A filter is a binary search over call numbers: at installation the kernel runs it for every number, and a linear list
takes three times as long. The numbers come from the kernel's `arch/x86/entry/syscalls/syscall_64.tbl` and
`include/uapi/asm-generic/unistd.h`; a table omits calls that its architecture lacks (fork on arm64).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence

from rayapp.core.errors import IsolationUnavailableError
from rayapp.sandbox.local.levels import kernel

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # values of `seccomp_data.arch`

HIGHEST = 470  # Linux 6.18; calls with higher numbers are refused

_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "clone3": 435, "close_range": 436, "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446, "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
    "fchmodat2": 452, "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460, "setxattrat": 463,
    "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469,
}  # fmt: skip

_X86_64 = {
    "msync": 26, "sendmsg": 46, "flock": 73, "fsync": 74, "fdatasync": 75, "setsid": 112, "sync": 162, "io_setup": 206,
    "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210, "fadvise64": 221, "timer_create": 222,
    "sync_file_range": 277, "syncfs": 306, "sendmmsg": 307, "io_pgetevents": 333,
    "open": 2, "truncate": 76, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "utimes": 235, "openat": 257, "fchownat": 260, "futimesat": 261, "fchmodat": 268,
    "utimensat": 280,
    "setsockopt": 54, "getsockopt": 55,
    "ioctl": 16, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "accept": 43, "sendto": 44,
    "bind": 49, "listen": 50, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "kill": 62, "semget": 64,
    "semop": 65, "semctl": 66, "shmdt": 67, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "fcntl": 72,
    "ptrace": 101, "syslog": 103, "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setgroups": 116,
    "setresuid": 117, "setresgid": 119, "setfsuid": 122, "setfsgid": 123, "rt_sigqueueinfo": 129, "mknod": 133,
    "uselib": 134, "personality": 135, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
    "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "tkill": 200, "sched_setaffinity": 203, "lookup_dcookie": 212, "semtimedop": 220,
    "clock_settime": 227, "tgkill": 234, "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239,
    "mq_open": 240, "mq_unlink": 241,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251, "inotify_init": 253,
    "migrate_pages": 256, "mknodat": 259, "unshare": 272, "vmsplice": 278, "move_pages": 279, "accept4": 288,
    "inotify_init1": 294, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300,
    "fanotify_mark": 301, "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "sched_setattr": 314, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip

_AARCH64 = {
    "io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_cancel": 3, "io_getevents": 4, "flock": 32, "sync": 81,
    "fsync": 82, "fdatasync": 83, "sync_file_range": 84, "timer_create": 107, "setsid": 157, "sendmsg": 211,
    "fadvise64": 223, "msync": 227, "syncfs": 267, "sendmmsg": 269, "io_pgetevents": 292,
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
    "truncate": 45, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "openat": 56, "utimensat": 88,
    "lookup_dcookie": 18, "fcntl": 25, "inotify_init1": 26, "ioctl": 29, "ioprio_set": 30, "mknodat": 33,
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "vmsplice": 75,
    "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
    "clock_settime": 112, "syslog": 116, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119,
    "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140,
    "reboot": 142, "setregid": 143, "setgid": 144, "setreuid": 145, "setuid": 146, "setresuid": 147,
    "setresgid": 149, "setfsuid": 151, "setfsgid": 152, "setgroups": 159, "sethostname": 161, "setdomainname": 162,
    "prctl": 167, "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181, "msgget": 186,
    "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193,
    "setsockopt": 208, "getsockopt": 209,
    "shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197, "socket": 198, "socketpair": 199, "bind": 200,
    "listen": 201, "accept": 202, "connect": 203, "sendto": 206, "add_key": 217, "request_key": 218, "keyctl": 219,
    "clone": 220, "swapon": 224, "swapoff": 225, "mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236,
    "migrate_pages": 238,
    "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242, "prlimit64": 261,
    "fanotify_init": 262, "fanotify_mark": 263, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "sched_setattr": 274, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip

NUMBERS = {"x86_64": {**_COMMON, **_X86_64}, "aarch64": {**_COMMON, **_AARCH64}}


def this_machine() -> str:
    name = platform.machine()
    if name not in NUMBERS:
        raise IsolationUnavailableError(
            f"no system call table for {name}: the local sandbox runs only on x86_64 and aarch64. Use a remote provider"
        )
    return name


def number(name: str) -> int:
    return NUMBERS[this_machine()][name]


_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_NOT_BELOW, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_FARTHEST = 255  # instructions that a conditional jump can skip

INSTRUCTION = struct.Struct("<HBBI")  # of an `Instruction`, as the kernel reads it
# Operation code, instructions to skip if true, instructions to skip if false, constant.
Instruction = tuple[int, int, int, int]
Block = tuple[Instruction, ...]  # every path ends in a return

PERMIT: Block = ((_RETURN, 0, 0, _ALLOW),)


def refuse(number: int = errno.EPERM) -> Block:
    return ((_RETURN, 0, 0, _ERRNO | number),)


def no_effect() -> Block:
    return refuse(0)


def _argument(index: int, *, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * index + 4 * high)


def only_with(index: int, value: int) -> Block:
    """Allow the call only if this argument (32 bits, such as a process id) has the value."""
    return (_argument(index), (_JUMP_EQUAL, 0, 1, value), *PERMIT, *refuse())


def not_with(index: int, *values: int) -> Block:
    last = len(values) - 1
    tests = [(_JUMP_EQUAL, last - at, 1 if at == last else 0, value) for at, value in enumerate(values)]
    return (_argument(index), *tests, *refuse(), *PERMIT)


def without_bits(index: int, bits: int) -> Block:
    return (_argument(index), (_JUMP_ANY_BIT, 0, 1, bits), *refuse(), *PERMIT)


def not_masked(index: int, mask: int, value: int) -> Block:
    return (_argument(index), (_AND, 0, 0, mask), (_JUMP_EQUAL, 0, 1, value), *refuse(), *PERMIT)


def with_bits(index: int, bits: int, *, forbidden: int, number: int) -> Block:
    """Allow a call with one of `bits` and none of `forbidden`; without any of `bits` it fails with error `number`."""
    return (
        _argument(index),
        (_JUMP_ANY_BIT, 0, 1, forbidden),
        *refuse(),
        (_JUMP_ANY_BIT, 0, 1, bits),
        *PERMIT,
        *refuse(number),
    )


def both(first: tuple[int, int], second: tuple[int, int], mask: int = 0xFFFFFFFF) -> Block:
    """Allow the call if both arguments (index, value) have their values; the mask is applied to the second."""
    return (
        _argument(first[0]),
        (_JUMP_EQUAL, 0, 4, first[1]),
        _argument(second[0]),
        (_AND, 0, 0, mask),
        (_JUMP_EQUAL, 0, 1, second[1]),
        *PERMIT,
        *refuse(),
    )


def every(*tests: tuple[int, int, tuple[int, ...]]) -> Block:
    """Allow the call if each test (index, mask, values) holds: the argument (32 bits) has a value after the mask is
    applied."""
    return (*(step for test in tests for step in _one_of(*test)), *PERMIT)


def pairs(first: int, second: int, allowed: Mapping[int, tuple[int, ...]]) -> Block:
    """Allow the call if argument `first` is a key of `allowed` and argument `second` one of the key's values."""
    found: list[Instruction] = []
    for value, seconds in allowed.items():
        rest = (*_one_of(second, 0xFFFFFFFF, seconds), *PERMIT)
        found += [_argument(first), (_JUMP_EQUAL, 0, len(rest), value), *rest]
    return (*found, *refuse())


def where(index: int, value: int, block: Block) -> Block:
    """Apply the block if this argument (32 bits) has the value; otherwise allow the call."""
    return (_argument(index), (_JUMP_EQUAL, 0, len(block), value), *block, *PERMIT)


def refused_or(first: Block, otherwise: Block) -> Block:
    assert first[-1:] == PERMIT
    return (*first[:-1], *otherwise)


def _one_of(index: int, mask: int, values: Sequence[int]) -> Block:
    # Refuses the call if the argument, after the mask, is none of the values; otherwise continues after this block.
    tests = [(_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return (_argument(index), (_AND, 0, 0, mask), *tests, *refuse())


def null_pointer(index: int) -> Block:
    """Allow the call if this argument (64 bits) is 0."""
    return (
        _argument(index),
        (_JUMP_EQUAL, 0, 3, 0),
        _argument(index, high=True),
        (_JUMP_EQUAL, 0, 1, 0),
        *PERMIT,
        *refuse(),
    )


def dies_with(first: tuple[int, int], second: tuple[int, int]) -> Block:
    """Kill the caller if both arguments (index, value) have their values; otherwise allow the call."""
    return (
        _argument(first[0]),
        (_JUMP_EQUAL, 0, 3, first[1]),
        _argument(second[0]),
        (_JUMP_EQUAL, 0, 1, second[1]),
        (_RETURN, 0, 0, _KILL),
        *PERMIT,
    )


def program(rules: Mapping[str, Block], *, unknown: Block = PERMIT, machine: str | None = None) -> bytes:
    """Build a filter from call names and rules. Calls without a rule are allowed, `unknown` is the rule above HIGHEST;
    a call with another architecture's numbers kills the process."""
    machine = machine or this_machine()
    numbers = NUMBERS[machine]
    by_number = {numbers[name]: block for name, block in rules.items() if name in numbers}
    head: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        # Refuse the x32 calls of x86-64: they have the same effects under other numbers.
        (_JUMP_NOT_BELOW, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
    ]
    return _assemble([*head, *_search(_segments(by_number, unknown))])


def _segments(by_number: Mapping[int, Block], unknown: Block) -> list[tuple[int, Block]]:
    # Pairs (first call number, block): a block applies to all numbers before the next pair's.
    found = [(0, by_number.get(0, PERMIT))]
    for number in range(1, HIGHEST + 1):
        block = by_number.get(number, PERMIT)
        if block != found[-1][1]:
            found.append((number, block))
    return [*found, (HIGHEST + 1, unknown)]


def _search(segments: Sequence[tuple[int, Block]]) -> list[Instruction]:
    if len(segments) == 1:
        return list(segments[0][1])
    middle = len(segments) // 2
    below, above = _search(segments[:middle]), _search(segments[middle:])
    first = segments[middle][0]
    if len(below) <= _FARTHEST:
        return [(_JUMP_NOT_BELOW, len(below), 0, first), *below, *above]
    return [(_JUMP_NOT_BELOW, 0, 1, first), (_JUMP, 0, 0, len(below)), *below, *above]


def _assemble(instructions: Iterable[Instruction]) -> bytes:
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in instructions)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def installation(code: bytearray) -> kernel.Step:
    """Prepare the call that installs a filter for this process (with no_new_privs set) and its forks. Until the call is
    made, the bytes of `code` may change, but not its length."""
    shared = (ctypes.c_char * len(code)).from_buffer(code)
    filtering = _Program(len(code) // INSTRUCTION.size, ctypes.addressof(shared))
    filtering.kept = shared
    mode = ctypes.c_ulong(kernel.SECCOMP_MODE_FILTER)
    return kernel.prctl_step(kernel.PR_SET_SECCOMP, mode, ctypes.pointer(filtering))


def install(code: bytes) -> None:
    kernel.take([installation(bytearray(code))])
