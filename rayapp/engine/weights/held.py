"""What an engine's worker computes with after a load, as parts of the tensors that the learners sent.

vLLM merges matrices (q, k and v), splits them over tensor-parallel ranks, and on a CPU packs them for a kernel.
Whatever it did: a linear layer maps a unit vector to a column of its matrix, exactly. So a layer is asked for the
columns that the checksum is of, with its own kernel, and its ranks' answers are gathered. Experts are compared apart:
`rayapp.engine.weights.experts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rayapp.engine.weights.checksum import columns_of, part_of

EXACT = (torch.bfloat16, torch.float32)
"""Types that hold what is sent; others round it."""
_MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def held_parts(model: Any, names: Iterable[str], *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, part of the tensor) of each of these that the model computes with.

    Collective among the tensor-parallel ranks, which give the names in one order. Left out is what vLLM holds in a type
    that rounds, and over ranks what mixers split in ways of their own.

    Args:
        tied: the embedding is the output layer's matrix, too; given a second time, as that layer computes it.
    """
    from vllm.distributed import get_tp_group

    modules = {place_of(name): module for name, module in model.named_modules()}
    embedding, heads = _tied(model) if tied else (None, [])
    with torch.no_grad():
        for name in names:
            owner, _, kind = place_of(_renamed(model, name)).rpartition(".")
            if (found := _layer(model, modules, owner, name)) is not None:
                mixer = modules.get(owner.rpartition(".")[0])
                is_convolution = "conv" in owner and kind == "weight"
                parts = _convolution(found[0], mixer) if is_convolution else _matrix(*found, kind, name)
                yield from ((name, part) for part in parts)
                if found[0] is embedding:
                    yield from ((name, part) for head in heads for part in _head(head, name))
            elif (tensor := _whole(modules.get(owner), kind)) is not None:
                yield name, part_of(name, tensor)
            elif kind == "A_log" and get_tp_group().world_size == 1:
                yield name, (-modules[owner].A).log()  # so mamba's mixers hold it, in float32


def place_of(name: str) -> str:
    """A name without what families put before a language model's, in checkpoints and in vLLM."""
    return re.sub(r"^((language_)?model\.)+", "", name)


def _renamed(model: Any, name: str) -> str:
    name = name.replace(".router.layer.", ".gate.")  # Granite
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return name if mapper is None else next(iter(mapper.apply_list([name])), "")


def _layer(model: Any, modules: Mapping[str, Any], owner: str, name: str) -> tuple[Any, list[int]] | None:
    """The layer that a matrix or bias is of, and which of those merged in it: all that the checkpoint merges, too.

    None where vLLM puts rows in another order as it loads: heads of q, k and v by turns (GPT-NeoX).
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
    elif type(layer.quant_method) is UnquantizedLinearMethod and _is_split_plainly(layer, which):
        found = layer.bias if kind == "bias" else _computed(layer, _units(layer, name, layer.input_size))
        parts = found.split(layer.output_partition_sizes, dim=-1)
        yield torch.cat([_over_outputs(layer, parts[i], is_key_or_value=i > 0) for i in which], dim=-1).t()


def _units(layer: Any, name: str, width: int) -> Tensor:
    """(columns, width): the unit vector of each column that the checksum is of."""
    columns = columns_of(name, width)
    units: Tensor = layer.weight.new_zeros(len(columns), width, dtype=layer.params_dtype)
    units[range(len(columns)), columns] = 1
    return units


def _computed(layer: Any, inputs: Tensor) -> Tensor:
    found: Tensor = layer.quant_method.apply(layer, inputs)
    return found


def _columns_over_inputs(layer: Any, name: str) -> Tensor:
    """Of a layer whose ranks have some of the inputs each."""
    from vllm.distributed import get_tp_group

    units = _units(layer, name, layer.input_size)
    if layer.tp_size == 1:
        return _computed(layer, units).t()
    own = units.chunk(layer.tp_size, dim=-1)[layer.tp_rank].contiguous()
    summed: Tensor = get_tp_group().all_reduce(_computed(layer, own))
    return summed.t()


def _over_outputs(layer: Any, part: Tensor, *, is_key_or_value: bool) -> Tensor:
    """Of a layer whose ranks have some of the outputs each; of few key-value heads several ranks have the same."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    if not isinstance(layer, ColumnParallelLinear) or layer.tp_size == 1:
        return part
    every = getattr(layer, "num_kv_head_replicas", 1) if is_key_or_value else 1
    return torch.cat(gathered(part, -1, layer.tp_size).chunk(layer.tp_size, dim=-1)[::every], dim=-1)


def _is_split_plainly(layer: Any, which: list[int]) -> bool:
    """False where ranks hold parts in an order of a mixer's own."""
    loader = getattr(layer.weight, "weight_loader", None)
    is_own = loader is None or getattr(loader, "__self__", None) is layer
    return getattr(layer, "tp_size", 1) == 1 or (is_own and (len(which) == 1 or layer.prefix.endswith(tuple(_MERGED))))


def _tied(model: Any) -> tuple[Any, list[Any]]:
    """The embedding that output layers are tied to (the first one), and those layers; itself where it is its own."""
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
        # Packed on CPUs, which keep the plain one beside it, and in some mixers compute with that.
        unpacked = getattr(layer, "_cpu_unpacked_conv_weight", layer.weight)
        yield getattr(mixer, "conv_weights", unpacked)


def gathered(part: Tensor, dim: int, num_ranks: int) -> Tensor:
    """The parts of all ranks of vLLM's, along a dimension."""
    from vllm.distributed import get_tp_group

    return part if num_ranks == 1 else get_tp_group().all_gather(part.contiguous(), dim)


def _whole(owner: Any, kind: str) -> Tensor | None:
    """What each rank holds as it was sent, if this is: norms, scales, a router that is a layer of torch's."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    tensor = getattr(owner, kind, None)
    if not isinstance(tensor, Tensor) or tensor.dtype not in EXACT or hasattr(owner, "params_dtype"):
        return None
    is_plain = tensor.ndim == 1 or isinstance(owner, torch.nn.Linear)
    loader = getattr(tensor, "weight_loader", default_weight_loader)
    return tensor if is_plain and (get_tp_group().world_size == 1 or loader is default_weight_loader) else None
