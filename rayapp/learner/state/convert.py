"""A checkpoint's weights as a Hugging Face folder, for `rayapp eval` on a checkpoint that was saved without one.

Called by the driver; needs no other learner and no process group. Reads the weights only: the
optimizer's state, twice their size, stays on disk.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rayapp.config.config import Config
from rayapp.core.errors import CheckpointError
from rayapp.learner.policy import PolicyModel, load_causal_lm, named_weights
from rayapp.learner.state.export import export_hf
from rayapp.learner.state.lora import add_adapters

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
    causal_lm = load_causal_lm(config)
    if config.learner.lora.rank > 0:
        add_adapters(causal_lm, config.learner.lora)
    model = PolicyModel(causal_lm)
    weights = {f"{_WEIGHTS}{name}": p.detach() for name, p in named_weights(model) if p.requires_grad}
    try:
        _check_names(set(weights), learner_folder)
        load(weights, checkpoint_id=learner_folder, no_dist=True)
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the weights in {learner_folder} can't be read into {config.model.path}: {error}. The checkpoint is torn, "
            "was saved without `model` (checkpoint.save_contents), or belongs to another model."
        ) from error
    export_hf(config, model, str(out), rank=0)


def _check_names(expected: set[str], folder: Path) -> None:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    found = {name for name in stored if name.startswith(_WEIGHTS)}
    if found != expected:
        odd = sorted(found ^ expected)
        raise ValueError(f"it has {len(found)} of {len(expected)} tensors, and {odd[0]} is not in both")
