"""Packs weights for sending, into a few large buffers in place of hundreds of tensors.

    learner rank 0: tensors in server.dtype -> WeightBucket -> object store -> server actor -> shared memory -> workers

Checksums of a sample prove that a server loads the tensors that the learners sent; that vLLM computes with them, tests
do (`tests/cluster/test_number_formats.py`).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ONE_IN = 8
NUM_COLUMNS = 128
MAX_VALUES = 1 << 24  # that a checksum covers: a fraction of a second on one core


class Sampler:
    """Chooses the tensors to check, in a model's order: the first of every kind (a name without its numbers), all
    norms, and one in eight of the rest."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def takes(self, name: str) -> bool:
        kind = re.sub(r"\d+", "", name)
        is_first = kind not in self._kinds
        self._kinds.add(kind)
        return is_first or "norm" in name or zlib.crc32(name.encode()) % ONE_IN == 0


def columns_of(name: str, width: int) -> list[int]:
    """Return the columns that a tensor's checksum covers: a random choice, the same in every process."""
    every = range(width)
    return sorted(random.Random(name).sample(every, NUM_COLUMNS)) if width > NUM_COLUMNS else list(every)


def part_of(name: str, tensor: Tensor) -> Tensor:
    return tensor[..., columns_of(name, tensor.shape[-1])] if tensor.ndim > 1 else tensor


def checksum_of(part: Tensor) -> int:
    """Return the CRC-32 of the values as they are sent, in row-major order on any device; -0 counts as 0."""
    import torch

    values = part.detach().reshape(-1)[:MAX_VALUES] + 0.0
    return zlib.crc32(values.cpu().view(torch.uint8).numpy().data) if values.numel() else 0


class Arrivals:
    """Tensors of one update, counted and sampled while the engine loads them in the learner's order."""

    def __init__(self) -> None:
        self._num_tensors = 0
        self._checksums: dict[str, int] = {}
        self._sampler = Sampler()

    def counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._num_tensors += 1
            if self._sampler.takes(name):
                self._checksums[name] = checksum_of(part_of(name, tensor))
            yield name, tensor

    def check(self, checksums: Mapping[str, int]) -> int:
        """Return the number of tensors. ValueError: one of the learner's checksums has no equal here."""
        wrong = [name for name, value in checksums.items() if self._checksums.get(name) != value]
        if wrong:
            raise ValueError(
                f"the weights received by this server are not the learner's weights: {len(wrong)} of {len(checksums)} "
                f"compared tensors have other checksums or never arrived: {', '.join(wrong[:3])}"
            )
        return self._num_tensors


TensorEntry = tuple[str, str, tuple[int, ...], int, int]  # name, torch's name of the dtype, shape, offset, nbytes

ALIGNMENT = 64  # bytes of a cache line, because vector instructions read views of a mapped buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some tensors of a model, by their Hugging Face names, in one buffer.

    Example: entries=(("lm_head.weight", "bfloat16", (49152, 576), 0, 56623104),), data of 56623104 bytes.
    """

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8]  # (nbytes,), contiguous, so that the object store maps it without a copy
    checksums: tuple[tuple[str, int], ...] = ()  # (name, CRC-32) of the tensors that `Sampler` chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """A whole model or an adapter in a file of shared memory, which an engine's workers map."""

    path: str  # such as /proc/PID/fd/NUMBER
    entries: tuple[TensorEntry, ...]
    checksums: Mapping[str, int]  # CRC-32, by name, of the tensors that `Sampler` chooses


def pack(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Copy tensors in host memory into buckets of at most `bucket_bytes`; a larger one gets its own. Each is copied
    before the next is requested."""
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
    """A bucket that is being filled. Each tensor is copied at once: collecting them would need twice the memory. Only
    the filled part of `capacity` bytes takes up memory."""

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
        return WeightBucket(
            entries=tuple(self._entries), data=self._data[: self.size], checksums=tuple(self._checksums)
        )


def unpack(entries: Iterable[TensorEntry], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the tensors in a buffer (nbytes,) uint8."""
    import torch

    for name, dtype, shape, offset, nbytes in entries:
        # Treat empty tensors separately: torch can't view zero bytes as another dtype.
        part = data[offset : offset + nbytes].view(getattr(torch, dtype)) if nbytes else data.new_empty(0)
        yield name, part.to(getattr(torch, dtype)).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
