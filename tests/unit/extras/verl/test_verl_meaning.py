"""What verl's own resolution makes of its commands, beside ours, value by value."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.extras.verl.importing import import_verl

COMMANDS: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[3] / "data" / "verl_commands.json").read_text(encoding="utf-8")
)
COMPARED = (
    "v_cispo_trainer__run_qwen3_8b_fsdp",
    "v_gdpo_trainer__run_qwen3_8b_fsdp",
    "v_gmpo_trainer__run_qwen3_8b_fsdp",
    "v_gpg_trainer__run_qwen3_8b_fsdp",
    "v_grpo_trainer__run_qwen3_8b_fsdp",
    "v_grpo_trainer__run_qwen3_30b_a3b_fsdp",
    "v_gspo_trainer__run_qwen3_8b_fsdp",
    "v_otb_trainer__run_qwen3_8b_fsdp",
    "v_sapo_trainer__run_qwen3_30b_a3b_fsdp",
    "v_tuning__lora__run_qwen3_8b_fsdp",
    "v_tuning__scaling__run_qwen2_5_72b_fsdp",
)
"""Commands of different estimators, losses, models and sizes."""
KL_NAMES = {"kl": "k1", "mse": "k2"}


def resolved_by_verl(overrides: list[str]) -> Any:
    """Return the configuration that verl's main_ppo would run with."""
    from hydra import compose, initialize_config_dir

    package = importlib.util.find_spec("verl")
    folder = Path(package.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def theirs(verl: Any) -> dict[str, Any]:
    actor, rollout, algorithm = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout, verl.algorithm
    batch, gpus = verl.data.train_batch_size, verl.trainer.n_gpus_per_node * verl.trainer.nnodes
    low, high = (
        side if side is not None else actor.clip_ratio for side in (actor.clip_ratio_low, actor.clip_ratio_high)
    )
    return {
        "batch": batch,
        "mini-batch": min(actor.ppo_mini_batch_size, batch),
        "group": rollout.n,
        "lengths": (verl.data.max_prompt_length, verl.data.max_response_length),
        "optimizer": (actor.optim.lr, actor.optim.weight_decay, tuple(actor.optim.betas)),
        "gradient": actor.get("grad_clip", actor.optim.clip_grad),
        "schedule": (actor.optim.lr_scheduler_type, max(0, actor.optim.lr_warmup_steps)),
        "clip": (low, high, actor.clip_ratio_c),
        "kl": (actor.kl_loss_coef if actor.use_kl_loss else 0.0, KL_NAMES.get(actor.kl_loss_type, actor.kl_loss_type)),
        "entropy": actor.entropy_coeff,
        "loss": (actor.policy_loss.loss_mode, actor.loss_agg_mode),
        "advantage": (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo),
        "sampling": (rollout.temperature, rollout.tensor_model_parallel_size, gpus),
        "evaluation": (rollout.val_kwargs.temperature, rollout.val_kwargs.top_p, rollout.val_kwargs.n),
        "adapters": verl.actor_rollout_ref.model.lora_rank,
        "when": (max(0, verl.trainer.save_freq), max(0, verl.trainer.test_freq)),
        "correction": algorithm.rollout_correction.rollout_is,
    }


def ours(config: Config) -> dict[str, Any]:
    algorithm, optimizer, train = config.algorithm, config.learner.optimizer, config.train
    level = algorithm.rollout_correction.level
    return {
        "batch": train.groups_per_step,
        "mini-batch": train.groups_per_step // train.num_minibatches,
        "group": config.rollout.group_size,
        "lengths": (config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens),
        "optimizer": (optimizer.lr, optimizer.weight_decay, optimizer.betas),
        "gradient": optimizer.max_grad_norm,
        "schedule": (optimizer.schedule, optimizer.warmup_steps // train.num_minibatches),
        "clip": (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c),
        "kl": (algorithm.kl_loss_coef, algorithm.kl_loss_type),
        "entropy": algorithm.entropy_coef,
        "loss": (algorithm.policy_loss, algorithm.loss_agg_mode),
        "advantage": (algorithm.adv_estimator, algorithm.norm_adv_by_std),
        "sampling": (config.rollout.temperature, config.server.tensor_parallel_size, config.cluster.num_gpus),
        "evaluation": (config.eval.temperature, config.eval.top_p, config.eval.samples_per_task),
        "adapters": config.learner.lora.rank,
        "when": (config.checkpoint.every_steps, config.eval.every_steps),
        "correction": None if level == "none" else level,
    }


@pytest.mark.parametrize("name", COMPARED)
def test_a_command_means_here_what_verls_own_resolution_says(name: str) -> None:
    found = ours(import_verl(None, COMMANDS[name]).config)
    assert found == theirs(resolved_by_verl(COMMANDS[name]))
