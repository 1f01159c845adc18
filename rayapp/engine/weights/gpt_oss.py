"""gpt-oss, whose stacked experts and sinks vLLM 0.30 copies straight into its parameters.

In a reload those are placeholders without memory, so that the engine would go on with the old ones and say nothing.
Given one by one, experts go through their layer's loader, as everything else does; sinks are copied behind the reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_PARTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def mend_reload(model: Any) -> None:
    """Make `load_weights` take all of gpt-oss; nothing where the model is another one. Idempotent.

    `copy_sinks` follows each reload.
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
    """Give attention the sinks of the reload that has just ended, on each rank those of its heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    parameters = dict(model.named_parameters())
    for name, sinks in getattr(model, "late_sinks", {}).items():
        own = parameters[name.replace(".self_attn.", ".attn.")].data
        own.copy_(sinks.narrow(0, get_tensor_model_parallel_rank() * own.numel(), own.numel()))
