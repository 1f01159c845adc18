"""Sends weights from the learners to the servers: chooses transport and ranks, and makes one sync at a time.

nccl           a group: learner 0 is rank 0, server i's tensor-parallel ranks follow at 1 + i * tp
ipc            no group: a learner shares its GPU's memory with the server's rank on that GPU
object_store   buckets through Ray: for machines without GPUs, for adapters, and for a restarted server
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from rayapp.config.config import Config
from rayapp.config.sections import ServerSection
from rayapp.core.errors import ConfigError, LearnersLostError, ObjectsLostError, RayappError, WeightSyncError

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20  # large enough that the transfer dominates, small enough for two in flight in any object store


class WeightGiver(Protocol):
    """Learners, as senders."""

    def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """Yield references to `WeightBucket`s of the present weights."""
        ...

    async def open_weight_group(self, servers: Sequence[Any], timeout_s: float) -> None:
        """Form a new process group with these servers, and leave the earlier one."""
        ...

    async def send_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        """Send the weights to every server of the group. Return bytes and seconds."""
        ...


class WeightTaker(Protocol):
    """Server, as receiver."""

    @property
    def name(self) -> str: ...

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]:
        """Load a policy version from buckets, and sample with it. Return bytes and seconds."""
        ...

    async def go_on(self, timeout_s: float) -> int:
        """Sample with the group's weights, if they are complete. Return the version that the server holds; -1 for
        none."""
        ...


class Sent(NamedTuple):
    metrics: dict[str, float]  # `weight_sync/*`
    failed: dict[str, RayappError]  # each server without the version, by name


class Carrier(Protocol):
    """Transport of weights."""

    needs_all_servers: bool  # a sync must wait for a server that is starting

    async def join(self, learners: WeightGiver, servers: Sequence[WeightTaker]) -> None:
        """Connect learners and servers, unless they are. WeightSyncError: one did not join; all keep their weights."""
        ...

    async def send(self, version: int, learners: WeightGiver, servers: Sequence[WeightTaker]) -> Sent:
        """Make `version` the policy version that all servers hold. LearnersLostError, WeightSyncError: the learners did
        not give their weights, or not in time."""
        ...

    async def buckets(self, version: int, learners: WeightGiver) -> Sequence[Any]:
        """Return references to buckets of the last sync, for one server."""
        ...


class WeightSync:
    """Sends the learners' weights to all servers, and again to a restarted server."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._version = 0
        self._learners: WeightGiver | None = None  # of the last sync
        self._is_syncing = asyncio.Lock()
        self.are_lost = False  # the last sync's weights went with a node or a learner: only a new sync can provide any

    async def sync(
        self,
        version: int,
        *,
        learners: WeightGiver,
        servers: Sequence[WeightTaker],
        settled: Callable[[], Awaitable[None]],
    ) -> Sent:
        """Make `version` the policy version that all servers hold, when `settled` has waited until each is up. Servers
        in `failed` refuse to generate, and must be replaced; the new ones get their weights by `catch_up`."""
        if self._carrier.needs_all_servers:
            # If joining fails, try once more: the servers that are up have kept their weights.
            await settled()
            if not await self._joins(learners, servers):
                await settled()
        async with self._is_syncing:
            self._learners = learners
            sent = await self._carrier.send(version, learners, servers)
            self._version, self.are_lost = version, False
        return sent

    async def _joins(self, learners: WeightGiver, servers: Sequence[WeightTaker]) -> bool:
        async with self._is_syncing:
            try:
                await self._carrier.join(learners, servers)
            except WeightSyncError as error:
                log.warning("the servers did not join: %s", error)
                return False
        return True

    async def catch_up(self, server: WeightTaker) -> None:
        """Send the weights of the last sync to a server that has just started. If they were lost with the learners or
        their node, it generates nothing until the next sync. WeightSyncError: the server must be replaced."""
        # Hold the sync's lock: otherwise an older version could arrive last.
        async with self._is_syncing:
            if self._learners is None or self.are_lost:
                return
            try:
                if buckets := await self._carrier.buckets(self._version, self._learners):
                    await server.load_weights(self._version, buckets)
            except (LearnersLostError, ObjectsLostError) as error:
                log.warning(
                    "the weights of version %d were lost and can't be sent to %s: %s", self._version, server.name, error
                )
                self.are_lost = True


class StoreCarrier:
    """Puts buckets into Ray's object store: written once, and read by all servers of a node without a copy."""

    needs_all_servers = False

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buckets: list[Any] = []

    async def join(self, learners: WeightGiver, servers: Sequence[WeightTaker]) -> None: ...

    async def send(self, version: int, learners: WeightGiver, servers: Sequence[WeightTaker]) -> Sent:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                buckets = [ref async for ref in learners.export_weights(version, BUCKET_BYTES)]
        except TimeoutError:
            raise WeightSyncError(
                f"the learners did not export version {version} within {self._timeout_s:g} s, a fifth "
                "of server.start_timeout_s. If the model is large, raise this timeout."
            ) from None
        exported = time.monotonic()
        answers = await asyncio.gather(*(self._load(version, server, buckets) for server in servers))
        self._buckets = buckets
        loaded = [facts for facts in answers if isinstance(facts, dict)]
        metrics = {
            "weight_sync/bytes": float(max((facts["bytes"] for facts in loaded), default=0.0)),
            "weight_sync/tensors_loaded": float(min((facts.get("num_loaded", 0.0) for facts in loaded), default=0.0)),
            "weight_sync/export_s": exported - started,
            "weight_sync/load_s": time.monotonic() - exported,
        }
        named = zip(servers, answers, strict=True)
        return Sent(metrics, {server.name: error for server, error in named if not isinstance(error, dict)})

    async def _load(self, version: int, server: WeightTaker, buckets: list[Any]) -> dict[str, Any] | RayappError:
        """Return the error, if any, so that one failure doesn't hide other servers' success."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await server.load_weights(version, buckets)
        except RayappError as error:
            return error
        except TimeoutError:
            return WeightSyncError(
                f"{server.name} did not load version {version} within {self._timeout_s:g} s (a fifth of "
                "server.start_timeout_s)"
            )

    async def buckets(self, version: int, learners: WeightGiver) -> Sequence[Any]:
        """Return the last sync's references, whose holding keeps the buckets in the store."""
        return self._buckets


class GroupCarrier:
    """Sends tensors directly into the engines, through a group formed at the first sync and kept. `timeout_s` is for
    each phase: forming the group, sending, and `go_on` on all servers."""

    needs_all_servers = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._joined_by: WeightGiver | None = None
        self._joined_s = 0.0  # of forming groups since the last sync

    async def join(self, learners: WeightGiver, servers: Sequence[WeightTaker]) -> None:
        """Form the group, unless these learners have."""
        if self._joined_by is learners:
            return
        started = time.monotonic()
        await learners.open_weight_group(servers, self._timeout_s)
        self._joined_by = learners
        self._joined_s += time.monotonic() - started

    async def send(self, version: int, learners: WeightGiver, servers: Sequence[WeightTaker]) -> Sent:
        """Send `version`. If one server fails, so does every server that lacks it: they wait for each other."""
        started, facts, error = time.monotonic(), dict[str, float](), None
        try:
            await self.join(learners, servers)
            facts = await learners.send_weights(version, self._timeout_s)
        except WeightSyncError as caught:
            log.warning("version %d did not reach every server: %s", version, caught)
            self._joined_by, error = None, caught
        failed = await self._without(version, servers, error)
        joined_s, self._joined_s = self._joined_s, 0.0
        metrics = {
            "weight_sync/bytes": facts.get("bytes", 0.0),
            "weight_sync/join_s": joined_s,
            "weight_sync/load_s": time.monotonic() - started,
            "weight_sync/tensors_loaded": facts.get("num_loaded", 0.0),
        }
        return Sent(metrics, failed)

    async def _without(
        self, version: int, servers: Sequence[WeightTaker], error: RayappError | None
    ) -> dict[str, RayappError]:
        """Let servers take back memory of shared GPUs, after every learner has sent; return errors of those without the
        version."""
        answers = await asyncio.gather(*(self._go_on(server) for server in servers))
        reason = error or WeightSyncError(f"the server does not hold version {version}, although the sync succeeded")
        held = [reason if isinstance(answer, int) and answer != version else answer for answer in answers]
        return {s.name: answer for s, answer in zip(servers, held, strict=True) if isinstance(answer, RayappError)}

    async def _go_on(self, server: WeightTaker) -> int | RayappError:
        try:
            return await server.go_on(self._timeout_s)
        except RayappError as error:
            return error

    async def buckets(self, version: int, learners: WeightGiver) -> Sequence[Any]:
        """Export the weights. The next sync forms a new group, because this one has lost a member."""
        self._joined_by = None
        return [ref async for ref in learners.export_weights(version, BUCKET_BYTES)]


Transport = Literal["object_store", "nccl", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRanks:
    """Ranks of the process group of learner 0 and all workers of the servers.

    Example: 4 servers of TP 2 -> world_size 9, rank_offsets (1, 3, 5, 7).
    """

    transport: Transport
    world_size: int
    rank_offsets: tuple[int, ...]  # of each server's first worker, to which vLLM adds the tensor-parallel rank
    bucket_bytes: int


def choose_transport(config: Config, *, on_gpu: bool) -> Transport:
    """Return the configured transport, or for `auto` the fastest that the placement allows."""
    asked, placement = config.server.weight_transport, config.cluster.placement
    if config.learner.lora.sends_adapter:
        if asked not in ("auto", "object_store"):
            raise ConfigError(
                f"server.weight_transport is {asked}, but learner.lora.send is adapter, and adapters can only be sent "
                "by object_store. Set server.weight_transport: auto, or learner.lora.send: merged."
            )
        return "object_store"
    if asked == "auto":
        if not on_gpu:
            return "object_store"
        return "ipc" if placement == "colocated" else "nccl"
    if asked in ("nccl", "ipc") and not on_gpu:
        raise ConfigError(
            f"server.weight_transport is {asked}, which moves weights between GPUs, but this run has no GPUs "
            f"(cluster.device = {config.cluster.device}). Use object_store, or leave it auto."
        )
    if asked == "ipc" and placement == "split":
        raise ConfigError(
            "server.weight_transport is ipc, which needs a learner on every GPU of every server, but "
            "cluster.placement is split. Use nccl, or set cluster.placement: colocated."
        )
    if asked == "nccl" and placement == "colocated":
        raise ConfigError(
            "server.weight_transport is nccl, but cluster.placement is colocated: two ranks of one NCCL group can't "
            "share a GPU. Use ipc, or set cluster.placement: split."
        )
    return asked


def transfer_plan(server: ServerSection, transport: Transport) -> TransferRanks:
    tp, num_servers = server.tensor_parallel_size, server.num_servers
    return TransferRanks(
        transport=transport,
        world_size=1 + num_servers * tp,
        rank_offsets=tuple(1 + server * tp for server in range(num_servers)),
        bucket_bytes=server.weight_bucket_mib << 20,
    )
