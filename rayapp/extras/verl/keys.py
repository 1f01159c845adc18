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

# Defaults of verl 0.9 for keys that a user omits, if they change something here.
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{_ACTOR}.use_dynamic_bsz": False,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra"],
    f"{_OPTIM}.lr": 1e-6,
    f"{_OPTIM}.weight_decay": 0.01,
    f"{_OPTIM}.lr_warmup_steps": -1,
    f"{_OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}.enforce_eager": False,
    f"{_ROLLOUT}.max_num_seqs": 256,
    f"{_ROLLOUT}.agent.num_workers": 8,
    f"{_ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
    f"{_TURNS}.max_assistant_turns": None,
    f"{_TURNS}.max_parallel_calls": 1,
    f"{_TURNS}.max_tool_response_length": 256,
    f"{_VAL}.n": 1,
    f"{_VAL}.temperature": 0.0,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
}

# Older names of verl's keys: a value other than null counts as that of the newer key.
RENAMED: dict[str, str] = {
    f"{_OPTIM}.warmup_style": f"{_OPTIM}.lr_scheduler_type",
    **{
        f"{_ACTOR}.{name}": f"{_ACTOR}.policy_loss.{name}"
        for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
}

DATA: dict[str, Rule] = {
    "data.train_files": arithmetic.data_files("tasks"),
    "data.val_files": arithmetic.data_files("eval.tasks"),
    "data.train_batch_size": to("train.groups_per_step", int, note="prompts per step"),
    "data.max_prompt_length": to("rollout.max_prompt_tokens", int),
    "data.max_response_length": to(
        "rollout.max_completion_tokens", int, note="the limit covers all turns, tool results included"
    ),
    "data.filter_overlong_prompts": to("data.filter_overlong_prompts", bool),
    "data.truncation": to("data.truncation"),
    "data.shuffle": to("data.shuffle", bool),
    "data.seed": optional("run.seed", int),
    "data.val_max_samples": to("eval.max_problems", arithmetic.at_least_zero),
    "data.tool_config_path": optional("agent.tool_file"),
    "data.image_key": rules.image_key,
}

ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": arithmetic.advantage,
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std", bool),
    "algorithm.use_kl_in_reward": arithmetic.kl_in_reward,
    "algorithm.gdpo_reward_keys": optional("algorithm.gdpo_reward_terms", as_list),
    f"{_ACTOR}.kl_loss_coef": arithmetic.kl_loss,
    f"{_ACTOR}.kl_loss_type": choice(
        "algorithm.kl_loss_type",
        {name: name for name in ("k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+", "abs+")}
        | {"kl": "k1", "kl+": "k1+", "mse": "k2", "mse+": "k2", "k2+": "k2"},
    ),
    f"{_ACTOR}.entropy_coeff": to("algorithm.entropy_coef", float),
    f"{_ACTOR}.clip_ratio_low": arithmetic.clip_ratio,
    f"{_ACTOR}.clip_ratio_high": arithmetic.clip_ratio,
    f"{_ACTOR}.clip_ratio_c": to("algorithm.clip_ratio_c", float),
    f"{_ACTOR}.loss_agg_mode": to("algorithm.loss_agg_mode"),
    f"{_ACTOR}.policy_loss.loss_mode": arithmetic.policy_loss,
    "algorithm.rollout_correction.rollout_is": choice(
        "algorithm.rollout_correction.level", {None: "none", "token": "token", "sequence": "sequence"}
    ),
    "algorithm.rollout_correction.rollout_is_threshold": arithmetic.correction_threshold,
}

LEARNER: dict[str, Rule] = {
    f"{_MODEL}.path": to("model.path"),
    f"{_MODEL}.trust_remote_code": to("model.trust_remote_code", bool),
    f"{_ACTOR}.freeze_vision_tower": to("model.freeze_vision", bool),
    f"{_MODEL}.enable_gradient_checkpointing": to("learner.activation_checkpointing", bool),
    f"{_MODEL}.lora_rank": arithmetic.lora,
    f"{_ACTOR}.ppo_mini_batch_size": arithmetic.minibatches,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": arithmetic.microbatch_tokens,
    f"{_ACTOR}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_ACTOR}.grad_clip": to("learner.optimizer.max_grad_norm", float),
    f"{_OPTIM}.clip_grad": to("learner.optimizer.max_grad_norm", float),
    f"{_OPTIM}.lr": to("learner.optimizer.lr", float),
    f"{_OPTIM}.weight_decay": to(
        "learner.optimizer.weight_decay", float, note="rayapp applies no weight decay to norms and biases"
    ),
    f"{_OPTIM}.betas": to("learner.optimizer.betas"),
    f"{_OPTIM}.lr_warmup_steps": arithmetic.warmup,
    f"{_OPTIM}.lr_scheduler_type": choice("learner.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_OPTIM}.min_lr_ratio": optional("learner.optimizer.min_lr_ratio", float),
    f"{_FSDP}.offload_policy": to("learner.cpu_offload", bool),
    f"{_FSDP}.fsdp_size": arithmetic.replicas,
    f"{_FSDP}.dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision.param_dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision.*": choice_without_effect(
        _DTYPES, note="gradients and buffers are always float32, which is at least as precise"
    ),
    f"{_FSDP}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_FSDP}.full_determinism": arithmetic.determinism,
    f"{_ACTOR}.checkpoint.save_contents": arithmetic.contents,
}

ROLLOUT: dict[str, Rule] = {
    f"{_ROLLOUT}.n": arithmetic.group_size,
    f"{_ROLLOUT}.temperature": to("rollout.temperature", float),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("server.tensor_parallel_size", int),
    f"{_ROLLOUT}.gpu_memory_utilization": to(
        "server.gpu_memory_utilization", float, note="as in verl, the share of memory that the learners leave free"
    ),
    f"{_ROLLOUT}.enforce_eager": to("server.enforce_eager", bool),
    f"{_ROLLOUT}.max_num_seqs": to("server.max_num_seqs", int),
    f"{_ROLLOUT}.max_num_batched_tokens": to("server.max_num_batched_tokens", int),
    f"{_ROLLOUT}.dtype": to("server.dtype"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": to("learner.router_replay", bool, note="router_replay.mode R3"),
    f"{_ROLLOUT}.agent.num_workers": arithmetic.workers,
    f"{_ROLLOUT}.agent.default_agent_loop": choice(
        "agent.name",
        {"tool_agent": "tool_agent", "single_turn_agent": "single_turn_agent"},
        note="used for rows without agent_name",
    ),
    f"{_TURNS}.max_assistant_turns": arithmetic.turns,
    f"{_TURNS}.tool_config_path": optional("agent.tool_file"),
    f"{_TURNS}.max_parallel_calls": to("agent.max_calls_per_turn", int),
    f"{_TURNS}.max_tool_response_length": to("agent.max_tool_output_chars", int),
    f"{_TURNS}.format": to("agent.tool_parser"),
    f"{_VAL}.n": to("eval.samples_per_task", int),
    f"{_VAL}.temperature": arithmetic.eval_temperature,
    f"{_VAL}.top_p": to("eval.top_p", float),
    f"{_VAL}.top_k": to("eval.top_k", arithmetic.at_least_zero),
}

TRAINER: dict[str, Rule] = {
    "trainer.project_name": arithmetic.output_dir,
    "trainer.experiment_name": arithmetic.run_name,
    "trainer.logger": arithmetic.trackers,
    "trainer.n_gpus_per_node": arithmetic.gpus,
    "trainer.total_training_steps": arithmetic.num_steps,
    "trainer.save_freq": to("checkpoint.every_steps", arithmetic.at_least_zero),
    "trainer.test_freq": to("eval.every_steps", arithmetic.at_least_zero, note="and after the last step"),
    "trainer.val_before_train": arithmetic.before_training,
    "trainer.resume_mode": choice("run.resume", {"auto": "auto", "disable": "never"}),
    "trainer.max_actor_ckpt_to_keep": optional("checkpoint.keep_last", int),
    "custom_reward_function.path": arithmetic.custom_reward,
    "reward.custom_reward_function.path": arithmetic.custom_reward,
}

FEATURES: dict[str, Rule] = {
    "algorithm.filter_groups.enable": rules.filter_groups,
    "algorithm.filter_groups.metric": rules.filter_metric,
    "reward_model.reward_manager": rules.reward_manager,
    "reward.reward_manager.name": rules.reward_manager,
    "reward_model.reward_kwargs.*": rules.reward_kwargs,
    "reward.reward_kwargs.*": rules.reward_kwargs,
    "reward_model.overlong_buffer.*": rules.reward_kwargs,
    "reward.reward_model.enable": rules.reward_model,
    "reward_model.enable": rules.reward_model,
    "data.apply_chat_template_kwargs.*": rules.template_variable,
    "distillation.enabled": rules.distillation,
    "rollout.n_gpus_per_node": arithmetic.rollout_gpus,
    f"{_ROLLOUT}.trace.backend": rules.trace,
    f"{_ROLLOUT}.prompt_length": rules.same_as("data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": rules.same_as("data.max_response_length"),
    f"{_ROLLOUT}.engine_kwargs.vllm.*": arithmetic.engine_argument,
    f"{_ROLLOUT}.quantization": arithmetic.quantization,
    f"{_ROLLOUT}.full_determinism": arithmetic.determinism,
    f"{_MODEL}.override_config.max_position_embeddings": to("model.max_position_embeddings", int),
    "algorithm.rollout_correction.rollout_rs": arithmetic.rejection,
    "algorithm.rollout_correction.bypass_mode": arithmetic.bypass_mode,
    "algorithm.rollout_correction.rollout_is_batch_normalize": to(
        "algorithm.rollout_correction.batch_normalize",
        bool,
        note="normalized over all micro-batches, also with bypass_mode",
    ),
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
# End of a key of verl's forks and earlier versions -> overrides to give in its place.
COUNTERPARTS: dict[str, str] = {end: said for ends, said in _YAML["counterparts"].items() for end in ends.split()}
TABLE: dict[str, Rule] = {key: rule for name, lines in _YAML["sections"].items() for key, rule in rules_of(lines, name)}
TABLE |= DATA | ALGORITHM | LEARNER | ROLLOUT | TRAINER | FEATURES
