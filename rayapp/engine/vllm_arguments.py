"""Derives vLLM's environment variables and engine arguments from the configuration, and loads LoRA adapters.

`load_adapter` takes tensors from shared memory: vLLM's own loader reads adapters only from folders.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rayapp.config.bundles import gpu_problems
from rayapp.config.config import Config
from rayapp.config.learner import LoraSection
from rayapp.config.sections import ClusterSection, ModelSection, ServerSection, TrainSection
from rayapp.core.errors import ConfigError
from rayapp.core.machine import share_of_cores
from rayapp.core.timing import MOST_ITERATIONS
from rayapp.engine.vllm_forms import BACKEND
from rayapp.engine.vllm_pictures import picture_args
from rayapp.engine.weights.buckets import TensorEntry
from rayapp.engine.weights.sync import Transport, choose_transport
from rayapp.storage.models.nf4 import kernels

ADAPTER_ID, ADAPTER_NAME = 1, "policy"
NF4 = "rayapp_nf4"  # the name by which vLLM knows the loader of `nf4_loader`
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has buffers; another rank uses part of the next larger one


def adapter_args(lora: LoraSection) -> dict[str, Any]:
    if not lora.sends_adapter:
        return {}
    rank = next(size for size in RANKS if size >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def is_adapter(entries: Sequence[TensorEntry]) -> bool:
    return bool(entries) and all(".lora_A." in name or ".lora_B." in name for name, *_ in entries)


def adapter_request() -> Any:
    """Return the policy's LoRARequest, whose path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=ADAPTER_NAME, lora_int_id=ADAPTER_ID, lora_path="in-memory")


def load_adapter(model_runner: Any, tensors: Iterable[tuple[str, Any]]) -> int:
    """Replace the adapter by copies of these tensors (peft's names, scaled). Return their number. ValueError: the
    engine has no modules for some of them, and would silently ignore them."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    own = {name: tensor.clone() for name, tensor in tensors}
    workers = model_runner.lora_manager
    manager = workers._adapter_manager  # noqa: SLF001 - vLLM has no public way to adapters that are in memory
    rank = max(tensor.shape[0] for name, tensor in own.items() if ".lora_A." in name)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        own,
        # Alpha equals the rank, because the scale is already multiplied into the tensors.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=workers.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    check_places(adapter.loras, manager.modules, manager.packed_modules)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return len(own)


def check_places(
    loras: Mapping[str, Any],
    modules: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]],
) -> None:
    """Raise ValueError if the engine lacks a module of the adapter, as for another model's."""
    places = {part for name in modules for part in packed.get(name, [name])}
    lost = sorted(set(loras) - places)
    if lost:
        raise ValueError(
            f"vLLM's model lacks {len(lost)} of the {len(loras)} modules that the adapter changes: "
            f"{', '.join(lost[:3])}. Leave these modules out of "
            "learner.lora.target_modules, or set learner.lora.send: merged."
        )


WHOLE_GIB_OF_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # size of vLLM's KV cache on a CPU


def set_process_environment(config: Config) -> None:
    """Set the variables that vLLM reads when it is imported; the engine's processes inherit them."""
    threads = config.server.cpu_threads or share_of_cores(
        config.server.num_servers, is_synchronous=config.train.takes_turns, model=config.model.path
    )
    # The variable would override the argument `kv_cache_memory_bytes`.
    os.environ.pop(WHOLE_GIB_OF_CACHE, None)
    # Ray sets OMP_NUM_THREADS to the actor's num_cpus, which is a share for scheduling, not the number of cores to use.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if config.run.deterministic and is_on_gpu(config.cluster):
        # On a CPU cohorts suffice: equal batches give equal results.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    # With torch's kernels of another instruction set beside its own, vLLM 0.30 samples tokens of probability 0.0001.
    for imitation in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        os.environ.pop(imitation, None)
    tp = config.server.tensor_parallel_size
    # A single rank runs inside the engine core. By default vLLM runs even a single rank in its multi-process executor,
    # which spins on a queue and pins threads: 1.6 times slower on 2 cores.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if tp > 1 else "0"
    if tp > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))


def gpu_bytes() -> int:
    """Return the bytes of the first GPU; 0 on CPU. Makes no CUDA context: vLLM can't fork a process that has one."""
    from vllm.platforms import current_platform

    return 0 if current_platform.is_cpu() else current_platform.get_device_total_memory()


def vllm_args(config: Config) -> dict[str, Any]:
    server, on_gpu = config.server, is_on_gpu(config.cluster)
    cache_bytes = server.kv_cache_bytes(on_gpu=on_gpu)
    return {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": server.dtype,
        "max_model_len": config.max_model_tokens,
        "tensor_parallel_size": server.tensor_parallel_size,
        "distributed_executor_backend": "mp" if server.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": _share_at_start(server, cache_bytes) if on_gpu else 0.85,  # only for GPUs
        "kv_cache_memory_bytes": cache_bytes,
        "max_num_seqs": server.max_num_seqs,
        "max_num_batched_tokens": (server.gpu_batched_tokens if on_gpu else server.max_num_batched_tokens) or None,
        "enforce_eager": server.is_eager(on_gpu=on_gpu),
        "enable_prefix_caching": True,
        # Return log-probs of the sampled distribution; vLLM's default are log-probs before the temperature is applied.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rayapp.engine.vllm_worker.WeightUpdateExtension",
        "seed": config.run.seed,
        # Ignore the model's generation_config.json: its top_k or repetition penalty would bias log-probs.
        "generation_config": "vllm",
        "disable_log_stats": False,
        "hf_overrides": partial(as_vllm_reads_it, max_position_embeddings=config.model.max_position_embeddings),
        "enable_return_routed_experts": config.learner.router_replay,
        "enable_sleep_mode": config.cluster.placement == "colocated" and on_gpu,
        "quantization": None if server.quantization == "none" else server.quantization,
        "kv_cache_dtype": server.kv_cache_dtype,
        **_profiler_args(config.train),
        **_transfer_args(choose_transport(config, on_gpu=on_gpu)),
        **adapter_args(config.learner.lora),
        **_rounding_args(config.model),
        **picture_args(config.model, on_gpu=on_gpu),
        **server.engine_args,
        "structured_outputs_config": {"backend": BACKEND, **server.engine_args.get("structured_outputs_config", {})},
    }


def _share_at_start(server: ServerSection, cache_bytes: int | None) -> float:
    # vLLM refuses to start if less of the GPU is free. For a cache in bytes it reads the share for nothing else.
    return server.gpu_share if cache_bytes is None else min(1.0, cache_bytes / gpu_bytes())


def as_vllm_reads_it(architecture: Any, max_position_embeddings: int | None = None) -> Any:
    """Adapt the model's config for vLLM. In Command R7B (cohere2) vLLM 0.30 attends to one token more than
    `sliding_window`, which changes log-probs by 0.1 if the window is short."""
    if max_position_embeddings is not None:
        architecture.get_text_config().max_position_embeddings = max_position_embeddings
    if architecture.model_type == "cohere2" and architecture.sliding_window:
        architecture.sliding_window -= 1
    return architecture


def _profiler_args(train: TrainSection) -> dict[str, Any]:
    if not train.profile_steps:
        return {}
    from vllm.config import ProfilerConfig

    profiler = ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=tempfile.mkdtemp(prefix="rayapp-profile-"),
        torch_profiler_with_stack=False,
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
        max_iterations=MOST_ITERATIONS,
    )
    return {"profiler_config": profiler}


def _rounding_args(model: ModelSection) -> dict[str, Any]:
    if model.quantization == "none":
        return {}
    kernels()  # refuse here: in the engine's process the error would be one of vLLM's
    return {"load_format": NF4, "worker_extension_cls": "rayapp.engine.nf4_loader.RoundedWeightsExtension"}


def _transfer_args(transport: Transport) -> dict[str, Any]:
    if transport == "object_store":
        return {}
    from vllm.config.weight_transfer import WeightTransferConfig

    if transport == "ipc":
        # vLLM must pickle handles of GPU memory. Only processes of this run use the channel.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return {"weight_transfer_config": WeightTransferConfig(backend=transport)}


def is_sent_whole(model_config: Any) -> bool:
    """Return whether a sync writes each weight of vLLM's model; it leaves out, for instance, the correction biases of
    routers and a frozen tower."""
    is_other = model_config.is_multimodal_model or model_config.is_hybrid or model_config.quantization is not None
    return not is_other and model_config.get_num_experts() == 0


def is_on_gpu(cluster: ClusterSection) -> bool:
    return cluster.device != "cpu" and _has_gpu()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def check_gpu(config: Config) -> None:
    import torch

    problems = gpu_problems(config, torch.cuda.get_device_capability()) if is_on_gpu(config.cluster) else ()
    if problems:
        raise ConfigError("; ".join(problems))
