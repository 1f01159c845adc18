"""Checks `server.engine_args`: arguments of vLLM's engine by vLLM's own names, which the run passes on.

Refused are arguments that have a key of rayapp, or contradict what a run relies on (log-probs, seeds, weight syncs,
sleep). vLLM checks all others when a server starts (docs/scale.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayapp.core.errors import ConfigError
from rayapp.core.names import did_you_mean

# Argument of vLLM -> key of rayapp that sets it.
HAS_KEY: Mapping[str, str] = {
    "data_parallel_size": "server.num_servers, which are placed, weighed and replaced one by one",
    "dtype": "server.dtype",
    "enable_lora": "learner.lora.rank",
    "enable_return_routed_experts": "learner.router_replay",
    "enable_sleep_mode": "cluster.placement: colocated",
    "enforce_eager": "server.enforce_eager",
    "gpu_memory_utilization": "server.gpu_memory_utilization",
    "hf_overrides": "model.max_position_embeddings",
    "kv_cache_dtype": "server.kv_cache_dtype",
    "kv_cache_memory_bytes": "server.kv_cache_gib",
    "lora_target_modules": "learner.lora.target_modules",
    "max_lora_rank": "learner.lora.rank",
    "max_loras": "learner.lora.rank",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_completion_tokens",
    "max_num_batched_tokens": "server.max_num_batched_tokens",
    "max_num_seqs": "server.max_num_seqs",
    "model": "model.path",
    "profiler_config": "train.profile_steps",
    "quantization": "server.quantization",
    "seed": "run.seed",
    "tensor_parallel_size": "server.tensor_parallel_size",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "server.weight_transport",
}

_PLACES = "Ray places the processes, and each server is on one node"
_OFFLOAD = "vLLM's layer-wise reload, which loads new weights, does not work with weights in host memory"
_MOVES = "experts would move between GPUs, but a weight sync loads each expert on the GPU where it was at the start"
_SAMPLING = "it would change the sampled distribution, whose log-probs the learner computes"
_OWN = "rayapp's own class or setting is there, which weight syncs, cohorts and the detection of stalls rely on"
_FILES = "tokenizer, config and weights are the files of model.path. Fetch the revision into a folder"
# Argument of vLLM -> why a run can't have it.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("distributed_executor_backend", "worker_cls", "worker_extension_cls", "scheduler_cls", "disable_log_stats"),
        _OWN,
    ),
    **dict.fromkeys(
        (
            "data_parallel_address", "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb", "data_parallel_rank", "data_parallel_rpc_port",
            "data_parallel_size_local", "data_parallel_start_rank", "device_ids", "enable_elastic_ep", "master_addr",
            "master_port", "nnodes", "node_rank", "pipeline_parallel_size", "prefill_context_parallel_size",
        ),
        _PLACES,
    ),
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
         "offload_params", "offload_prefetch_step"),
        _OFFLOAD,
    ),
    **dict.fromkeys(("enable_eplb", "eplb_config"), _MOVES),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "watermark_config",
         "diffusion_config"),
        _SAMPLING,
    ),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "write it into speculative_config"),
    **dict.fromkeys(
        ("config_format", "code_revision", "hf_config_path", "hf_token", "model_weights", "revision", "tokenizer",
         "tokenizer_mode", "tokenizer_revision", "model_class_overrides"),
        _FILES,
    ),
    **dict.fromkeys(("runner", "convert", "pooler_config"), "the engine must generate text"),
    "ec_transfer_config": "each server computes its own prompts",
    "kv_events_config": "each server computes its own prompts",
    "kv_transfer_config": "each server computes its own prompts: keys and values of older weights must not come back",
    "load_format": "with dummy, tensors that weight syncs don't send would keep random values",
    "logprobs_mode": "log-probs must be those of the sampled distribution (processed_logprobs), after the temperature",
    "quantization_config": "server.quantization chooses how all linear layers are rounded after each sync",
    "skip_tokenizer_init": "stop texts need the tokenizer",
}  # fmt: skip


def check_engine_args(args: Mapping[str, Any]) -> None:
    """Raise a ValueError that names every argument with a key of rayapp, or against what a run relies on."""
    if wrong := [fault for name, value in args.items() if (fault := _fault(name, value))]:
        raise ValueError("; ".join(wrong) + ".")


def check_names(args: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise a ConfigError if the installed vLLM lacks one of these arguments."""
    known = sorted(known)
    if unknown := [f"{name}{did_you_mean(name, known)}" for name in args if name not in known]:
        raise ConfigError(f"server.engine_args: the installed vLLM has no argument {' '.join(unknown)}")


def _fault(name: str, value: Any) -> str:
    if name in HAS_KEY:
        return f"{name} has a key of its own: set {HAS_KEY[name]}"
    if name in REFUSED:
        return f"{name} can't be set: {REFUSED[name]}. Leave it out"
    if name == "structured_outputs_config" and not (isinstance(value, dict) and "backend" not in value):
        return f"{name} is {value!r:.200}: it must be a mapping without backend, which is always xgrammar"
    if name == "speculative_config" and isinstance(value, dict) and value.get("rejection_sample_method") == "synthetic":
        return "rejection_sample_method is synthetic, which accepts tokens that the policy did not sample. Leave it out"
    return ""
