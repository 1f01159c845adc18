"""Cohorts: requests that start together wait here for each other, but not for ever, as some may have been lost.

Used by `VllmEngine`, which says what starting them means. Pure asyncio: neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rayapp.core.types import SamplingParams

log = logging.getLogger(__name__)


class Request:
    """A request that waits for its cohort."""

    def __init__(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.created_s = time.monotonic()
        self.queue: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """The engine's output queue, once the request has started; cancelled when whoever asked has gone."""

    def order(self) -> tuple[object, ...]:
        """Sort key that compares numbers as numbers: `group=2/trajectory=10` comes after `group=2/trajectory=9`."""
        return tuple(int(part) if part.isdigit() else part for part in self.request_id.replace("/", "=").split("="))


class Cohorts:
    """Collects requests until their cohort is complete, then starts it.

    Args:
        start: settles the `queue` of every request that it is given.
        patience_s: how long a request waits for its cohort; then those that are there start. Where a worker died, its
            groups are issued again alone, and the rest of the cohort would wait for them until it failed.
    """

    def __init__(self, start: Callable[[list[Request]], Awaitable[None]], *, patience_s: float) -> None:
        self._start = start
        self._patience_s = patience_s
        self._waiting: list[Request] = []

    async def admit(self, request: Request, size: int) -> Any:
        """Start a request with its cohort, in the order of ids. Returns the engine's output queue for it.

        Args:
            size: number of requests in the cohort, itself included.
        """
        self._waiting.append(request)
        try:
            if len(self._waiting) < size:
                await asyncio.wait([request.queue], timeout=self._patience_s)
                if request in self._waiting:
                    log.warning("%s starts with %d of its %d", request.request_id, len(self._waiting), size)
            if request in self._waiting:
                cohort, self._waiting = sorted(self._waiting, key=Request.order), []
                # Shielded: if this request is cancelled, the others must start all the same.
                await asyncio.shield(self._start_all(cohort))
            return await request.queue
        except asyncio.CancelledError:
            request.queue.cancel()
            raise
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def _start_all(self, cohort: list[Request]) -> None:
        try:
            await self._start(cohort)
        except Exception as error:  # boundary: every request of the cohort must get the error
            for request in cohort:
                if not request.queue.done():
                    request.queue.set_exception(error)
