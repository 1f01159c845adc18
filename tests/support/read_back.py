"""Reads back the weights with which the pinned vLLM computes, in the form of the tensors that the learners sent.

`ReadBackExtension` replaces the workers' extension (`VllmEngine.start(worker_extension_cls=...)`). After each load it
compares checksums of what the engine holds, and `finish_update` returns the number of compared tensors.

vLLM merges matrices (q, k and v), splits them over tensor-parallel ranks, and on a CPU packs them for a kernel. In
whatever form vLLM stores a matrix, its linear layer maps a unit vector exactly to a column of the matrix. So
`held_parts` computes the columns that a checksum covers with the layer's own kernel, and gathers them over the ranks.

vLLM keeps a layer's experts stacked, split over tensor-parallel ranks, and on CPU in the order of its kernel. So
`held_experts` reads them before they are packed, and afterwards `check_computes` compares the output of one expert of
each layer. With `server.quantization` vLLM rounds linear layers after each load: `check_rounded` compares the columns
of each matrix as it arrived with those that the rounded layer computes. Rounded experts are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.platforms import current_platform

from rayapp.engine.vllm_worker import WeightUpdateExtension
from rayapp.engine.weights.buckets import checksum_of, columns_of, part_of
from rayapp.engine.weights.reload_workarounds import expert_layers


class ReadBackExtension(WeightUpdateExtension):
    """The product's extension, which also compares what the model holds after each load."""

    def _prepare(self) -> None:
        super()._prepare()
        keep_sent_parts(self.model_runner.get_model())

    def seal_weights(self, checksums: dict[str, int]) -> int:
        model = self.model_runner.get_model()
        held = check(held_experts(model, checksums), checksums)
        experts = [last_expert(layer) for layer in expert_layers(model)]
        super().seal_weights(checksums)
        for layer, *matrices in experts:
            if current_platform.is_cpu() and layer.activation.value in _ACTIVATIONS:
                check_computes(layer, len(layer.w13_weight) - 1, *matrices)
        return len(held) + self.check_held(checksums, with_experts=False)

    def check_held(self, checksums: dict[str, int], with_experts: bool = True) -> int:
        """Compare without a load before it: matrices of experts are packed then, so that none of theirs is equal."""
        model, architecture = self.model_runner.get_model(), self.model_runner.model_config.hf_text_config
        held = check(held_experts(model, checksums), checksums) if with_experts else set()
        held |= check(held_parts(model, checksums, tied=architecture.tie_word_embeddings), checksums)
        return len(held | check_rounded(model, checksums))


def check(parts: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int]) -> set[str]:
    """Compare each tensor's checksum with the learner's. Returns the tensors' names."""
    found = [(name, checksum_of(part)) for name, part in parts]
    wrong = [name for name, value in found if value != checksums[name]]
    if wrong:
        raise ValueError(f"the weights held by this server have other checksums: {', '.join(wrong[:3])}")
    return {name for name, _ in found}


def last_expert(layer: Any) -> tuple[Any, ...]:
    """The layer, and copies of the plain matrices (and biases) of its last expert."""
    names = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
    return layer, *(getattr(layer, name)[-1].float() for name in names if hasattr(layer, name))


EXACT = (torch.bfloat16, torch.float32)
"""Number formats that hold the sent values (bfloat16) exactly; other formats round them."""
_MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def held_parts(model: Any, names: Iterable[str], *, tied: bool, rounded: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, part of the tensor) for each name in `names` whose values can be read back from the model.

    All tensor-parallel ranks call it together, with the names in the same order. It leaves out tensors that vLLM stores
    in a rounding number format. With several ranks it also leaves out tensors that mixers (linear attention, mamba)
    split in their own way.

    Args:
        tied: the embedding is also the matrix of the output layer; it is then yielded a second time, as the output
            layer computes it.
        rounded: yield only the matrices of layers that round, computed by these layers.
    """
    from vllm.distributed import get_tp_group

    modules = {place_of(name): module for name, module in model.named_modules()}
    embedding, heads = _tied(model) if tied else (None, [])
    with torch.no_grad():
        for name in names:
            owner, _, kind = place_of(_renamed(model, name)).rpartition(".")
            found = _layer(model, modules, owner, name)
            if rounded != (found is not None and kind == "weight" and is_rounded(found[0])):
                continue
            if found is not None:
                mixer = modules.get(owner.rpartition(".")[0])
                is_convolution = "conv" in owner and kind == "weight"
                parts = _convolution(found[0], mixer) if is_convolution else _matrix(*found, kind, name)
                yield from ((name, part) for part in parts)
                if found[0] is embedding:
                    yield from ((name, part) for head in heads for part in _head(head, name))
            elif (tensor := _whole(modules.get(owner), kind)) is not None:
                yield name, part_of(name, tensor)
            elif kind == "A_log" and get_tp_group().world_size == 1:
                yield name, (-modules[owner].A).log()  # mamba's mixers hold -exp(A_log), in float32


def place_of(name: str) -> str:
    """Return a tensor's name without the prefixes `model.` and `language_model.`, which checkpoints and vLLM add
    differently.
    """
    return re.sub(r"^((language_)?model\.)+", "", name)


def _renamed(model: Any, name: str) -> str:
    name = name.replace(".router.layer.", ".gate.")  # Granite
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return name if mapper is None else next(iter(mapper.apply_list([name])), "")


def _layer(model: Any, modules: Mapping[str, Any], owner: str, name: str) -> tuple[Any, list[int]] | None:
    """Return the layer that holds a matrix or bias, and the indices of its parts in the layer.

    vLLM merges matrices into one layer: for `q_proj` the result is (layer `qkv_proj`, [0]). All indices are returned if
    the checkpoint merges the matrices in the same way, or the layer has one part. None is returned if no layer holds
    the matrix, or if vLLM reorders its rows when it loads them (interleaved heads of q, k and v in GPT-NeoX).
    """
    own = name.rpartition(".")[0].rpartition(".")[2]
    parent, _, kind = owner.rpartition(".")
    merged = {**_MERGED, **getattr(model, "packed_modules_mapping", {})}
    for whole in (kind, *(whole for whole, parts in merged.items() if kind in parts)):
        layer = modules.get(f"{parent}.{whole}" if parent else whole)
        if not hasattr(layer, "params_dtype"):
            continue
        sizes = getattr(layer, "output_partition_sizes", [0])
        if len(sizes) == 1 or (whole == own and (own in _MERGED or not hasattr(layer, "total_num_kv_heads"))):
            return layer, list(range(len(sizes)))
        parts = list(merged.get(whole, ()))
        return (layer, [parts.index(own)]) if own in parts and len(parts) == len(sizes) else None
    return None


def _matrix(layer: Any, which: list[int], kind: str, name: str) -> Iterator[Tensor]:
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    is_table = isinstance(layer, VocabParallelEmbedding)
    if layer.params_dtype not in EXACT or (is_table and kind == "bias"):
        return
    if isinstance(layer, ParallelLMHead):
        yield from _head(layer, name)
    elif is_table:
        columns = layer.weight[:, columns_of(name, layer.embedding_dim)]
        yield gathered(columns, 0, layer.tp_size)[: layer.org_vocab_size]
    elif isinstance(layer, RowParallelLinear):
        yield layer.bias if kind == "bias" else _columns_over_inputs(layer, name)
    elif (type(layer.quant_method) is UnquantizedLinearMethod or is_rounded(layer)) and _is_split_plainly(layer, which):
        found = layer.bias if kind == "bias" else _computed(layer, _units(layer, name, layer.input_size))
        parts = found.split(layer.output_partition_sizes, dim=-1)
        yield torch.cat([_over_outputs(layer, parts[i], is_key_or_value=i > 0) for i in which], dim=-1).t()


def _units(layer: Any, name: str, width: int) -> Tensor:
    """Return (columns, width): the unit vector of each column that the checksum covers."""
    columns = columns_of(name, width)
    units: Tensor = layer.weight.new_zeros(len(columns), width, dtype=layer.params_dtype)
    units[range(len(columns)), columns] = 1
    return units


def _computed(layer: Any, inputs: Tensor) -> Tensor:
    found: Tensor = layer.quant_method.apply(layer, inputs)
    return found


def _columns_over_inputs(layer: Any, name: str) -> Tensor:
    """Return the checked columns of a layer that is split over its inputs."""
    from vllm.distributed import get_tp_group

    units = _units(layer, name, layer.input_size)
    if layer.tp_size == 1:
        return _computed(layer, units).t()
    own = units.chunk(layer.tp_size, dim=-1)[layer.tp_rank].contiguous()
    summed: Tensor = get_tp_group().all_reduce(_computed(layer, own))
    return summed.t()


def _over_outputs(layer: Any, part: Tensor, *, is_key_or_value: bool) -> Tensor:
    """Gather the outputs of a layer that is split over its outputs. Several ranks may hold the same key-value heads."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    if not isinstance(layer, ColumnParallelLinear) or layer.tp_size == 1:
        return part
    every = getattr(layer, "num_kv_head_replicas", 1) if is_key_or_value else 1
    return torch.cat(gathered(part, -1, layer.tp_size).chunk(layer.tp_size, dim=-1)[::every], dim=-1)


def _is_split_plainly(layer: Any, which: list[int]) -> bool:
    """Return False if a mixer splits the tensor over the ranks in its own way."""
    loader = getattr(layer.weight, "weight_loader", None)
    is_own = loader is None or getattr(loader, "__self__", None) is layer
    return getattr(layer, "tp_size", 1) == 1 or (is_own and (len(which) == 1 or layer.prefix.endswith(tuple(_MERGED))))


def _tied(model: Any) -> tuple[Any, list[Any]]:
    """Return the first embedding, to which output layers are tied, and the output layers."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [table for table in tables if isinstance(table, ParallelLMHead)]
    embedding = next((table for table in tables if table not in heads), None)
    return embedding, heads or [embedding]


def _head(layer: Any, name: str) -> Iterator[Tensor]:
    if layer.params_dtype in EXACT:
        logits = _computed(layer, _units(layer, name, layer.embedding_dim))
        yield gathered(logits, -1, layer.tp_size)[:, : layer.org_vocab_size].t()


def _convolution(layer: Any, mixer: Any) -> Iterator[Tensor]:
    if layer.tp_size == 1 and layer.params_dtype in EXACT:
        # On CPUs the layer holds packed weights and also the unpacked weights, with which some mixers compute.
        unpacked = getattr(layer, "_cpu_unpacked_conv_weight", layer.weight)
        yield getattr(mixer, "conv_weights", unpacked)


def gathered(part: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Gather the parts of all tensor-parallel ranks along a dimension."""
    from vllm.distributed import get_tp_group

    return part if num_ranks == 1 else get_tp_group().all_gather(part.contiguous(), dim)


def _whole(owner: Any, kind: str) -> Tensor | None:
    """Return a tensor that every rank holds whole (norms, scales, plain torch routers); None if it is split."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    tensor = getattr(owner, kind, None)
    if not isinstance(tensor, Tensor) or tensor.dtype not in EXACT or hasattr(owner, "params_dtype"):
        return None
    is_plain = tensor.ndim == 1 or isinstance(owner, torch.nn.Linear)
    loader = getattr(tensor, "weight_loader", default_weight_loader)
    return tensor if is_plain and (get_tp_group().world_size == 1 or loader is default_weight_loader) else None


MAX_ROUNDING = 0.1
"""Limit for the error of a matrix's checked columns after rounding to 8 bits, relative to their norm. Rounding changes
a value by at most 1/16; with another matrix the error is above 1.
"""


def is_rounded(layer: Any) -> bool:
    """Return True for a linear layer that vLLM rounds to 8 bits as it loads it."""
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

    return isinstance(getattr(layer, "quant_method", None), OnlineLinearBase)


def keep_sent_parts(model: Any) -> None:
    """Make the model's `load_weights` keep the checked columns of each matrix that arrives. Does nothing if no layer
    rounds. Idempotent.
    """
    if hasattr(model, "sent_parts") or not any(map(is_rounded, model.modules())):
        return
    model.sent_parts, load_weights = {}, model.load_weights

    def kept(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if tensor.ndim == 2:
                model.sent_parts[name] = part_of(name, tensor).clone()
            yield name, tensor

    model.load_weights = lambda weights: load_weights(kept(weights))


def check_rounded(model: Any, names: Iterable[str]) -> set[str]:
    """Compare the matrices of rounded layers with the matrices of the last load. Returns the names of the compared
    matrices.

    Raises:
        ValueError: a layer computes with another matrix.
    """
    sent, compared = getattr(model, "sent_parts", {}), set()
    if not sent:
        return set()
    for name, held in held_parts(model, names, tied=False, rounded=True):
        if (own := sent.get(name)) is None:
            continue
        error = (held.float() - own.to(held).float()).norm() / own.float().norm().clamp_min(1e-30)
        if not error <= MAX_ROUNDING:
            raise ValueError(
                f"{name}: the server's 8-bit matrix is not the learner's matrix: they differ by {error:.2g} of the "
                f"norm, and rounding explains at most {MAX_ROUNDING:g}"
            )
        compared.add(name)
    sent.clear()
    return compared


MAX_ERROR = 0.05
"""Limit for the error of an expert's output in bfloat16, relative to its largest value. With matrices in a wrong order
the error is about 1.
"""


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
    """Yield (name, part of the tensor) for each name in `names` that is a matrix of experts, before they are packed.

    All tensor-parallel ranks call it together. Layers whose kernel stores experts in an order of its own yield nothing.
    """
    from vllm.distributed import get_tp_group

    by_place, num_ranks = {place_of(name): name for name in names}, get_tp_group().world_size
    for layer in expert_layers(model):
        for place, parts, dim in _parts(layer):
            name = by_place.get(place_of(place))
            if name is not None and parts[0].dtype in EXACT:
                whole = [gathered(part, dim, num_ranks) for part in parts]
                yield name, part_of(name, torch.cat(whole, dim) if len(whole) > 1 else whole[0])


def _parts(layer: Any) -> Iterator[tuple[str, list[Tensor], int]]:
    """Yield, for each tensor of experts, its name, this rank's parts of the merged tensor, and the dimension along
    which ranks split each part.
    """
    backend = getattr(getattr(layer.quant_method, "unquantized_backend", None), "name", "")
    if backend not in ("CPU", "TRITON") or not layer.moe_config.is_act_and_mul or layer.expert_map is not None:
        return
    place, gate_up, down = layer.layer_name, layer.w13_weight.detach(), layer.w2_weight.detach()
    if hasattr(layer, "w13_bias"):  # gpt-oss: stacked, with gate and up interleaved, and transposed
        yield f"{place}.gate_up_proj", [gate_up.transpose(1, 2)], 2
        yield f"{place}.gate_up_proj_bias", [layer.w13_bias.detach()], 1
        yield f"{place}.down_proj", [down.transpose(1, 2)], 1
        if layer.moe_config.moe_parallel_config.tp_size == 1:
            yield (
                f"{place}.down_proj_bias",
                [layer.w2_bias.detach()],
                1,
            )  # in models other than gpt-oss only the first rank has this bias
        return
    gates, ups = gate_up.chunk(2, dim=1)
    block = place.rpartition(".")[0]
    yield f"{block}.input_linear.weight", [gates, ups], 1  # Granite: stacked
    yield f"{block}.output_linear.weight", [down], 2
    for number in range(len(gate_up)):
        yield f"{place}.{number}.{layer.ckpt_gate_proj_name}.weight", [gates[number]], 0
        yield f"{place}.{number}.{layer.ckpt_up_proj_name}.weight", [ups[number]], 0
        yield f"{place}.{number}.{layer.ckpt_down_proj_name}.weight", [down[number]], 1


def check_computes(
    layer: Any,
    number: int,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Compare an expert's output with the product computed from these matrices. Raises ValueError if they differ."""
    probe = torch.randn(1, down.shape[0], generator=torch.Generator().manual_seed(0)).to(layer.w13_weight.dtype)
    hidden = _ACTIVATIONS[layer.activation.value](functional.linear(probe.float(), gate_up, gate_up_bias))
    expected = functional.linear(hidden, down, down_bias)
    weights, experts = torch.ones(1, 1), torch.full((1, 1), number, dtype=torch.int32)
    found = layer.quant_method.forward_native(layer, probe, weights, experts, None, None).float()
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not error <= MAX_ERROR:
        raise ValueError(
            f"{layer.layer_name}: with the new weights, vLLM's output of expert {number} is wrong: the largest "
            f"error is {error:.2g} times the largest value, and at most {MAX_ERROR:g} is allowed"
        )
