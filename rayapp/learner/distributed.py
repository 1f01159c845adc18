"""Sets up the process groups of the learners: one rank or many, gloo on CPU and NCCL on GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rayapp.config.config import Config
from rayapp.config.learner import LearnerSection
from rayapp.config.sections import ClusterSection, RunSection
from rayapp.core.errors import LearnerError, first_line
from rayapp.core.machine import keep_freed_memory, share_of_cores, use_interface_towards
from rayapp.learner.sequence import SequenceGroup

T = TypeVar("T")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a shard or partial sum. Collective."""
    part = tensor.detach()
    return part.full_tensor() if isinstance(part, DTensor) else part


def reshard(model: torch.nn.Module) -> None:
    """Free the weights that a forward without a backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank of this process among the learners, and their process groups."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    cpu_group: dist.ProcessGroup  # for Python objects
    save_group: dist.ProcessGroup  # for threads that write checkpoints: their calls must not mix with training's
    sequence: SequenceGroup | None = None  # ranks that compute each micro-batch together

    @property
    def data_rank(self) -> int:
        """Index of this rank's sequence group, whose ranks train on the same trajectories."""
        return self.rank // self.num_parts

    @property
    def num_parts(self) -> int:
        """Ranks that compute a micro-batch together."""
        return 1 if self.sequence is None else self.sequence.size

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return [gathered for gathered in values if gathered is not None]

    def gather_data(self, value: T) -> list[T]:
        """Return one value for each sequence group: its first rank's. Collective."""
        return self.gather(value)[:: self.num_parts]

    def first_of(self, problem: str) -> str:
        """Return the first problem that is not empty, the same on all ranks. Collective."""
        return next(filter(None, self.gather(problem)), "")


def start_ranks(config: Config, rank: int, world_size: int, master_address: str, master_port: int) -> Ranks:
    """Join the other learners. Blocks until all have joined."""
    use_deterministic_kernels(config.run)
    device = learner_device(config.cluster)
    # Results on a CPU depend on the number of threads.
    torch.set_num_threads(
        config.learner.cpu_threads
        or share_of_cores(world_size, is_synchronous=config.train.takes_turns, model=config.model.path)
    )
    if device.type == "cpu":
        keep_freed_memory()
    # If a rank fails, the other ranks wait in a collective until this timeout, the driver's deadline.
    timeout = timedelta(seconds=config.recovery.step_timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store: Store
    if world_size == 1:
        store = HashStore()
    else:
        use_interface_towards(master_address)
        store = TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = learner_mesh(device.type, world_size, config.learner)
    cpu_group, save_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    assert cpu_group is not None
    assert save_group is not None
    return Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        mesh=mesh,
        cpu_group=cpu_group,
        save_group=save_group,
        sequence=_sequence_group(config.learner.sequence_parallel, rank, timeout),
    )


@contextmanager
def only_rank(config: Config) -> Iterator[Ranks]:
    ranks = start_ranks(config, 0, 1, "", 0)
    try:
        yield ranks
    finally:
        end_ranks()


EXPERT_RANKS = "experts"  # dimension of the mesh over which experts are split


def learner_mesh(device_type: str, world_size: int, section: LearnerSection) -> DeviceMesh:
    """Return the mesh over which FSDP shards parameters: shards over neighbouring ranks within replicas; with expert
    parallelism experts are split over neighbouring ranks, and each part over the other dimension."""
    if (size := section.expert_parallel_size) > 1:
        return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("shard", EXPERT_RANKS))
    if (replicas := section.replicas) == 1:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def _sequence_group(size: int, rank: int, timeout: timedelta) -> SequenceGroup | None:
    if size == 1:
        return None
    group, _ = dist.new_subgroups(group_size=size, timeout=timeout)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return SequenceGroup(group=group, rank=rank % size, size=size)


def end_ranks() -> None:
    """Leave the process group. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def learner_device(cluster: ClusterSection) -> torch.device:
    """Return the GPU that Ray assigned, else the CPU. LearnerError: torch can't use a configured or assigned GPU."""
    if cluster.device == "cpu" or not (torch.cuda.is_available() or _has_been_given_gpu(cluster)):
        return torch.device("cpu")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(0)
    except (RuntimeError, AssertionError) as error:
        raise LearnerError(
            f"this learner needs a GPU, but torch {torch.__version__} can use none: {first_line(error)}. nvidia-smi "
            "shows the driver: CUDA 13 needs 580 or later. If the CPU build of torch is installed, run `make venv "
            "DEVICE=gpu`; or set cluster.device=cpu."
        ) from error
    return torch.device("cuda", 0)


def _has_been_given_gpu(cluster: ClusterSection) -> bool:
    # If the config requires a GPU or Ray reserved one, the CPU must not be used silently.
    return cluster.device == "gpu" or os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")


def give_back_memory(cluster: ClusterSection, device: torch.device) -> None:
    """Free torch's cached memory for a server that shares the GPU."""
    if device.type == "cuda" and cluster.placement == "colocated":
        torch.cuda.empty_cache()


# As vLLM 0.30 sets them in its workers with VLLM_BATCH_INVARIANT: with others the first broadcast would hang.
NCCL_OF_BATCH_INVARIANCE = {
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_NTHREADS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_SOCKET_NTHREADS": "1",
}


def use_deterministic_kernels(run: RunSection) -> None:
    """With `run.deterministic`, choose kernels that repeat their bits, before CUDA or NCCL start."""
    if not run.deterministic:
        return
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | NCCL_OF_BATCH_INVARIANCE
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
