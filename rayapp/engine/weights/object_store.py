"""Weights from learners to servers through Ray's object store: the transport of CPU machines, and the fallback.

Learner rank 0 streams buckets; each server maps them where it runs. A bucket is written once and read by every server
of a node without a copy, and no tensor ever passes through the driver or an engine's RPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from rayapp.core.errors import ObjectsLostError, RayappError, WeightSyncError

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
"""Large enough that a bucket's cost is its bytes, small enough that two copies in flight fit any object store."""


class WeightSource(Protocol):
    """The learners, as far as this transport knows them."""

    def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """References to `WeightBucket`s of the weights as they are, which the caller knows by this version."""
        ...


class WeightTarget(Protocol):
    """A server, as far as this transport knows it."""

    @property
    def name(self) -> str: ...

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]: ...


class ObjectStoreTransport:
    """Gives every server the learners' weights, and keeps the last ones for a server that is started again.

    Args:
        timeout_s: for one whole sync.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version = 0
        self._buckets: list[Any] = []
        self._is_syncing = asyncio.Lock()
        self.are_lost = False
        """True when the weights of the last sync were on a node that is gone: only the learners can give them again."""

    async def sync(
        self, version: int, *, source: WeightSource, servers: Sequence[WeightTarget]
    ) -> tuple[dict[str, float], dict[str, RayappError]]:
        """Make `version` the one that all servers hold.

        Returns:
            `weight_sync/*` (bytes, seconds to export, seconds until the slowest server holds it), and by name the
            servers that do not hold it. They refuse to generate; whoever replaces them calls `catch_up`.
        Raises:
            LearnersLostError: the learners did not give their weights.
            WeightSyncError: they did not within the timeout.
        """
        started = time.monotonic()
        async with self._is_syncing:
            try:
                async with asyncio.timeout(self._timeout_s):
                    buckets = [ref async for ref in source.export_weights(version, BUCKET_BYTES)]
            except TimeoutError:
                raise WeightSyncError(
                    f"the learners did not give version {version} within server.sync_timeout_s = {self._timeout_s:g} s"
                ) from None
            self._version, self._buckets, self.are_lost = version, buckets, False
            exported = time.monotonic()
            loaded = await asyncio.gather(*(self._load(server) for server in servers))
        failed = {
            server.name: facts for server, facts in zip(servers, loaded, strict=True) if not isinstance(facts, dict)
        }
        num_held = min((facts.get("num_held", 0.0) for facts in loaded if isinstance(facts, dict)), default=0.0)
        num_bytes = max((facts["bytes"] for facts in loaded if isinstance(facts, dict)), default=0.0)
        metrics = {
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/tensors_held": float(num_held),
            "weight_sync/export_s": exported - started,
            "weight_sync/load_s": time.monotonic() - exported,
        }
        return metrics, failed

    async def _load(self, server: WeightTarget) -> dict[str, Any] | RayappError:
        """Load one server. Returns its answer or its error: one server's failure must not hide the others' success."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await server.load_weights(self._version, self._buckets)
        except RayappError as error:
            return error
        except TimeoutError:
            return WeightSyncError(
                f"{server.name} did not load version {self._version} within server.sync_timeout_s = "
                f"{self._timeout_s:g} s"
            )

    async def catch_up(self, server: WeightTarget) -> None:
        """Give the version of the last sync to a server that has just been started.

        Where those weights are gone, as after the loss of the learners' node, it gets none: it serves nothing until the
        next sync, and `are_lost` says so.

        Raises:
            WeightSyncError: or another error of `load_weights`; the server must be replaced.
        """
        # Serialize with sync, else an older version lands last.
        async with self._is_syncing:
            if not self._buckets:
                return
            try:
                await server.load_weights(self._version, self._buckets)
            except ObjectsLostError as error:
                log.warning("version %d can't be given to %s any more: %s", self._version, server.name, error)
                self._buckets, self.are_lost = [], True
