"""The table of the import: every known key of verl, and its rule. `keys.yaml` has the keys that set nothing here.

A key that ends in `*` stands for all keys that begin so. A key without a row makes the import fail; no key is ignored
silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rayapp.config.foreign_keys import Rule, as_list, choice, choice_without_effect, optional, rules_of, to
from rayapp.extras.verl import arithmetic, rules

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"
_OPTIM, _TURNS, _VAL = f"{_ACTOR}.optim", f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.val_kwargs"
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}

DATA: dict[str, Rule] = {
    "data.train_files": to("tasks", arithmetic.data_files, note="a name of no known ending gets .parquet"),
    "data.val_files": optional("eval.tasks", arithmetic.data_files),
    "data.val_max_samples": to("eval.max_problems", arithmetic.at_least_zero),
    "data.image_key": rules.image_key,
}

ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": arithmetic.advantage,
    "algorithm.use_kl_in_reward": arithmetic.kl_in_reward,
    "algorithm.gdpo_reward_keys": optional("algorithm.gdpo_reward_terms", as_list),
    f"{_ACTOR}.kl_loss_coef": arithmetic.kl_loss,
    f"{_ACTOR}.kl_loss_type": choice(
        "algorithm.kl_loss_type",
        {name: name for name in ("k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+", "abs+")}
        | {"kl": "k1", "kl+": "k1+", "mse": "k2", "mse+": "k2", "k2+": "k2"},
    ),
    f"{_ACTOR}.clip_ratio_low": arithmetic.clip_ratio,
    f"{_ACTOR}.clip_ratio_high": arithmetic.clip_ratio,
    f"{_ACTOR}.policy_loss.loss_mode": arithmetic.policy_loss,
    "algorithm.rollout_correction.rollout_is": choice(
        "algorithm.rollout_correction.level", {None: "none", "token": "token", "sequence": "sequence"}
    ),
    "algorithm.rollout_correction.rollout_is_threshold": arithmetic.correction_threshold,
}

LEARNER: dict[str, Rule] = {
    f"{_ACTOR}.optim.lr": to("learner.optimizer.lr", float),
    f"{_ACTOR}.freeze_vision_tower": to("model.freeze_vision", bool),
    f"{_MODEL}.lora_rank": arithmetic.lora,
    f"{_ACTOR}.ppo_mini_batch_size": arithmetic.minibatches,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": arithmetic.microbatch_tokens,
    f"{_ACTOR}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_OPTIM}.lr_warmup_steps": arithmetic.warmup,
    f"{_OPTIM}.lr_scheduler_type": choice("learner.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_FSDP}.fsdp_size": arithmetic.replicas,
    f"{_FSDP}.dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision.param_dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision.*": choice_without_effect(
        _DTYPES, note="gradients and buffers are always float32, which is at least as precise"
    ),
    f"{_FSDP}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_FSDP}.full_determinism": to("run.deterministic", bool),
    f"{_ACTOR}.checkpoint.save_contents": arithmetic.contents,
}

ROLLOUT: dict[str, Rule] = {
    f"{_ROLLOUT}.n": arithmetic.group_size,
    f"{_ROLLOUT}.agent.num_workers": arithmetic.workers,
    f"{_ROLLOUT}.agent.default_agent_loop": choice(
        "agent.name",
        {"tool_agent": "tool_agent", "single_turn_agent": "single_turn_agent"},
        note="used for rows without agent_name",
    ),
    f"{_TURNS}.max_assistant_turns": arithmetic.turns,
    f"{_VAL}.temperature": arithmetic.eval_temperature,
    f"{_VAL}.top_k": to("eval.top_k", arithmetic.at_least_zero),
}

TRAINER: dict[str, Rule] = {
    "trainer.project_name": to("run.output_dir", "outputs/{}".format, note="folder of the project's runs"),
    "trainer.experiment_name": arithmetic.run_name,
    "trainer.logger": arithmetic.trackers,
    "trainer.n_gpus_per_node": arithmetic.gpus,
    "trainer.total_training_steps": arithmetic.num_steps,
    "trainer.save_freq": to("checkpoint.every_steps", arithmetic.at_least_zero),
    "trainer.test_freq": to("eval.every_steps", arithmetic.at_least_zero, note="and after the last step"),
    "trainer.val_before_train": arithmetic.before_training,
    "trainer.max_actor_ckpt_to_keep": rules.kept_checkpoints,
    "trainer.resume_mode": choice("run.resume", {"auto": "auto", "disable": "never"}),
    "custom_reward_function.path": arithmetic.custom_reward,
    "reward.custom_reward_function.path": arithmetic.custom_reward,
}

FEATURES: dict[str, Rule] = {
    "algorithm.filter_groups.enable": rules.filter_groups,
    "algorithm.filter_groups.metric": rules.filter_metric,
    "reward_model.reward_kwargs.*": rules.reward_kwargs,
    "reward.reward_kwargs.*": rules.reward_kwargs,
    "reward_model.overlong_buffer.*": rules.reward_kwargs,
    "data.apply_chat_template_kwargs.*": rules.template_variable,
    "rollout.n_gpus_per_node": arithmetic.rollout_gpus,
    f"{_ROLLOUT}.trace.backend": choice(
        "tracking.trace_ratio", {None: 0.0, "mlflow": 1.0}, note="a share of the trajectories, if mlflow is a tracker"
    ),
    f"{_ROLLOUT}.prompt_length": rules.same_as("data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": rules.same_as("data.max_response_length"),
    f"{_ROLLOUT}.engine_kwargs.vllm.*": arithmetic.engine_argument,
    f"{_ROLLOUT}.quantization": arithmetic.quantization,
    f"{_ROLLOUT}.full_determinism": to("run.deterministic", bool),
    "algorithm.rollout_correction.rollout_rs": arithmetic.rejection,
    "algorithm.rollout_correction.bypass_mode": arithmetic.bypass_mode,
    **{
        f"{_ACTOR}.policy_loss.{name}": rules.loss_option
        for name in (
            "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta", "tau_pos",
            "tau_neg",
        )
    },
    f"{_ACTOR}.tau_pos": rules.loss_option,
    f"{_ACTOR}.tau_neg": rules.loss_option,
}  # fmt: skip


_YAML = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text())
# Defaults of verl 0.9 for keys that a user omits, if they change something here.
DEFAULTS: dict[str, Any] = _YAML["defaults"]
# Older names of verl's keys: a value other than null counts as that of the newer key.
RENAMED: dict[str, str] = _YAML["renamed"]
# End of a key of verl's forks and earlier versions -> overrides to give in its place.
COUNTERPARTS: dict[str, str] = {end: said for ends, said in _YAML["counterparts"].items() for end in ends.split()}
TABLE: dict[str, Rule] = {key: rule for name, lines in _YAML["sections"].items() for key, rule in rules_of(lines, name)}
TABLE |= DATA | ALGORITHM | LEARNER | ROLLOUT | TRAINER | FEATURES
