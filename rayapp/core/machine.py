"""What a process takes of its machine: memory, cores to compute on, a network interface.

glibc can keep freed memory or give it back to the system; elsewhere the functions here do nothing. The two processes
that allocate much want opposite things of it: a learner on CPU keeps it for the next step, the driver gives it back
after each.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Of ioctl, from sockios.h: an interface's IPv4 address."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Options of glibc's mallopt, from malloc.h."""


def keep_freed_memory() -> None:
    """Reuse what was freed instead of giving it back to the system.

    A step frees and allocates gigabytes of activations; each page given back is zeroed and mapped again, which took a
    tenth of the step's CPU time (measured: 1.2 s of 11 s, 783000 page faults, against 0.03 s and 7000). The price is
    pieces that nothing fits into: up to as much again as is in use.
    """
    set_option = _function("mallopt")
    if set_option is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20)):
            set_option(option, value)


def trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps what each thread freed in a pool of its thread. Ray's threads allocate every answer, so a driver that
    holds nothing grows by the bytes of a step's groups with every step, for hundreds of steps.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """The C library's function of that name, if it has one."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def available_memory() -> int:
    """Bytes that a new process can have: what the machine, or the cgroup of this container (v2, v1), leaves."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    root, old = Path("/sys/fs/cgroup"), "memory/memory"
    for limit, usage in (("memory.max", "memory.current"), (f"{old}.limit_in_bytes", f"{old}.usage_in_bytes")):
        if (root / limit).exists() and (most := (root / limit).read_text().strip()) != "max":
            return min(free, max(0, int(most) - int((root / usage).read_text())))
    return free


def share_of_cores(num_processes: int, *, is_synchronous: bool) -> int:
    """Threads for each of so many processes of a kind.

    A synchronous run has either its servers or its learners at work: each kind gets all cores. Above staleness 0 both
    are, and with all cores for both they wait for each other in every operator.
    """
    cores = len(os.sched_getaffinity(0))
    if not is_synchronous:
        cores //= 2
    return max(1, cores // num_processes)


def use_interface_towards(address: str) -> None:
    """Have gloo listen where processes of other nodes reach it, unless GLOO_SOCKET_IFNAME says where.

    By itself it takes the address of the host's name, which is 127.0.1.1 on Debian.

    Args:
        address: of the process that all of a group find each other through.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of UDP: nothing is sent
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex() if _address_of(name, probe) == own]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _address_of(interface: str, probe: socket.socket) -> str:
    """IPv4 address of an interface; empty if it has none."""
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
