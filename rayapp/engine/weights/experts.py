"""Experts of a mixture in an engine's worker, after a load: held as the learner sent them, and computed with.

vLLM keeps a layer's experts stacked, split over tensor-parallel ranks, and on CPU in an order of its kernel's. So they
are compared where they lie plainly, and on CPU, once packed, one expert of each layer computes a vector both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MAX_ERROR = 0.05
"""Of what an expert computes in bfloat16, relative to its largest output; read in another order: about 1."""
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def held_experts(model: Any, names: Mapping[str, int]) -> dict[str, Tensor]:
    """Matrices of experts by those of these names that they have, whole and in bfloat16. Before `pack_experts`.

    Collective among the tensor-parallel ranks. Nothing of a layer whose kernel keeps its experts in another order.
    """
    by_place = {_place(name): name for name in names}
    parts = ((by_place.get(_place(name)), part, dim) for layer in _layers(model) for name, part, dim in _parts(layer))
    return {name: _gathered(part, dim) for name, part, dim in parts if name and part.dtype == torch.bfloat16}


def _layers(model: Any) -> Iterator[Any]:
    for layer in model.modules():
        if hasattr(layer, "w13_weight") and hasattr(layer, "quant_method"):
            yield layer


def _place(name: str) -> str:
    """A name without what families put before their layers, in checkpoints and in vLLM."""
    return name[name.find("layers.") :]


def _parts(layer: Any) -> Iterator[tuple[str, Tensor, int]]:
    """(name, this rank's part, dimension along which ranks split it) of each matrix."""
    backend = getattr(getattr(layer.quant_method, "unquantized_backend", None), "name", "")
    if backend not in ("CPU", "TRITON") or not layer.moe_config.is_act_and_mul or layer.expert_map is not None:
        return
    for number, (gate_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = gate_up.chunk(2)
        place = f"{layer.layer_name}.{number}"
        yield f"{place}.{layer.ckpt_gate_proj_name}.weight", gate, 0
        yield f"{place}.{layer.ckpt_up_proj_name}.weight", up, 0
        yield f"{place}.{layer.ckpt_down_proj_name}.weight", down, 1


def _gathered(part: Tensor, dim: int) -> Tensor:
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return part if group.world_size == 1 else group.all_gather(part.contiguous(), dim)


def pack_experts(model: Any) -> None:
    """Bring experts into the order that the CPU kernel reads; nothing on a GPU.

    vLLM 0.30 does so where it makes the kernel, at the first load only: after a second one the kernel would read plain
    matrices as packed ones, and no norm or bias would show it.

    Raises:
        ValueError: an expert computes something else than its matrices say.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in _layers(model):
        number = layer.w13_weight.shape[0] - 1
        matrices = layer.w13_weight[number].float(), layer.w2_weight[number].float()
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        if layer.activation.value in _ACTIVATIONS and not hasattr(layer, "w13_bias"):
            check_computes(layer, number, *matrices)


def check_computes(layer: Any, number: int, gate_up: Tensor, down: Tensor) -> None:
    """Compare what the layer computes with what these matrices of one of its experts do. Raises as `pack_experts`."""
    probe = torch.randn(1, down.shape[0], generator=torch.Generator().manual_seed(0)).to(layer.w13_weight.dtype)
    gate, up = (probe.float() @ gate_up.t()).chunk(2, dim=-1)
    expected = (_ACTIVATIONS[layer.activation.value](gate) * up) @ down.t()
    weights, experts = torch.ones(1, 1), torch.full((1, 1), number, dtype=torch.int32)
    found = layer.quant_method.forward_native(layer, probe, weights, experts, None, None).float()
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not error <= MAX_ERROR:
        raise ValueError(
            f"{layer.layer_name}: after the weights were loaded, expert {number} computes something else than its "
            f"matrices say: off by {error:.2g} of the largest value"
        )
