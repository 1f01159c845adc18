"""Waiting for GPUs on a real Ray: logical ones, which come with a second node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.placement import wait_for_gpus
from rayapp.config.bundles import bundles_of
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.driver.cluster import open_cluster
from support.stand_ins import stand_ins

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(stand_in_engines: None, until_started: Callable[[Callable[[], Any]], Any]) -> Iterator[Any]:
    """A head with one GPU. A later test adds a node."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = until_started(lambda: Cluster(initialize_head=True, head_node_args=head))
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
        await wait_for_gpus(config(0.5), bundles_of(config(0.5)))


async def test_no_wait_is_asked_for_on_cpu_or_by_default(cluster: Any) -> None:
    await wait_for_gpus(config(0.0), bundles_of(config(0.0)))
    on_cpu = Config.model_validate({"cluster": {"wait_for_gpus_s": 300.0, "device": "cpu"}})
    await wait_for_gpus(on_cpu, bundles_of(on_cpu))


async def test_run_waits_until_the_workers_are_there(cluster: Any) -> None:
    # One server and one learner: two GPUs, of which the head has one.
    waiting = asyncio.create_task(wait_for_gpus(config(300.0), bundles_of(config(300.0))))
    await asyncio.sleep(0)
    assert not waiting.done()

    # Not in a thread: a node installs signal handlers, which only the main thread may.
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)

    await waiting


@pytest.fixture
def run_of(cluster: Any, tiny_model: Path, letter_tasks: list[str], tmp_path: Path) -> Callable[..., Config]:
    """Call it with sections: the config of a run on this cluster, to which the run itself connects."""
    ray.shutdown()
    return lambda **sections: Config.model_validate(
        {
            "run": {"name": "waits", "output_dir": str(tmp_path)},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            **sections,
            "cluster": {"address": cluster.address, **sections["cluster"]},
        }
    )


async def test_an_evaluation_does_not_wait_for_the_learners_gpus(run_of: Callable[..., Config]) -> None:
    # The cluster has the one GPU of the server, and none for the eight learners that the config would train with.
    config = run_of(cluster={"wait_for_gpus_s": 5.0}, learner={"num_learners": 8})

    async with open_cluster(config, with_learners=False, stand_ins=stand_ins()) as opened:
        assert len(opened.servers) == 1
