"""The policy's weights outwards: bfloat16 buckets for the servers, and Hugging Face folders.

Gathering sharded weights is collective: every rank calls these. Rank 0 sends buckets. A folder is written by all ranks,
each its own files of it, so that none has the whole model; `hf_folder` says which file holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayapp.config.config import Config
from rayapp.config.learner import LoraSection
from rayapp.core.errors import CheckpointError
from rayapp.engine.weights.buckets import WeightBucket, pack
from rayapp.learner.distributed import Ranks, local_part, whole
from rayapp.learner.families.hub_names import groups_of, hub_tensors
from rayapp.learner.family import persistent_buffers
from rayapp.learner.policy import PolicyModel, named_weights
from rayapp.learner.state.hf_folder import EXPORT_DTYPE, HfFile, HfLayout, hf_layout, write_file
from rayapp.learner.state.lora import ADAPTER, BASE, adapter_weights, merged_weight


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
class StagedFolder:
    """This rank's part of a Hugging Face folder on the host, to be written by any thread while training goes on."""

    layout: HfLayout
    files: Mapping[str, dict[str, Tensor]]
    """Tensors by the hub's names, by file: parameters in bfloat16, persistent buffers in their own dtype."""
    is_first: bool
    """This rank also writes what is no weight."""

    def write(self, folder: Path) -> None:
        """Write this rank's files.

        Raises:
            CheckpointError: a weight is not finite, or the weights can't be written.
        """
        for tensors in self.files.values():
            if wrong := not_finite(tensors):
                raise CheckpointError(f"the model for {folder} is not written: it has {wrong}")
        for name, tensors in self.files.items():
            write_file(folder / name, tensors)
        if self.is_first:
            self.layout.describe(folder)


def not_finite(state: Mapping[str, Any]) -> str:
    """Names of tensors with an infinity or NaN, empty when there is none. Looks at this rank's shards."""
    # Look at the least and the greatest value: they take no memory, unlike a mask, and NaN shows in both.
    bounds = {
        name: torch.stack(torch.aminmax(local)).isfinite().all()
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and (local := local_part(tensor)).is_floating_point() and local.numel()
    }
    wrong = [name for name, is_finite in bounds.items() if not is_finite.item()]
    more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
    return f"values that are not finite in {wrong[0]}{more}" if wrong else ""


def stage_hf(config: Config, model: PolicyModel, ranks: Ranks) -> StagedFolder:
    """Gather the weights, each on the rank that will write it. Collective."""
    layout = hf_layout(config, model.causal_lm)
    files = {
        file.name: tensors
        for number, file in enumerate(layout.files)
        if (tensors := _gathered_file(config, model, file, is_own=number % ranks.world_size == ranks.rank)) is not None
    }
    return StagedFolder(layout=layout, files=files, is_first=ranks.rank == 0)


def export_hf(config: Config, model: PolicyModel, folder: Path, ranks: Ranks) -> None:
    """Write a Hugging Face folder, as many files at once as there are ranks. Collective.

    Raises:
        CheckpointError: a weight is not finite, or the weights can't be written.
    """
    if wrong := ranks.first_of(not_finite(dict(named_weights(model)))):
        raise CheckpointError(f"the model for {folder} is not written: it has {wrong}")
    layout = hf_layout(config, model.causal_lm)
    failure: CheckpointError | None = None
    for start in range(0, len(layout.files), ranks.world_size):
        mine: tuple[HfFile, dict[str, Tensor]] | None = None
        for rank, file in enumerate(layout.files[start : start + ranks.world_size]):
            tensors = _gathered_file(config, model, file, is_own=rank == ranks.rank)
            mine = (file, tensors) if tensors is not None else mine
        # Who can't write goes on gathering: the others would wait for it.
        if mine is not None and failure is None:
            try:
                write_file(folder / mine[0].name, mine[1])
            except CheckpointError as error:
                failure = error
    if failure is not None:
        raise failure
    if ranks.rank == 0:
        layout.describe(folder)


def _gathered_file(config: Config, model: PolicyModel, file: HfFile, *, is_own: bool) -> dict[str, Tensor] | None:
    """The tensors of a file by the hub's names, on the rank that writes it. Collective."""
    parameters = dict(named_weights(model))
    names = {name.replace(BASE, ""): name for name in parameters}
    buffers = persistent_buffers(model.causal_lm)
    tensors: dict[str, Tensor] = {}
    for group in file.groups:
        # The other ranks gather too, and copy nothing to the host.
        gathered = ((name, _whole(parameters, names[name], config.learner.lora)) for name in group if name in names)
        kept = {name: weight.cpu() for name, weight in gathered if is_own}
        if is_own:
            kept |= {name: buffers[name].to("cpu", copy=True) for name in group if name in buffers}
            tensors |= hub_tensors(model.causal_lm, kept)
    return tensors if is_own else None


def sent_weights(model: PolicyModel, lora: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The bfloat16 host tensors for the servers: all weights as the hub names them, or the adapters under peft's names.
    Collective."""
    if lora.sends_adapter:
        return ((name, weight.to(EXPORT_DTYPE).cpu()) for name, weight in adapter_weights(model.causal_lm, lora))
    parameters = dict(named_weights(model))
    return _as_on_the_hub(model, lambda name: _whole(parameters, name, lora).cpu())


def weight_shapes(model: PolicyModel) -> list[tuple[str, torch.Size]]:
    """Names and whole shapes of what `device_weights` yields, in its order, without gathering anything."""
    shapes = {name: parameter.shape for name, parameter in named_weights(model)}
    empty = _as_on_the_hub(model, lambda name: torch.empty(shapes[name], dtype=EXPORT_DTYPE, device="meta"))
    return [(name, tensor.shape) for name, tensor in empty]


def device_weights(model: PolicyModel, lora: LoraSection, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every weight as the hub names it, in bfloat16 on the device where the learner computes, adapters merged in, a few
    at a time.

    Collective. Weights that live in host memory (`learner.cpu_offload`) are moved there first: it gathers faster.
    """
    parameters = dict(named_weights(model))
    return _as_on_the_hub(model, lambda name: _whole(parameters, name, lora, device))


def _as_on_the_hub(model: PolicyModel, weight_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What `weight_of` gives for each of the policy's weights, as the hub has them."""
    own = {name.replace(BASE, ""): name for name, _ in named_weights(model) if ADAPTER not in name}
    for group in groups_of(model.causal_lm, own):
        yield from hub_tensors(model.causal_lm, {name: weight_of(own[name]) for name in group}).items()


def _whole(
    parameters: Mapping[str, nn.Parameter], name: str, lora: LoraSection, device: torch.device | None = None
) -> Tensor:
    """The full tensor in bfloat16, with its adapter merged in; without a device on that of its shards.

    Never the learner's own memory.
    """
    # Adapters are merged in float32 and rounded once, as weights are that are trained directly; those are cast before
    # they are gathered, so that half the bytes travel.
    own: Any = merged_weight(parameters, name, lora) if BASE in name else parameters[name].detach()
    narrow = own.to(EXPORT_DTYPE).to(device or own.device)
    return whole(narrow)
