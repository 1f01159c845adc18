"""What one execution may use, and the resource limits that hold each of its processes to it. Used by the levels."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    cpu_s: int
    memory_mib: int
    """Address space beyond what the warm interpreter has mapped already."""
    disk_mib: int
    """Of its private tmpfs, and of one file."""
    max_processes: int
    """Processes and threads."""
    max_open_files: int = 128


def set_limits(limits: Limits, *, num_running: int | None) -> None:
    """Resource limits of this process and all it starts; lowered hard, so nothing can raise them again.

    Args:
        num_running: processes of this user id that run already and count against its limit; None leaves it out.
    """
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, mapped_bytes() + limits.memory_mib * MIB),
        (resource.RLIMIT_FSIZE, limits.disk_mib * MIB),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, 128),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (value, value))
    if num_running is not None:
        most = num_running + limits.max_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


@cache
def mapped_bytes() -> int:
    """Address space of the warm interpreter, measured at boot: every execution is forked from it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
