"""How busy an engine is: the few numbers of vLLM's statistics that an operator watches.

`VllmEngine` hands an `EngineLoad` to vLLM as one of its stat loggers and reads it back. It never imports vLLM: what
vLLM calls here is decided by the names of the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EngineLoad:
    """A stat logger for vLLM that remembers the last numbers. One per engine; the rank's number is not used.

    Args:
        on_step: told after each step of the engine the share of the KV cache in use, and how many sequences it threw
            out.
        on_tokens: told after each step that sampled any.
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
        """Return this logger where vLLM asks for a new one."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM after each step of the engine; an argument is None where the step has no such statistics."""
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
        """Our engines never sleep."""

    def scalars(self) -> dict[str, float]:
        """Requests running and waiting, share of the KV cache in use; tokens looked up and found, and sequences thrown
        out to be computed again, since the start."""
        return {
            "running": float(self._running),
            "waiting": float(self._waiting),
            "kv_used": float(self._kv_used),
            "prefix_queries": float(self._prefix_queries),
            "prefix_hits": float(self._prefix_hits),
            "preempted": float(self._preempted),
        }
