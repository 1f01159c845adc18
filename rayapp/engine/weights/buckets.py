"""Weights on the wire: a few large buffers instead of hundreds of tensors.

learner rank 0: tensors -> bf16 -> WeightBucket -> object store -> server actor -> shared memory -> engine workers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayapp.engine.weights.checksum import Sampler, checksum_of, part_of

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
    """(name, CRC-32) of its tensors that are in the sample; see `rayapp.engine.weights.checksum`."""


def pack(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Copy tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Args:
        tensors: on the host; each is copied before the next one is asked for, and may be freed then.
    """
    filling, sampler = None, Sampler()
    for name, tensor in tensors:
        nbytes = _aligned(tensor.numel() * tensor.element_size())
        if filling is not None and filling.size + nbytes > bucket_bytes:
            yield filling.bucket()
            filling = None
        if filling is None:
            filling = _Filling(max(bucket_bytes, nbytes))
        filling.add(name, tensor, is_sampled=sampler.takes(name))
    if filling is not None:
        yield filling.bucket()


class _Filling:
    """A bucket in the making. Each tensor is copied into its buffer at once.

    Keeping the tensors until it is full would need its memory twice, and touching fresh memory costs several times
    what the copy costs.

    Args:
        capacity: bytes; only those that are filled take up memory.
    """

    def __init__(self, capacity: int) -> None:
        self._data = np.empty(capacity, np.uint8)
        self._entries: list[TensorEntry] = []
        self._checksums: list[tuple[str, int]] = []
        self.size = 0

    def add(self, name: str, tensor: torch.Tensor, *, is_sampled: bool) -> None:
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(self._data)[self.size : self.size + nbytes].copy_(flat)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append((name, dtype, tuple(tensor.shape), self.size, nbytes))
        self.size += _aligned(nbytes)
        if is_sampled:
            self._checksums.append((name, checksum_of(part_of(name, tensor))))

    def bucket(self) -> WeightBucket:
        """The bucket, with what has been added by now."""
        return WeightBucket(
            entries=tuple(self._entries), data=self._data[: self.size], checksums=tuple(self._checksums)
        )


def unpack(entries: Iterable[TensorEntry], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in a buffer; nothing is copied.

    Args:
        data: (nbytes,) uint8.
    """
    import torch

    for name, dtype, shape, offset, nbytes in entries:
        # An empty tensor apart: torch can't view zero bytes as another dtype.
        part = data[offset : offset + nbytes].view(getattr(torch, dtype)) if nbytes else data.new_empty(0)
        yield name, part.to(getattr(torch, dtype)).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
