"""Kinds of GPUs, with their makers' figures and the memory that a process can use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayapp.core.errors import InputError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU."""

    name: str
    room: int
    """Bytes that a process can use."""
    tflops: float
    """Dense bfloat16 products with float32 sums."""
    memory_gb_s: float
    link_gb_s: float
    """Bandwidth to the other GPUs of its node in one direction, in GB/s: NVLink or PCIe."""

    @property
    def gib(self) -> float:
        return self.room / GIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h200", room=139 * GIB, tflops=989, memory_gb_s=4800, link_gb_s=450),
        Gpu(name="h100", room=79 * GIB, tflops=989, memory_gb_s=3350, link_gb_s=450),
        Gpu(name="a100", room=79 * GIB, tflops=312, memory_gb_s=2039, link_gb_s=300),
        Gpu(name="l40s", room=44 * GIB, tflops=362, memory_gb_s=864, link_gb_s=32),
        Gpu(name="rtx4090", room=23 * GIB, tflops=165, memory_gb_s=1008, link_gb_s=32),
    )
}
"""H200 141 GB, H100 80 GB SXM, A100 80 GB SXM, L40S 48 GB and RTX 4090 24 GB."""
NODE_GPUS, NODE_LINK_GB_S = 8, 50.0
"""Number of GPUs of a node; each GPU's bandwidth to other nodes in GB/s (400 Gbit/s)."""


def gpu_called(name: str) -> Gpu:
    """Return the kind of GPU of this name.

    Raises:
        InputError: the name is unknown.
    """
    if name not in GPUS:
        raise InputError(f"--gpu {name!r} is unknown: use one of {', '.join(GPUS)}.")
    return GPUS[name]


def gpu_here() -> Gpu | None:
    """Return the kind of this machine's first GPU; None without a GPU. Raises: InputError: the table has no figures of
    this kind.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_name(0)
    plain = found.lower().replace(" ", "")
    for name, gpu in GPUS.items():
        if name in plain:
            room = torch.cuda.get_device_properties(0).total_memory - GIB  # variants of one name differ in memory
            return replace(gpu, room=min(gpu.room, room))
    raise InputError(
        f"this machine has a {found}, whose figures are unknown: name the nearest kind, --gpu {'|'.join(GPUS)}"
    )
