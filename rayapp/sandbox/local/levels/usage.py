"""What an execution has used, over its whole tree: memory, processes, processor time. Read from /proc, by the zygote.

Resource limits hold for each process by itself: sixteen processes may have sixteen times the memory, and sixteen times
the processor. A cgroup would count them together, but a pod has none to write to.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

_PAGE = resource.getpagesize()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CPU_FIELDS, _ALL_CPU_FIELDS, _THREADS_FIELD, _RESIDENT_FIELD = slice(11, 13), slice(11, 15), 17, 21
"""Fields of /proc/PID/stat from the state on, see proc(5): own ticks, and with those of children it has waited for."""


@dataclass(slots=True)
class Use:
    """Memory, threads and processor time that one execution has used so far."""

    memory_bytes: int = 0
    num_threads: int = 0
    """Threads of all processes together."""
    cpu_s: float = 0.0
    """Processor time of all processes together, those that have ended included."""
    waited_s: float = 0.0
    """Longest time that one of its threads, able to run, has waited for a processor."""
    _cpu: dict[str, int] = field(default_factory=dict)
    """Ticks by process id."""
    _ticks_before: int = 0
    _waited_before: dict[str, int] = field(default_factory=dict)
    """Nanoseconds by thread."""

    def take(self, stats: dict[str, list[str]], waited: dict[str, int], warm_pages: int) -> None:
        """Take in a look at all living processes: their /proc/PID/stat, and how long each thread has waited."""
        # Subtract the warm interpreter's pages, which each of its forks shares with it.
        pages = sum(max(0, int(stat[_RESIDENT_FIELD]) - warm_pages) for stat in stats.values())
        self.memory_bytes = pages * _PAGE
        self.num_threads = sum(int(stat[_THREADS_FIELD]) for stat in stats.values())
        self.cpu_s = (self._ticks(stats) - self._ticks_before) * _TICK_S
        since = (ns - self._waited_before.get(thread, 0) for thread, ns in waited.items())
        self.waited_s = max(self.waited_s, max(since, default=0) / 1e9)

    def _ticks(self, stats: dict[str, list[str]]) -> int:
        self._cpu |= {pid: sum(map(int, stat[_CPU_FIELDS])) for pid, stat in stats.items()}
        # Take the larger of two sums: the kernel's lacks children that nobody waited for, ours those never looked at.
        of_kernel = sum(sum(map(int, stat[_ALL_CPU_FIELDS])) for stat in stats.values())
        return max(of_kernel, sum(self._cpu.values()))

    def forget(self, stats: dict[str, list[str]], waited: dict[str, int]) -> None:
        """Drop what was used until now, by an earlier job of the same session."""
        self._ticks_before, self._waited_before = self._ticks(stats), waited


@dataclass(slots=True)
class Usage:
    """Sees a process's descendants, through a /proc opened before it went out of sight."""

    proc: int
    """Descriptor of a /proc; -1 where there is none, and then nothing is ever used."""
    own_pid: str = ""
    """Id in that /proc, which may be of an outer pid namespace, of the process whose children are looked at."""
    _depth: int = 0
    """Pid namespaces between that /proc and that process."""
    _warm_pages: int = 0

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
        """Set the process whose children are looked at: the one that executions are forked from."""
        self.own_pid = pid
        if self.proc >= 0:
            self._warm_pages = int(self._stat(pid)[_RESIDENT_FIELD])
            self._depth = len(self._ids(pid)) - 1

    def id_of_this_process(self) -> str:
        """Its id in that /proc; empty where there is none."""
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def look(self, use: Use, apart: Collection[int]) -> None:
        """Look at everything that the execution has running now.

        Args:
            apart: process ids, as that process knows them, of children that are not the execution's.
        """
        if self.proc >= 0:
            use.take(*self._seen(apart), self._warm_pages)

    def begin(self, use: Use, apart: Collection[int]) -> None:
        """Count from here on, as another job of its session comes."""
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
        """Its id in the pid namespace of the process whose children are looked at; 0 when it has just ended."""
        ids = self._ids(pid)
        return int(ids[self._depth]) if ids else 0

    def _ids(self, pid: str) -> list[str]:
        """Process ids in each pid namespace: first in that of /proc, last in its own."""
        _, _, after = self._read(f"{pid}/status").partition("\nNSpid:")
        return after.partition("\n")[0].split()

    def _stat(self, pid: str) -> list[str]:
        """Fields from the state on, as the name before them may be anything; empty when it has just ended."""
        return self._read(f"{pid}/stat").rpartition(")")[2].split()

    def _threads(self, pid: str, num_threads: int) -> list[str]:
        """Folder of each thread in that /proc."""
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
        """0 where the kernel does not count it (CONFIG_SCHED_INFO)."""
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
