"""What tests of the learner are made of: small models, trajectories, a learner without actors. Used by tests only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from rayapp.core.imports import large_imports
from rayapp.core.types import Reward, RolloutStatus, Trajectory

if TYPE_CHECKING:
    from rayapp.config.config import Config
    from rayapp.learner.distributed import Ranks
    from rayapp.learner.step import PolicyLearner


def import_learner(*families: str) -> None:
    """In a process that is going to fork learners: import what each would import by itself for 5 seconds, in its
    constructor and its first step.

    Args:
        families: of the models, as transformers calls their folders, where they are not Llamas.
    """
    with large_imports():
        from torch.distributed import checkpoint, fsdp  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401
        from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
        from verl.workers.config import actor  # noqa: F401

        from rayapp.learner import build, scoring, supervised  # noqa: F401
        from rayapp.learner.memory import idle  # noqa: F401
        from rayapp.learner.state import checkpoint as saving  # noqa: F401
        from rayapp.learner.state import export  # noqa: F401

        for family in ("llama", *families):
            import_module(f"transformers.models.{family}.modeling_{family}")


SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def save_llama(folder: Path, *, dtype: str = "float32", **shape: float | bool | None) -> Path:
    """A Llama with random weights, without a tokenizer, as a Hugging Face folder.

    Args:
        shape: of its `LlamaConfig`, beside or in place of SHAPE.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | shape)))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def sampled(
    token_ids: ArrayLike,
    num_prompt_tokens: int,
    *,
    reward: float = 0.0,
    terms: dict[str, float] | None = None,
    log_prob: float = 0.0,
    policy_version: int = 0,
) -> Trajectory:
    """A completed trajectory: a prompt, and a response whose tokens the engine gave `log_prob` each."""
    tokens = np.asarray(token_ids, np.int32)
    mask = np.arange(tokens.size) >= num_prompt_tokens
    return Trajectory(
        token_ids=tokens,
        response_mask=mask,
        rollout_log_probs=np.where(mask, log_prob, 0.0).astype(np.float32),
        completion_text="",
        reward=Reward(value=reward, terms=terms or {}),
        status=RolloutStatus.COMPLETED,
        min_policy_version=policy_version,
        max_policy_version=policy_version,
    )


@contextmanager
def learner_alone(config: Config) -> Iterator[tuple[PolicyLearner, Ranks]]:
    """The only rank, in this process."""
    from rayapp.learner.build import build_learner
    from rayapp.learner.distributed import only_rank

    with only_rank(config) as ranks:
        yield build_learner(config, ranks), ranks
