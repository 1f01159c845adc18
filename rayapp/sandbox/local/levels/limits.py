"""Limits of one execution: rlimits for each process, and measurements of the whole process tree in /proc.

An rlimit applies to each process separately: sixteen processes could use sixteen times the memory. A cgroup would count
them together, but a pod can't write to its cgroup.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MIB = 1 << 20
# The zygote's own limit is higher: with an equal one it could send no descriptor while code has as many in flight
# (unix(7), ETOOMANYREFS).
MAX_OPEN_FILES = 128
# Sockets of the whole tree; each holds up to 208 KiB of kernel memory (wmem_default), which no other limit counts.
MAX_SOCKETS = 256
# 1 switches core dumps off (fs/coredump.c); with 0 the kernel would still start core_pattern's program, as root
_NO_CORE = 1
_MAX_SIGNALS = 128


_MAX_WAIT_FACTOR, _MAX_WAIT_S = 9.0, 30.0

Bounds = tuple[tuple[int, int], ...]  # pairs of an RLIMIT_… constant and its value


def longest_s(timeout_s: float) -> float:
    """Return the wall-clock seconds after which code is stopped in any case, even if it waited for a processor."""
    return timeout_s + min(_MAX_WAIT_FACTOR * timeout_s, _MAX_WAIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    cpu_s: int
    memory_mib: int  # address space, in addition to that of the warm interpreter
    disk_mib: int  # of the private tmpfs, and of one file
    max_processes: int  # and threads
    # `memory_mib` then limits private data: many programs (Go, Java, Node) reserve far more addresses than they use.
    is_of_image: bool = False

    def as_dict(self) -> dict[str, object]:
        return {
            "cpu_s": self.cpu_s,
            "memory_mib": self.memory_mib,
            "disk_mib": self.disk_mib,
            "max_processes": self.max_processes,
            "is_of_image": self.is_of_image,
        }


def set_standing_limits() -> None:
    """Set the limits that are the same for every execution, in the zygote; its forks inherit them."""
    standing = (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
    )
    lower(tuple((what, _at_most_ours(what, value)) for what, value in standing))


def resource_bounds(limits: Limits, *, num_running: int | None) -> Bounds:
    """Return the rlimits of an execution, none above this process's own. `num_running` processes of this user count
    against the limit of processes; None leaves that limit out."""
    bounds = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (
            resource.RLIMIT_DATA if limits.is_of_image else resource.RLIMIT_AS,
            mapped_bytes() + limits.memory_mib * MIB,
        ),
        (resource.RLIMIT_FSIZE, limits.disk_mib * MIB),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    if num_running is not None:
        bounds.append((resource.RLIMIT_NPROC, num_running + limits.max_processes))
    return tuple((what, _at_most_ours(what, value)) for what, value in bounds)


def lower(bounds: Bounds) -> None:
    """Lower the soft and hard limits of this process and its children, which then can't raise them again."""
    for what, value in bounds:
        resource.setrlimit(what, (value, value))


@cache
def _at_most_ours(what: int, value: int) -> int:
    _, most = resource.getrlimit(what)
    return value if most == resource.RLIM_INFINITY else min(value, most)


@cache
def mapped_bytes() -> int:
    """Return the bytes of this process's address space; every execution starts with one of this size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


_PAGE = resource.getpagesize()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Indices into /proc/PID/stat where 0 is the state (proc(5)): ticks; these and those of reaped children; threads; pages.
_CPU_FIELDS, _ALL_CPU_FIELDS, _THREADS_FIELD, _RESIDENT_FIELD = slice(11, 13), slice(11, 15), 17, 21


@dataclass(slots=True)
class Use:
    """Memory, threads and processor time that one execution has used so far."""

    memory_bytes: int = 0
    num_threads: int = 0
    cpu_s: float = 0.0  # all processes together, ended ones included
    num_sockets: int = 0  # in the execution's network namespace, without TCP sockets
    # Seconds that runnable threads waited for a processor; between two checks only the longest wait counts.
    waited_s: float = 0.0
    _cpu: dict[str, int] = field(default_factory=dict)  # ticks by process id
    _ticks_before: int = 0
    _waited: dict[str, int] = field(default_factory=dict)  # nanoseconds by thread, at the last check

    def take(self, stats: dict[str, list[str]], waited: dict[str, int], warm_pages: int) -> None:
        """Add a sample: fields of /proc/PID/stat by process id, nanoseconds each thread waited, pages of the warm
        interpreter."""
        # Subtract the pages of the warm interpreter, because all of its forks share them.
        pages = sum(max(0, int(stat[_RESIDENT_FIELD]) - warm_pages) for stat in stats.values())
        self.memory_bytes = pages * _PAGE
        self.num_threads = sum(int(stat[_THREADS_FIELD]) for stat in stats.values())
        self.cpu_s = (self._ticks(stats) - self._ticks_before) * _TICK_S
        since = (ns - self._waited.get(thread, 0) for thread, ns in waited.items())
        self.waited_s += max(0, max(since, default=0)) / 1e9
        self._waited = waited

    def _ticks(self, stats: dict[str, list[str]]) -> int:
        self._cpu |= {pid: sum(map(int, stat[_CPU_FIELDS])) for pid, stat in stats.items()}
        # Take the larger of two sums. The kernel's sum lacks children that were never reaped; the sum of the samples
        # lacks children that were never sampled.
        of_kernel = sum(sum(map(int, stat[_ALL_CPU_FIELDS])) for stat in stats.values())
        return max(of_kernel, sum(self._cpu.values()))

    def forget(self, stats: dict[str, list[str]], waited: dict[str, int]) -> None:
        """Reset the use to zero for the next job of a session."""
        self._ticks_before, self._waited = self._ticks(stats), waited


@dataclass(slots=True)
class Usage:
    """Samples of the descendants of a process, through a /proc that was opened before the zygote hid it."""

    proc: int  # -1 if there is none, so that nothing can be measured
    own_pid: str = ""  # as `proc` shows it, which may be of an outer pid namespace
    _depth: int = 0  # pid namespaces between `proc` and the process whose children are measured
    _warm_pages: int = 0
    counts_sockets: bool = False  # the network namespace holds only sockets of executions

    @classmethod
    def of_this_process(cls) -> Usage:
        try:
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            usage = cls(proc)
            usage.look_at_children_of(usage.id_of_this_process())
        except OSError:
            return cls(-1)
        return usage

    def look_at_children_of(self, pid: str) -> None:
        self.own_pid = pid
        if self.proc >= 0:
            self._warm_pages = int(self._stat(pid)[_RESIDENT_FIELD])
            self._depth = len(self._ids(pid)) - 1

    def id_of_this_process(self) -> str:
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def look(self, use: Use, apart: Collection[int]) -> None:
        """Sample all processes of the execution; `apart`: children that don't belong to it, by id in their parent's
        namespace."""
        if self.proc >= 0:
            use.take(*self._seen(apart), self._warm_pages)
            if self.counts_sockets:
                use.num_sockets = num_sockets(self._read("self/net/sockstat"))

    def begin(self, use: Use, apart: Collection[int]) -> None:
        """Restart the count for the next job of a session."""
        if self.proc >= 0:
            use.forget(*self._seen(apart))

    def _seen(self, apart: Collection[int]) -> tuple[dict[str, list[str]], dict[str, int]]:
        stats = {pid: stat for pid in self._tree(apart) if (stat := self._stat(pid))}
        threads = [thread for pid, stat in stats.items() for thread in self._threads(pid, int(stat[_THREADS_FIELD]))]
        return stats, {thread: self._waited_ns(thread) for thread in threads}

    def _tree(self, apart: Collection[int]) -> Iterator[str]:
        pending = [pid for pid in self._children(self.own_pid) if not apart or self._known_as(pid) not in apart]
        while pending:
            pid = pending.pop()
            yield pid
            pending += self._children(pid)

    def _children(self, pid: str) -> list[str]:
        return self._read(f"{pid}/task/{pid}/children").split()

    def ids_of_children(self, known_as: Collection[int]) -> list[int]:
        """Return the ids in `proc` of children that have the ids `known_as` in their parent's pid namespace."""
        return [int(pid) for pid in self._children(self.own_pid) if self._known_as(pid) in known_as]

    def _known_as(self, pid: str) -> int:
        # 0 if the process has just ended
        ids = self._ids(pid)
        return int(ids[self._depth]) if ids else 0

    def _ids(self, pid: str) -> list[str]:
        """Return a process's ids: in the pid namespace of `proc`, then in each nested one, last in its own."""
        _, _, after = self._read(f"{pid}/status").partition("\nNSpid:")
        return after.partition("\n")[0].split()

    def _stat(self, pid: str) -> list[str]:
        """Return the fields from the state on; none if the process has just ended. The process chooses the name
        before."""
        return self._read(f"{pid}/stat").rpartition(")")[2].split()

    def _threads(self, pid: str, num_threads: int) -> list[str]:
        if num_threads < 2:
            return [f"{pid}/task/{pid}"]
        try:
            folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return []  # the process has just ended
        try:
            return [f"{pid}/task/{thread}" for thread in os.listdir(folder)]  # noqa: PTH208  (of a descriptor)
        except OSError:
            return []
        finally:
            os.close(folder)

    def _waited_ns(self, thread: str) -> int:
        # 0 if the kernel does not count them (CONFIG_SCHED_INFO)
        fields = self._read(f"{thread}/schedstat").split()
        return int(fields[1]) if len(fields) > 1 else 0

    def _read(self, path: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""  # the process has just ended
        try:
            return os.read(descriptor, 1 << 16).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(descriptor)


def num_sockets(sockstat: str) -> int:
    """Return the number of sockets, without TCP sockets; 0 if the file could not be read."""
    words = sockstat.split()
    return int(words[2]) - int(words[words.index("TCP:") + 2]) if "TCP:" in words else 0
