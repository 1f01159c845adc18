"""Exports the policy's weights: in buckets for the servers, and as Hugging Face folders.

Gathering is collective: every rank calls these functions. Rank 0 sends the buckets. Each rank writes its own files of a
folder, so that no rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayapp.config.config import Config
from rayapp.config.learner import LearnerSection, LoraSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import CheckpointError
from rayapp.engine.weights.buckets import WeightBucket, pack
from rayapp.learner.distributed import Ranks, local_part, whole
from rayapp.learner.families.pictures import frozen_tower
from rayapp.learner.family import persistent_buffers
from rayapp.learner.policy import DTYPES, PolicyModel, named_weights
from rayapp.learner.state.hf_folder import HfFile, HfLayout, hf_layout, write_adapter, write_file
from rayapp.learner.state.lora import ADAPTER, BASE, adapter_weights, merged_weight
from rayapp.learner.state.pretrained import groups_of, hub_tensors
from rayapp.storage.models.nf4 import shape_of

# Number formats to which a sent weight is rounded, in order; two if a server that computes in float32 must hold the
# weights of a bfloat16 folder.
Formats = Sequence[torch.dtype]


def export_buckets(
    model: PolicyModel, bucket_bytes: int, formats: Formats, *, rank: int, lora: LoraSection | None = None
) -> Iterator[WeightBucket]:
    """Yield the weights for the servers in buckets of at most `bucket_bytes`; a larger tensor gets one of its own."""
    tensors = sent_weights(model, lora or LoraSection(), formats)
    if rank == 0:
        yield from pack(tensors, bucket_bytes)
        return
    for _ in tensors:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFolder:
    """Part of a Hugging Face folder that this rank holds in host memory, for a thread to write."""

    layout: HfLayout
    files: Mapping[str, dict[str, Tensor]]  # by file and by the hub's name
    is_first: bool  # this rank also writes the other files

    def write(self, folder: Path) -> None:
        """Write this rank's files. CheckpointError: a weight is not finite, or can't be written."""
        for tensors in self.files.values():
            if wrong := not_finite(tensors):
                raise CheckpointError(f"the model for {folder} is not written: it has {wrong}")
        for name, tensors in self.files.items():
            write_file(folder / name, tensors)
        if self.is_first:
            self.layout.describe(folder)


def not_finite(state: Mapping[str, Any]) -> str:
    """Describe this rank's tensors with an infinity or NaN; empty if there are none."""
    # Check the least and the greatest value: unlike a mask they need no memory, and they are NaN if any value is NaN.
    bounds = {
        name: torch.stack(torch.aminmax(local)).isfinite().all()
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and (local := local_part(tensor)).is_floating_point() and local.numel()
    }
    wrong = [name for name, is_finite in bounds.items() if not is_finite.item()]
    more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
    return f"values that are not finite in {wrong[0]}{more}" if wrong else ""


def stage_hf(section: ModelSection, learner: LearnerSection, model: PolicyModel, ranks: Ranks) -> StagedFolder:
    """Gather each weight in float32 on the rank that will write it. Collective."""
    layout = hf_layout(section, model.causal_lm, torch.float32)
    files = {
        file.name: tensors
        for number, file in enumerate(layout.files)
        if (
            tensors := _gathered_file(
                learner, model, file, layout.dtype, is_own=number % ranks.world_size == ranks.rank
            )
        )
        is not None
    }
    return StagedFolder(layout=layout, files=files, is_first=ranks.rank == 0)


def export_hf(config: Config, model: PolicyModel, folder: Path, ranks: Ranks) -> None:
    """Write a Hugging Face folder in `checkpoint.final_dtype`, each rank its files one at a time; adapters merged, and
    alone in `adapter/`. Collective."""
    if wrong := ranks.first_of(not_finite(dict(named_weights(model)))):
        raise CheckpointError(f"the model for {folder} is not written: it has {wrong}")
    dtype = DTYPES[config.checkpoint.final_dtype]
    layout = hf_layout(config.model, model.causal_lm, dtype)
    failure: CheckpointError | None = None
    for start in range(0, len(layout.files), ranks.world_size):
        mine: tuple[HfFile, dict[str, Tensor]] | None = None
        for rank, file in enumerate(layout.files[start : start + ranks.world_size]):
            tensors = _gathered_file(config.learner, model, file, dtype, is_own=rank == ranks.rank)
            mine = (file, tensors) if tensors is not None else mine
        # A rank that can't write must continue gathering, or the other ranks would wait for it.
        if mine is not None and failure is None:
            try:
                write_file(folder / mine[0].name, mine[1])
            except CheckpointError as error:
                failure = error
    if failure is not None:
        raise failure
    if ranks.rank == 0:
        layout.describe(folder)
    if config.learner.lora.rank > 0:
        adapter = {
            name: weight.to(dtype).cpu() for name, weight in adapter_weights(model.causal_lm, config.learner.lora)
        }
        if ranks.rank == 0:
            write_adapter(folder / "adapter", adapter, rank=config.learner.lora.rank, base=config.model.path)


def _gathered_file(
    learner: LearnerSection, model: PolicyModel, file: HfFile, dtype: torch.dtype, *, is_own: bool
) -> dict[str, Tensor] | None:
    """Return tensors by the hub's names on the rank that writes the file. Collective."""
    parameters = dict(named_weights(model))
    names = {name.replace(BASE, ""): name for name in parameters}
    buffers = persistent_buffers(model.causal_lm)
    tensors: dict[str, Tensor] = {}
    for group in file.groups:
        # The other ranks take part in gathering, but copy nothing to the host.
        gathered = ((name, _whole(parameters, names[name], learner.lora, [dtype])) for name in group if name in names)
        kept = {name: weight.cpu() for name, weight in gathered if is_own}
        if is_own:
            kept |= {name: buffers[name].to("cpu", copy=True) for name in group if name in buffers}
            tensors |= hub_tensors(model.causal_lm, kept)
    return tensors if is_own else None


def sent_weights(model: PolicyModel, lora: LoraSection, formats: Formats) -> Iterator[tuple[str, Tensor]]:
    """Yield the servers' tensors: all weights by the hub's names, or adapters by peft's. Collective."""
    if lora.sends_adapter:
        return ((name, weight.to(formats[-1]).cpu()) for name, weight in adapter_weights(model.causal_lm, lora))
    parameters = dict(named_weights(model))
    return _as_on_the_hub(model, lambda name: _whole(parameters, name, lora, formats).cpu())


def weight_shapes(model: PolicyModel) -> list[tuple[str, torch.Size]]:
    """Return names and full shapes of what `device_weights` yields, in its order, without gathering."""
    shapes = {name: shape_of(parameter) for name, parameter in named_weights(model)}
    empty = _as_on_the_hub(model, lambda name: torch.empty(shapes[name], device="meta"))
    return [(name, tensor.shape) for name, tensor in empty]


def device_weights(
    model: PolicyModel, lora: LoraSection, device: torch.device, formats: Formats
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by the hub's name on the learner's device, with adapters merged in. Collective. Weights in
    host memory are first moved there, where gathering is faster."""
    parameters = dict(named_weights(model))
    return _as_on_the_hub(model, lambda name: _whole(parameters, name, lora, formats, device))


def _as_on_the_hub(model: PolicyModel, weight_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    # The servers have a frozen tower from model.path.
    frozen = frozen_tower(model.causal_lm)
    names = (name for name, _ in named_weights(model) if ADAPTER not in name and name not in frozen)
    own = {name.replace(BASE, ""): name for name in names}
    for group in groups_of(model.causal_lm, own):
        yield from hub_tensors(model.causal_lm, {name: weight_of(own[name]) for name in group}).items()


def _whole(
    parameters: Mapping[str, nn.Parameter],
    name: str,
    lora: LoraSection,
    formats: Formats,
    device: torch.device | None = None,
) -> Tensor:
    # Merge adapters in float32 and round once, like weights that are trained directly. Weights without an adapter are
    # cast before they are gathered, which halves the bytes to send.
    own: Any = parameters[name].detach()
    if BASE in name or own.dtype == torch.uint8:
        own = merged_weight(parameters, name, lora)
    for dtype in formats:
        own = own.to(dtype)
    return whole(own.to(device or own.device))
