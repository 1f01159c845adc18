"""Weights straight from the learners to the engines: the transport of runs whose servers and learners form a group.

    sync: learners.send_weights --vLLM's start, update, finish--> servers.go_on: all hold the version, or are named
    catch_up: one server that was started again takes the learners' weights through the object store, as the group it
              belonged to is gone; the next sync forms a new one

The group is made at the first sync and kept. Written against protocols, so that tests need neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rayapp.core.errors import RayappError, WeightSyncError
from rayapp.engine.weights.object_store import BUCKET_BYTES, WeightSource, WeightTarget

log = logging.getLogger(__name__)


class GroupSource(WeightSource, Protocol):
    """The learners, as far as this transport knows them."""

    async def open_weight_group(self, servers: Sequence[Any], timeout_s: float) -> None:
        """Form a new group with these servers; an older one is left."""
        ...

    async def send_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        """Give every server of the group the weights as they are. Returns bytes and seconds."""
        ...


class GroupTarget(WeightTarget, Protocol):
    """A server, as far as this transport knows it."""

    async def go_on(self, timeout_s: float) -> int:
        """Serve with the weights of an update that is whole. Policy version that it holds; -1 for none."""
        ...


class DirectTransport:
    """Gives every server the learners' weights through one process group.

    Args:
        timeout_s: for each phase: forming the group, sending, and having the servers go on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version = 0
        self._source: GroupSource | None = None
        self._joined_by: GroupSource | None = None
        self._is_syncing = asyncio.Lock()
        self.are_lost = False
        """Always False, as the learners have the weights; there for the interface of `ObjectStoreTransport`."""

    async def sync(
        self, version: int, *, source: GroupSource, servers: Sequence[GroupTarget]
    ) -> tuple[dict[str, float], dict[str, RayappError]]:
        """Make `version` the one that all servers hold; see `ObjectStoreTransport.sync`.

        After a failure every server that does not hold the version is in the second dict: they waited for each other
        in the middle of it, and each must be replaced.

        Raises:
            LearnersLostError: the learners are gone.
        """
        started = time.monotonic()
        async with self._is_syncing:
            self._source, facts, error = source, {}, None
            try:
                joined_s = await self._join(source, servers)
                facts = await source.send_weights(version, self._timeout_s)
            except WeightSyncError as caught:
                log.warning("version %d did not reach every server: %s", version, caught)
                self._joined_by, error, joined_s = None, caught, 0.0
            self._version = version
            failed = await self._without(version, servers, error)
        metrics = {
            "weight_sync/bytes": facts.get("bytes", 0.0),
            "weight_sync/join_s": joined_s,
            "weight_sync/load_s": time.monotonic() - started - joined_s,
            "weight_sync/tensors_held": facts.get("num_checked", 0.0),
        }
        return metrics, failed

    async def _join(self, source: GroupSource, servers: Sequence[GroupTarget]) -> float:
        """Form the group, unless these learners have. Returns seconds."""
        if self._joined_by is source:
            return 0.0
        started = time.monotonic()
        await source.open_weight_group(servers, self._timeout_s)
        self._joined_by = source
        return time.monotonic() - started

    async def _without(
        self, version: int, servers: Sequence[GroupTarget], error: RayappError | None
    ) -> dict[str, RayappError]:
        """Have the servers go on. Those that do not hold the version, by name, each with the reason.

        Only now, when every learner is done: servers that share a GPU with one take its memory back.
        """
        answers = await asyncio.gather(*(self._go_on(server) for server in servers))
        reason = error or WeightSyncError(f"it does not hold version {version} although the sync went through")
        failed: dict[str, RayappError] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, RayappError):
                failed[server.name] = answer
            elif answer != version:
                failed[server.name] = reason
        return failed

    async def _go_on(self, server: GroupTarget) -> int | RayappError:
        try:
            return await server.go_on(self._timeout_s)
        except RayappError as error:
            return error

    async def catch_up(self, server: GroupTarget) -> None:
        """Give the learners' weights to a server that has just been started. Waits for a step that is being trained,
        and then gives that step's.

        Raises:
            LearnersLostError: the learners are gone.
            WeightSyncError: or another error of `load_weights`; the server must be replaced.
        """
        async with self._is_syncing:
            if self._source is None:
                return
            self._joined_by = None
            buckets = [ref async for ref in self._source.export_weights(self._version, BUCKET_BYTES)]
            await server.load_weights(self._version, buckets)
