"""The learner as a library: GRPO steps on trajectories sampled elsewhere, in this process, without Ray, on one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from rayapp.api.arguments import ConfigLike, Overrides, load
from rayapp.core.errors import InputError
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, Prompt, Reward, Trajectory

if TYPE_CHECKING:
    from rayapp.learner.step import PolicyLearner


def trajectory(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    reward: float,
    log_probs: Sequence[float] | None = None,
) -> Trajectory:
    """Make a trajectory of one turn, with the completion's tokens exactly as they were sampled. `log_probs` are the
    sampling engine's; only `algorithm.rollout_correction` and metrics that compare engine and learner need them."""
    for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
        if not len(ids):
            raise InputError(f"{name} is empty: a trajectory needs at least one token in its prompt and its completion")
    if log_probs is not None and len(log_probs) != len(completion_ids):
        raise InputError(
            f"log_probs has {len(log_probs)} values, but completion_ids has {len(completion_ids)} tokens: give one "
            "log-prob for each token"
        )
    token_ids = np.asarray([*prompt_ids, *completion_ids], np.int32)
    mask = np.arange(token_ids.size) >= len(prompt_ids)
    of_engine = np.zeros(token_ids.size, np.float32)
    of_engine[mask] = log_probs if log_probs is not None else 0.0
    return Trajectory.of_tokens(token_ids, mask, reward=Reward(value=reward), log_probs=of_engine)


class LocalLearner:
    """The policy and its optimizer, which exist during a `with` block.

    The config's sections `model`, `algorithm`, `learner`, `train` and `rollout` are used as in a run, with `overrides`.
    """

    def __init__(self, config: ConfigLike = None, overrides: Overrides = ()) -> None:
        self._config = load(config, overrides)
        self._learner: PolicyLearner | None = None
        self._num_steps = 0
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        from rayapp.learner.build import build_learner
        from rayapp.learner.distributed import only_rank

        with ExitStack() as exits:
            self._learner = build_learner(self._config, exits.enter_context(only_rank(self._config)))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._learner = None
        self._exits.close()

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Run one training step on trajectories grouped by prompt; rewards are compared within a group. Return
        `learner/*` and the other metrics of a run's step."""
        from rayapp.learner.shares import Share

        self._num_steps += 1
        made = [_group(number, members) for number, members in enumerate(groups)]
        summaries = [summarize_group(group, time_total_s=0.0) for group in made]
        return self._open().train_step(self._num_steps, summaries, list(map(Share, range(len(made)))), made)

    def supervised_step(self, rows: Sequence[Trajectory]) -> dict[str, float]:
        """Run one cross-entropy step on the sampled tokens. Rewards are ignored."""
        from rayapp.learner.supervised import supervised_step

        self._num_steps += 1
        return supervised_step(self._open(), self._num_steps, rows)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as a Hugging Face folder, with the model's tokenizer."""
        from rayapp.learner.state.export import export_hf

        learner = self._open()
        export_hf(self._config, learner.model, Path(folder), learner.ranks)

    def _open(self) -> PolicyLearner:
        if self._learner is None:
            raise RuntimeError("the learner is not open: use it within `with LocalLearner(...) as learner:`")
        return self._learner


def _group(number: int, members: Sequence[Trajectory]) -> Group:
    if not members:
        raise InputError(f"group {number} has no trajectories: a group needs at least one")
    first = members[0]
    prompt_ids = first.token_ids[: int(np.argmax(first.response_mask))]
    return Group(group_id=number, prompt=Prompt(task="own", text="", token_ids=prompt_ids), trajectories=tuple(members))
