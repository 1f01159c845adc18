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
MAX_VALUES = 1 << 20  # that a checksum covers, unless one column has more


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


def columns_of(name: str, height: int, width: int) -> list[int]:
    """Return the columns that a tensor's checksum covers: a random choice, the same in every process. A tensor of many
    rows has few, so that all its rows are covered."""
    most = min(NUM_COLUMNS, max(1, MAX_VALUES // max(1, height)))
    every = range(width)
    return sorted(random.Random(name).sample(every, most)) if width > most else list(every)


def part_of(name: str, tensor: Tensor) -> Tensor:
    import torch

    if tensor.ndim < 2 or not tensor.numel():
        return tensor
    width = tensor.shape[-1]
    # Don't index with the list itself, which takes a millisecond, and on a GPU waits for the queue.
    columns = torch.tensor(columns_of(name, tensor.numel() // width, width))
    return tensor.index_select(-1, columns.to(tensor.device, non_blocking=True))


def checksum_of(part: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of the values' bits, each times an odd number of its place in row-major order: one
    int64 on the part's device, the same on every device. -0 counts as 0."""
    import torch

    values = part.detach().reshape(-1) + 0.0
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    places = 2 * torch.arange(values.numel(), device=values.device) + 1
    return (values.view(integers).to(torch.int64) * places).sum()


class Checksums:
    """Tensors of one transfer, counted, and summed by a sample while they pass. The sums stay on the tensors' device
    until all are read at once: each reading waits for the GPU."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._sums: dict[str, Tensor] = {}
        self.num_tensors = self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        if self._sampler.takes(name):
            self._sums[name] = checksum_of(part_of(name, tensor))

    def passed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def read(self) -> dict[str, int]:
        import torch

        sums = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        return dict(zip(self._sums, sums, strict=True))

    def check(self, sent: Mapping[str, int]) -> int:
        """Return the number of tensors. ValueError: one of the learner's checksums has no equal here."""
        here = self.read()
        wrong = [name for name, value in sent.items() if here.get(name) != value]
        if wrong:
            raise ValueError(
                f"the weights received by this server are not the learner's weights: {len(wrong)} of {len(sent)} "
                f"compared tensors have other checksums or never arrived: {', '.join(wrong[:3])}"
            )
        return self.num_tensors


TensorEntry = tuple[str, str, tuple[int, ...], int, int]  # name, torch's name of the dtype, shape, offset, nbytes

ALIGNMENT = 64  # bytes of a cache line, because vector instructions read views of a mapped buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some tensors of a model, by their Hugging Face names, in one buffer.

    Example: entries=(("lm_head.weight", "bfloat16", (49152, 576), 0, 56623104),), data of 56623104 bytes.
    """

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8]  # (nbytes,), contiguous, so that the object store maps it without a copy
    checksums: Mapping[str, int]  # of all buckets, in the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """A whole model or an adapter in a file of shared memory, which an engine's workers map."""

    path: str  # such as /proc/PID/fd/NUMBER
    entries: tuple[TensorEntry, ...]
    checksums: Mapping[str, int]  # by name, of the tensors that `Sampler` chooses


def pack(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Copy tensors in host memory into buckets of at most `bucket_bytes`; a larger one gets its own. Each is copied
    before the next is requested. The last bucket has the checksums of all."""
    filling, sums = None, Checksums()
    for name, tensor in sums.passed(tensors):
        nbytes = _aligned(tensor.numel() * tensor.element_size())
        if filling is not None and filling.size + nbytes > bucket_bytes:
            yield filling.bucket({})
            filling = None
        if filling is None:
            filling = _Filling(max(bucket_bytes, nbytes))
        filling.add(name, tensor)
    if filling is not None:
        yield filling.bucket(sums.read())


class _Filling:
    """A bucket that is being filled. Each tensor is copied at once: collecting them would need twice the memory. Only
    the filled part of `capacity` bytes takes up memory."""

    def __init__(self, capacity: int) -> None:
        self._data = np.empty(capacity, np.uint8)
        self._entries: list[TensorEntry] = []
        self.size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(self._data)[self.size : self.size + nbytes].copy_(flat)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append((name, dtype, tuple(tensor.shape), self.size, nbytes))
        self.size += _aligned(nbytes)

    def bucket(self, checksums: Mapping[str, int]) -> WeightBucket:
        return WeightBucket(entries=tuple(self._entries), data=self._data[: self.size], checksums=checksums)


def unpack(entries: Iterable[TensorEntry], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the tensors in a buffer (nbytes,) uint8."""
    import torch

    for name, dtype, shape, offset, nbytes in entries:
        # Treat empty tensors separately: torch can't view zero bytes as another dtype.
        part = data[offset : offset + nbytes].view(getattr(torch, dtype)) if nbytes else data.new_empty(0)
        yield name, part.to(getattr(torch, dtype)).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
