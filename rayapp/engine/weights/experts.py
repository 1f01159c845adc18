"""Experts of a mixture in an engine's worker, after a load: held as the learner sent them, and computed with.

vLLM keeps a layer's experts stacked, split over tensor-parallel ranks, and on CPU in an order of its kernel's. So they
are compared where they lie plainly, and on CPU, once packed, one expert of each layer computes a vector both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayapp.engine.weights.checksum import part_of
from rayapp.engine.weights.held import EXACT, gathered, place_of

MAX_ERROR = 0.05
"""Of what an expert computes in bfloat16, relative to its largest output; read in another order: about 1."""


def _gated(activation: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return activation(gate) * up


def _swiglu_of_gpt_oss(hidden: Tensor) -> Tensor:
    gate, up = hidden[..., ::2].clamp(max=7.0), hidden[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(_gated, functional.silu),
    "gelu": partial(_gated, functional.gelu),
    "gelu_tanh": partial(_gated, partial(functional.gelu, approximate="tanh")),
    "swigluoai": _swiglu_of_gpt_oss,
}


def held_experts(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, part of the tensor) of experts' matrices, of those of these names that they have. Before `pack_experts`.

    Collective among the tensor-parallel ranks. Nothing of a layer whose kernel keeps its experts in another order.
    """
    from vllm.distributed import get_tp_group

    by_place, num_ranks = {place_of(name): name for name in names}, get_tp_group().world_size
    for layer in _layers(model):
        for place, parts, dim in _parts(layer):
            name = by_place.get(place_of(place))
            if name is not None and parts[0].dtype in EXACT:
                whole = [gathered(part, dim, num_ranks) for part in parts]
                yield name, part_of(name, torch.cat(whole, dim) if len(whole) > 1 else whole[0])


def _layers(model: Any) -> Iterator[Any]:
    for layer in model.modules():
        if hasattr(layer, "w13_weight") and hasattr(layer, "quant_method"):
            yield layer


def _parts(layer: Any) -> Iterator[tuple[str, list[Tensor], int]]:
    """(name, this rank's part of what is merged in it, dimension along which ranks split each) of each tensor."""
    backend = getattr(getattr(layer.quant_method, "unquantized_backend", None), "name", "")
    if backend not in ("CPU", "TRITON") or not layer.moe_config.is_act_and_mul or layer.expert_map is not None:
        return
    place, gate_up, down = layer.layer_name, layer.w13_weight.detach(), layer.w2_weight.detach()
    if hasattr(layer, "w13_bias"):  # gpt-oss: stacked, gate and up by turns, and transposed
        yield f"{place}.gate_up_proj", [gate_up.transpose(1, 2)], 2
        yield f"{place}.gate_up_proj_bias", [layer.w13_bias.detach()], 1
        yield f"{place}.down_proj", [down.transpose(1, 2)], 1
        if layer.moe_config.moe_parallel_config.tp_size == 1:
            yield f"{place}.down_proj_bias", [layer.w2_bias.detach()], 1  # else the first rank's alone
        return
    gates, ups = gate_up.chunk(2, dim=1)
    block = place.rpartition(".")[0]
    yield f"{block}.input_linear.weight", [gates, ups], 1  # Granite: stacked
    yield f"{block}.output_linear.weight", [down], 2
    for number in range(len(gate_up)):
        yield f"{place}.{number}.{layer.ckpt_gate_proj_name}.weight", [gates[number]], 0
        yield f"{place}.{number}.{layer.ckpt_up_proj_name}.weight", [ups[number]], 0
        yield f"{place}.{number}.{layer.ckpt_down_proj_name}.weight", [down[number]], 1


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
        biases = (layer.w13_bias[number].float(), layer.w2_bias[number].float()) if hasattr(layer, "w13_bias") else ()
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        if layer.activation.value in _ACTIVATIONS:
            check_computes(layer, number, *matrices, *biases)


def check_computes(
    layer: Any,
    number: int,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Compare what the layer computes with what these matrices of one of its experts do. Raises as `pack_experts`."""
    probe = torch.randn(1, down.shape[0], generator=torch.Generator().manual_seed(0)).to(layer.w13_weight.dtype)
    hidden = _ACTIVATIONS[layer.activation.value](functional.linear(probe.float(), gate_up, gate_up_bias))
    expected = functional.linear(hidden, down, down_bias)
    weights, experts = torch.ones(1, 1), torch.full((1, 1), number, dtype=torch.int32)
    found = layer.quant_method.forward_native(layer, probe, weights, experts, None, None).float()
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not error <= MAX_ERROR:
        raise ValueError(
            f"{layer.layer_name}: after the weights were loaded, expert {number} computes something else than its "
            f"matrices say: off by {error:.2g} of the largest value"
        )
