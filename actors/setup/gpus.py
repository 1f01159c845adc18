"""Waiting until a Ray cluster has the GPUs that a run needs. Called by `rayapp.driver.cluster` before it starts any
actor.

A job of KubeRay's SidecarMode starts when the head answers, while workers may still pull their image; and a cluster
that scales itself adds nodes only once somebody asks for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import ray
from ray.autoscaler.sdk import request_resources

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

log = logging.getLogger(__name__)
POLL_S = 2.0
REPORT_EVERY_S = 60.0


def gpu_bundles(config: Config) -> list[dict[str, float]]:
    """GPUs of each process that needs some; one process's are on one node."""
    servers = [{"GPU": float(config.server.tensor_parallel_size)}] * config.server.num_servers
    if config.cluster.placement == "colocated":
        return servers
    return [*servers, *[{"GPU": 1.0}] * config.learner.num_learners]


async def wait_for_gpus(config: Config) -> None:
    """Return once the cluster has the run's GPUs; at once when cluster.wait_for_gpus_s is 0 or the device is cpu.

    Raises:
        ConfigError: it does not have them in time.
    """
    if config.cluster.device == "cpu" or config.cluster.wait_for_gpus_s == 0:
        return
    bundles = gpu_bundles(config)
    request_resources(bundles=bundles)
    try:
        await _poll(bundles, config.cluster.wait_for_gpus_s)
    finally:
        # A request stays until it is taken back; once actors run, they hold the nodes themselves.
        request_resources(bundles=[])


async def _poll(bundles: Sequence[dict[str, float]], timeout_s: float) -> None:
    need = sum(bundle["GPU"] for bundle in bundles)
    deadline = time.monotonic() + timeout_s
    report_at = time.monotonic()
    while (have := float(ray.cluster_resources().get("GPU", 0.0))) < need:
        now = time.monotonic()
        if now >= deadline:
            raise ConfigError(
                f"after {timeout_s:g} s (cluster.wait_for_gpus_s) the Ray cluster has {have:g} of the {need:g} GPUs "
                "that the config needs. Look at pods that are pending (kubectl get pods, kubectl describe pod), lower "
                "server.num_servers, server.tensor_parallel_size or learner.num_learners, or wait longer."
            )
        if now >= report_at:
            log.warning("waiting for GPUs: the cluster has %g of %g", have, need)
            report_at = now + REPORT_EVERY_S
        await asyncio.sleep(min(POLL_S, deadline - now))
