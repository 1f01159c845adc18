"""Proof that a server holds what the learners sent: checksums of a sample of tensors, made where they leave.

The learner writes them into the buckets; the engine's workers make them again from what arrived and, where the model
keeps a tensor under its own name and whole (norms, biases, the embedding), from what it holds. Pure functions.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

MAX_SAMPLED_BYTES = 32 << 20
"""Larger tensors are left out: a checksum takes a second for some GB, and a sync should not."""
ONE_IN = 8


def is_sampled(name: str, nbytes: int) -> bool:
    """True if this tensor is in the sample: all norms, as every engine keeps them whole, and one in eight of the rest.

    Decided by the name alone, so that both sides agree without a list.
    """
    return nbytes <= MAX_SAMPLED_BYTES and ("norm" in name or zlib.crc32(name.encode()) % ONE_IN == 0)


def checksum(data: NDArray[np.uint8]) -> int:
    """CRC-32 of some bytes."""
    return zlib.crc32(data.data)


def checksum_of(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's values in their order, wherever it is."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return checksum(flat.numpy()) if flat.numel() else 0
