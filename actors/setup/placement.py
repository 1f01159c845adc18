"""Which process runs on which GPUs: one placement group per run, named after it. Used by `rayapp.driver.cluster`.

split      a bundle per server (its tensor-parallel ranks on one node) and one per learner
colocated  a bundle per server, and the learners that share its GPUs in the same one: the GPUs belong to the learners,
           the server sees the same ones and sleeps while they train
either     a bundle per model server (judges, teachers)

Without GPUs the bundles hold CPU shares only, and everything else is the same. An actor that is started again returns
to its bundle.

Of bundles that are alike the first ones are those of one node, then those of the next: neighbouring ranks of learners,
which are one replica (learner.replicas) or share micro-batches (learner.sequence_parallel), are on one node where they
can be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import answer
from actors.spawn import ROLES, Seat, free_address
from rayapp.config.config import Bundle, Config, bundles_of
from rayapp.core.errors import ConfigError

PROBE_TIMEOUT_S = 60.0


def resources_of(bundle: Bundle) -> dict[str, float]:
    """What Ray reserves for a bundle."""
    roles = ["learner"] * len(bundle.learners)
    roles += ["vllm-server"] * (bundle.server is not None) + ["model-server"] * bool(bundle.model_server)
    cpus = sum(ROLES[role].num_cpus for role in roles)
    return {"CPU": round(cpus, 4)} | ({"GPU": float(bundle.num_gpus)} if bundle.num_gpus else {})


def group_name(run_name: str) -> str:
    """Of a run's placement group in the dashboard."""
    return f"{run_name}: servers and learners"


@dataclass(slots=True, eq=False, repr=False)
class Placement:
    """The run's reserved bundles; make it with `reserve`, give it back with `release`."""

    group: PlacementGroup
    bundles: list[Bundle]
    gpu_ids: dict[int, str]
    places: Sequence[int]
    """By position among the bundles: Ray's index of the one that it takes."""

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
        """Reserve everything at once.

        Raises:
            ConfigError: the cluster can't hold it, or did not within timeout_s; says what was asked and what there is.
        """
        bundles = bundles_of(config, on_gpu=on_gpu, with_servers=with_servers, with_learners=with_learners)
        group = placement_group(
            [resources_of(bundle) for bundle in bundles], strategy="PACK", name=group_name(config.run.name)
        )
        try:
            await answer(group.ready(), timeout_s=timeout_s, what="placement group")
            places = by_node(bundles, _nodes_of(group))
            shared = [bundle for bundle in bundles if bundle.server is not None and bundle.learners]
            ids = await asyncio.gather(*(_gpu_ids(group, places[bundles.index(bundle)], bundle) for bundle in shared))
        except TimeoutError:
            remove_placement_group(group)
            raise ConfigError(_refusal(bundles, timeout_s)) from None
        except BaseException:
            remove_placement_group(group)
            raise
        gpu_ids = {bundles.index(bundle): found for bundle, found in zip(shared, ids, strict=True)}
        return cls(group, bundles, gpu_ids, places)

    @property
    def shares_gpus(self) -> bool:
        """Servers use the GPUs of their learners."""
        return bool(self.gpu_ids)

    def server(self, index: int) -> Seat:
        """Where server `index` runs."""
        position = next(p for p, bundle in enumerate(self.bundles) if bundle.server == index)
        bundle = self.bundles[position]
        strategy = self._strategy(position)
        if bundle.learners:
            return Seat(strategy=strategy, visible_devices=self.gpu_ids[position])
        return Seat(strategy=strategy, num_gpus=bundle.num_gpus)

    def learner(self, rank: int) -> Seat:
        """Where learner `rank` runs."""
        position = next(p for p, bundle in enumerate(self.bundles) if rank in bundle.learners)
        return Seat(strategy=self._strategy(position), num_gpus=min(1, self.bundles[position].num_gpus))

    def model_server(self, name: str) -> Seat:
        """Where the model server of this name runs."""
        position = next(p for p, bundle in enumerate(self.bundles) if bundle.model_server == name)
        return Seat(strategy=self._strategy(position), num_gpus=self.bundles[position].num_gpus)

    async def address_of_learner(self, rank: int) -> tuple[str, int]:
        """Its node's address, and a port that is free there now."""
        strategy = self.learner(rank).strategy
        probe = ray.remote(free_address).options(num_cpus=0, scheduling_strategy=strategy, name="free port")
        found: tuple[str, int] = await answer(probe.remote(), timeout_s=PROBE_TIMEOUT_S, what="free port")
        return found

    def _strategy(self, position: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.places[position])

    def release(self) -> None:
        """Give the bundles back; what still runs in them ends. Idempotent."""
        try:
            remove_placement_group(self.group)
        except (ValueError, RuntimeError):
            # The connection to Ray ended first, and our bundles with it.
            return


def by_node(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[int]:
    """For each bundle the index of the alike one that it takes, so that neighbours are on one node.

    Args:
        nodes: of each index.
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
    """Node of each of its bundles."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


async def _gpu_ids(group: PlacementGroup, position: int, bundle: Bundle) -> str:
    """The devices behind a bundle, asked from within it: its server has to see those of its learners."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position)
    probe = ray.remote(_visible).options(
        num_gpus=bundle.num_gpus, num_cpus=0, scheduling_strategy=strategy, name="which GPUs"
    )
    ids: str = await answer(probe.remote(), timeout_s=PROBE_TIMEOUT_S, what="which GPUs")
    return ids


def _visible() -> str:
    return in_order(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def in_order(gpu_ids: Sequence[str]) -> str:
    """For CUDA_VISIBLE_DEVICES: numbers by their size. Parts of a GPU (MIG) have UUIDs, whose order says nothing."""
    return ",".join(sorted(gpu_ids, key=lambda gpu_id: (len(gpu_id), gpu_id)))


def _refusal(bundles: list[Bundle], timeout_s: float) -> str:
    asked = Counter(_shown(resources_of(bundle)) for bundle in bundles)
    nodes = [_shown(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    free: dict[str, Any] = ray.available_resources()
    return (
        f"the run's processes could not be placed within cluster.start_timeout_s = {timeout_s:g} s. Asked for: "
        f"{', '.join(f'{count} x ({what})' for what, count in asked.items())}, each on one node. The cluster has "
        f"{len(nodes)} node(s): {'; '.join(nodes) or 'none'}; free now: {_shown(free)}. Lower server.num_servers, "
        "server.tensor_parallel_size or learner.num_learners, end what else runs there, or add nodes."
    )


def _shown(resources: dict[str, Any]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU") if name in resources) or "nothing"
