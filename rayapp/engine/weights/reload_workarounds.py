"""Workarounds for vLLM 0.30, which skips some weights when it loads weights a second time.

With a newer one, remove a call and run tests/cluster/test_vllm_families.py and test_vllm_experts.py: if they pass,
delete the function.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

_PARTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def mend_reload(model: Any) -> None:
    """Make `load_weights` load all of gpt-oss; other models stay as they are.

    vLLM copies stacked experts and sinks directly into its parameters, which have no memory during a reload. So experts
    are passed one by one to their layer's loader, and sinks are copied after the reload.
    """
    if type(model).__name__ != "GptOssForCausalLM" or hasattr(model, "late_sinks"):
        return
    model.late_sinks, load_weights = {}, model.load_weights
    model.load_weights = lambda weights: load_weights(_one_by_one(weights, model.late_sinks))


def _one_by_one(weights: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        experts, _, part = name.rpartition(".")
        if experts.endswith(".experts") and part in _PARTS:
            yield from ((f"{experts}.{number}.{_PARTS[part]}", own) for number, own in enumerate(tensor))
            continue
        if part == "sinks":
            sinks[name] = tensor.clone()
        yield name, tensor


def copy_sinks(model: Any) -> None:
    """Copy the sinks of the last reload; each rank those of its own heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    parameters = dict(model.named_parameters())
    for name, sinks in getattr(model, "late_sinks", {}).items():
        own = parameters[name.replace(".self_attn.", ".attn.")].data
        own.copy_(sinks.narrow(0, get_tensor_model_parallel_rank() * own.numel(), own.numel()))


def copy_convolutions(model: Any) -> None:
    """Copy the convolutions of the last reload into the mixers. On a CPU with AVX512-BF16 the layer packs them into new
    memory, but mixers compute with a view of the old."""
    for mixer in model.modules():
        unpacked = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if unpacked is not None and "conv_weights" in dict(mixer.named_buffers(recurse=False)):
            mixer.conv_weights.copy_(unpacked)


def expect_unsent_towers() -> None:
    """Drop vLLM's warnings, at every sync, of the layers of a vision tower: learners don't send a frozen one. The check
    of what arrived covers the weights that they send."""
    told = {
        "model_executor.model_loader.reload.layerwise": "Failed to load weights",
        "v1.worker.gpu_model_runner": "Following weights were not loaded",
    }
    for module, warning in told.items():
        logging.getLogger(f"vllm.{module}").addFilter(partial(_is_other, warning))


def _is_other(warning: str, record: logging.LogRecord) -> bool:
    return warning not in record.getMessage()


def is_tied(model_config: Any) -> bool:
    """Return True if the output layer is the embedding. Qwen2.5-VL has the key only in the config of the whole."""
    whole = getattr(model_config.hf_config, "tie_word_embeddings", False)
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", whole))


def tie_again(model: Any, *, is_tied: bool) -> None:
    """Copy the new embedding into a tied output layer, which vLLM's reload skips: on CPU it holds a repacked copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not is_tied:
        return
    layers = list(model.modules())
    embedding = next(layer for layer in layers if type(layer) is VocabParallelEmbedding)
    for head in (layer for layer in layers if isinstance(layer, ParallelLMHead)):
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)


def mend_after_reload(model: Any, *, is_tied: bool) -> None:
    copy_sinks(model)
    copy_convolutions(model)
    tie_again(model, is_tied=is_tied)
    pack_experts(model)


def pack_experts(model: Any) -> None:
    """Bring the experts' matrices into the order of the CPU kernel, as vLLM does only at the first load."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in expert_layers(model):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def expert_layers(model: Any) -> Iterator[Any]:
    for layer in model.modules():
        if hasattr(layer, "w13_weight") and hasattr(layer, "quant_method"):
            yield layer
