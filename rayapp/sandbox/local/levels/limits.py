"""Limits of one execution: rlimits for each process, and measurements of the whole process tree.

The zygote reads the tree's memory, processes and processor time from /proc. An rlimit would not be enough, because it
applies to each process separately: sixteen processes could use sixteen times the memory and processor time. A cgroup
would count the processes together, but a pod can't write to its cgroup.
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
"""Maximum number of open files of each process of an execution. The zygote's own limit is
higher: with an equal limit it could send no descriptor while candidate code has as many in flight (unix(7),
ETOOMANYREFS)."""
MAX_SOCKETS = 256
"""Maximum number of sockets of an execution's whole process tree. A socket holds up to 208 KiB of kernel memory
(Linux's default of `wmem_default`), which no other limit counts."""
_NO_CORE = 1
"""Maximum size of core dumps, in bytes. 1 switches them off (fs/coredump.c). With 0 the kernel would still start the
program in core_pattern, as root and outside the sandbox."""
_MAX_SIGNALS = 128


_MAX_WAIT_FACTOR, _MAX_WAIT_S = 9.0, 30.0

Bounds = tuple[tuple[int, int], ...]
"""Pairs of an RLIMIT_… constant and its value."""


def longest_s(timeout_s: float) -> float:
    """Return the wall-clock seconds after which code with this time limit is stopped in any case, even if it waited for
    a processor.
    """
    return timeout_s + min(_MAX_WAIT_FACTOR * timeout_s, _MAX_WAIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one execution."""

    cpu_s: int
    memory_mib: int
    """Maximum address space, in addition to that of the warm interpreter."""
    disk_mib: int
    """Maximum size of the private tmpfs, and of one file."""
    max_processes: int
    """Maximum number of processes and threads together."""
    is_of_image: bool = False
    """True for programs of an image. `memory_mib` then limits private data and not the address space, because many
    programs (Go, Java, Node) reserve far more addresses than they use."""

    def as_dict(self) -> dict[str, object]:
        return {
            "cpu_s": self.cpu_s,
            "memory_mib": self.memory_mib,
            "disk_mib": self.disk_mib,
            "max_processes": self.max_processes,
            "is_of_image": self.is_of_image,
        }


def set_standing_limits() -> None:
    """Set the limits that are the same for every execution. They are set in the zygote, and its forks inherit them."""
    standing = (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
    )
    lower(tuple((what, _at_most_ours(what, value)) for what, value in standing))


def resource_bounds(limits: Limits, *, num_running: int | None) -> Bounds:
    """Return the rlimits of an execution. None is higher than this process's own limit.
    Args:
        num_running: number of this user's running processes, which count against the limit of processes; None leaves
            this limit out.
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
    """Lower the soft and hard limits of this process and its children, which then can't raise them again."""
    for what, value in bounds:
        resource.setrlimit(what, (value, value))


@cache
def _at_most_ours(what: int, value: int) -> int:
    _, most = resource.getrlimit(what)
    return value if most == resource.RLIM_INFINITY else min(value, most)


@cache
def mapped_bytes() -> int:
    """Return the bytes of this process's address space. Called at boot, because every execution starts with an address
    space of this size.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


_PAGE = resource.getpagesize()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CPU_FIELDS, _ALL_CPU_FIELDS, _THREADS_FIELD, _RESIDENT_FIELD = slice(11, 13), slice(11, 15), 17, 21
"""Indices into the fields of /proc/PID/stat, where 0 is the state (see proc(5)): ticks of processor time; these and the
ticks of reaped children; number of threads; resident pages."""


@dataclass(slots=True)
class Use:
    """Memory, threads and processor time that one execution has used so far."""

    memory_bytes: int = 0
    num_threads: int = 0
    """Number of threads of all processes together."""
    cpu_s: float = 0.0
    """Processor time of all processes together, in seconds, including processes that have ended."""
    num_sockets: int = 0
    """Number of sockets in the execution's network namespace, without TCP sockets."""
    waited_s: float = 0.0
    """Seconds for which runnable threads have waited for a processor. Between two checks only the thread with the
    longest wait counts, because threads wait at the same time."""
    _cpu: dict[str, int] = field(default_factory=dict)
    """Ticks of processor time by process id."""
    _ticks_before: int = 0
    _waited: dict[str, int] = field(default_factory=dict)
    """Nanoseconds for which each thread had waited at the last check."""

    def take(self, stats: dict[str, list[str]], waited: dict[str, int], warm_pages: int) -> None:
        """Add a sample of all living processes.

        Args:
            stats: fields of /proc/PID/stat, by process id.
            waited: nanoseconds for which each thread has waited for a processor.
            warm_pages: resident pages of the warm interpreter.
        """
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
    """Samples the descendants of a process through a /proc that was opened before the zygote hid it."""

    proc: int
    """Descriptor of a /proc; -1 if there is none, so that nothing can be measured."""
    own_pid: str = ""
    """Id of the process whose children are measured, as `proc` shows it: `proc` may be of an outer pid namespace."""
    _depth: int = 0
    """Number of pid namespaces between `proc` and the process whose children are measured."""
    _warm_pages: int = 0
    counts_sockets: bool = False
    """True if the network namespace holds only sockets of executions, so that they can be counted."""

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
        """Set the process whose children are measured: the process from which executions are forked."""
        self.own_pid = pid
        if self.proc >= 0:
            self._warm_pages = int(self._stat(pid)[_RESIDENT_FIELD])
            self._depth = len(self._ids(pid)) - 1

    def id_of_this_process(self) -> str:
        """Return this process's id as `proc` shows it; empty if there is no /proc."""
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def look(self, use: Use, apart: Collection[int]) -> None:
        """Sample all running processes of the execution.

        Args:
            apart: ids of children that do not belong to the execution, in the pid namespace of their parent.
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

    def ids_of_children(self, known_as: Collection[int]) -> list[int]:
        """Return the ids, as `proc` shows them, of children that have the ids `known_as` in the pid namespace of their
        parent.
        """
        return [int(pid) for pid in self._children(self.own_pid) if self._known_as(pid) in known_as]

    def _known_as(self, pid: str) -> int:
        """Return a process's id in the pid namespace of its parent; 0 if the process has just ended."""
        ids = self._ids(pid)
        return int(ids[self._depth]) if ids else 0

    def _ids(self, pid: str) -> list[str]:
        """Return a process's ids: first in the pid namespace of `proc`, then in each nested one, last in its own."""
        _, _, after = self._read(f"{pid}/status").partition("\nNSpid:")
        return after.partition("\n")[0].split()

    def _stat(self, pid: str) -> list[str]:
        """Return the fields of /proc/PID/stat from the state on; empty if the process has just ended. The field before
        the state is skipped, because it is a name that the process itself chooses.
        """
        return self._read(f"{pid}/stat").rpartition(")")[2].split()

    def _threads(self, pid: str, num_threads: int) -> list[str]:
        """Return the path of each thread's folder in `proc`."""
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
        """Return the nanoseconds for which a thread has waited for a processor; 0 if the kernel does not count them
        (CONFIG_SCHED_INFO).
        """
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
    """Return the number of sockets, without TCP sockets, that /proc/net/sockstat gives; 0 if that file could not be
    read.
    """
    words = sockstat.split()
    return int(words[2]) - int(words[words.index("TCP:") + 2]) if "TCP:" in words else 0
