"""Waiting for GPUs on a real Ray: logical ones, which come with a second node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from actors.setup.gpus import wait_for_gpus
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one GPU. The last test adds a node."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000},
    )
    ray.init(address=cluster.address, logging_level="error")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def config(wait_s: float) -> Config:
    return Config.model_validate({"cluster": {"wait_for_gpus_s": wait_s}, "learner": {"num_learners": 1}})


async def test_cluster_that_stays_too_small_is_named_with_what_it_lacks(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"after 0.5 s .* the Ray cluster has 1 of the 2 GPUs"):
        await wait_for_gpus(config(0.5))


async def test_no_wait_is_asked_for_on_cpu_or_by_default(cluster: Any) -> None:
    await wait_for_gpus(config(0.0))
    await wait_for_gpus(Config.model_validate({"cluster": {"wait_for_gpus_s": 300.0, "device": "cpu"}}))


async def test_run_waits_until_the_workers_are_there(cluster: Any) -> None:
    # One server and one learner: two GPUs, of which the head has one.
    waiting = asyncio.create_task(wait_for_gpus(config(300.0)))
    await asyncio.sleep(0)
    assert not waiting.done()

    # Not in a thread: a node installs signal handlers, which only the main thread may.
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)

    await waiting
