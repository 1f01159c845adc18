"""What one execution may use, and the resource limits that hold each of its processes to it. Used by the levels."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIB = 1 << 20
MAX_OPEN_FILES = 128
"""Open files of one execution. The zygote's own limit stays higher: with as many descriptors of its user in flight as
that limit it could send none, see unix(7), ETOOMANYREFS."""
_NO_CORE = 1
"""Limit of core dumps in bytes that switches them off. With 0 the kernel still starts a helper that core_pattern names,
as root and outside; 1 means none (fs/coredump.c)."""
_MAX_SIGNALS = 128


_MAX_WAIT_FACTOR, _MAX_WAIT_S = 9.0, 30.0

Bounds = tuple[tuple[int, int], ...]
"""Resource limits: RLIMIT_… and its value."""


def longest_s(timeout_s: float) -> float:
    """How long code with this time limit may take by the wall clock, if it has to wait for a processor."""
    return timeout_s + min(_MAX_WAIT_FACTOR * timeout_s, _MAX_WAIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    cpu_s: int
    memory_mib: int
    """Address space beyond what the warm interpreter has mapped already."""
    disk_mib: int
    """Size of its private tmpfs, and of one file."""
    max_processes: int
    """Processes and threads."""

    def as_dict(self) -> dict[str, object]:
        return {
            "cpu_s": self.cpu_s,
            "memory_mib": self.memory_mib,
            "disk_mib": self.disk_mib,
            "max_processes": self.max_processes,
        }


def set_standing_limits() -> None:
    """Limits that are the same for every execution, on the zygote itself: its forks inherit them."""
    standing = (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
    )
    lower(tuple((what, _at_most_ours(what, value)) for what, value in standing))


def resource_bounds(limits: Limits, *, num_running: int | None) -> Bounds:
    """Resource limits that hold an execution to these, never above this process's own.

    Args:
        num_running: processes of this user id that run already and count against its limit; None leaves it out.
    """
    bounds = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, mapped_bytes() + limits.memory_mib * MIB),
        (resource.RLIMIT_FSIZE, limits.disk_mib * MIB),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    if num_running is not None:
        bounds.append((resource.RLIMIT_NPROC, num_running + limits.max_processes))
    return tuple((what, _at_most_ours(what, value)) for what, value in bounds)


def lower(bounds: Bounds) -> None:
    """Lower the limits of this process and all it starts, soft and hard, so that nothing can raise them again."""
    for what, value in bounds:
        resource.setrlimit(what, (value, value))


@cache
def _at_most_ours(what: int, value: int) -> int:
    _, most = resource.getrlimit(what)
    return value if most == resource.RLIM_INFINITY else min(value, most)


@cache
def mapped_bytes() -> int:
    """Address space of the warm interpreter, measured at boot: every execution is forked from it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
