"""Limits of one execution, the resource limits that enforce them per process, and the use of its whole tree.

The zygote reads the tree's use (memory, processes, processor time) from /proc, because resource limits hold for each
process alone: sixteen processes may have sixteen times the memory and processor time. A cgroup would count them
together, but a pod has none to write to.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MIB = 1 << 20
MAX_OPEN_FILES = 128
"""Open files of one execution. The zygote's own limit stays higher: with that many descriptors of its user in flight
it could send none; see unix(7), ETOOMANYREFS."""
MAX_SOCKETS = 256
"""Sockets of one execution, over its whole tree. Each holds up to 208 KiB of the kernel's memory (Linux's default of
`wmem_default`), which no other limit counts."""
_NO_CORE = 1
"""Limit of core dumps, in bytes, that switches them off. With 0 the kernel still starts the helper in core_pattern, as
root and outside; 1 means none (fs/coredump.c)."""
_MAX_SIGNALS = 128


_MAX_WAIT_FACTOR, _MAX_WAIT_S = 9.0, 30.0

Bounds = tuple[tuple[int, int], ...]
"""Pairs of RLIMIT_… and its value."""


def longest_s(timeout_s: float) -> float:
    """Return the wall-clock seconds that code with this time limit may take if it has to wait for a processor."""
    return timeout_s + min(_MAX_WAIT_FACTOR * timeout_s, _MAX_WAIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one execution."""

    cpu_s: int
    memory_mib: int
    """Address space beyond that of the warm interpreter."""
    disk_mib: int
    """Size of the private tmpfs, and of one file."""
    max_processes: int
    """Processes and threads."""
    is_of_image: bool = False
    """True for programs of an image: `memory_mib` limits their private data, as many reserve far more addresses than
    they use (Go, Java, Node)."""

    def as_dict(self) -> dict[str, object]:
        return {
            "cpu_s": self.cpu_s,
            "memory_mib": self.memory_mib,
            "disk_mib": self.disk_mib,
            "max_processes": self.max_processes,
            "is_of_image": self.is_of_image,
        }


def set_standing_limits() -> None:
    """Set the limits that are the same for every execution on the zygote itself: its forks inherit them."""
    standing = (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
    )
    lower(tuple((what, _at_most_ours(what, value)) for what, value in standing))


def resource_bounds(limits: Limits, *, num_running: int | None) -> Bounds:
    """Return resource limits for an execution, never above this process's own.

    Args:
        num_running: processes of this user id that run already and count against its limit; None omits that limit.
    """
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
    """Lower the limits of this process and its children, soft and hard, so that nothing can raise them again."""
    for what, value in bounds:
        resource.setrlimit(what, (value, value))


@cache
def _at_most_ours(what: int, value: int) -> int:
    _, most = resource.getrlimit(what)
    return value if most == resource.RLIM_INFINITY else min(value, most)


@cache
def mapped_bytes() -> int:
    """Return the address space of the warm interpreter, measured at boot: every execution is forked from it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


_PAGE = resource.getpagesize()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CPU_FIELDS, _ALL_CPU_FIELDS, _THREADS_FIELD, _RESIDENT_FIELD = slice(11, 13), slice(11, 15), 17, 21
"""Fields of /proc/PID/stat from the state on, see proc(5): own ticks; own ticks and those of reaped children; …"""


@dataclass(slots=True)
class Use:
    """Memory, threads and processor time that one execution has used so far."""

    memory_bytes: int = 0
    num_threads: int = 0
    """Threads of all processes together."""
    cpu_s: float = 0.0
    """Processor time of all processes together, including ended ones."""
    num_sockets: int = 0
    """Sockets of its network namespace, except TCP's."""
    waited_s: float = 0.0
    """Seconds that its runnable threads have waited for a processor: the longest wait between each two checks, because
    threads may wait one after the other."""
    _cpu: dict[str, int] = field(default_factory=dict)
    """Ticks by process id."""
    _ticks_before: int = 0
    _waited: dict[str, int] = field(default_factory=dict)
    """Nanoseconds by thread, at the last check."""

    def take(self, stats: dict[str, list[str]], waited: dict[str, int], warm_pages: int) -> None:
        """Add a sample of all living processes: their /proc/PID/stat, and how long each thread has waited."""
        # Subtract the warm interpreter's pages, which each of its forks shares with it.
        pages = sum(max(0, int(stat[_RESIDENT_FIELD]) - warm_pages) for stat in stats.values())
        self.memory_bytes = pages * _PAGE
        self.num_threads = sum(int(stat[_THREADS_FIELD]) for stat in stats.values())
        self.cpu_s = (self._ticks(stats) - self._ticks_before) * _TICK_S
        since = (ns - self._waited.get(thread, 0) for thread, ns in waited.items())
        self.waited_s += max(0, max(since, default=0)) / 1e9
        self._waited = waited

    def _ticks(self, stats: dict[str, list[str]]) -> int:
        self._cpu |= {pid: sum(map(int, stat[_CPU_FIELDS])) for pid, stat in stats.items()}
        # Take the larger of two sums: the kernel's lacks children that were never reaped, ours those never sampled.
        of_kernel = sum(sum(map(int, stat[_ALL_CPU_FIELDS])) for stat in stats.values())
        return max(of_kernel, sum(self._cpu.values()))

    def forget(self, stats: dict[str, list[str]], waited: dict[str, int]) -> None:
        """Drop the use until now, by an earlier job of the same session."""
        self._ticks_before, self._waited = self._ticks(stats), waited


@dataclass(slots=True)
class Usage:
    """Samples a process's descendants, through a /proc opened before it went out of sight."""

    proc: int
    """Descriptor of a /proc; -1 if there is none: nothing is measured then."""
    own_pid: str = ""
    """Id, in that /proc (maybe of an outer pid namespace), of the process whose children are measured."""
    _depth: int = 0
    """Number of pid namespaces between that /proc and that process."""
    _warm_pages: int = 0
    counts_sockets: bool = False
    """True in a separate network namespace, which holds no other program's sockets."""

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
        """Set the process whose children are measured: the one that executions are forked from."""
        self.own_pid = pid
        if self.proc >= 0:
            self._warm_pages = int(self._stat(pid)[_RESIDENT_FIELD])
            self._depth = len(self._ids(pid)) - 1

    def id_of_this_process(self) -> str:
        """Return this process's id in that /proc; empty if there is none."""
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def look(self, use: Use, apart: Collection[int]) -> None:
        """Sample all running processes of the execution.

        Args:
            apart: process ids, in that process's namespace, of children that do not belong to the execution.
        """
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

    def _known_as(self, pid: str) -> int:
        """Return an id in the pid namespace of the process whose children are measured; 0 if it has just ended."""
        ids = self._ids(pid)
        return int(ids[self._depth]) if ids else 0

    def _ids(self, pid: str) -> list[str]:
        """Return the process's id in each pid namespace: first that of /proc, last its own."""
        _, _, after = self._read(f"{pid}/status").partition("\nNSpid:")
        return after.partition("\n")[0].split()

    def _stat(self, pid: str) -> list[str]:
        """Return the fields from the state on, because the name before may be anything; empty if it has just ended."""
        return self._read(f"{pid}/stat").rpartition(")")[2].split()

    def _threads(self, pid: str, num_threads: int) -> list[str]:
        """Return the folder of each thread in that /proc."""
        if num_threads < 2:
            return [f"{pid}/task/{pid}"]
        try:
            folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return []  # it has just ended
        try:
            return [f"{pid}/task/{thread}" for thread in os.listdir(folder)]  # noqa: PTH208  (of a descriptor)
        except OSError:
            return []
        finally:
            os.close(folder)

    def _waited_ns(self, thread: str) -> int:
        """Return nanoseconds of waiting; 0 if the kernel does not count them (CONFIG_SCHED_INFO)."""
        fields = self._read(f"{thread}/schedstat").split()
        return int(fields[1]) if len(fields) > 1 else 0

    def _read(self, path: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""  # it has just ended
        try:
            return os.read(descriptor, 1 << 16).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(descriptor)


def num_sockets(sockstat: str) -> int:
    """Return the number of sockets, except TCP's, from /proc/net/sockstat; 0 without such a file."""
    words = sockstat.split()
    return int(words[2]) - int(words[words.index("TCP:") + 2]) if "TCP:" in words else 0
