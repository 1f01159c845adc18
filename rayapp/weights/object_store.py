"""Weights from learners to servers through Ray's object store: the transport of CPU machines, and the fallback.

Learner rank 0 streams buckets; each server maps them where it runs. A bucket is written once and read by every server
of a node without a copy, and no tensor ever passes through the driver or an engine's RPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from rayapp.errors import WeightSyncError

BUCKET_BYTES = 256 << 20
"""Large enough that a bucket's cost is its bytes, small enough that two copies in flight fit any object store."""


class WeightSource(Protocol):
    """The learners."""

    def export_weights(self, bucket_bytes: int) -> AsyncIterator[Any]:
        """References to `WeightBucket`s."""
        ...


class WeightTarget(Protocol):
    """A server."""

    @property
    def name(self) -> str: ...

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]: ...


class ObjectStoreTransport:
    """Gives every server the learners' weights.

    Args:
        timeout_s: for one whole sync.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def sync(self, version: int, *, source: WeightSource, servers: Sequence[WeightTarget]) -> dict[str, float]:
        """Make `version` the one that all servers hold.

        Returns:
            `weight_sync/*`: bytes, seconds to export, seconds until the slowest server holds it.
        Raises:
            WeightSyncError: a server does not hold it. It refuses to generate until a later sync succeeds.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                refs = [ref async for ref in source.export_weights(BUCKET_BYTES)]
                exported = time.monotonic()
                facts = await asyncio.gather(*(server.load_weights(version, refs) for server in servers))
        except TimeoutError:
            raise WeightSyncError(
                f"version {version} did not reach every server within server.sync_timeout_s = {self._timeout_s:g} s"
            ) from None
        return {
            "weight_sync/bytes": float(facts[0]["bytes"]) if facts else 0.0,
            "weight_sync/export_s": exported - started,
            "weight_sync/load_s": time.monotonic() - exported,
        }
