"""The system call filters, run by a small interpreter of their instructions, for both architectures.

`tests/adversarial` tests them in this machine's kernel; here the other architecture's table is tested too.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.sandbox.local.levels import rules
from rayapp.sandbox.local.levels.seccomp import (
    AUDIT_ARCH,
    HIGHEST,
    NUMBERS,
    program,
    refuse,
)

ALLOWED = "allowed"
DONE = "done"
KILLED = "killed"
MACHINES = sorted(NUMBERS)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
FILLED_IN = rules.ClosingAlone()


def verdict(code: bytes, machine: str, number: int, *args: int) -> str:
    """Return a filter's decision on a call: allowed, killed, or the name of the error."""
    data = struct.pack("<IIQ6Q", number, AUDIT_ARCH[machine], 0, *(*args, *[0] * (6 - len(args))))
    value = _run(code, data)
    if value & 0xFFFF0000 == 0x00050000:
        return errno.errorcode[value & 0xFFFF] if value & 0xFFFF else DONE
    return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}[value]


def _run(code: bytes, data: bytes) -> int:
    steps = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        operation, yes, no, constant = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x06:
            return constant
        elif operation == 0x05:
            at += constant
        else:
            test = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            at += yes if test[operation] else no


def named(code: bytes, machine: str, name: str, *args: int) -> str:
    return verdict(code, machine, NUMBERS[machine][name], *args)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


UNNEEDED = ["socket", "ptrace", "bpf", "io_uring_setup", "keyctl", "shmget", "mq_open", "process_vm_readv"]
COUNTED = ["io_setup", "io_submit", "flock"]
"""Calls that are counted for the whole machine or held against others."""
OF_THE_ZYGOTE = ["mount", "unshare", "setns", "memfd_create", "setresuid", "pidfd_open", "chroot", "setuid"]
HANDING_ON = ["sendmsg", "sendmmsg", "setsid"]
"""Calls that send descriptors or start sessions."""


@pytest.mark.parametrize("name", [*UNNEEDED, *COUNTED])
def test_calls_that_nobody_needs_are_refused_from_the_start(machine: str, name: str) -> None:
    assert named(rules.standing(machine), machine, name) == "EPERM"


@pytest.mark.parametrize("name", [*OF_THE_ZYGOTE, *HANDING_ON])
def test_calls_of_the_zygote_are_refused_once_code_runs(machine: str, name: str) -> None:
    assert named(rules.standing(machine), machine, name) == ALLOWED
    alone = [rules.closing(own_pid=77, machine=machine)] * (name in HANDING_ON)
    assert {named(code, machine, name) for code in (rules.closing(machine=machine), *alone)} == {"EPERM"}


@pytest.mark.parametrize("name", ["sync", "syncfs", "fsync", "fdatasync", "sync_file_range", "msync", "fadvise64"])
def test_there_is_nothing_to_write_out_so_it_is_done_at_once(machine: str, name: str) -> None:
    assert named(rules.standing(machine), machine, name) == DONE


CLOSE_ON_EXEC, THREAD, NEW_USER, SIGCHLD = 0o2000000, 0x00010000, 0x10000000, 17
STREAM, DATAGRAM, RAW, PACKETS = 1, 2, 3, 5
UNIX, INET, INET6, TCP, MPTCP = 1, 2, 10, 6, 262
OF_ALL = 0xFFFFFFFFFFFFFFFF
HELD_OPTIONS = [(3, 6, 31), (3, 6, 30), (3, 6, 35), (3, 1, 60), (3, 1, 26), (3, 0, 1), (3, 41, 26), (3, 1, 1)]
"""Options of sockets that change more than a client's own connection."""
Calls = list[tuple[int, ...]]
RULES: list[tuple[str, str, str, Calls, Calls]] = [
    ("files are neither watched nor leased", "standing", "fcntl",
     [(0, 5)], [(0, 1024), (0, 1026), (0, 1031), (0, 37)]),
    ("code neither makes itself dumpable nor keeps others off the twin of its core", "closing", "prctl",
     [(15,)], [(4,), (62,)]),
    ("limits of others are out of reach", "standing", "prlimit64 sched_setaffinity sched_setscheduler sched_setattr",
     [(0,)], [(1,), (4242,)]),
    ("priorities of others are out of reach", "standing", "setpriority", [(0, 0, 5)], [(0, 1), (1, 0), (2, 0)]),
    ("the buffers of a pair of sockets keep their size", "standing", "setsockopt",
     [(3, 1, 20), (3, 6, 7)], [(3, 1, 7), (3, 1, 8), (3, 1, 32), (3, 1, 33)]),
    ("a pair of sockets is a stream or packets, but never datagrams", "standing", "socketpair",
     [(UNIX, STREAM), (UNIX, STREAM | CLOSE_ON_EXEC), (UNIX, PACKETS)],
     [(UNIX, DATAGRAM), (UNIX, RAW), (INET, STREAM)]),
    ("what is sent has no address", "standing", "sendto", [(3, 0, 0, 0, 0)], [(3, 0, 0, 0, 1), (3, 0, 0, 0, 1 << 40)]),
    ("with a loopback, sockets are of TCP", "loopback", "socket",
     [(INET, kind, protocol) for kind in (STREAM, STREAM | CLOSE_ON_EXEC) for protocol in (0, TCP)],
     [(INET6, STREAM, 0), (INET, DATAGRAM, 0), (INET, STREAM, MPTCP), (UNIX, STREAM, 0), (INET, RAW, TCP)]),
    ("with a loopback, code is a client", "loopback", "connect", [(3,)], []),
    ("with a loopback, code is no server", "loopback", "bind listen accept accept4", [], [(3,)]),
    ("with a loopback, a client sets its own options", "loopback", "setsockopt",
     [(3, 1, 9), (3, 6, 1), (3, 1, 4)], [(3, 1, 7), (3, 1, 8), *HELD_OPTIONS]),
    ("with a loopback, a client reads its own options", "loopback", "getsockopt",
     [(3, 1, 7), (3, 1, 8), (3, 1, 9), (3, 6, 1), (3, 1, 4)], HELD_OPTIONS),
    ("with a loopback, no interface is asked for or changed", "loopback", "ioctl",
     [(3, 0x5421), (3, 0x5401)], [(3, 0x8912), (3, 0x8946), (3, 0x89FF), (3, 0x5412)]),
    ("with a loopback, what is sent has no address", "loopback", "sendto", [], [(3, 0, 0, 0, 1)]),
    ("no signals by way of files", "standing", "fcntl", [(0, 1)], [(0, 8), (0, 10), (0, 15)]),
    ("no signals by way of terminals", "standing", "ioctl", [(0, 0x5401)], [(0, 0x5412), (0, 0x8901)]),
    ("threads and processes, but no new namespaces", "closing", "clone",
     [(SIGCHLD,), (THREAD,)], [(THREAD | NEW_USER,), (NEW_USER,)]),
    ("without a pid namespace, threads only", "alone", "clone", [(THREAD,)], [(THREAD | NEW_USER,)]),
    ("without a pid namespace, signals only to oneself", "alone", "kill tgkill rt_sigqueueinfo",
     [(77, 9)], [(1, 9), (78, 9)]),
    ("without a pid namespace, no signal to all processes", "alone", "kill", [], [(OF_ALL, 9)]),
    ("without a pid namespace, no signal to a thread of any process", "alone", "tkill", [], [(77, 9)]),
]  # fmt: skip
"""Reason, filter, names of system calls, arguments that are allowed, arguments that are refused."""


@pytest.mark.parametrize(
    ("filtered", "names", "allowed", "refused"), [pytest.param(*rule[1:], id=rule[0]) for rule in RULES]
)
def test_a_call_is_allowed_or_refused_by_its_arguments(
    machine: str, filtered: str, names: str, allowed: Calls, refused: Calls
) -> None:
    code = {
        "standing": rules.standing(machine),
        "loopback": rules.standing(machine, has_loopback=True),
        "closing": rules.closing(machine=machine),
        "alone": rules.closing(own_pid=77, machine=machine),
    }[filtered]

    for name in names.split():
        assert [named(code, machine, name, *args) for args in allowed] == [ALLOWED] * len(allowed), name
        assert [named(code, machine, name, *args) for args in refused] == ["EPERM"] * len(refused), name


@pytest.mark.parametrize("command", [6, 7])
def test_locks_of_files_have_no_effect_as_other_sandboxes_could_see_them(machine: str, command: int) -> None:
    assert named(rules.standing(machine), machine, "fcntl", 3, command) == DONE


def test_new_processes_are_not_there_where_programs_must_look_for_another_way(machine: str) -> None:
    assert named(rules.standing(machine), machine, "clone3") == "ENOSYS"
    assert named(rules.closing(own_pid=77, machine=machine), machine, "clone", SIGCHLD) == "EAGAIN"


def test_calls_newer_than_the_table_do_not_exist(machine: str) -> None:
    assert verdict(rules.standing(machine), machine, HIGHEST + 1) == "ENOSYS"
    assert verdict(rules.standing(machine), machine, 5000) == "ENOSYS"


def test_calls_of_another_architecture_kill(machine: str) -> None:
    other = next(name for name in MACHINES if name != machine)

    assert verdict(rules.standing(machine), other, 0) == KILLED
    assert _run(rules.standing(machine), struct.pack("<IIQ6Q", 1, 0x40000003, *[0] * 7)) == 0x80000000  # i386
    assert verdict(rules.standing(machine), machine, 0x40000000 + 41) == KILLED  # the x32 twin of socket


def test_the_first_process_of_a_pid_namespace_can_kill_itself(machine: str) -> None:
    code = rules.closing(machine=machine)

    assert [named(code, machine, "kill", 1, signal) for signal in (9, 15)] == [KILLED, ALLOWED]
    assert named(code, machine, "kill", 2, 9) == ALLOWED


def test_every_call_without_a_rule_is_allowed_and_every_rule_is_where_it_belongs(machine: str) -> None:
    # A wrong jump in the binary search would hit a neighbour: so all numbers are tried.
    names = list(NUMBERS[machine])[::3]
    code = program({name: refuse(errno.EXDEV) for name in names}, unknown=refuse(), machine=machine)
    ruled = {NUMBERS[machine][name] for name in names}

    found = {number for number in range(HIGHEST + 1) if verdict(code, machine, number) == "EXDEV"}

    assert found == ruled
    assert verdict(code, machine, HIGHEST + 1) == "EPERM"


@pytest.mark.parametrize("machine_name", MACHINES)
def test_no_two_names_share_a_number(machine_name: str) -> None:
    numbers = list(NUMBERS[machine_name].values())

    assert len(numbers) == len(set(numbers))
    assert max(numbers) <= HIGHEST


def test_the_filters_are_small(machine: str) -> None:
    assert len(rules.standing(machine)) // 8 < 400
    assert len(rules.closing(own_pid=1, machine=machine)) // 8 < 200


def test_without_a_file_system_of_its_own_code_changes_no_files_owner_mode_times_or_length(machine: str) -> None:
    alone, apart = rules.closing(own_pid=1234, machine=machine), rules.closing(machine=machine)
    for name in ("fchmodat", "fchmod", "fchownat", "utimensat", "fsetxattr", "file_setattr", "truncate"):
        assert [named(code, machine, name) for code in (alone, apart)] == ["EPERM", ALLOWED]
    read, read_and_truncate, write_and_truncate = os.O_RDONLY, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC
    answers = [named(alone, machine, "openat", 0, 0, how) for how in (read, read_and_truncate, write_and_truncate)]
    assert answers == [ALLOWED, "EPERM", ALLOWED]  # Landlock checks calls that open files for writing
    assert named(alone, machine, "openat2") == "ENOSYS"


def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    # Calls newer than the headers have the same number everywhere; nothing here could check them.
    known = {name: number for name, number in NUMBERS[machine].items() if number <= 450}
    assert {name: int(found.get(name, -1)) for name in known} == known


@given(st.integers(min_value=1, max_value=1 << 22))
def test_the_filter_for_a_process_id_is_the_same_whether_made_or_filled_in(pid: int) -> None:
    FILLED_IN.fill_in(pid)
    assert bytes(FILLED_IN.filter) == rules.closing(own_pid=pid)
