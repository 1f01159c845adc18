"""Proof that a server holds what the learners sent: checksums of a sample of tensors, made where they leave.

The learner makes them of what it sends; the engine's workers make them again of what arrived, and of what the model
computes with (`rayapp.engine.weights.held`). Of values in bfloat16, whatever holds them. Pure functions.
"""

from __future__ import annotations

import random
import re
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ONE_IN = 8
NUM_COLUMNS = 128
MAX_VALUES = 1 << 24
"""Of one tensor: a fraction of a second on one core. Of more, the first ones."""


class Sampler:
    """Chooses tensors of a model as they pass: the first of every kind, all norms, and one in eight of the rest.

    A kind is a name without its numbers, such as `model.layers..mlp.experts..down_proj.weight`.
    """

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def takes(self, name: str) -> bool:
        kind = re.sub(r"\d+", "", name)
        is_first = kind not in self._kinds
        self._kinds.add(kind)
        return is_first or "norm" in name or zlib.crc32(name.encode()) % ONE_IN == 0


def columns_of(name: str, width: int) -> list[int]:
    """The columns of a tensor that its checksum is of, out of so many: random ones, the same for everybody.

    Every row is in it, at little cost: a matrix packed for a kernel is unpacked by what its layer computes, column by
    column.
    """
    every = range(width)
    return sorted(random.Random(name).sample(every, NUM_COLUMNS)) if width > NUM_COLUMNS else list(every)


def part_of(name: str, tensor: Tensor) -> Tensor:
    """What of a tensor its checksum is of."""
    return tensor[..., columns_of(name, tensor.shape[-1])] if tensor.ndim > 1 else tensor


def checksum_of(part: Tensor) -> int:
    """CRC-32 of values as bfloat16, in their order, wherever they are; -0 is 0."""
    import torch

    values = part.detach().reshape(-1)[:MAX_VALUES].bfloat16() + 0.0
    return zlib.crc32(values.cpu().view(torch.uint8).numpy().data) if values.numel() else 0
