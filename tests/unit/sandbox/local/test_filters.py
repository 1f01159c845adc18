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


def test_files_are_locked_for_oneself_only_and_neither_watched_nor_leased(machine: str) -> None:
    set_lock, lease, notify, pipe_size, open_file_lock = 6, 1024, 1026, 1031, 37

    found = [
        named(rules.standing(machine), machine, "fcntl", 0, what)
        for what in (set_lock, lease, notify, pipe_size, open_file_lock)
    ]

    assert found == [ALLOWED, *["EPERM"] * 4]


def test_code_can_not_make_itself_dumpable_or_keep_others_off_the_twin_of_its_core(machine: str) -> None:
    dumpable, name, core_scheduling = 4, 15, 62

    code = rules.closing(machine=machine)

    assert [named(code, machine, "prctl", option) for option in (dumpable, name, core_scheduling)] == [
        "EPERM",
        ALLOWED,
        "EPERM",
    ]


def test_calls_newer_than_the_table_do_not_exist(machine: str) -> None:
    assert verdict(rules.standing(machine), machine, HIGHEST + 1) == "ENOSYS"
    assert verdict(rules.standing(machine), machine, 5000) == "ENOSYS"


def test_calls_of_another_architecture_kill(machine: str) -> None:
    other = next(name for name in MACHINES if name != machine)

    assert verdict(rules.standing(machine), other, 0) == KILLED
    assert _run(rules.standing(machine), struct.pack("<IIQ6Q", 1, 0x40000003, *[0] * 7)) == 0x80000000  # i386
    assert verdict(rules.standing(machine), machine, 0x40000000 + 41) == KILLED  # the x32 twin of socket


def test_limits_and_priorities_of_others_are_out_of_reach(machine: str) -> None:
    code = rules.standing(machine)

    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setattr"):
        assert [named(code, machine, name, pid) for pid in (0, 1, 4242)] == [ALLOWED, "EPERM", "EPERM"]
    assert named(code, machine, "setpriority", 0, 0, 5) == ALLOWED
    assert [named(code, machine, "setpriority", which, who) for which, who in ((0, 1), (1, 0), (2, 0))] == ["EPERM"] * 3


def test_the_buffers_of_a_pair_of_sockets_keep_their_size(machine: str) -> None:
    options = (1, 7), (1, 8), (1, 32), (1, 33), (1, 20), (6, 7)

    found = [named(rules.standing(machine), machine, "setsockopt", 3, *option) for option in options]

    assert found == [*["EPERM"] * 4, ALLOWED, ALLOWED]


def test_a_pair_of_sockets_is_a_stream_or_packets_but_never_datagrams(machine: str) -> None:
    stream, datagram, raw, packets, close_on_exec = 1, 2, 3, 5, 0o2000000
    kinds = (stream, stream | close_on_exec, packets, datagram, raw)

    found = [named(rules.standing(machine), machine, "socketpair", 1, kind) for kind in kinds]

    assert found == [ALLOWED, ALLOWED, ALLOWED, "EPERM", "EPERM"]
    assert named(rules.standing(machine), machine, "socketpair", 2, stream) == "EPERM"
    assert named(rules.standing(machine), machine, "sendto", 3, 0, 0, 0, 0) == ALLOWED
    assert [named(rules.standing(machine), machine, "sendto", 3, 0, 0, 0, to) for to in (1, 1 << 40)] == ["EPERM"] * 2


def test_with_a_loopback_clients_of_tcp_are_made_and_nothing_else(machine: str) -> None:
    code = rules.standing(machine, has_loopback=True)
    inet, inet6, stream, datagram, tcp, mptcp, close_on_exec = 2, 10, 1, 2, 6, 262, 0o2000000

    def say(name: str, *args: int) -> str:
        return named(code, machine, name, *args)

    assert [say("socket", inet, kind, proto) for kind in (stream, stream | close_on_exec) for proto in (0, tcp)] == (
        [ALLOWED] * 4
    )
    for refused in ((inet6, stream, 0), (inet, datagram, 0), (inet, stream, mptcp), (1, stream, 0), (inet, 3, tcp)):
        assert say("socket", *refused) == "EPERM"
    assert say("connect", 3) == ALLOWED
    assert [say(name, 3) for name in ("bind", "listen", "accept", "accept4")] == ["EPERM"] * 4
    assert [(say("setsockopt", 3, 1, size), say("getsockopt", 3, 1, size)) for size in (7, 8)] == [
        ("EPERM", ALLOWED)
    ] * 2
    for name in ("setsockopt", "getsockopt"):
        assert [say(name, 3, *option) for option in ((1, 9), (6, 1), (1, 4))] == [ALLOWED] * 3
        for level, option in ((6, 31), (6, 30), (6, 35), (1, 60), (1, 26), (0, 1), (41, 26), (1, 1)):
            assert say(name, 3, level, option) == "EPERM"
    assert [say("ioctl", 3, what) for what in (0x5421, 0x5401)] == [ALLOWED] * 2
    assert [say("ioctl", 3, what) for what in (0x8912, 0x8946, 0x89FF, 0x5412)] == ["EPERM"] * 4
    assert say("sendto", 3, 0, 0, 0, 1) == "EPERM"


def test_signals_can_not_be_sent_by_way_of_files_or_terminals(machine: str) -> None:
    code = rules.standing(machine)

    assert [named(code, machine, "fcntl", 0, command) for command in (1, 8, 10, 15)] == [ALLOWED, *["EPERM"] * 3]
    assert [named(code, machine, "ioctl", 0, what) for what in (0x5401, 0x5412, 0x8901)] == [ALLOWED, "EPERM", "EPERM"]


def test_new_namespaces_are_refused_and_threads_and_processes_are_not(machine: str) -> None:
    thread, new_user, sigchld = 0x00010000, 0x10000000, 17
    code = rules.closing(machine=machine)

    assert [named(code, machine, "clone", flags) for flags in (sigchld, thread, thread | new_user, new_user)] == [
        ALLOWED,
        ALLOWED,
        "EPERM",
        "EPERM",
    ]
    assert named(rules.standing(machine), machine, "clone3") == "ENOSYS"


def test_without_a_pid_namespace_there_are_threads_only_and_signals_only_to_oneself(machine: str) -> None:
    thread, new_user, sigchld = 0x00010000, 0x10000000, 17
    code = rules.closing(own_pid=77, machine=machine)

    assert [named(code, machine, "clone", flags) for flags in (sigchld, thread, thread | new_user)] == [
        "EAGAIN",
        ALLOWED,
        "EPERM",
    ]
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        assert [named(code, machine, name, pid, 9) for pid in (77, 1, 78)] == [ALLOWED, "EPERM", "EPERM"]
    assert named(code, machine, "kill", 0xFFFFFFFFFFFFFFFF, 9) == "EPERM"  # all processes
    assert named(code, machine, "tkill", 77, 9) == "EPERM"


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
