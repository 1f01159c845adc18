"""Saves and loads a learner's state with torch distributed checkpoint (DCP), in one folder, on any number of ranks.

It holds float32 weights, AdamW's moments, the optimizer step (the schedule's only state), the policy version, torch's
RNG, and the coefficient of the KL in the reward. Threads write from copies in host memory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rayapp.core.errors import CheckpointDamagedError, CheckpointError
from rayapp.learner.policy import named_weights
from rayapp.learner.state.export import not_finite, stage_hf
from rayapp.learner.step import PolicyLearner

FULL_BYTES = 1 << 16  # a disk with fewer free bytes after a failed write is reported as full


class SaveInProgress:
    """Part of a checkpoint that threads of one rank are writing."""

    def __init__(self, folder: str, writing: Sequence[Future[Any]]) -> None:
        self._folder, self._writing = folder, tuple(writing)

    def is_done(self) -> bool:
        return all(future.done() for future in self._writing)

    def wait(self) -> None:
        """Wait until this rank's part is written. CheckpointError: it can't be."""
        wait(self._writing)
        errors = [error for future in self._writing if (error := future.exception()) is not None]
        if errors:
            # On a full disk torch may report only that a file has an unexpected length.
            is_full = shutil.disk_usage(self._folder).free < FULL_BYTES
            reason = f"{os.strerror(errno.ENOSPC)} ({_reason(errors[0])})" if is_full else _reason(errors[0])
            raise CheckpointError(
                f"the checkpoint in {self._folder} can't be written: {reason}. Remove the cause (on a full disk: free "
                "some space) and start the same command again."
            ) from errors[0]


def begin_save(
    learner: PolicyLearner, folder: str, version: int, on_host: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> SaveInProgress:
    """Copy what `checkpoint.save_contents` names to host memory, and write it in the background. Collective.

    A Hugging Face folder goes to `hf_model` beside `folder`. CheckpointError: a weight or a moment is not finite; it
    must not replace a good checkpoint.
    """
    contents = learner.config.checkpoint.save_contents
    writing: list[Future[Any]] = []
    state = {name: on_host(value) for name, value in _state(learner).items() if name.split(".")[0] in contents}
    if wrong := learner.ranks.first_of(not_finite(state)):
        raise CheckpointError(f"training diverged: there are {wrong}. No checkpoint is saved.")
    if state:
        state |= _beside_tensors(learner, version)
        writing.append(_async_save(state, folder, learner.ranks.save_group))
    if "hf_model" in contents:
        staged = stage_hf(learner.config.model, learner.config.learner, learner.model, learner.ranks)
        writer = ThreadPoolExecutor(1, thread_name_prefix="hf_model")
        writing.append(writer.submit(staged.write, Path(folder).with_name("hf_model")))
        writer.shutdown(wait=False)
    return SaveInProgress(folder, writing)


def _async_save(state: dict[str, Any], folder: str, group: Any) -> Future[Any]:
    future = async_save(state, checkpoint_id=folder, process_group=group)
    assert isinstance(future, Future), f"async_save gave a {type(future).__name__}"
    return future


def load_learner(learner: PolicyLearner, folder: str) -> int:
    """Load a learner's state on any number of ranks. Return the policy version. Collective. CheckpointDamagedError: it
    is not finite, so an older checkpoint may do."""
    state = _state(learner)
    state |= _beside_tensors(learner, 0)
    try:
        _check_same_model(state, folder)
        load(state, checkpoint_id=folder, process_group=learner.ranks.cpu_group)
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} can't be read into this model: {_reason(error)}. The checkpoint is incomplete "
            "or belongs to another model. Set the model.path with which it was saved, or start over: set another "
            "run.name and run.resume: never."
        ) from error
    if wrong := learner.ranks.first_of(not_finite(state)):
        raise CheckpointDamagedError(f"the checkpoint in {folder} is damaged: it has {wrong}")
    version, learner.optimizer_steps, learner.skipped_steps = (int(value) for value in state["counters"])
    torch.set_rng_state(state["rng"])
    return version


def _check_same_model(state: dict[str, Any], folder: str) -> None:
    # Exactly these tensors: DCP would load part of a larger checkpoint.
    stored = {
        name: tuple(entry.size)
        for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    different = [
        f"{name} is {stored.get(name, 'missing')} in the checkpoint and {own.get(name, 'missing')} in the model"
        for name in sorted(stored.keys() | own.keys())
        if stored.get(name) != own.get(name)
    ]
    if different:
        more = f", and {len(different) - 2} more" if len(different) > 2 else ""
        raise ValueError(f"{len(different)} tensors differ: {'; '.join(different[:2])}{more}")


def _state(learner: PolicyLearner) -> dict[str, Any]:
    """Return the tensors by name, to save or to load in place."""
    state: dict[str, Any] = {}
    for name, parameter in named_weights(learner.model):
        if not parameter.requires_grad:
            continue  # frozen under LoRA: model.path has it
        state[f"model.{name}"] = parameter.detach()
        for kind, moment in _moments(learner.optimizer, parameter).items():
            state[f"optimizer.{name}.{kind}"] = moment
    return state


def _beside_tensors(learner: PolicyLearner, version: int) -> dict[str, Tensor]:
    return {
        "counters": torch.tensor([version, learner.optimizer_steps, learner.skipped_steps]),
        "rng": torch.get_rng_state(),
    }


def _moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's moments; before the first step, as AdamW would make them."""
    moments = optimizer.state[parameter]
    if not moments:
        moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments["exp_avg"] = torch.zeros_like(parameter)
        moments["exp_avg_sq"] = torch.zeros_like(parameter)
    return dict(moments)


def _reason(error: BaseException) -> str:
    """Return the cause in one line, from DCP's report of all ranks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line or "error" in line]
    return (causes or lines or [type(error).__name__])[-1]
