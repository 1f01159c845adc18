"""Adds LoRA adapters (peft). The learner trains them on frozen weights, and sends them alone or merged
(`learner.lora.send`). Checkpoints hold the adapters only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rayapp.config.learner import LoraSection
from rayapp.core.errors import InputError
from rayapp.learner.distributed import whole
from rayapp.storage.models.adapters import PEFT_PREFIX
from rayapp.storage.models.nf4 import plain

ADAPTER, BASE = ".lora_", ".base_layer"
ROUTERS = {"gate", "router"}
# Weights that are read without calling the layer: routers, and Gemma 3n's coefficients.
READ_PAST = ROUTERS | {"prediction_coefs", "correction_coefs"}


def add_adapters(causal_lm: nn.Module, section: LoraSection) -> None:
    """Add adapters to the target modules and freeze everything else. InputError: there are none."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = chosen_linears(causal_lm, section.target_modules)
    settings = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets, lora_dropout=0.0)
    # Hide the model's config: with it peft would also adapt experts, whose parameters aren't in linear layers.
    inject_adapter_in_model(settings, nn.ModuleDict({"model": causal_lm}))
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(ADAPTER in name)


def chosen_linears(causal_lm: Any, target_modules: Sequence[str]) -> list[str]:
    """Return the decoder's linear layers whose last part is in `target_modules`; `all-linear` chooses all.

    Left out are the head, which may be tied, and layers that are read without calling them, where an adapter has no
    effect: READ_PAST, and layers that mamba's kernels fuse.
    """
    decoder, inside = causal_lm.get_decoder(), {id(part) for part in causal_lm.get_decoder().modules()}
    past = {id(m.out_proj) for m in decoder.modules() if hasattr(m, "cuda_kernels_forward") and hasattr(m, "out_proj")}
    linears = {name for name, m in causal_lm.named_modules() if type(m) is nn.Linear and id(m) in inside - past}
    names = sorted(name for name in linears if not READ_PAST & set(name.split(".")))
    if target_modules == ("all-linear",):
        return names
    ends = {name.rpartition(".")[2] for name in names}
    if missing := [target for target in target_modules if target not in ends]:
        raise InputError(
            f"learner.lora.target_modules: {type(causal_lm).__name__} has no linear layer {', '.join(missing)}; it has "
            f"{', '.join(sorted(ends))}"
        )
    return [name for name in names if name.rpartition(".")[2] in target_modules]


def merged_weight(parameters: Mapping[str, Tensor], name: str, section: LoraSection) -> Tensor:
    """Return the full parameter; with an adapter, W + alpha / rank * B A in float32. Collective if sharded."""
    module, is_adapted, kind = name.partition(BASE)
    weight = plain(whole(parameters[name]))
    if not is_adapted or kind != ".weight":
        return weight
    down, up = (whole(parameters[f"{module}.lora_{letter}.default.weight"]) for letter in "AB")
    return weight + (section.alpha / section.rank) * (up @ down)  # (out, rank) @ (rank, in)


def adapter_weights(causal_lm: nn.Module, section: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' full float32 matrices by peft's names, with alpha / rank in each B. Collective."""
    for name, parameter in causal_lm.named_parameters():
        if ADAPTER not in name:
            continue
        scale = section.alpha / section.rank if ".lora_B." in name else 1.0
        yield peft_name(name), scale * whole(parameter)


def peft_name(name: str) -> str:
    return f"{PEFT_PREFIX}{name.replace('.default.', '.')}"
