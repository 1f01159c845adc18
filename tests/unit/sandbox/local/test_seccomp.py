"""Seccomp filters, run by a small interpreter of the kernel's filter language: both architectures, without a kernel."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.sandbox.local.levels import rules, seccomp
from rayapp.sandbox.local.levels.seccomp import (
    both,
    not_with,
    null_pointer,
    only_with,
    program,
    refuse,
    with_bits,
    without_bits,
)

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
FILLED_IN = rules.ClosingAlone()
MACHINES = sorted(seccomp.NUMBERS)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def run(code: bytes, number: int, *args: int, arch: int) -> int:
    """Return the kernel's decision: the value that a filter returns for this call."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *args, *[0] * (6 - len(args)))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, constant = struct.unpack_from("<HBBI", code, at * 8)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            at += constant
        elif operation == 0x06:
            return int(constant)
        else:
            holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            at += if_true if holds[operation] else if_false


def on(machine: str, code: bytes, name: str, *args: int) -> int:
    return run(code, seccomp.NUMBERS[machine][name], *args, arch=seccomp.AUDIT_ARCH[machine])


def here(code: bytes, name: str, *args: int) -> int:
    return on(seccomp.this_machine(), code, name, *args)


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 0x3FFFFFFF), refused=st.sets(st.integers(0, 100), max_size=20))
def test_exactly_the_named_calls_are_refused(machine: str, number: int, refused: set[int]) -> None:
    names = sorted(seccomp.NUMBERS[machine])
    chosen = {names[index % len(names)] for index in refused}
    code = program({name: refuse() for name in chosen}, unknown=refuse(errno.ENOSYS), machine=machine)
    expected = ALLOW
    if number > seccomp.HIGHEST:
        expected = ERRNO | errno.ENOSYS
    elif number in {seccomp.NUMBERS[machine][name] for name in chosen}:
        expected = ERRNO | errno.EPERM
    assert run(code, number, arch=seccomp.AUDIT_ARCH[machine]) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_and_x32_are_killed(machine: str) -> None:
    code = program({}, machine=machine)
    other = next(arch for name, arch in seccomp.AUDIT_ARCH.items() if name != machine)
    i386 = 0x40000003
    for arch in (other, i386):
        assert run(code, 1, arch=arch) == KILL
    assert run(code, 0x40000000 + 1, arch=seccomp.AUDIT_ARCH[machine]) == KILL
    assert run(code, 1, arch=seccomp.AUDIT_ARCH[machine]) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_a_rule_asks_for_it(machine: str) -> None:
    code = program(
        {
            "prlimit64": only_with(0, 0),
            "ioctl": not_with(1, 0x5412, 0x541C),
            "clone": with_bits(0, 0x10000, forbidden=0x10000000, number=errno.EAGAIN),
            "unshare": without_bits(0, 0x10000000),
            "socketpair": both((0, 1), (1, 1), 0xF),
            "sendto": null_pointer(4),
        },
        machine=machine,
    )

    def answer(name: str, *args: int) -> int:
        return on(machine, code, name, *args)

    assert [answer("prlimit64", 0), answer("prlimit64", 5)] == [ALLOW, ERRNO | errno.EPERM]
    assert [answer("ioctl", 0, request) for request in (0x5401, 0x5412, 0x541C)] == [ALLOW] + [ERRNO | errno.EPERM] * 2
    assert [answer("clone", 0x10000), answer("clone", 17)] == [ALLOW, ERRNO | errno.EAGAIN]
    assert answer("clone", 0x10010000) == ERRNO | errno.EPERM
    assert [answer("unshare", 0x20000), answer("unshare", 0x10020000)] == [ALLOW, ERRNO | errno.EPERM]
    assert [answer("socketpair", 1, 0x80001), answer("socketpair", 1, 2)] == [ALLOW, ERRNO | errno.EPERM]
    assert answer("socketpair", 2, 1) == ERRNO | errno.EPERM
    # 64 bits: an address whose low half is 0 is still an address.
    assert [answer("sendto", 3, 9, 1, 0, 0), answer("sendto", 3, 9, 1, 0, 1 << 32)] == [ALLOW, ERRNO | errno.EPERM]


@pytest.mark.parametrize(
    "name", ["socket", "ptrace", "bpf", "io_uring_setup", "keyctl", "shmget", "connect", "mq_open"]
)
def test_the_standing_filter_refuses_what_nobody_here_needs(name: str) -> None:
    assert here(rules.standing(), name) == ERRNO | errno.EPERM


@pytest.mark.parametrize("name", ["mount", "unshare", "setns", "chroot", "setuid", "pidfd_open", "memfd_create"])
def test_what_the_zygote_needs_is_refused_to_executions_only(name: str) -> None:
    assert here(rules.standing(), name) == ALLOW
    assert here(rules.closing(), name) == ERRNO | errno.EPERM


def test_without_a_pid_namespace_code_signals_itself_only_and_starts_threads_only() -> None:
    code = rules.closing(own_pid=1234)
    assert [here(code, "kill", pid) for pid in (1234, 1, 0, 0xFFFFFFFF)] == [ALLOW] + [ERRNO | errno.EPERM] * 3
    threads, fork, namespace = 0x10000 | 0x100, 17, 0x10000 | 0x10000000
    assert [here(code, "clone", flags) for flags in (threads, fork)] == [ALLOW, ERRNO | errno.EAGAIN]
    assert here(code, "clone", namespace) == ERRNO | errno.EPERM
    assert here(rules.closing(), "clone", fork) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_file_system_of_its_own_code_changes_no_files_owner_mode_times_or_length(machine: str) -> None:
    alone, apart = rules.closing(own_pid=1234, machine=machine), rules.closing(machine=machine)
    for name in ("fchmodat", "fchmod", "fchownat", "utimensat", "fsetxattr", "file_setattr", "truncate"):
        assert on(machine, alone, name) == ERRNO | errno.EPERM
        assert on(machine, apart, name) == ALLOW
    read, read_and_truncate, write_and_truncate = os.O_RDONLY, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC
    answers = [on(machine, alone, "openat", 0, 0, how) for how in (read, read_and_truncate, write_and_truncate)]
    # Landlock checks calls that open files for writing
    assert answers == [ALLOW, ERRNO | errno.EPERM, ALLOW]
    assert on(machine, alone, "openat2") == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    # Calls newer than the headers have the same number everywhere; nothing here could check them.
    known = {name: number for name, number in seccomp.NUMBERS[machine].items() if number <= 450}
    assert {name: int(found.get(name, -1)) for name in known} == known


@given(st.integers(min_value=1, max_value=1 << 22))
def test_the_filter_for_a_process_id_is_the_same_whether_made_or_filled_in(pid: int) -> None:
    FILLED_IN.fill_in(pid)
    assert bytes(FILLED_IN.filter) == rules.closing(own_pid=pid)
