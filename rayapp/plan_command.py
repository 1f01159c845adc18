"""`rayapp plan`: reads the model's shape without its weights, and prints the memory that `memory_plan` computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayapp.config import Config
from rayapp.errors import InputError
from rayapp.memory_plan import (
    GIB,
    GPU_BYTES,
    LEARNER_KINDS,
    LearnerPlan,
    ModelShape,
    ServerPlan,
    SharedPlan,
    plan_learner,
    plan_server,
    plan_shared,
    with_token_budget,
)
from rayapp.model_prefetch import with_local_model

CALIBRATION = (
    "Calibrated on CPU only: gradients and optimizer equal the learner's tensors to the byte, and what torch allocates "
    "in a step is within 10% of the whole (tests/unit/test_token_budget.py). Nothing here was measured on a GPU."
)


def model_shape(config: Config) -> ModelShape:
    """Of `config.model.path`, with every tensor on torch's meta device: nothing is allocated.

    Raises:
        InputError: there is no such model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = with_local_model(config)
    path, trusted = config.model.path, config.model.trust_remote_code
    try:
        read: Any = AutoConfig.from_pretrained(path, trust_remote_code=trusted, local_files_only=Path(path).is_dir())
    except (OSError, ValueError) as error:
        raise InputError(f"model.path {path!r} can't be read: {error}") from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read, trust_remote_code=trusted)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    heads = read.num_attention_heads
    num_parameters = sum(p.numel() for p in model.parameters())
    adapters = _adapters(model, config)
    return ModelShape(
        num_parameters=num_parameters,
        num_layer_parameters=max(layers),
        num_layers=len(layers),
        hidden=read.hidden_size,
        intermediate=read.intermediate_size,
        num_heads=heads,
        num_key_heads=getattr(read, "num_key_value_heads", None) or heads,
        head_size=getattr(read, "head_dim", None) or read.hidden_size // heads,
        vocabulary=read.vocab_size,
        num_adapter_parameters=sum(p.numel() for p in adapters),
        adapter_rank_sum=len(adapters) // 2 * config.learner.lora.rank // len(layers),
    )


def _adapters(model: Any, config: Config) -> list[Any]:
    """Both matrices of every adapter that the learner would add, on the meta device. Changes the model."""
    from rayapp.learner.lora import ADAPTER, add_adapters

    if config.learner.lora.rank == 0:
        return []
    add_adapters(model, config.learner.lora)
    return [parameter for name, parameter in model.named_parameters() if ADAPTER in name]


def plan_command(config: Config, gpu: str) -> bool:
    """Print the plan. Returns whether it fits.

    Raises:
        InputError: the GPU or the model is unknown.
    """
    if gpu not in GPU_BYTES:
        raise InputError(f"--gpu {gpu!r} is unknown: use one of {', '.join(GPU_BYTES)}.")
    shape, room = model_shape(config), GPU_BYTES[gpu]
    if config.learner.max_tokens_per_microbatch == "auto":
        config = with_token_budget(shape, config, room)
        print(f"learner.max_tokens_per_microbatch is auto: planned with {config.learner.token_budget}")
    learner, server = plan_learner(shape, config), plan_server(shape, config, room)
    is_shared = config.cluster.placement == "colocated"
    shared = plan_shared(learner, server, config, room) if is_shared else None
    for line in plan_lines(shape, learner, server, gpu):
        print(line)
    for line in shared_lines(shared, room) if shared else ():
        print(line)
    print(CALIBRATION)
    return max(learner.total, shared.total if shared else 0) <= room and server.num_sequences > 0


def plan_lines(shape: ModelShape, learner: LearnerPlan, server: ServerPlan, gpu: str) -> Iterator[str]:
    """The plan for people."""
    room = GPU_BYTES[gpu]
    yield f"{shape.num_parameters / 1e6:.1f}M parameters in {shape.num_layers} layers; {gpu}: {room / GIB:.0f} GiB"
    if shape.num_adapter_parameters:
        yield f"adapters: {shape.num_adapter_parameters / 1e6:.2f}M parameters; all others are frozen"
    yield "learner, each GPU:"
    for name in LEARNER_KINDS:
        yield f"  {name:<12} {getattr(learner, name) / GIB:8.2f} GiB"
    yield f"  {'total':<12} {learner.total / GIB:8.2f} GiB"
    if learner.host:
        yield f"  in host memory, each learner: {learner.host / GIB:.2f} GiB (learner.cpu_offload)"
    if learner.total > room:
        yield (
            f"  {(learner.total - room) / GIB:.2f} GiB too much: raise learner.num_learners, lower "
            "learner.max_tokens_per_microbatch, or set learner.activation_checkpointing=true"
        )
    yield "server, each GPU:"
    for name in ("weights", "kv_cache", "runtime"):
        yield f"  {name:<12} {getattr(server, name) / GIB:8.2f} GiB"
    yield f"  the cache holds {server.kv_tokens} tokens: {server.num_sequences} sequences of the longest kind"
    if server.num_sequences == 0:
        yield "  not one sequence fits: raise server.tensor_parallel_size or server.gpu_memory_utilization"


def shared_lines(shared: SharedPlan, room: int) -> Iterator[str]:
    """GPUs that learners and servers share, for people."""
    yield "shared GPUs (cluster.placement: colocated):"
    yield f"  training     {shared.training / GIB:8.2f} GiB, the server asleep"
    yield f"  generating   {shared.generating / GIB:8.2f} GiB, with what stays of the learner"
    yield f"  in host memory, each GPU: {shared.host / GIB:.2f} GiB of the sleeping server's weights"
    if shared.generating > room:
        yield (
            f"  {(shared.generating - room) / GIB:.2f} GiB too much: lower server.gpu_memory_utilization, or set "
            "learner.cpu_offload=true"
        )
