"""The table of the import: every known key of verl, and its rule.

A key that ends in `*` stands for all keys below it. A key without a row makes the import fail; no key is ignored
silently.
"""

from __future__ import annotations

from typing import Any

from rayapp.config.foreign_keys import (
    Rule,
    as_list,
    choice,
    choice_without_effect,
    no_effect,
    only,
    optional,
    refused,
    to,
)
from rayapp.extras.verl import arithmetic
from rayapp.extras.verl.keys_without_counterpart import REST

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"
_OPTIM, _TURNS, _VAL = f"{_ACTOR}.optim", f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.val_kwargs"
_ENGINE = "rayapp's learners use FSDP2, not Megatron or another engine. Use verl's FSDP script for this model"
_NO_CRITIC = "rayapp has no critic: advantages come from the group"
_ALWAYS = "always so here"
_OFFLOAD = (
    "learners keep parameters and optimizer state on the GPU between steps; rayapp.learner.offload_when_idle=true "
    "offloads both"
)
_LOG_PROBS = "log-probs are computed in micro-batches of learner.max_tokens_per_microbatch"
_SAMPLING = "it would bias the importance ratio, so training samples the model's own distribution"
_VLLM_OWN = "vLLM's default is used"
_NOT_READ = "verl's GRPO doesn't read it either, or it concerns only verl's internals"
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_OF_FSDP = (
    "grad_offload", "wrap_policy.*", "reshard_after_forward", "forward_prefetch", "use_orig_params", "seed",
    "use_torch_compile", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size",
    "entropy_checkpointing", "pad_to_length", "pad_to_length_bucket", "use_no_sync_for_gradient_accumulation",
)  # fmt: skip
"""Keys of fsdp_config that change the time or the memory of a step, but not its result."""

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
"""verl 0.9's defaults for keys that a user omits, if they change something here."""

RENAMED: dict[str, str] = {
    f"{_OPTIM}.warmup_style": f"{_OPTIM}.lr_scheduler_type",
    **{
        f"{_ACTOR}.{name}": f"{_ACTOR}.policy_loss.{name}"
        for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
}
"""Older names of verl's keys: a value other than null counts as that of the newer key."""

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
    "data.train_max_samples": only(
        -1, why="training uses all rows; shorten the file, or prepare it with `rayapp data prepare --limit`"
    ),
    "data.prompt_key": only("prompt", why="the column must be called prompt (docs/data.md)"),
    "data.reward_fn_key": only("data_source", why="the column must be called data_source (docs/data.md)"),
    "data.return_raw_chat": no_effect("messages are always kept unchanged"),
    "data.validation_shuffle": only(False, why="evaluation reads rows in file order"),
    "data.custom_cls.*": only(None, why="data files must have verl's default schema"),
    "data.tool_config_path": optional("agent.tool_file"),
    **dict.fromkeys(
        (
            "data.return_raw_input_ids",
            "data.return_full_prompt",
            "data.return_multi_modal_inputs",
            "data.gen_batch_size",
            "data.val_batch_size",
            "data.dataloader_num_workers",
            "data.filter_overlong_prompts_workers",
            "data.use_shm",
        ),
        no_effect("every rollout worker reads its rows when it needs them"),
    ),
}

ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": arithmetic.advantage,
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std", bool),
    "algorithm.use_kl_in_reward": arithmetic.kl_in_reward,
    "algorithm.gdpo_reward_keys": optional("algorithm.gdpo_reward_terms", as_list),
    "algorithm.kl_ctrl.*": no_effect("goes with use_kl_in_reward"),
    "algorithm.kl_penalty": no_effect("goes with use_kl_in_reward"),
    "algorithm.gamma": only(1.0, 1, why="rewards are not discounted over tokens"),
    "algorithm.lam": no_effect(_NO_CRITIC),
    f"{_ACTOR}.use_kl_loss": no_effect("turns kl_loss_coef on"),
    f"{_ACTOR}.kl_loss_coef": arithmetic.kl_loss,
    f"{_ACTOR}.kl_loss_type": choice(
        "algorithm.kl_loss_type",
        {name: name for name in ("k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+", "abs+")}
        | {"kl": "k1", "kl+": "k1+", "mse": "k2", "mse+": "k2", "k2+": "k2"},
    ),
    f"{_ACTOR}.entropy_coeff": to("algorithm.entropy_coef", float),
    f"{_ACTOR}.clip_ratio": no_effect("used if clip_ratio_low or clip_ratio_high is null"),
    f"{_ACTOR}.clip_ratio_low": arithmetic.clip_ratio,
    f"{_ACTOR}.clip_ratio_high": arithmetic.clip_ratio,
    f"{_ACTOR}.clip_ratio_c": to("algorithm.clip_ratio_c", float),
    f"{_ACTOR}.loss_agg_mode": to("algorithm.loss_agg_mode"),
    f"{_ACTOR}.policy_loss.loss_mode": arithmetic.policy_loss,
    f"{_ACTOR}.ppo_epochs": only(1, why="each batch is trained on once"),
    f"{_ACTOR}.shuffle": only(False, why="mini-batches are whole groups, in order"),
    "algorithm.rollout_correction.rollout_is": choice(
        "algorithm.rollout_correction.level", {None: "none", "token": "token", "sequence": "sequence"}
    ),
    "algorithm.rollout_correction.rollout_is_threshold": arithmetic.correction_threshold,
}

LEARNER: dict[str, Rule] = {
    f"{_MODEL}.path": to("model.path"),
    f"{_MODEL}.trust_remote_code": to("model.trust_remote_code", bool),
    f"{_MODEL}.enable_gradient_checkpointing": to("learner.activation_checkpointing", bool),
    f"{_MODEL}.use_remove_padding": no_effect("sequences are always packed, never padded"),
    f"{_MODEL}.lora_rank": arithmetic.lora,
    f"{_MODEL}.lora_alpha": no_effect("counts where lora_rank is set"),
    f"{_MODEL}.target_modules": no_effect("counts where lora_rank is set"),
    f"{_MODEL}.custom_chat_template": only(None, why="give a .jinja file in agent.chat_template"),
    f"{_MODEL}.use_fused_kernels": no_effect("logits are always computed in chunks (learner.log_prob_chunk_tokens)"),
    f"{_MODEL}.use_shm": no_effect(_NOT_READ),
    f"{_ACTOR}.ppo_mini_batch_size": arithmetic.minibatches,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": arithmetic.microbatch_tokens,
    f"{_ACTOR}.use_dynamic_bsz": no_effect(_ALWAYS + ": micro-batches are sized in tokens"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": no_effect("sets learner.max_tokens_per_microbatch if use_dynamic_bsz is on"),
    f"{_ACTOR}.use_torch_compile": no_effect("on GPUs learner.compile compiles norms, positions and MLPs"),
    f"{_ACTOR}.strategy": only("fsdp", "fsdp2", why="learners shard with FSDP2"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_ACTOR}.grad_clip": to("learner.optimizer.max_grad_norm", float),
    f"{_OPTIM}.clip_grad": to("learner.optimizer.max_grad_norm", float),
    f"{_OPTIM}.lr": to("learner.optimizer.lr", float),
    f"{_OPTIM}.weight_decay": to(
        "learner.optimizer.weight_decay", float, note="rayapp applies no weight decay to norms and biases"
    ),
    f"{_OPTIM}.betas": to("learner.optimizer.betas"),
    f"{_OPTIM}.lr_warmup_steps": arithmetic.warmup,
    f"{_OPTIM}.lr_warmup_steps_ratio": no_effect("used if lr_warmup_steps is not set"),
    f"{_OPTIM}.lr_scheduler_type": choice("learner.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_OPTIM}.min_lr_ratio": optional("learner.optimizer.min_lr_ratio", float),
    f"{_OPTIM}.total_training_steps": no_effect("the schedule always ends with the run's last step"),
    f"{_FSDP}.param_offload": no_effect(_OFFLOAD),
    f"{_FSDP}.optimizer_offload": no_effect(_OFFLOAD),
    f"{_FSDP}.offload_policy": to("learner.cpu_offload", bool),
    f"{_FSDP}.fsdp_size": arithmetic.replicas,
    **{f"{_FSDP}.{name}": no_effect("the learner has its own FSDP2 settings") for name in _OF_FSDP},
    f"{_FSDP}.model_dtype": no_effect("parameters and optimizer state are always float32"),
    f"{_FSDP}.dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision": only(None, {}, why="give fsdp_config.dtype"),
    f"{_FSDP}.mixed_precision.param_dtype": choice("learner.compute_dtype", _DTYPES),
    f"{_FSDP}.mixed_precision.*": choice_without_effect(
        _DTYPES, note="gradients and buffers are always float32, which is at least as precise"
    ),
    f"{_FSDP}.ulysses_sequence_parallel_size": arithmetic.sequence_parallel,
    f"{_FSDP}.full_determinism": arithmetic.determinism,
    f"{_FSDP}.strategy": only("fsdp", "fsdp2", why="learners shard with FSDP2"),
    f"{_FSDP}.forward_only": only(False, why="the policy is trained"),
    f"{_FSDP}.qat": only(None, {}, why="the policy is trained in learner.compute_dtype"),
    f"{_FSDP}.qat.enable": only(False, why="the policy is trained in learner.compute_dtype"),
    f"{_FSDP}.qat.*": no_effect("only read with qat.enable"),
    f"{_FSDP}.turbo_config.*": no_effect("verl reads it only with strategy=fsdp_turbo"),
    **{
        f"{_ACTOR}.{name}.*": refused(f"{_ACTOR}.{name}", why=_ENGINE)
        for name in ("megatron", "engine", "veomni", "torchtitan")
    },
    f"{_ACTOR}.checkpoint.save_contents": arithmetic.contents,
    f"{_ACTOR}.checkpoint.load_contents": no_effect("a resumed run loads everything that was saved"),
    f"{_ACTOR}.checkpoint.async_save": to("checkpoint.asynchronous", bool),
    f"{_ACTOR}.profiler.*": no_effect("verl's profiler"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": no_effect(_LOG_PROBS),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": no_effect(_LOG_PROBS),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": no_effect(_LOG_PROBS),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": no_effect(_LOG_PROBS),
    "actor_rollout_ref.ref.fsdp_config.*": no_effect("the reference is sharded like the policy"),
    "actor_rollout_ref.ref.strategy": no_effect("the reference is sharded like the policy"),
    "actor_rollout_ref.hybrid_engine": no_effect("cluster.placement is colocated"),
    "critic.*": no_effect(_NO_CRITIC),
}

ROLLOUT: dict[str, Rule] = {
    f"{_ROLLOUT}.name": only("vllm", why="rollouts run on vLLM"),
    f"{_ROLLOUT}.mode": only(
        "async", "sync", why="each trajectory of a group is sampled separately, from the same distribution"
    ),
    f"{_ROLLOUT}.n": arithmetic.group_size,
    f"{_ROLLOUT}.temperature": to("rollout.temperature", float),
    f"{_ROLLOUT}.top_p": only(1, 1.0, why=_SAMPLING),
    f"{_ROLLOUT}.top_k": only(-1, why=_SAMPLING),
    f"{_ROLLOUT}.do_sample": only(True, why="training needs sampled completions, not greedy ones"),
    f"{_ROLLOUT}.ignore_eos": only(False, why="a turn ends where the policy ends it"),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("server.tensor_parallel_size", int),
    f"{_ROLLOUT}.gpu_memory_utilization": to(
        "server.gpu_memory_utilization", float, note="as in verl, the share of memory that the learners leave free"
    ),
    f"{_ROLLOUT}.enforce_eager": to("server.enforce_eager", bool),
    f"{_ROLLOUT}.max_num_seqs": to("server.max_num_seqs", int),
    f"{_ROLLOUT}.max_num_batched_tokens": to("server.max_num_batched_tokens", int),
    f"{_ROLLOUT}.dtype": to("server.dtype"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": to("learner.router_replay", bool, note="router_replay.mode R3"),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": no_effect(_LOG_PROBS),
    f"{_ROLLOUT}.log_prob_micro_batch_size": no_effect(_LOG_PROBS),
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": no_effect(_LOG_PROBS),
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": no_effect(_LOG_PROBS),
    f"{_ROLLOUT}.calculate_log_probs": no_effect(_ALWAYS),
    f"{_ROLLOUT}.max_model_len": no_effect("max_prompt_length + max_response_length"),
    f"{_ROLLOUT}.enable_prefix_caching": no_effect("servers always use prefix caching, which doesn't change samples"),
    **dict.fromkeys(
        (
            f"{_ROLLOUT}.enable_chunked_prefill",
            f"{_ROLLOUT}.disable_log_stats",
            f"{_ROLLOUT}.load_format",
            f"{_ROLLOUT}.free_cache_engine",
            f"{_ROLLOUT}.seed",
        ),
        no_effect(_VLLM_OWN),
    ),
    f"{_ROLLOUT}.agent.num_workers": arithmetic.workers,
    f"{_ROLLOUT}.agent.default_agent_loop": choice(
        "agent.name",
        {"tool_agent": "tool_agent", "single_turn_agent": "single_turn_agent"},
        note="used for rows without agent_name",
    ),
    f"{_TURNS}.enable": no_effect("verl's agent loops don't read it; they read max_assistant_turns"),
    f"{_TURNS}.max_assistant_turns": arithmetic.turns,
    f"{_TURNS}.max_user_turns": no_effect(
        "limits turns together with max_assistant_turns, because every user turn is a tool's answer"
    ),
    f"{_TURNS}.tool_config_path": optional("agent.tool_file"),
    f"{_TURNS}.max_parallel_calls": to("agent.max_calls_per_turn", int),
    f"{_TURNS}.max_tool_response_length": to("agent.max_tool_output_chars", int),
    f"{_TURNS}.tool_response_truncate_side": to("agent.tool_output_keeps"),
    f"{_TURNS}.format": to("agent.tool_parser"),
    f"{_TURNS}.use_inference_chat_template": no_effect("turns are kept exactly as they were sampled"),
    f"{_TURNS}.tokenization_sanity_check_mode": no_effect("text is never tokenized again"),
    f"{_VAL}.n": to("eval.samples_per_task", int),
    f"{_VAL}.temperature": arithmetic.eval_temperature,
    f"{_VAL}.do_sample": no_effect("verl's agent loops don't read it; they read temperature"),
    f"{_VAL}.top_p": to("eval.top_p", float),
    f"{_VAL}.top_k": to("eval.top_k", arithmetic.at_least_zero),
    f"{_ROLLOUT}.profiler.*": no_effect("verl's profiler"),
}

TRAINER: dict[str, Rule] = {
    "trainer.project_name": arithmetic.output_dir,
    "trainer.experiment_name": arithmetic.run_name,
    "trainer.logger": arithmetic.trackers,
    "trainer.n_gpus_per_node": arithmetic.gpus,
    "trainer.nnodes": no_effect("counted in cluster.num_gpus"),
    "trainer.total_training_steps": arithmetic.num_steps,
    "trainer.total_epochs": no_effect("used if total_training_steps is not set"),
    "trainer.save_freq": to("checkpoint.every_steps", arithmetic.at_least_zero),
    "trainer.test_freq": to("eval.every_steps", arithmetic.at_least_zero, note="and after the last step"),
    "trainer.val_before_train": arithmetic.before_training,
    "trainer.val_only": only(False, why="use `rayapp eval`"),
    "trainer.resume_mode": choice("run.resume", {"auto": "auto", "disable": "never"}),
    "trainer.max_actor_ckpt_to_keep": optional("checkpoint.keep_last", int),
    "trainer.critic_warmup": no_effect(_NO_CRITIC),
    "trainer.max_critic_ckpt_to_keep": no_effect(_NO_CRITIC),
    "trainer.default_local_dir": no_effect("checkpoints are in the run folder, <run.output_dir>/<run.name>"),
    "trainer.balance_batch": no_effect(_ALWAYS),
    "trainer.log_val_generations": no_effect("look at trajectories with `rayapp view`"),
    "trainer.rollout_data_dir": no_effect("trajectories are in the run folder"),
    "trainer.validation_data_dir": no_effect("metrics of evaluations are in metrics.jsonl"),
    "trainer.default_hdfs_dir": only(None, why="checkpoints go to the run folder"),
    "trainer.device": only("cuda", why="learners run on CUDA or CPU"),
    "custom_reward_function.path": arithmetic.custom_reward,
    "custom_reward_function.name": no_effect("goes with custom_reward_function.path"),
    "reward.custom_reward_function.path": arithmetic.custom_reward,
    "reward.custom_reward_function.name": no_effect("goes with reward.custom_reward_function.path"),
    "hydra.*": no_effect("setting of Hydra itself, which rayapp doesn't use"),
    "model_engine": only("dp", None, why="rayapp's learners use only FSDP2, not Megatron, VeOmni or TorchTitan"),
    "ray_kwargs.*": no_effect("see cluster.*"),
}

TABLE: dict[str, Rule] = REST | DATA | ALGORITHM | LEARNER | ROLLOUT | TRAINER
