"""Waits for the GPUs that a run needs, and reserves them: one placement group per run, named after it.

split: a bundle per server (its tensor-parallel ranks on one node) and one per learner. colocated: a bundle per server,
with the learners that share its GPUs; it sleeps while they train. Either: a bundle per model server. Equal bundles are
ordered by node, so that neighbouring ranks (replicas, sequence_parallel) are on one node if possible.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.handles import answer
from actors.spawn import ROLES, GpuShare, free_address
from rayapp.config.bundles import Bundle, bundles_of, fewer_gpus, gpu_arithmetic, num_gpus_of
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

log = logging.getLogger(__name__)
POLL_S = 2.0
REPORT_EVERY_S = 60.0


def uses_gpus(config: Config, bundles: Sequence[Bundle]) -> bool:
    """Return whether the processes of these bundles need GPUs. ConfigError: the cluster has too few."""
    have = int(ray.cluster_resources().get("GPU", 0))
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and have == 0):
        return False
    if num_gpus_of(bundles) > have:
        raise ConfigError(
            f"the run needs {gpu_arithmetic(bundles)} GPUs, but the Ray cluster has {have}. {fewer_gpus(config, have)} "
            "Or add GPUs."
        )
    return True


async def wait_for_gpus(config: Config, bundles: Sequence[Bundle]) -> None:
    """Wait until the cluster has the GPUs of these bundles: workers may still pull their image, or nodes be added."""
    if config.cluster.device == "cpu" or config.cluster.wait_for_gpus_s == 0:
        return
    # Request whole bundles, because all GPUs of a process must be on one node.
    request_resources(bundles=[{"GPU": float(bundle.num_gpus)} for bundle in bundles])
    try:
        await _poll(config, num_gpus_of(bundles), config.cluster.wait_for_gpus_s)
    finally:
        # Withdraw the request, which would otherwise stay. Actors that run keep their nodes.
        request_resources(bundles=[])


async def _poll(config: Config, need: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    report_at = time.monotonic()
    while (have := float(ray.cluster_resources().get("GPU", 0.0))) < need:
        now = time.monotonic()
        if now >= deadline:
            raise ConfigError(
                f"after {timeout_s:g} s (cluster.wait_for_gpus_s) the Ray cluster has {have:g} of the {need} GPUs "
                "that the config needs. Look at pods that are pending (kubectl get pods, kubectl describe pod), or "
                f"raise cluster.wait_for_gpus_s. {fewer_gpus(config, int(have))}"
            )
        if now >= report_at:
            log.warning("waiting for GPUs: the cluster has %g of %d", have, need)
            report_at = now + REPORT_EVERY_S
        await asyncio.sleep(min(POLL_S, deadline - now))


def resources_of(bundle: Bundle) -> dict[str, float]:
    roles = ["learner"] * len(bundle.learners)
    roles += ["vllm-server"] * (bundle.server is not None) + ["model-server"] * bool(bundle.model_server)
    cpus = sum(ROLES[role].num_cpus for role in roles)
    return {"CPU": round(cpus, 4)} | ({"GPU": float(bundle.num_gpus)} if bundle.num_gpus else {})


def group_name(run_name: str) -> str:
    return f"{run_name}: servers and learners"


@dataclass(slots=True, eq=False, repr=False)
class Placement:
    """The run's reserved bundles; made by `reserve`, freed by `release`."""

    group: PlacementGroup
    bundles: list[Bundle]
    gpu_ids: dict[int, str]
    places: Sequence[int]  # index that Ray gives to each of `bundles`
    timeout_s: float  # for a task in a bundle, whose node may have to build the job's environment first

    @classmethod
    async def reserve(
        cls,
        config: Config,
        *,
        on_gpu: bool,
        timeout_s: float,
        with_servers: bool = True,
        with_learners: bool = True,
    ) -> Placement:
        """Reserve all bundles at once. ConfigError, with requested and free resources: no room in time."""
        bundles = bundles_of(config, on_gpu=on_gpu, with_servers=with_servers, with_learners=with_learners)
        group = placement_group(
            [resources_of(bundle) for bundle in bundles], strategy="PACK", name=group_name(config.run.name)
        )
        try:
            await answer(group.ready(), timeout_s=timeout_s, what="placement group")
            places = by_node(bundles, _nodes_of(group))
            shared = [bundle for bundle in bundles if bundle.server is not None and bundle.learners]
            ids = await asyncio.gather(
                *(_gpu_ids(group, places[bundles.index(bundle)], bundle, timeout_s) for bundle in shared)
            )
        except TimeoutError:
            remove_placement_group(group)
            raise ConfigError(_refusal(bundles, timeout_s)) from None
        except BaseException:
            remove_placement_group(group)
            raise
        gpu_ids = {bundles.index(bundle): found for bundle, found in zip(shared, ids, strict=True)}
        return cls(group, bundles, gpu_ids, places, timeout_s)

    @property
    def shares_gpus(self) -> bool:
        return bool(self.gpu_ids)

    def server(self, index: int) -> GpuShare:
        position = next(p for p, bundle in enumerate(self.bundles) if bundle.server == index)
        bundle = self.bundles[position]
        strategy = self._strategy(position)
        if bundle.learners:
            return GpuShare(strategy=strategy, visible_devices=self.gpu_ids[position])
        return GpuShare(strategy=strategy, num_gpus=bundle.num_gpus)

    def learner(self, rank: int) -> GpuShare:
        position = next(p for p, bundle in enumerate(self.bundles) if rank in bundle.learners)
        return GpuShare(strategy=self._strategy(position), num_gpus=min(1, self.bundles[position].num_gpus))

    def model_server(self, name: str) -> GpuShare:
        position = next(p for p, bundle in enumerate(self.bundles) if bundle.model_server == name)
        return GpuShare(strategy=self._strategy(position), num_gpus=self.bundles[position].num_gpus)

    async def address_of_learner(self, rank: int) -> tuple[str, int]:
        strategy = self.learner(rank).strategy
        probe = ray.remote(free_address).options(num_cpus=0, scheduling_strategy=strategy, name="free port")
        found: tuple[str, int] = await answer(probe.remote(), timeout_s=self.timeout_s, what="free port")
        return found

    def _strategy(self, position: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.places[position])

    def release(self) -> None:
        """Free the bundles; actors that still run in them end. Idempotent."""
        try:
            remove_placement_group(self.group)
        except (ValueError, RuntimeError):
            # The connection to Ray has already ended, and the bundles with it.
            return


def by_node(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[int]:
    """Return for each bundle the index of an equal bundle whose place it takes, so that neighbours are on one node.

    Example: learners 0 to 3 on nodes a, b, a, b take indices 0, 2, 1, 3.
    """
    places = list(range(len(bundles)))
    alike: dict[tuple[int, bool, str], list[int]] = {}
    for index, bundle in enumerate(bundles):
        alike.setdefault((bundle.num_gpus, bundle.server is not None, bundle.model_server), []).append(index)
    for indices in alike.values():
        firsts = [nodes[index] for index in indices]
        for position, index in zip(indices, sorted(indices, key=lambda i: firsts.index(nodes[i])), strict=True):
            places[position] = index
    return places


def _nodes_of(group: PlacementGroup) -> list[str]:
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


async def _gpu_ids(group: PlacementGroup, position: int, bundle: Bundle, timeout_s: float) -> str:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position)
    probe = ray.remote(_visible).options(
        num_gpus=bundle.num_gpus, num_cpus=0, scheduling_strategy=strategy, name="which GPUs"
    )
    ids: str = await answer(probe.remote(), timeout_s=timeout_s, what="which GPUs")
    return ids


def _visible() -> str:
    return in_order(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def in_order(gpu_ids: Sequence[str]) -> str:
    """Return the ids for CUDA_VISIBLE_DEVICES, sorted by number. Parts of a GPU (MIG) have UUIDs in any order."""
    return ",".join(sorted(gpu_ids, key=lambda gpu_id: (len(gpu_id), gpu_id)))


def _refusal(bundles: list[Bundle], timeout_s: float) -> str:
    asked = Counter(_shown(resources_of(bundle)) for bundle in bundles)
    nodes = [_shown(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    free: dict[str, Any] = ray.available_resources()
    return (
        f"the run's processes could not be placed within {timeout_s:g} s (a fifth of server.start_timeout_s). "
        f"Requested: {', '.join(f'{count} x ({what})' for what, count in asked.items())}, each on one node. There are "
        f"{len(nodes)} node(s): {'; '.join(nodes) or 'none'}; free now: {_shown(free)}. Lower server.num_servers, "
        "server.tensor_parallel_size or learner.num_learners, end other programs on these nodes, or add nodes."
    )


def _shown(resources: dict[str, Any]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU") if name in resources) or "nothing"
