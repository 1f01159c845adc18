"""How weights get from the learners to the servers, decided before anything moves: which transport, and which ranks.

    nccl, gloo   learner 0 is rank 0 of one group; server i's tensor-parallel ranks follow at 1 + i * tp
    ipc          no group: a learner and the server's rank on the same GPU share its memory
    object_store buckets through Ray; needs nothing, and is what a server that comes back in mid-step is given

Pure functions over the configuration; used by `rayapp.driver.cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

Transport = Literal["object_store", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Ranks of one process group over learner 0 and all servers.

    Example: 4 servers of TP 2 -> world_size 9, rank_offsets (1, 3, 5, 7).
    """

    transport: Transport
    world_size: int
    rank_offsets: tuple[int, ...]
    """Rank of each server's first worker. vLLM adds the tensor-parallel rank."""
    bucket_bytes: int


def choose_transport(config: Config, *, on_gpu: bool) -> Transport:
    """The transport of `server.weight_transport`, or the fastest that the placement allows.

    Raises:
        ConfigError: the one that is asked for can't work here; says what to use.
    """
    asked, placement = config.server.weight_transport, config.cluster.placement
    if config.learner.lora.sends_adapter:
        if asked not in ("auto", "object_store"):
            raise ConfigError(
                f"server.weight_transport is {asked}, which carries whole models, but learner.lora.send is adapter: a "
                "few megabytes that go through object_store. Leave it auto, or set learner.lora.send: merged."
            )
        return "object_store"
    if asked == "auto":
        if not on_gpu:
            return "object_store"
        return "ipc" if placement == "colocated" else "nccl"
    if asked in ("nccl", "ipc") and not on_gpu:
        raise ConfigError(
            f"server.weight_transport is {asked}, which moves weights between GPUs, but this run uses none "
            f"(cluster.device = {config.cluster.device}). Use object_store or gloo, or leave it auto."
        )
    if asked == "ipc" and placement == "split":
        raise ConfigError(
            "server.weight_transport is ipc, which needs a learner on every GPU of every server, but "
            "cluster.placement is split. Use nccl, or placement colocated."
        )
    if asked == "nccl" and placement == "colocated":
        raise ConfigError(
            "server.weight_transport is nccl, but cluster.placement is colocated: two ranks of one NCCL group can't "
            "share a GPU. Use ipc, or placement split."
        )
    return asked


def transfer_plan(config: Config, transport: Transport) -> TransferPlan:
    """Distinct ranks for every worker of every server."""
    tp, num_servers = config.server.tensor_parallel_size, config.server.num_servers
    return TransferPlan(
        transport=transport,
        world_size=1 + num_servers * tp,
        rank_offsets=tuple(1 + server * tp for server in range(num_servers)),
        bucket_bytes=config.server.weight_bucket_mib << 20,
    )
