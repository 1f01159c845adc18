"""Whether a Ray cluster has the GPUs that a run needs, and waiting until it has. Called by `rayapp.driver.cluster`
before it starts any actor.

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

from rayapp.config.config import FEWER_GPUS, Bundle, Config, gpu_arithmetic, num_gpus_of
from rayapp.core.errors import ConfigError

log = logging.getLogger(__name__)
POLL_S = 2.0
REPORT_EVERY_S = 60.0


def uses_gpus(config: Config, bundles: Sequence[Bundle]) -> bool:
    """Whether the processes of these bundles ask Ray for GPUs.

    Raises:
        ConfigError: the cluster has fewer than they need.
    """
    have = int(ray.cluster_resources().get("GPU", 0))
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and have == 0):
        return False
    if num_gpus_of(bundles) > have:
        raise ConfigError(
            f"GPUs: {gpu_arithmetic(bundles)}, but the Ray cluster has {have}. {FEWER_GPUS}, or add GPUs."
        )
    return True


async def wait_for_gpus(config: Config, bundles: Sequence[Bundle]) -> None:
    """Return once the cluster has the GPUs of these bundles; at once if cluster.wait_for_gpus_s is 0, or on CPU.

    Raises:
        ConfigError: it does not have them in time.
    """
    if config.cluster.device == "cpu" or config.cluster.wait_for_gpus_s == 0:
        return
    # One process's GPUs are on one node.
    request_resources(bundles=[{"GPU": float(bundle.num_gpus)} for bundle in bundles])
    try:
        await _poll(num_gpus_of(bundles), config.cluster.wait_for_gpus_s)
    finally:
        # A request stays until it is taken back; once actors run, they hold the nodes themselves.
        request_resources(bundles=[])


async def _poll(need: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    report_at = time.monotonic()
    while (have := float(ray.cluster_resources().get("GPU", 0.0))) < need:
        now = time.monotonic()
        if now >= deadline:
            raise ConfigError(
                f"after {timeout_s:g} s (cluster.wait_for_gpus_s) the Ray cluster has {have:g} of the {need} GPUs "
                "that the config needs. Look at pods that are pending (kubectl get pods, kubectl describe pod), "
                f"{FEWER_GPUS[0].lower()}{FEWER_GPUS[1:]}, or wait longer."
            )
        if now >= report_at:
            log.warning("waiting for GPUs: the cluster has %g of %d", have, need)
            report_at = now + REPORT_EVERY_S
        await asyncio.sleep(min(POLL_S, deadline - now))
