"""How much memory and how many processes an execution has, over its whole tree. Read from /proc, by the zygote.

Resource limits hold for each process by itself: sixteen processes may have sixteen times the memory. A cgroup would
count them together, but a pod has none to write to.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from rayapp.sandbox.local.limits import MIB, Limits

_PAGE = resource.getpagesize()


@dataclass(slots=True)
class Usage:
    """Sees a process's descendants, through a /proc opened before it went out of sight."""

    proc: int
    """Descriptor of a /proc; -1 where there is none, and then nothing is ever in excess."""
    own_pid: str = ""
    """Id in that /proc, which may be of an outer pid namespace, of the process whose children are looked at."""
    apart: frozenset[str] = frozenset()
    """Children whose trees are counted elsewhere: a session beside the execution."""
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
        """From now on: of this process, which they are forked from."""
        self.own_pid = pid
        self._warm_pages = self._resident_pages(pid) if self.proc >= 0 else 0

    def id_of_this_process(self) -> str:
        """Its id in that /proc; empty where there is none."""
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def children(self) -> set[str]:
        """Ids in that /proc of that process's children."""
        return set(self._read(f"{self.own_pid}/task/{self.own_pid}/children").split()) if self.proc >= 0 else set()

    def excess(self, limits: Limits) -> str | None:
        """`memory` or `processes` when the tree has more than it may."""
        if self.proc < 0:
            return None
        pages = threads = 0
        for pid in self._tree():
            # Each is a fork of the warm interpreter: what they share with it is no memory of theirs.
            pages += max(0, self._resident_pages(pid) - self._warm_pages)
            threads += self._num_threads(pid)
            if threads > limits.max_processes:
                return "processes"
        return "memory" if pages * _PAGE > limits.memory_mib * MIB else None

    def _tree(self) -> Iterator[str]:
        pending = [pid for pid in self.children() if pid not in self.apart]
        while pending:
            pid = pending.pop()
            yield pid
            pending += self._read(f"{pid}/task/{pid}/children").split()

    def _resident_pages(self, pid: str) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) if len(fields) > 1 else 0

    def _num_threads(self, pid: str) -> int:
        try:
            return os.stat(f"{pid}/task", dir_fd=self.proc).st_nlink - 2
        except OSError:
            return 0  # it has just ended

    def _read(self, path: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""  # it has just ended
        try:
            return os.read(descriptor, 1 << 16).decode()
        except OSError:
            return ""
        finally:
            os.close(descriptor)
