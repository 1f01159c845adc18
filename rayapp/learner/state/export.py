"""The policy's weights outwards: bfloat16 buckets for the servers, and a Hugging Face folder at the end of a run.

Gathering sharded weights is collective: every rank calls these, and only rank 0 gets anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayapp.config.config import Config
from rayapp.config.learner import LoraSection
from rayapp.core.errors import CheckpointError
from rayapp.engine.weights.buckets import WeightBucket, pack
from rayapp.learner.families.hub_names import NamedTensor, hub_tensors
from rayapp.learner.family import persistent_buffers
from rayapp.learner.policy import PolicyModel, named_weights
from rayapp.learner.state.lora import ADAPTER, BASE, adapter_weights, merged_weights

EXPORT_DTYPE = torch.bfloat16


def export_buckets(
    model: PolicyModel, bucket_bytes: int, *, rank: int, lora: LoraSection | None = None
) -> Iterator[WeightBucket]:
    """The weights for the servers, in buckets of at most `bucket_bytes` (or of one larger tensor).

    Args:
        lora: settings of the adapters, which go alone or merged in; None or rank 0 where the model has none.
    """
    tensors = sent_weights(model, lora or LoraSection())
    if rank == 0:
        yield from pack(tensors, bucket_bytes)
        return
    for _ in tensors:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFolder:
    """Weights gathered on rank 0, ready to be written by any thread while training goes on."""

    weights: dict[str, Tensor]
    """Host tensors by Hugging Face name: parameters in bfloat16, persistent buffers in their own dtype."""
    causal_lm: Any
    """A transformers model of its own config over the learner's parameters: only its config and names are read."""
    tokenizer_path: str
    trust_remote_code: bool

    def write(self, folder: Path) -> None:
        """Write what transformers and vLLM load: safetensors, config, generation config, tokenizer.

        Raises:
            CheckpointError: a weight is not finite, or the weights can't be written.
        """
        from safetensors import SafetensorError
        from transformers import AutoTokenizer

        if wrong := not_finite(self.weights):
            raise CheckpointError(f"the model for {folder} is not written: it has {wrong}")
        try:
            self.causal_lm.save_pretrained(folder, state_dict=self.weights)
        except SafetensorError as error:  # safetensors raises it for any error of the disk, a full one too
            raise CheckpointError(f"the model can't be written to {folder}: {error}") from error
        # The config names the dtype of the learner's own parameters; the weights in the folder are narrower.
        self.causal_lm.config.dtype = EXPORT_DTYPE
        self.causal_lm.config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path, trust_remote_code=self.trust_remote_code)
        tokenizer.save_pretrained(folder)


def not_finite(state: Mapping[str, Any]) -> str:
    """Names of tensors with an infinity or NaN, empty when there is none. Looks at this rank's shards."""
    # Look at the least and the greatest value: they take no memory, unlike a mask, and NaN shows in both.
    bounds = {
        name: torch.stack(torch.aminmax(local)).isfinite().all()
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and (local := _local(tensor)).is_floating_point() and local.numel()
    }
    wrong = [name for name, is_finite in bounds.items() if not is_finite.item()]
    more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
    return f"values that are not finite in {wrong[0]}{more}" if wrong else ""


def stage_hf(config: Config, model: PolicyModel, *, rank: int) -> HfFolder | None:
    """Gather the weights. Collective; None on ranks other than 0."""
    # The other ranks gather with it and keep nothing: host memory holds one whole model per run, not one per GPU.
    weights = {name: weight for name, weight in whole_weights(model, config.learner.lora) if rank == 0}
    # Buffers belong to the model though they are not trained: routers' correction biases, layers' scalars.
    weights |= {name: buffer.to("cpu", copy=True) for name, buffer in persistent_buffers(model.causal_lm).items()}
    if rank != 0:
        return None
    causal_lm: Any = copy.copy(model.causal_lm)
    # Copy the config, to change it: the learner's must keep naming our attention, which only this process knows.
    causal_lm.config = copy.deepcopy(causal_lm.config)
    causal_lm.config._attn_implementation = "sdpa"  # noqa: SLF001 - transformers offers no public name for it
    return HfFolder(
        weights=weights,
        causal_lm=causal_lm,
        tokenizer_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )


def export_hf(config: Config, model: PolicyModel, folder: str, *, rank: int) -> None:
    """Write a Hugging Face folder. Collective; only rank 0 writes."""
    staged = stage_hf(config, model, rank=rank)
    if staged is not None:
        staged.write(Path(folder))


def sent_weights(model: PolicyModel, lora: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The bfloat16 host tensors for the servers: all weights as the hub names them, or the adapters under peft's names.
    Collective."""
    if lora.sends_adapter:
        return ((name, weight.to(EXPORT_DTYPE).cpu()) for name, weight in adapter_weights(model.causal_lm, lora))
    return _as_on_the_hub(model, whole_weights(model, lora))


def _as_on_the_hub(model: PolicyModel, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
    return hub_tensors(model.causal_lm, [name for name, _ in _own_shapes(model)], tensors)


def whole_weights(model: PolicyModel, lora: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """Every weight in bfloat16 on the host under transformers' names, adapters merged in. Collective."""
    if lora.rank > 0:
        # Merge in float32 and round once, as for weights that are trained directly.
        yield from ((name, weight.to(EXPORT_DTYPE).cpu()) for name, weight in merged_weights(model.causal_lm, lora))
        return
    yield from ((name, _whole(parameter)) for name, parameter in named_weights(model))


def weight_shapes(model: PolicyModel) -> list[tuple[str, torch.Size]]:
    """Names and whole shapes of what `device_weights` yields, in its order, without gathering anything."""
    empty = ((name, torch.empty(shape, dtype=EXPORT_DTYPE, device="meta")) for name, shape in _own_shapes(model))
    return [(name, tensor.shape) for name, tensor in _as_on_the_hub(model, empty)]


def _own_shapes(model: PolicyModel) -> list[tuple[str, torch.Size]]:
    """Of all weights, under transformers' names, adapters merged in."""
    named = ((name, parameter) for name, parameter in named_weights(model) if ADAPTER not in name)
    return [(name.replace(BASE, ""), parameter.shape) for name, parameter in named]


def device_weights(model: PolicyModel, lora: LoraSection, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every weight as the hub names it, in bfloat16 on the device where the learner computes, adapters merged in, a few
    at a time.

    Collective. Weights that live in host memory (`learner.cpu_offload`) are moved there first: it gathers faster.
    """
    if lora.rank > 0:
        merged = merged_weights(model.causal_lm, lora)
        own = ((name, weight.to(EXPORT_DTYPE).to(device)) for name, weight in merged)
    else:
        own = ((name, _gathered(parameter, device)) for name, parameter in named_weights(model))
    return _as_on_the_hub(model, own)


def _gathered(parameter: torch.nn.Parameter, device: torch.device | None = None) -> Tensor:
    """The full tensor in bfloat16. It is cast before it is gathered, so that half the bytes travel."""
    narrow: Any = parameter.detach().to(EXPORT_DTYPE)
    if device is not None:
        narrow = narrow.to(device)
    full: Tensor = narrow.full_tensor() if hasattr(narrow, "full_tensor") else narrow
    return full


def _whole(parameter: torch.nn.Parameter) -> Tensor:
    """The full tensor in bfloat16 on the host."""
    full = _gathered(parameter)
    # Copy even on CPU: the next step must not change what is being written.
    return full.to("cpu", copy=True) if full.data_ptr() == _local(parameter).data_ptr() else full.cpu()


def _local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
