"""Weights on the wire: a few large buffers instead of hundreds of tensors.

learner rank 0: tensors -> bf16 -> WeightBucket -> object store -> server actor -> shared memory -> engine workers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayapp.weights.checksum import checksum, is_sampled

if TYPE_CHECKING:
    import torch

TensorEntry = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, offset, nbytes); the dtype as torch prints it without `torch.`, e.g. bfloat16."""

ALIGNMENT = 64
"""Bytes: tensors start on a cache line, as views of a mapped buffer are read in vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some tensors of a model, by their Hugging Face names, in one buffer.

    Example: entries=(("lm_head.weight", "bfloat16", (49152, 576), 0, 56623104),), data of 56623104 bytes.
    """

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8]
    """(nbytes,) contiguous; the object store maps it without a copy."""
    checksums: tuple[tuple[str, int], ...] = ()
    """Of the tensors in it that are in the sample; see `rayapp.weights.checksum`."""


def pack(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Copy tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Args:
        tensors: on the host, contiguous; each may be freed once the next one is asked for.
    """
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = _aligned(tensor.numel() * tensor.element_size())
        if waiting and size + nbytes > bucket_bytes:
            yield _bucket(waiting, size)
            waiting, size = [], 0
        waiting.append((name, tensor.detach().contiguous()))
        size += nbytes
    if waiting:
        yield _bucket(waiting, size)


def _bucket(tensors: list[tuple[str, torch.Tensor]], size: int) -> WeightBucket:
    import torch

    data = np.empty(size, np.uint8)
    buffer = torch.from_numpy(data)
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        buffer[offset : offset + nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes))
        offset += _aligned(nbytes)
    checksums = tuple(
        (name, checksum(data[offset : offset + nbytes]))
        for name, _, _, offset, nbytes in entries
        if is_sampled(name, nbytes)
    )
    return WeightBucket(entries=tuple(entries), data=data, checksums=checksums)


def unpack(entries: Iterable[TensorEntry], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in a buffer; nothing is copied.

    Args:
        data: (nbytes,) uint8.
    """
    import torch

    for name, dtype, shape, offset, nbytes in entries:
        # torch can't view no bytes as another dtype.
        part = data[offset : offset + nbytes].view(getattr(torch, dtype)) if nbytes else data.new_empty(0)
        yield name, part.to(getattr(torch, dtype)).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
