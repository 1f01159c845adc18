"""A sync that did not reach every server names those without the weights, and the next one reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.errors import DeadlineError, LearnersLostError, RayappError, WeightSyncError
from rayapp.engine.weights.sync import BUCKET_BYTES, GroupCarrier, StoreCarrier, WeightSync


@dataclass
class Server:
    """Records what it loaded, and holds the version of its last sync."""

    name: str
    version: int = -1
    error: RayappError | None = None
    hangs: bool = False
    loaded: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    async def go_on(self, timeout_s: float) -> int:
        if self.error:
            raise self.error
        return self.version

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]:
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        self.version = version
        self.loaded.append((version, tuple(buckets)))
        return {"bytes": 128.0}


@dataclass
class Learners:
    """Export two buckets, or send to the servers of the group; `breaks_before` is the index of the server at which
    sending fails."""

    sizes: list[int] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    members: Sequence[Server] = ()
    breaks_before: int | None = None
    not_up: set[str] = field(default_factory=set)
    are_lost: bool = False

    async def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[str]:
        if self.are_lost:
            raise LearnersLostError("a learner died while it exported its weights")
        self.sizes.append(bucket_bytes)
        for ref in ("first", "second"):
            yield ref

    async def open_weight_group(self, servers: Sequence[Server], timeout_s: float) -> None:
        if self.not_up:
            raise WeightSyncError(f"{min(self.not_up)}.ping: it is being started")
        self.groups.append([server.name for server in servers])
        self.members = servers

    async def send_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        await asyncio.sleep(0)
        for index, server in enumerate(self.members):
            if index == self.breaks_before:
                raise WeightSyncError("vllm-server-1.receive_weights did not answer")
            server.version = version
        return {"bytes": 64.0, "num_loaded": 3.0}


Synced = tuple[dict[str, float], dict[str, RayappError]]


async def synced(transport: WeightSync, version: int, learners: Learners, servers: Sequence[Server]) -> Synced:
    """Sync to servers that are all up. Return the metrics, and the errors of the servers without the weights."""

    async def all_up() -> None:
        return

    return await transport.sync(version, learners=learners, servers=servers, settled=all_up)


def two_servers(**second: Any) -> list[Server]:
    return [Server("vllm-server-0"), Server("vllm-server-1", **second)]


async def test_every_server_gets_the_same_references_and_the_export_happens_once() -> None:
    learners, servers = Learners(), two_servers()

    metrics, failed = await synced(WeightSync(StoreCarrier(10.0)), 3, learners, servers)

    assert failed == {}
    assert learners.sizes == [BUCKET_BYTES]
    assert [server.loaded for server in servers] == [[(3, ("first", "second"))]] * 2
    assert metrics["weight_sync/bytes"] == 128.0
    assert {"weight_sync/export_s", "weight_sync/load_s"} <= set(metrics)


async def test_a_server_that_hangs_is_found_by_the_deadline_and_the_others_have_the_weights() -> None:
    servers = two_servers(hangs=True)

    _, failed = await synced(WeightSync(StoreCarrier(2.0)), 3, Learners(), servers)

    assert servers[0].loaded == [(3, ("first", "second"))]
    assert list(failed) == ["vllm-server-1"]
    assert "vllm-server-1 did not load version 3 within 2 s" in str(failed["vllm-server-1"])


async def test_a_server_that_was_started_again_gets_the_weights_of_the_last_sync() -> None:
    broken, replaced = Server("vllm-server-0", error=WeightSyncError("it was not loaded")), Server("vllm-server-0")
    transport = WeightSync(StoreCarrier(10.0))

    _, failed = await synced(transport, 3, Learners(), [broken])
    await transport.catch_up(replaced)

    assert str(failed["vllm-server-0"]) == "it was not loaded"
    assert replaced.loaded == [(3, ("first", "second"))]


async def test_a_server_never_gets_an_older_version_after_a_newer_one() -> None:
    late, learners, transport = Server("vllm-server-1"), Learners(), WeightSync(StoreCarrier(10.0))
    await synced(transport, 3, learners, [])

    # Both use the server at the same time: a sync to version 4, and a catch-up with version 3.
    await asyncio.gather(synced(transport, 4, learners, [late]), transport.catch_up(late))

    assert [version for version, _ in late.loaded] == [4, 4]


async def test_a_group_is_made_once_for_the_same_learners_and_kept() -> None:
    learners, others, servers, transport = Learners(), Learners(), two_servers(), WeightSync(GroupCarrier(5.0))

    for version, those in enumerate((learners, learners, learners, others)):
        metrics, failed = await synced(transport, version, those, servers)
        assert failed == {}
        assert those is others or version == 0 or metrics["weight_sync/join_s"] == 0.0

    assert learners.groups == others.groups == [["vllm-server-0", "vllm-server-1"]]
    assert [server.version for server in servers] == [3, 3]
    assert metrics["weight_sync/bytes"] == 64.0


async def test_a_broken_sync_names_who_has_no_weights_and_the_next_makes_a_new_group() -> None:
    learners, servers, transport = Learners(breaks_before=1), two_servers(), WeightSync(GroupCarrier(5.0))

    _, failed = await synced(transport, 3, learners, servers)

    # Server 0 had sealed the version before the group broke: it serves on.
    assert list(failed) == ["vllm-server-1"]
    assert "did not answer" in str(failed["vllm-server-1"])
    learners.breaks_before = None
    await transport.catch_up(servers[1])
    assert servers[1].loaded == [(3, ("first", "second"))]
    assert (await synced(transport, 4, learners, servers))[1] == {}
    assert len(learners.groups) == 2


async def test_a_server_that_starts_while_the_learners_are_lost_waits_for_the_weights_of_their_successors() -> None:
    lost, servers, transport = Learners(), two_servers(), WeightSync(GroupCarrier(5.0))
    await synced(transport, 3, lost, servers)

    lost.are_lost = True
    await transport.catch_up(servers[1])
    assert transport.are_lost
    await synced(transport, 4, Learners(), servers)
    assert not transport.are_lost
    assert [server.version for server in servers] == [4, 4]


async def test_a_server_that_does_not_say_what_it_holds_has_failed() -> None:
    servers = two_servers(error=DeadlineError("vllm-server-1.go_on did not answer within 5 s"))
    _, failed = await synced(WeightSync(GroupCarrier(5.0)), 1, Learners(), servers)
    assert list(failed) == ["vllm-server-1"]


async def test_a_server_that_is_starting_when_a_sync_begins_takes_no_other_down() -> None:
    servers = [Server(f"vllm-server-{index}", version=3) for index in range(7)]
    learners, waits = Learners(not_up={"vllm-server-2"}), 0

    async def settled() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:  # the first was before the server died
            learners.not_up.clear()

    _, failed = await WeightSync(GroupCarrier(5.0)).sync(4, learners=learners, servers=servers, settled=settled)
    assert failed == {}
    assert {server.version for server in servers} == {4}
