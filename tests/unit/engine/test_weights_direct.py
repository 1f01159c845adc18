"""A group is formed once and kept; a failed sync names the servers without the weights; the next one forms a new
group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.errors import DeadlineError, LearnersLostError, RayappError, WeightSyncError
from rayapp.engine.weights.sync import GroupCarrier, WeightSync


@dataclass
class Server:
    """Holds the version of its last sync."""

    name: str
    version: int = -1
    error: RayappError | None = None
    loaded: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    async def go_on(self, timeout_s: float) -> int:
        if self.error:
            raise self.error
        return self.version

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]:
        self.version = version
        self.loaded.append((version, tuple(buckets)))
        return {}


@dataclass
class Learners:
    """Reach the servers of the group; `breaks_before` is the index of the server at which sending fails."""

    groups: list[list[str]] = field(default_factory=list)
    members: Sequence[Server] = ()
    breaks_before: int | None = None
    not_up: set[str] = field(default_factory=set)
    are_lost: bool = False

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

    async def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[str]:
        if self.are_lost:
            raise LearnersLostError("a learner died while it exported its weights")
        yield "bucket"


def two_servers() -> list[Server]:
    return [Server("vllm-server-0"), Server("vllm-server-1")]


async def all_up() -> None:
    """Every server is up."""


async def test_the_group_is_made_once_and_kept() -> None:
    learners, servers, transport = Learners(), two_servers(), WeightSync(GroupCarrier(5.0))

    for version in (0, 1, 2):
        metrics, failed = await transport.sync(version, learners=learners, servers=servers, settled=all_up)
        assert failed == {}

    assert learners.groups == [["vllm-server-0", "vllm-server-1"]]
    assert [server.version for server in servers] == [2, 2]
    assert metrics["weight_sync/bytes"] == 64.0
    assert metrics["weight_sync/join_s"] == 0.0


async def test_new_learners_make_a_new_group() -> None:
    first, second, servers, transport = Learners(), Learners(), two_servers(), WeightSync(GroupCarrier(5.0))
    await transport.sync(0, learners=first, servers=servers, settled=all_up)
    await transport.sync(1, learners=second, servers=servers, settled=all_up)
    assert len(first.groups) == len(second.groups) == 1


async def test_a_broken_sync_names_who_has_no_weights_and_the_next_makes_a_new_group() -> None:
    learners, servers, transport = Learners(breaks_before=1), two_servers(), WeightSync(GroupCarrier(5.0))

    _, failed = await transport.sync(3, learners=learners, servers=servers, settled=all_up)

    # Server 0 had sealed the version before the group broke: it serves on.
    assert list(failed) == ["vllm-server-1"]
    assert "did not answer" in str(failed["vllm-server-1"])
    learners.breaks_before = None
    await transport.catch_up(servers[1])
    assert servers[1].loaded == [(3, ("bucket",))]
    _, failed = await transport.sync(4, learners=learners, servers=servers, settled=all_up)
    assert failed == {}
    assert len(learners.groups) == 2


async def test_a_server_that_starts_while_the_learners_are_lost_waits_for_the_weights_of_their_successors() -> None:
    lost, servers, transport = Learners(), two_servers(), WeightSync(GroupCarrier(5.0))
    await transport.sync(3, learners=lost, servers=servers, settled=all_up)

    lost.are_lost = True
    await transport.catch_up(servers[1])
    assert transport.are_lost
    await transport.sync(4, learners=Learners(), servers=servers, settled=all_up)
    assert not transport.are_lost
    assert [server.version for server in servers] == [4, 4]


async def test_a_server_that_does_not_say_what_it_holds_has_failed() -> None:
    servers = two_servers()
    servers[0].error = DeadlineError("vllm-server-0.go_on did not answer within 5 s")
    _, failed = await WeightSync(GroupCarrier(5.0)).sync(1, learners=Learners(), servers=servers, settled=all_up)
    assert list(failed) == ["vllm-server-0"]


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
