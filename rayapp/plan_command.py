"""`rayapp plan`: reads the model's shape without its weights, and prints the memory that `memory_plan` computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayapp.config import Config
from rayapp.errors import InputError
from rayapp.memory_plan import GIB, GPU_BYTES, LearnerPlan, ModelShape, ServerPlan, plan_learner, plan_server

CALIBRATION = (
    "Calibrated on CPU only: weights, gradients and optimizer equal the learner's tensors to the byte, activations and "
    "head lie within 15% of what autograd keeps (tests/unit/test_memory_plan.py). Nothing here was measured on a GPU."
)


def model_shape(config: Config) -> ModelShape:
    """Of `config.model.path`, with every tensor on torch's meta device: nothing is allocated.

    Raises:
        InputError: there is no such model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trusted = config.model.path, config.model.trust_remote_code
    try:
        read: Any = AutoConfig.from_pretrained(path, trust_remote_code=trusted, local_files_only=Path(path).is_dir())
    except (OSError, ValueError) as error:
        raise InputError(f"model.path {path!r} can't be read: {error}") from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read, trust_remote_code=trusted)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    heads = read.num_attention_heads
    return ModelShape(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layer_parameters=max(layers),
        num_layers=len(layers),
        hidden=read.hidden_size,
        intermediate=read.intermediate_size,
        num_heads=heads,
        num_key_heads=getattr(read, "num_key_value_heads", None) or heads,
        head_size=getattr(read, "head_dim", None) or read.hidden_size // heads,
        vocabulary=read.vocab_size,
    )


def plan_command(config: Config, gpu: str) -> bool:
    """Print the plan. Returns whether it fits.

    Raises:
        InputError: the GPU or the model is unknown.
    """
    if gpu not in GPU_BYTES:
        raise InputError(f"--gpu {gpu!r} is unknown: use one of {', '.join(GPU_BYTES)}.")
    shape = model_shape(config)
    learner, server = plan_learner(shape, config), plan_server(shape, config, GPU_BYTES[gpu])
    for line in plan_lines(shape, learner, server, gpu):
        print(line)
    return learner.total <= GPU_BYTES[gpu] and server.num_sequences > 0


def plan_lines(shape: ModelShape, learner: LearnerPlan, server: ServerPlan, gpu: str) -> Iterator[str]:
    """The plan for people."""
    room = GPU_BYTES[gpu]
    yield f"{shape.num_parameters / 1e6:.1f}M parameters in {shape.num_layers} layers; {gpu}: {room / GIB:.0f} GiB"
    yield "learner, each GPU:"
    for name in ("weights", "reference", "gradients", "optimizer", "activations", "head", "runtime"):
        yield f"  {name:<12} {getattr(learner, name) / GIB:8.2f} GiB"
    yield f"  {'total':<12} {learner.total / GIB:8.2f} GiB"
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
    yield CALIBRATION
