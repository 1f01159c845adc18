"""LoRA: the learner trains low-rank adapters (peft) on frozen weights, and sends them alone or merged in.

`load_policy` adds the adapters. `adapter_weights` gives them to servers that hold the model's own weights;
`merged_weights` takes them out again under the model's own names, for Hugging Face folders and for servers that have no
LoRA (`learner.lora.send: merged`). Checkpoints hold the adapters only: the frozen weights are those of model.path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from rayapp.config.learner import LoraSection
from rayapp.core.errors import InputError

ADAPTER, BASE = ".lora_", ".base_layer"
PEFT_PREFIX = "base_model.model."


def add_adapters(causal_lm: nn.Module, section: LoraSection) -> None:
    """Add adapters to the target modules and freeze all else. `start_adapters` gives them their first values.

    Raises:
        InputError: the model has none of the target modules.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = "all-linear" if section.target_modules == ("all-linear",) else list(section.target_modules)
    if targets == "all-linear":
        targets = linear_names(causal_lm)
    settings = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        inject_adapter_in_model(settings, causal_lm)
    except ValueError as error:
        raise InputError(
            f"learner.lora.target_modules {list(section.target_modules)} do not fit {type(causal_lm).__name__}: {error}"
        ) from error
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(ADAPTER in name)


def linear_names(causal_lm: Any) -> list[str]:
    """Last names of the decoder's linear layers. Without the head, which may be shared with the embedding."""
    decoder = causal_lm.get_decoder()
    return sorted({name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, nn.Linear)})


def merged_weights(causal_lm: nn.Module, section: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """Whole float32 weights under their Hugging Face names, with the adapters merged in.

    Gathering is collective: every rank iterates.
    """
    parameters = dict(causal_lm.named_parameters())
    for name in parameters:
        if ADAPTER not in name:
            yield name.replace(BASE, ""), merged_weight(parameters, name, section)


def merged_weight(parameters: Mapping[str, Tensor], name: str, section: LoraSection) -> Tensor:
    """The whole float32 parameter `name`: W + alpha / rank * B A where it has an adapter. Collective if sharded."""
    module, is_adapted, kind = name.partition(BASE)
    weight = _full(parameters[name])
    if not is_adapted or kind != ".weight":
        return weight
    down, up = (_full(parameters[f"{module}.lora_{letter}.default.weight"]) for letter in "AB")
    return weight + (section.alpha / section.rank) * (up @ down)  # (out, rank) @ (rank, in)


def adapter_weights(causal_lm: nn.Module, section: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The adapters' whole float32 matrices under peft's names, alpha / rank multiplied into the second ones.

    Gathering is collective: every rank iterates.
    """
    for name, parameter in causal_lm.named_parameters():
        if ADAPTER not in name:
            continue
        scale = section.alpha / section.rank if ".lora_B." in name else 1.0
        yield f"{PEFT_PREFIX}{name.replace('.default.', '.')}", scale * _full(parameter)


def _full(parameter: Tensor) -> Tensor:
    detached: Any = parameter.detach()
    full: Tensor = detached.full_tensor() if hasattr(detached, "full_tensor") else detached
    return full
