"""The learners' process group: one rank or many, gloo on CPU and nccl on GPU, made and ended here."""

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
from torch.distributed.tensor import DTensor

from rayapp.config.config import Config
from rayapp.core.errors import LearnerError, first_line
from rayapp.core.machine import keep_freed_memory, share_of_cores, use_interface_towards
from rayapp.learner.compute.sequence import SequenceGroup

T = TypeVar("T")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that may be sharded."""
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded, or a DTensor of partial sums. Collective."""
    part = tensor.detach()
    return part.full_tensor() if isinstance(part, DTensor) else part


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the learners, and their process groups."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    cpu_group: dist.ProcessGroup
    """gloo, for Python objects."""
    save_group: dist.ProcessGroup
    """gloo, for the threads that write checkpoints: in the training's group their calls would mix with its own."""
    sequence: SequenceGroup | None = None
    """The ranks that compute micro-batches together with this one; None where each computes its own."""

    @property
    def data_rank(self) -> int:
        """Which of the groups that train on different trajectories this rank is in."""
        return self.rank // self.num_parts

    @property
    def num_parts(self) -> int:
        """Ranks that compute a micro-batch together."""
        return 1 if self.sequence is None else self.sequence.size

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order of ranks; the same list on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return [gathered for gathered in values if gathered is not None]

    def gather_data(self, value: T) -> list[T]:
        """The values of ranks that train on different trajectories: of ranks that share theirs only the first one's."""
        return self.gather(value)[:: self.num_parts]

    def first_of(self, problem: str) -> str:
        """What is told on the first rank that has something to tell, so that all act alike; else empty. Collective."""
        return next(filter(None, self.gather(problem)), "")


def start_ranks(config: Config, rank: int, world_size: int, master_address: str, master_port: int) -> Ranks:
    """Join the other learners. Blocks until all are there.

    Args:
        master_port: port of rank 0's store; unused when there is only one rank.
    """
    device = learner_device(config)
    use_threads(config, world_size)
    if device.type == "cpu":
        keep_freed_memory()
    # When one rank fails, the others hang in a collective: they give up after the driver's own deadline.
    timeout = timedelta(seconds=config.learner.step_timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store: Store
    if world_size == 1:
        store = HashStore()
    else:
        use_interface_towards(master_address)
        store = TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = learner_mesh(device.type, world_size, config.learner.replicas)
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
    """A learner that is alone, in this process, for the length of the block."""
    ranks = start_ranks(config, 0, 1, "", 0)
    try:
        yield ranks
    finally:
        end_ranks()


def learner_mesh(device_type: str, world_size: int, replicas: int) -> DeviceMesh:
    """One dimension: parameters are sharded over all ranks. With replicas two: over neighbours, the same in each run of
    neighbours, and gradients are summed over the runs."""
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def _sequence_group(size: int, rank: int, timeout: timedelta) -> SequenceGroup | None:
    """Neighbouring ranks, `size` at a time. Collective."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(group_size=size, timeout=timeout)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return SequenceGroup(group=group, rank=rank % size, size=size)


def end_ranks() -> None:
    """Leave the process group. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def learner_device(config: Config) -> torch.device:
    """The device of this learner: the GPU that Ray gave it, else the CPU.

    Raises:
        LearnerError: it was to have a GPU, and torch finds none that works.
    """
    if config.cluster.device == "cpu" or not (torch.cuda.is_available() or _has_been_given_gpu(config)):
        return torch.device("cpu")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(0)
    except (RuntimeError, AssertionError) as error:
        raise LearnerError(
            f"this learner was to compute on a GPU, but torch {torch.__version__} can use none: "
            f"{first_line(error)}. nvidia-smi has the driver: CUDA 13 needs 580 or later. Was "
            "the CPU build installed? Use `make venv DEVICE=gpu`, or cluster.device=cpu."
        ) from error
    return torch.device("cuda", 0)


def _has_been_given_gpu(config: Config) -> bool:
    """True where a GPU is asked for, or Ray reserved one for this process: computing on the CPU would surprise."""
    return config.cluster.device == "gpu" or os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")


def give_back_memory(config: Config, device: torch.device) -> None:
    """Return what torch keeps for reuse to the GPU, where a server shares it: that one wakes when the learners rest."""
    if device.type == "cuda" and config.cluster.placement == "colocated":
        torch.cuda.empty_cache()


def use_threads(config: Config, world_size: int) -> None:
    """Give this learner its share of the cores. Results on CPU depend on the number, so it is fixed from here on."""
    torch.set_num_threads(
        config.learner.cpu_threads or share_of_cores(world_size, is_synchronous=config.train.max_staleness == 0)
    )
