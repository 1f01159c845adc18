"""Reads an engine's output: the cause of a failure from its log, and its load from vLLM's statistics.

vLLM's exceptions in the server say "see root cause above": the cause was raised in another process, which logs it to
the standard output that it shares with the server. That is one of Ray's log files, so `EngineOutput` finds the cause.

`VllmEngine` gives vLLM an `EngineLoad` as a stat logger and reads its numbers. vLLM calls its methods by name, so this
module does not import vLLM.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROCESS = rb"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] "
_CAUSE = re.compile(_PROCESS + rb"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)", re.MULTILINE)
"""Pattern of a traceback's last line, the only one that is not indented."""
_CACHE = re.compile(r"\bkv\b|\bcache\b", re.IGNORECASE)
_MOST_READ = 1 << 20
_MOST_CHARS = 500


class EngineOutput:
    """Output of this process and its children from now on.

    Args:
        descriptor: file descriptor that they write to; if it is not a file, the output is unknown.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._path = Path(f"/proc/self/fd/{descriptor}")
        self._start = _size(self._path)

    def cause(self) -> str:
        """Return `, because ` and the first exception that a process of the engine logged; empty without one."""
        found = _CAUSE.search(self._text())
        return _because(found[1]) if found else ""

    def last_line(self) -> str:
        """Return `, because ` and the last line: on standard error a failing program writes the reason last."""
        lines = self._text().split(b"\n")
        return next((_because(line) for line in reversed(lines) if line.strip()), "")

    def _text(self) -> bytes:
        if self._start is None:
            return b""
        with self._path.open("rb") as output:
            output.seek(self._start)
            return output.read(_MOST_READ)


def way_out(why: str) -> str:
    """Return the run's keys to set if vLLM says that its KV cache is too small or too large; else empty."""
    return (
        " Set the KV cache's size: server.kv_cache_gib, on a GPU server.gpu_memory_utilization."
        if _CACHE.search(why)
        else ""
    )


def _because(line: bytes) -> str:
    return f", because {line.decode(errors='replace')[:_MOST_CHARS]}"


def _size(path: Path) -> int | None:
    """Return the file's size; None for a pipe or a terminal, whose output can't be read again."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class EngineLoad:
    """A stat logger for vLLM that keeps the last numbers. One per engine; the rank's number is not used.

    Args:
        on_step: called after each step with the share of the KV cache in use, and the number of preempted sequences.
        on_tokens: called after each step that sampled tokens.
    """

    def __init__(
        self,
        on_step: Callable[[float, int], None] = lambda kv_used, num_preempted: None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._running = self._waiting = 0
        self._kv_used = 0.0
        self._prefix_queries = self._prefix_hits = self._preempted = 0
        self._on_step = on_step
        self._on_tokens = on_tokens

    def factory(self, vllm_config: Any, engine_index: int = 0) -> EngineLoad:
        """Return this logger when vLLM requests a new one."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Record a step's statistics; vLLM calls it after each step, with None for missing statistics."""
        num_preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
        self._preempted += num_preempted
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self._on_tokens()
        if scheduler_stats is None:
            return
        self._running = scheduler_stats.num_running_reqs
        self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._kv_used = scheduler_stats.kv_cache_usage
        self._prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self._prefix_hits += scheduler_stats.prefix_cache_stats.hits
        self._on_step(self._kv_used, num_preempted)

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM calls it."""

    def log(self) -> None:
        """Does nothing: the numbers are read with `scalars`."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing; vLLM calls it."""

    def scalars(self) -> dict[str, float]:
        """Return the requests running and waiting, and the share of the KV cache in use; and counts since the start of
        prefix-cache tokens looked up and found, and of preempted sequences."""
        return {
            "running": float(self._running),
            "waiting": float(self._waiting),
            "kv_used": float(self._kv_used),
            "prefix_queries": float(self._prefix_queries),
            "prefix_hits": float(self._prefix_hits),
            "preempted": float(self._preempted),
        }
