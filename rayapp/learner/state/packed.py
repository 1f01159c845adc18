"""Linear layers whose frozen weights stay packed in NF4 while they compute (`model.quantization: nf4`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayapp.core.errors import InputError
from rayapp.learner.state.lora import ADAPTER, BASE, chosen_linears
from rayapp.storage.models.nf4 import BYTES_PER_VALUE, is_packed, kernels, unpack


class PackedLinear(nn.Linear):
    """Linear layer whose weight is packed bytes. Forward and backward each unpack it, so that no matrix is kept."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # a compiled MLP calls it as it is
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Product.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        bias: Tensor | None = self.bias
        return outputs if bias is None else outputs + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return inputs @ unpack(packed, inputs.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [packed], [gradient] = ctx.saved_tensors, gradients
        return gradient @ unpack(packed, gradient.dtype), None


def packed_linears(causal_lm: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of the decoder's layers, by the names of their weights. InputError: a matrix of a layer
    can't be packed, such as stacked experts."""
    names = [name for name in chosen_linears(causal_lm, ("all-linear",)) if ADAPTER not in name]
    linears = {f"{name}.weight": causal_lm.get_submodule(name) for name in names}
    inside = {id(p) for layer in causal_lm.get_decoder().layers for p in layer.parameters() if p.ndim > 1}
    for name, parameter in causal_lm.named_parameters():
        hub_name = name.replace(BASE, "")
        is_asked = id(parameter) in inside or is_packed(hub_name, parameter.shape)
        fits = name in linears and is_packed(hub_name, parameter.shape)
        if is_asked and ADAPTER not in name and not fits:
            raise InputError(
                f"model.quantization is nf4, but {type(causal_lm).__name__} has {name} {tuple(parameter.shape)}, which "
                "can't be packed: it is no weight of a linear layer with a multiple of 64 inputs. Experts can't be "
                "packed. Set model.quantization: none."
            )
    return linears


def pack_linears(causal_lm: Any) -> None:
    """Pack these layers before their weights are read, after `add_adapters`. InputError, also without bitsandbytes."""
    kernels()
    for linear in packed_linears(causal_lm).values():
        linear.__class__ = PackedLinear
        size = (linear.out_features, int(linear.in_features * BYTES_PER_VALUE))
        linear.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
