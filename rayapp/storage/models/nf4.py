"""Rounds the matrices of decoder layers to NF4, four bits a value, with bitsandbytes' kernels (`model.quantization`).

Every 64 neighbouring values of a row share a float32 scale. A block never crosses a row, so ranks that hold some rows,
and servers that stack matrices, round each value alike. A packed matrix is one tensor of bytes, (out, in x 9 / 16): the
codes of a row, then its scales. FSDP shards, gathers and offloads bytes without casting them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rayapp.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# On a CPU bitsandbytes, which peft imports too, warns that it lacks a package for a kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
BLOCK = 64
BYTES_PER_VALUE = 0.5 + 4 / BLOCK
_IN_LAYERS = re.compile(r"(?!.*vision)(.*\.)?layers\.\d+\..+\.weight$")


def is_packed(name: str, shape: Sequence[int]) -> bool:
    """Return True for a matrix of a decoder's layer, by its hub name; not of a vision tower."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and bool(_IN_LAYERS.match(name))


def pack(weight: Tensor) -> Tensor:
    """Round a matrix (out, in) to NF4. Returns bytes (out, in x 9 / 16)."""
    import torch

    rows = weight.float().contiguous()
    codes, state = kernels().quantize_4bit(rows, blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(len(rows), -1).view(torch.uint8)
    return torch.cat([codes.view(len(rows), -1), scales], dim=1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix (out, in) of packed bytes."""
    import torch

    shape = shape_of(packed)
    codes, scales = packed[:, : shape[1] // 2], packed[:, shape[1] // 2 :]
    absmax = scales.contiguous().view(torch.float32).view(-1)
    bits = kernels()
    state = bits.QuantState(absmax, shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
    found: Tensor = bits.dequantize_4bit(codes.contiguous().view(-1, 1), state)
    return found


def plain(tensor: Tensor) -> Tensor:
    """Return a weight that is not packed: the tensor itself, or the float32 matrix of packed bytes."""
    import torch

    return unpack(tensor, torch.float32) if tensor.dtype == torch.uint8 else tensor


def shape_of(tensor: Any) -> torch.Size:
    """Return the shape of a weight; of a packed one, the shape of its matrix."""
    import torch

    if tensor.dtype != torch.uint8:
        return torch.Size(tensor.shape)
    return torch.Size((tensor.shape[0], int(tensor.shape[1] / BYTES_PER_VALUE)))


def rounded(name: str, weight: Tensor) -> Tensor:
    """Return a weight of the hub as the learner computes with it: through NF4 and back, if it is packed."""
    return plain(pack(weight)) if is_packed(name, weight.shape) else weight


def kernels() -> Any:
    """Return bitsandbytes' functions. InputError: it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise InputError(
            f"model.quantization is nf4, which needs bitsandbytes: {error}. Install it on all nodes of learners and "
            "servers: pip install 'rayapp[nf4]'"
        ) from error
    return functional
