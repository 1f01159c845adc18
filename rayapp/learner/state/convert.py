"""A checkpoint's weights as a Hugging Face folder, for `rayapp eval` on a checkpoint that was saved without one.

Called by the driver; needs no other learner and no process group. Holds one file's weights at a time. The optimizer's
state, twice the weights' size, stays on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rayapp.config.config import Config
from rayapp.config.learner import LoraSection
from rayapp.core.errors import CheckpointError
from rayapp.learner.families.hub_names import hub_tensors, sources_of
from rayapp.learner.family import persistent_buffers
from rayapp.learner.policy import build_causal_lm
from rayapp.learner.state.hf_folder import EXPORT_DTYPE, hf_layout, write_file
from rayapp.learner.state.lora import ADAPTER, BASE, add_adapters, merged_weight
from rayapp.learner.state.pretrained import WeightFiles, read_whole, tensors_of

_WEIGHTS = "model."


def checkpoint_to_hf(config: Config, learner_folder: Path, out: Path) -> None:
    """Write the checkpoint's weights as a Hugging Face folder, which transformers and vLLM load.

    Args:
        config: config of the run that saved it, for its base model and adapters.
        learner_folder: `learner/` of the checkpoint.
    Raises:
        CheckpointError: it holds no weights, or those of another model.
        InputError: the base model can't be loaded.
    """
    causal_lm = build_causal_lm(config, is_checked=False)
    if config.learner.lora.rank > 0:
        with torch.device("meta"):
            add_adapters(causal_lm, config.learner.lora)
    trained = {name for name, _ in causal_lm.named_parameters() if config.learner.lora.rank == 0 or ADAPTER in name}
    files = WeightFiles(config.model.path)
    sources = sources_of(causal_lm, files, tensors_of(causal_lm))
    layout = hf_layout(config, causal_lm)
    try:
        _check_names({f"{_WEIGHTS}{name}" for name in trained}, learner_folder)
        for file in layout.files:
            tensors: dict[str, Tensor] = {}
            for group in file.groups:
                held = _from_checkpoint(causal_lm, trained, set(group), learner_folder)
                held |= read_whole(causal_lm, sources, files, {name for name in group if name not in held})
                tensors |= hub_tensors(causal_lm, _exported(causal_lm, held, group, config.learner.lora))
            write_file(out / file.name, tensors)
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the weights in {learner_folder} can't be read into {config.model.path}: {error}. The checkpoint is torn, "
            "was saved without `model` (checkpoint.save_contents), or belongs to another model."
        ) from error
    layout.describe(out)


def _from_checkpoint(causal_lm: Any, trained: set[str], group: set[str], folder: Path) -> dict[str, Tensor]:
    """The trained float32 tensors of these weights and of their adapters, by the names that they have in the model."""
    named = {name: p.shape for name, p in causal_lm.named_parameters() if name in trained and _weight_of(name) in group}
    held = {f"{_WEIGHTS}{name}": torch.empty(shape) for name, shape in named.items()}
    if held:
        load(held, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in held.items()}


def _weight_of(name: str) -> str:
    """The weight that a parameter, or an adapter's matrix, is or changes."""
    module, is_adapter, _ = name.partition(ADAPTER)
    return f"{module}.weight" if is_adapter else name


def _exported(causal_lm: Any, held: dict[str, Tensor], group: Iterable[str], lora: LoraSection) -> dict[str, Tensor]:
    """The group as it is written: adapters merged in, parameters in bfloat16."""
    buffers = persistent_buffers(causal_lm)
    adapted = {name.partition(ADAPTER)[0] for name in held if ADAPTER in name}
    whole: dict[str, Tensor] = {}
    for name in group:
        if name in buffers:
            whole[name] = held[name].to(buffers[name].dtype)
            continue
        module, _, kind = name.rpartition(".")
        own = f"{module}{BASE}.{kind}" if module in adapted else name
        whole[name] = merged_weight(held | {own: held[name].float()}, own, lora).to(EXPORT_DTYPE)
    return whole


def _check_names(expected: set[str], folder: Path) -> None:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    found = {name for name in stored if name.startswith(_WEIGHTS)}
    if found != expected:
        odd = sorted(found ^ expected)
        raise ValueError(f"it has {len(found)} of {len(expected)} tensors, and {odd[0]} is not in both")
