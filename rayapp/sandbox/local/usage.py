"""How much memory and how many processes an execution has, over its whole tree. Read from /proc, by the zygote.

Resource limits hold for each process by itself: sixteen processes may have sixteen times the memory. A cgroup would
count them together, but a pod has none to write to.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
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
        """From now on: of this process, which they are forked from."""
        self.own_pid = pid
        if self.proc >= 0:
            self._warm_pages = self._resident_pages(pid)
            self._depth = len(self._ids(pid)) - 1

    def id_of_this_process(self) -> str:
        """Its id in that /proc; empty where there is none."""
        return os.readlink("self", dir_fd=self.proc) if self.proc >= 0 else ""

    def excess(self, limits: Limits, apart: Collection[int]) -> str | None:
        """`memory` or `processes` when the tree has more than it may.

        Args:
            apart: process ids, as that process knows them, of children that are not the execution's.
        """
        if self.proc < 0:
            return None
        pages = threads = 0
        for pid in self._tree(apart):
            # Each is a fork of the warm interpreter: what they share with it is no memory of theirs.
            pages += max(0, self._resident_pages(pid) - self._warm_pages)
            threads += self._num_threads(pid)
            if threads > limits.max_processes:
                return "processes"
        return "memory" if pages * _PAGE > limits.memory_mib * MIB else None

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
        """In that /proc's pid namespace first, in its own last."""
        _, _, after = self._read(f"{pid}/status").partition("\nNSpid:")
        return after.partition("\n")[0].split()

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
