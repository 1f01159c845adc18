"""How vLLM is started: its environment variables and the arguments of its engine, from the configuration.

Used by `VllmEngine.start`, before vLLM is imported.
"""

from __future__ import annotations

import os
from typing import Any

from rayapp.config.config import Config
from rayapp.core.machine import share_of_cores
from rayapp.engine.vllm_adapter import adapter_args
from rayapp.engine.weights.transfer_plan import choose_transport

WHOLE_GIB_OF_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable by which vLLM on a CPU is given whole GiB of KV cache."""


def set_process_environment(config: Config) -> None:
    """Set the variables that vLLM reads when it is imported; the engine's processes inherit them."""
    threads = config.server.cpu_threads or share_of_cores(
        config.server.num_servers, is_synchronous=config.train.max_staleness == 0
    )
    # It would come before `kv_cache_memory_bytes` of the arguments.
    os.environ.pop(WHOLE_GIB_OF_CACHE, None)
    # Ray sets this to the actor's num_cpus, which is a share for scheduling, not the number of cores to compute on.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    tp = config.server.tensor_parallel_size
    # A single rank runs inside the engine core. By default vLLM puts even that one behind its multi-process executor,
    # which spins on a queue and pins threads: 1.6 times slower on 2 cores.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if tp > 1 else "0"
    if tp > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))


def vllm_args(config: Config) -> dict[str, Any]:
    """The arguments of vLLM's `AsyncEngineArgs` that follow from the configuration."""
    server = config.server
    return {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": server.dtype,
        "max_model_len": config.max_model_tokens,
        "tensor_parallel_size": server.tensor_parallel_size,
        "distributed_executor_backend": "mp" if server.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if _is_on_gpu(config) else int(server.kv_cache_gib * 2**30),
        "block_size": server.kv_block_tokens or None,
        "max_num_seqs": server.max_num_seqs,
        "enforce_eager": server.enforce_eager,
        "enable_prefix_caching": True,
        # Log-probs of the distribution that was sampled from; vLLM's default is the one before temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rayapp.engine.vllm_worker.WeightUpdateExtension",
        "seed": config.run.seed,
        # Ignore the model's generation_config.json: it may hold top_k or a repetition penalty that biases log-probs.
        "generation_config": "vllm",
        "disable_log_stats": False,
        "hf_overrides": as_vllm_reads_it,
        "enable_return_routed_experts": config.learner.router_replay,
        "enable_sleep_mode": config.cluster.placement == "colocated" and _is_on_gpu(config),
        **_transfer_args(config),
        **adapter_args(config),
    }


def as_vllm_reads_it(architecture: Any) -> Any:
    """The model's config as vLLM is to read it.

    In Command R7B (cohere2) vLLM 0.30 attends to one token more than `sliding_window` says, transformers and the
    learner do not: 0.1 in log-probs where a window is short.
    """
    if architecture.model_type == "cohere2" and architecture.sliding_window:
        architecture.sliding_window -= 1
    return architecture


def _transfer_args(config: Config) -> dict[str, Any]:
    transport = choose_transport(config, on_gpu=_is_on_gpu(config))
    if transport == "object_store":
        return {}
    from vllm.config.weight_transfer import WeightTransferConfig

    if transport == "ipc":
        # vLLM must pickle: handles of GPU memory are no plain data. Only our own processes talk on this channel.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return {"weight_transfer_config": WeightTransferConfig(backend=transport)}


def _is_on_gpu(config: Config) -> bool:
    return config.cluster.device != "cpu" and _has_gpu()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
