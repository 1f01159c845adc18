"""Rest of the import's table: verl's keys without a counterpart in rayapp, each with the reason. `keys.py` includes it.

Most belong to features that are off by default. The value for "off" is accepted, any other is refused, because it would
change the training. Keys that concern only verl's internals are accepted with any value, and have no effect.

The module also has the rule for verl's section `distillation`.
"""

from __future__ import annotations

from typing import Any

from rayapp.config.verl import rules
from rayapp.config.verl.arithmetic import (
    bypass_mode,
    determinism,
    engine_argument,
    quantization,
    rejection,
    rollout_gpus,
)
from rayapp.config.verl.rules import Landing, Rule, Values, no_effect, only, to
from rayapp.core.errors import ConfigError

_LOSS = "distillation.distillation_loss"
_ESTIMATED = {
    # k1 is the log-ratio itself, used as an advantage; the other entries are losses with the same gradient.
    (True, "k1"): "reverse",
    (True, "kl"): "reverse",
    (False, "k2"): "reverse",
    (False, "mse"): "reverse",
    (False, "k3"): "forward",
    (False, "low_var_kl"): "forward",
}
"""verl's (use_policy_gradient, loss_mode) for a KL over sampled tokens -> direction of the KL with the same
gradient."""


_OF_LOSS = {
    "policy_loss_mode": ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"),
    "clip_ratio_low": ("actor_rollout_ref.actor.clip_ratio_low", 0.2),
    "clip_ratio_high": ("actor_rollout_ref.actor.clip_ratio_high", 0.2),
}
"""Option of the loss in verl's section `distillation` -> the key of the policy's own loss, and this key's default."""


def distillation(key: str, value: Any, values: Values) -> Landing:
    """Map all keys of the section `distillation` together, because their meanings depend on each other."""
    if not value:
        return Landing(note="no teacher")
    settings = {f"distillation.{name}": setting for name, setting in _kl(values).items()}
    takes_rewards = bool(values.get(f"{_LOSS}.use_task_rewards", True))
    if values.get(f"{_LOSS}.use_policy_gradient"):
        _check_loss(values)
    settings |= {
        "distillation.teacher": _teacher(values),
        "distillation.weight": float(values.get(f"{_LOSS}.distillation_loss_coef", 1.0)) if takes_rewards else 1.0,
        "distillation.reward_weight": float(takes_rewards),
    }
    return Landing(settings=settings, note="the learners hold the teacher; it has no separate servers")


def _check_loss(values: Values) -> None:
    """Check that distillation's policy loss equals the policy's: rayapp adds both advantages and computes one loss."""
    for name, (key, default) in _OF_LOSS.items():
        own, policys = values.get(f"{_LOSS}.{name}", default), values.get(key)
        if own != (default if policys is None else policys):
            raise ConfigError(
                f"{_LOSS}.{name} = {own!r} can't be imported: rayapp computes one loss from the advantages of teacher "
                f"and rewards, with {key} = {policys}. Give both keys the same value."
            )


def _kl(values: Values) -> dict[str, Any]:
    mode, as_advantage = values.get(f"{_LOSS}.loss_mode", "k3"), bool(values.get(f"{_LOSS}.use_policy_gradient", False))
    clamp, floor = values.get(f"{_LOSS}.loss_max_clamp"), values.get(f"{_LOSS}.log_prob_min_clamp")
    if mode != "forward_kl_topk":
        floor = None  # verl clamps log-probs only with top k
    if floor is not None or (clamp is not None and not as_advantage):
        name, found = ("log_prob_min_clamp", floor) if floor is not None else ("loss_max_clamp", clamp)
        raise ConfigError(f"{_LOSS}.{name} = {found!r} can't be imported: rayapp has no such limit. Set it to null.")
    if mode == "forward_kl_topk" and not as_advantage:
        return {"kl": "forward", "kl_over": "top_k", "top_k": int(values.get(f"{_LOSS}.topk", 32))}
    if (as_advantage, mode) not in _ESTIMATED:
        known = ", ".join(f"{known} with use_policy_gradient={on}" for on, known in _ESTIMATED)
        raise ConfigError(
            f"{_LOSS}.loss_mode = {mode!r} with use_policy_gradient={as_advantage} can't be imported; supported are "
            f"{known}, and forward_kl_topk with use_policy_gradient=False"
        )
    return {"kl": _ESTIMATED[as_advantage, mode], "kl_over": "sampled", "max_log_ratio": clamp}


def _teacher(values: Values) -> str:
    """Return the one teacher model: the user's entry, or else verl's default entry."""
    models = {
        key.split(".")[2]: str(path)
        for key, path in values.items()
        if key.startswith("distillation.teacher_models.") and key.endswith(".model_path") and path
    }
    if len(models) > 1:
        models.pop("teacher_model", None)
    if len(models) != 1:
        found = f"teachers {', '.join(models)} are named" if models else "no teacher_models.*.model_path is set"
        raise ConfigError(
            f"distillation.enabled = True can't be imported: {found}, but a run needs exactly one teacher."
        )
    return next(iter(models.values()))


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REF, _OPTIM, _TRACE = "actor_rollout_ref.ref", f"{_ACTOR}.optim", f"{_ROLLOUT}.trace"
_FILTER = "algorithm.filter_groups"
_OFF = "verl reads it only if its section is enabled"
_TRAINS_TEXT = "rayapp reads only text, not images, audio or video"


def _all(why: str, *keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys, no_effect(why))


DAPO: dict[str, Rule] = {
    f"{_FILTER}.enable": rules.filter_groups,
    f"{_FILTER}.metric": rules.filter_metric,
    f"{_FILTER}.max_num_gen_batches": no_effect("used if filter_groups.enable is on"),
    f"{_FILTER}.max_inflight_gen_batches": no_effect("replacement groups start one by one, when other groups end"),
    "reward_model.reward_manager": rules.reward_manager,
    "reward.reward_manager.name": rules.reward_manager,
    "reward.reward_manager.source": only("register", None, why="give a function of your own as reward.custom"),
    "reward.reward_manager.module.*": no_effect("verl reads it only with reward_manager.source=importlib"),
    "reward_model.reward_kwargs.*": rules.reward_kwargs,
    "reward.reward_kwargs.*": rules.reward_kwargs,
    "reward_model.overlong_buffer.*": rules.reward_kwargs,
}

REWARD: dict[str, Rule] = {
    **dict.fromkeys([f"{section}.enable" for section in rules.REWARD_MODELS], rules.reward_model),
    **_all("imported together with the reward model's key `enable`", "reward.reward_model.*", "reward_model.model.*"),
    **_all(
        "rollout workers compute rewards",
        "reward.num_workers",
        "reward_model.num_workers",
        "reward_model.launch_reward_fn_async",
        "reward_model.enable_resource_pool",
        "reward_model.n_gpus_per_node",
        "reward_model.nnodes",
        "reward_model.rollout.*",
    ),
    **dict.fromkeys(
        (
            "reward_model.reward_loop_source",
            "reward_model.reward_loop_module_path",
            "reward_model.reward_loop_class_name",
        ),
        only(None, why="give a function of your own as reward.custom"),
    ),
    **dict.fromkeys(
        ("sandbox_fusion.url", "reward.sandbox_fusion.url"),
        only(None, why="code runs in the sandboxes that the section sandbox configures"),
    ),
    **_all("see sandbox.*", "sandbox_fusion.*", "reward.sandbox_fusion.*"),
    **{
        f"{section}custom_reward_function.reward_kwargs{below}": only(
            None, {}, why="the function can't get arguments from the config; define them in its file"
        )
        for section in ("", "reward.")
        for below in ("", ".*")
    },
}

TRACES: dict[str, Rule] = {
    f"{_TRACE}.backend": rules.trace,
    f"{_TRACE}.token2text": no_effect("traces hold text anyway"),
    f"{_TRACE}.max_samples_per_step_per_worker": no_effect("used if trace.backend is set"),
    **_all("traces belong to the run's MLflow experiment", f"{_TRACE}.project_name", f"{_TRACE}.experiment_name"),
}

AGENT: dict[str, Rule] = {
    f"{_ROLLOUT}.agent.agent_loop_config_path": only(
        None, why="rayapp's agent loops are tool_agent and single_turn_agent"
    ),
    f"{_ROLLOUT}.agent.custom_async_server.*": only(None, why="rollouts run on vLLM"),
    f"{_ROLLOUT}.multi_turn.function_tool_path": only(None, why="name your class in the tool file (docs/tools.md)"),
    "data.function_tool_path": only(None, why="name your class in the tool file (docs/tools.md)"),
    f"{_ROLLOUT}.multi_turn.interaction_config_path": only(
        None, why="rayapp has no interactions; only tools answer the policy"
    ),
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": only(None, why="the number of completions is rollout.group_size"),
    f"{_ROLLOUT}.prompt_length": rules.same_as("data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": rules.same_as("data.max_response_length"),
}

ENGINE: dict[str, Rule] = {
    **{
        f"{_ROLLOUT}.engine_kwargs.vllm.{name}": no_effect("vLLM's default is used; samples don't change")
        for name in ("mm_processor_cache_gb", "disable_mm_preprocessor_cache", "swap_space")
    },
    f"{_ROLLOUT}.engine_kwargs.vllm.*": engine_argument,
    **{
        f"{_ROLLOUT}.engine_kwargs.{name}.*": no_effect(f"verl reads it only with rollout.name={name}")
        for name in ("sglang", "trtllm")
    },
    f"{_ROLLOUT}.engine_kwargs.*": only(None, {}, why="set single arguments: engine_kwargs.vllm.NAME"),
    f"{_ROLLOUT}.limit_images": only(None, why=_TRAINS_TEXT),
    **dict.fromkeys(
        (
            f"{_ROLLOUT}.data_parallel_size",
            f"{_ROLLOUT}.expert_parallel_size",
            f"{_ROLLOUT}.pipeline_model_parallel_size",
        ),
        only(
            1,
            why="a server can be split only by tensor_parallel_size; set the number of servers with server.num_servers",
        ),
    ),
    f"{_ROLLOUT}.nnodes": only(0, why="cluster.placement decides where servers run"),
    f"{_ROLLOUT}.logprobs_mode": only(
        "processed_logprobs", why="log-probs are always those of the sampled distribution"
    ),
    f"{_ROLLOUT}.over_sample_rate": only(0, 0.0, why="every group is finished"),
    f"{_ROLLOUT}.quantization": quantization,
    f"{_ROLLOUT}.quantization_config_file": only(None, why="rollout.quantization selects the quantization"),
    f"{_ROLLOUT}.disaggregation.enabled": only(False, why="each server does both prefill and decode"),
    f"{_ROLLOUT}.disaggregation.*": no_effect(_OFF),
    f"{_ROLLOUT}.prometheus.*": no_effect("metrics are Ray's (docs/operate.md)"),
    f"{_ROLLOUT}.checkpoint_engine.*": no_effect("server.weight_transport selects how new weights reach the servers"),
    f"{_ROLLOUT}.router_config_path": only(None, why="groups go to the server with the fewest groups"),
    f"{_ROLLOUT}.full_determinism": determinism,
    **_all(
        "vLLM's default is used",
        f"{_ROLLOUT}.cudagraph_capture_sizes",
        f"{_ROLLOUT}.scheduling_policy",
        f"{_ROLLOUT}.skip_tokenizer_init",
        f"{_ROLLOUT}.moe_load_balance_metrics_interval",
        f"{_ROLLOUT}.multi_stage_wake_up",
        f"{_ROLLOUT}.layered_summon",
        f"{_ROLLOUT}.n_gpus_per_node",
    ),
    **dict.fromkeys(
        (f"{_ROLLOUT}.mtp", f"{_ROLLOUT}.mtp.enable", f"{_ROLLOUT}.qat", f"{_ROLLOUT}.qat.enable"),
        only(None, False, why="servers don't quantize the policy"),
    ),
    f"{_ROLLOUT}.mtp.*": no_effect(_OFF),
    f"{_ROLLOUT}.qat.*": no_effect(_OFF),
}

POLICY: dict[str, Rule] = {
    **{
        f"{_ACTOR}.policy_loss.{name}": rules.loss_option
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    },
    **{
        f"{section}.{name}": rules.loss_option
        for section in (_ACTOR, f"{_ACTOR}.policy_loss")
        for name in ("tau_pos", "tau_neg")
    },
    f"{_ACTOR}.loss_scale_factor": only(None, why="the divisor is always the longest response"),
    f"{_ACTOR}.ppo_micro_batch_size": no_effect(
        "for all GPUs together; used if ppo_micro_batch_size_per_gpu is not set"
    ),
    f"{_ACTOR}.qat.enable": only(False, why="the policy is trained in learner.compute_dtype"),
    f"{_ACTOR}.qat.*": no_effect(_OFF),
    f"{_ACTOR}.router_replay.mode": only("disabled", "R3", why="give rollout.enable_rollout_routing_replay"),
    f"{_ACTOR}.router_replay.*": only(None, why="experts to replay come from the servers, not from files"),
    f"{_ACTOR}.checkpoint.strict": no_effect("a checkpoint must fit the model"),
    f"{_ACTOR}.checkpoint.mbridge_config": no_effect("verl's Megatron"),
    **_all(
        "always on in rayapp, or only about verl's internals",
        f"{_ACTOR}.calculate_entropy",
        f"{_ACTOR}.calculate_sum_pi_squared",
        f"{_ACTOR}.use_prefix_grouper",
        f"{_ACTOR}.use_fused_kernels",
        f"{_ACTOR}.use_remove_padding",
        f"{_ACTOR}.entropy_from_logits_with_chunking",
        f"{_ACTOR}.entropy_from_logits_chunk_size",
        f"{_ACTOR}.entropy_checkpointing",
        f"{_ACTOR}.pad_to_length",
        f"{_ACTOR}.rollout_n",
        f"{_ACTOR}.data_loader_seed",
        f"{_REF}.*",
        "actor_rollout_ref.nccl_timeout",
        "actor_rollout_ref.model.fused_kernel_options.*",
    ),
    f"{_ACTOR}.freeze_vision_tower": only(False, why=_TRAINS_TEXT),
    f"{_OPTIM}.optimizer": only("AdamW", None, why="the optimizer is AdamW"),
    f"{_OPTIM}.optimizer_impl": only("torch.optim", None, why="the optimizer is torch's AdamW"),
    f"{_OPTIM}.override_optimizer_config": only(None, {}, why="the optimizer is torch's AdamW; see learner.optimizer"),
    f"{_OPTIM}.num_cycles": only(0.5, None, why="the cosine has half a cycle, from the peak to the last step"),
    f"{_OPTIM}.zero_indexed_step": no_effect("one step of the warm-up"),
    f"{_MODEL}.hf_config_path": only(None, why="the model's configuration must be in the folder of the weights"),
    f"{_MODEL}.tokenizer_path": only(None, why="the tokenizer must be in the folder of the weights"),
    f"{_MODEL}.external_lib": only(None, why="rayapp doesn't import modules for their side effects"),
    f"{_MODEL}.override_config": only(None, {}, why="edit config.json in a copy of the model"),
    f"{_MODEL}.override_config.max_position_embeddings": to("model.max_position_embeddings", int),
    **{
        f"{_MODEL}.override_config.{name}": only(0.0, why="dropout is always 0 here")
        for name in ("attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout", "attn_pdrop")
    },
    f"{_MODEL}.override_config.*": only(None, why="edit config.json in a copy of the model"),
    f"{_MODEL}.enable_activation_offload": no_effect(
        "activations are recomputed instead of offloaded; results don't change"
    ),
    f"{_MODEL}.exclude_modules": only(None, why="name the modules that get adapters: target_modules"),
    f"{_MODEL}.lora_adapter_path": only(None, why="adapters start from zero; merge existing ones into the model"),
    f"{_MODEL}.use_liger": no_effect(
        "the learner has its own attention over packed sequences, and computes logits in chunks"
    ),
    f"{_MODEL}.tiled_mlp.enabled": only(False, why="the size of micro-batches limits the memory"),
    f"{_MODEL}.tiled_mlp.*": no_effect(_OFF),
    f"{_MODEL}.mtp.enable": only(False, why="the policy predicts one token at a time"),
    f"{_MODEL}.mtp.*": no_effect(_OFF),
    f"{_MODEL}.lora.rank": only(0, why="verl reads this key only with Megatron; set model.lora_rank instead"),
    f"{_MODEL}.lora.merge": no_effect("used if lora_rank is set"),
    f"{_MODEL}.lora.*": no_effect("only read by Megatron"),
}

ALGORITHM_REST: dict[str, Rule] = {
    "algorithm.use_pf_ppo": only(False, why="samples are not weighted by their score"),
    "algorithm.pf_ppo.*": no_effect(_OFF),
    "algorithm.rollout_correction.rollout_rs": rejection,
    "algorithm.rollout_correction.rollout_rs_threshold": no_effect("goes with rollout_rs"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": only(
        None, why="verl 0.9 writes the range as LOWER_UPPER in rollout_rs_threshold"
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": only(
        None, why="verl 0.9 has no veto any more; see rollout_rs"
    ),
    "algorithm.rollout_correction.bypass_mode": bypass_mode,
    "algorithm.rollout_correction.loss_type": no_effect("goes with bypass_mode"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": to(
        "algorithm.rollout_correction.batch_normalize",
        bool,
        note="normalized over all micro-batches, also with bypass_mode",
    ),
    "distillation.enabled": distillation,
    "distillation.*": no_effect("goes with distillation.enabled"),
}

DATA_REST: dict[str, Rule] = {
    "data.tokenizer": only(None, why="the model's tokenizer is used"),
    "data.trust_remote_code": no_effect("see actor_rollout_ref.model.trust_remote_code"),
    "data.apply_chat_template_kwargs": only(None, {}, why="holds the chat template's variables by name"),
    "data.apply_chat_template_kwargs.*": rules.template_variable,
    "data.sampler.class_path": only(None, why="rows are shuffled again in each epoch"),
    "data.sampler.class_name": only(None, why="rows are shuffled again in each epoch"),
    "data.continuous_token.enable": only(False, why="turns are kept as they were sampled"),
    "data.continuous_token.*": no_effect(_OFF),
    "data.datagen.*": only(None, why="rows come from files"),
    **_all(
        _TRAINS_TEXT,
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.image_patch_size",
        "data.mm_processor_kwargs",
        "data.mm_processor_kwargs.*",
    ),
}

TRAINER_REST: dict[str, Rule] = {
    "rollout.n_gpus_per_node": rollout_gpus,
    "rollout.nnodes": no_effect("counts with rollout.n_gpus_per_node"),
    "async_training.*": rules.refused(
        "async_training", why="for asynchronous runs set rayapp.train.max_staleness=1 or more"
    ),
    "trainer.resume_from_path": no_effect("verl reads it only with resume_mode=resume_path"),
    "trainer.checkpoint_callback_class": only(
        None, why="rayapp writes no event files; other programs can watch the folder of checkpoints"
    ),
    "trainer.del_local_ckpt_after_load": no_effect("checkpoint.keep_last sets the number of checkpoints to keep"),
    "trainer.v1.trainer_mode": only("sync", why="for asynchronous runs set rayapp.train.max_staleness=1 or more"),
    **_all(
        "verl's own machinery",
        "trainer.use_v1",
        "trainer.use_legacy_worker_impl",
        "trainer.v1.*",
        "trainer.esi_redundant_time",
        "trainer.ray_wait_register_center_timeout",
        "global_profiler.*",
        "skip.*",
    ),
    **dict.fromkeys(
        [f"skip.{name}.enable" for name in ("rollout", "rollout_tq", "async_rollout")],
        only(False, why="groups are sampled"),
    ),
    "trainer.v1.sampler.custom_sampler.path": only(None, why="groups are trained on in the order of their prompts"),
    "transfer_queue.enable": no_effect("groups travel through Ray's object store"),
    "transfer_queue.*": no_effect("groups travel through Ray's object store"),
}

REST: dict[str, Rule] = DAPO | REWARD | TRACES | AGENT | ENGINE | POLICY | ALGORITHM_REST | DATA_REST | TRAINER_REST
