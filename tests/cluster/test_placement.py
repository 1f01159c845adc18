"""Eight GPUs that are only numbers: who runs where, what each process sees, and what can't be placed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as FakeCluster

from actors.handles import answer
from actors.placement import Placement, group_name
from actors.progress import Progress, told
from actors.spawn import GpuShare, role_env
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
GPUS_PER_NODE = 4


def probe_class() -> type:
    """Made in a function: Ray then sends the class itself, as its processes can't import a test."""

    class Probe:
        """Stands where a server or a learner would, and says what it sees."""

        def facts(self) -> tuple[str, str]:
            return os.environ.get("CUDA_VISIBLE_DEVICES", "unset"), ray.get_runtime_context().get_node_id()

    return Probe


@pytest.fixture(scope="module")
def two_nodes(stand_in_engines: None, until_started: Callable[[Callable[[], Any]], Any]) -> Iterator[FakeCluster]:
    """Two nodes of four logical GPUs each."""
    node = {"num_cpus": 2, "num_gpus": GPUS_PER_NODE, "object_store_memory": 100_000_000}
    head = node | {"include_dashboard": False}
    cluster = until_started(lambda: FakeCluster(initialize_head=True, head_node_args=head))
    until_started(lambda: cluster.add_node(**node))
    ray.init(address=cluster.address, namespace="rayapp-placement", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def config(placement: str, *, num_servers: int, tp: int, num_learners: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "eight"},
            "cluster": {"placement": placement, "num_gpus": 8},
            "server": {"num_servers": num_servers, "tensor_parallel_size": tp},
            "learner": {"num_learners": num_learners},
        }
    )


def probe(role: str, name: str, share: GpuShare) -> Any:
    return (
        ray.remote(probe_class())
        .options(
            name=name,
            num_cpus=0.1,
            num_gpus=share.num_gpus,
            scheduling_strategy=share.strategy,
            runtime_env={"env_vars": role_env(role, share)},
        )
        .remote()
    )


async def seen(config: Config) -> tuple[dict[str, tuple[set[str], str]], dict[str, str]]:
    """By name of process: its GPUs and its node. And the names of the placement groups."""
    placement = await Placement.reserve(config, on_gpu=True, timeout_s=60.0)
    shares = {f"vllm-server-{i}": ("vllm-server", placement.server(i)) for i in range(config.server.num_servers)}
    shares |= {f"learner-{r}": ("learner", placement.learner(r)) for r in range(config.learner.num_learners)}
    actors = {name: probe(role, name, share) for name, (role, share) in shares.items()}
    try:
        found = {}
        for name, actor in actors.items():
            devices, node = await answer(actor.facts.remote(), timeout_s=120.0, what=name)
            found[name] = (set(devices.split(",")), node)
        return found, {g["name"]: g["state"] for g in ray.util.placement_group_table().values()}
    finally:
        for actor in actors.values():
            ray.kill(actor)
        placement.release()


async def test_a_learner_that_answers_no_calls_tells_the_driver_how_far_it_is(two_nodes: FakeCluster) -> None:
    assert told() == ""
    writer = ray.remote(Progress).options(num_cpus=0.1).remote()
    await answer(writer.tell.remote(0, 3), timeout_s=120.0, what="the writer")
    await answer(writer.tell.remote(1, 3), timeout_s=120.0, what="the writer")  # too early to be written
    ray.kill(writer)

    assert told() == "0 of 3 micro-batches of a pass done"


async def test_colocated_servers_see_exactly_the_gpus_of_their_two_learners(two_nodes: FakeCluster) -> None:
    found, groups = await seen(config("colocated", num_servers=4, tp=2, num_learners=8))

    for server in range(4):
        devices, node = found[f"vllm-server-{server}"]
        learners = [found[f"learner-{rank}"] for rank in (2 * server, 2 * server + 1)]
        assert devices == learners[0][0] | learners[1][0]
        assert len(devices) == 2
        assert {node} == {learners[0][1], learners[1][1]}
    whose = {(node, device) for name, (devices, node) in found.items() if "learner" in name for device in devices}
    assert len(whose) == 8  # every GPU has one learner
    assert groups[group_name("eight")] == "CREATED"


async def test_split_servers_and_learners_have_gpus_of_their_own_and_a_server_is_on_one_node(
    two_nodes: FakeCluster,
) -> None:
    found, _ = await seen(config("split", num_servers=2, tp=2, num_learners=4))

    owned = [(node, device) for devices, node in found.values() for device in devices]
    assert len(owned) == len(set(owned)) == 8
    assert [len(found[f"vllm-server-{server}"][0]) for server in range(2)] == [2, 2]
    assert [len(found[f"learner-{rank}"][0]) for rank in range(4)] == [1] * 4
    # Ranks of a node are neighbours.
    nodes = [found[f"learner-{rank}"][1] for rank in range(4)]
    assert sum(one != other for one, other in itertools.pairwise(nodes)) == len(set(nodes)) - 1


async def test_what_cannot_be_placed_is_refused_with_what_was_asked_and_what_there_is(two_nodes: FakeCluster) -> None:
    # 8 GPUs, but no node has the 8 that one server's ranks need together.
    wide = Config.model_validate(
        {"run": {"name": "wide"}, "server": {"tensor_parallel_size": 8}, "cluster": {"num_gpus": 9}}
    )

    with pytest.raises(ConfigError) as caught:
        await Placement.reserve(wide, on_gpu=True, timeout_s=2.0, with_learners=False)

    message = str(caught.value)
    assert "not be placed within 2 s" in message
    assert "Requested: 1 x (CPU 0.1, GPU 8), each on one node" in message
    assert "2 node(s): CPU 2, GPU 4; CPU 2, GPU 4" in message
    groups = ray.util.placement_group_table().values()
    assert group_name("wide") not in {group["name"] for group in groups if group["state"] != "REMOVED"}
