"""A learner's state on disk: torch distributed checkpoint, written by all ranks into one folder, read by any number.

The driver writes into a folder aside and renames it when every rank is done, so what is read here was whole. Holds
float32 weights, AdamW's moments, the optimizer step (the schedule's only state), the policy version and torch's RNG.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rayapp.errors import CheckpointError
from rayapp.learner.policy import named_weights
from rayapp.learner.step import PolicyLearner


def save_learner(learner: PolicyLearner, folder: str, version: int) -> None:
    """Write the learner's state. Collective.

    Raises:
        CheckpointError: it can't be written whole, e.g. because the disk is full.
    """
    state = _state(learner)
    state["counters"] = torch.tensor([version, learner.optimizer_steps, learner.skipped_steps])
    state["rng"] = torch.get_rng_state()
    try:
        save(state, checkpoint_id=folder, process_group=learner.ranks.cpu_group)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} can't be written: {_reason(error)}. The last whole checkpoint is intact; mend "
            "this (on a full disk: free some space) and start the same command again to go on from it."
        ) from error


def load_learner(learner: PolicyLearner, folder: str) -> int:
    """Read a state back, on any number of ranks. Collective.

    Returns:
        The policy version it holds.
    Raises:
        CheckpointError: it is torn, or of another model.
    """
    state = _state(learner)
    state["counters"] = torch.zeros(3, dtype=torch.int64)
    state["rng"] = torch.get_rng_state()
    try:
        load(state, checkpoint_id=folder, process_group=learner.ranks.cpu_group)
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} can't be read into this model: {_reason(error)}. It is torn or belongs to "
            "another model; set run.resume: never with another run.name to start over."
        ) from error
    version, learner.optimizer_steps, learner.skipped_steps = (int(value) for value in state["counters"])
    torch.set_rng_state(state["rng"])
    return version


def _state(learner: PolicyLearner) -> dict[str, Any]:
    """Tensors by name; loading fills them in place. Sharded ones are stored whole, so any world size can read them."""
    state: dict[str, Any] = {}
    for name, parameter in named_weights(learner.model):
        state[f"model.{name}"] = parameter.detach()
        for kind, moment in _moments(learner.optimizer, parameter).items():
            state[f"optimizer.{name}.{kind}"] = moment
    return state


def _moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made as AdamW would when it has not stepped yet."""
    moments = optimizer.state[parameter]
    if not moments:
        moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments["exp_avg"] = torch.zeros_like(parameter)
        moments["exp_avg_sq"] = torch.zeros_like(parameter)
    return dict(moments)


def _reason(error: BaseException) -> str:
    """DCP wraps what happened on each rank; the cause is one line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line or "error" in line]
    return (causes or lines or [type(error).__name__])[-1]
