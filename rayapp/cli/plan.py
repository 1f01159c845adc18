"""`rayapp plan`: reads the model's shape without its weights, and prints the memory that `learner/memory/plan.py`
computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED, ConfigFile, Overrides
from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.learner.memory.plan import (
    GIB,
    GPU_BYTES,
    LEARNER_KINDS,
    LearnerPlan,
    ModelShape,
    ServerPlan,
    SharedPlan,
    model_shape,
    plan_learner,
    plan_server,
    plan_shared,
    with_token_budget,
)

app = typer.Typer()

CALIBRATION = (
    "Calibrated on CPU only: gradients and optimizer equal the learner's tensors to the byte, and what torch allocates "
    "in a step is within 10% of the whole (tests/unit/learner/test_token_budget.py). "
    "Nothing here was measured on a GPU."
)


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


@app.command(epilog="Examples:\n\n  rayapp plan configs/coding_8gpu.yaml --gpu h100")
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100 or rtx4090")] = "h200",
) -> None:
    """Print the memory that CONFIG takes on each GPU, by kind; exits with 1 if it does not fit. Allocates nothing."""
    from rayapp.config.loading import load_config

    loaded = load_config(config, overrides or ())

    raise typer.Exit(0 if plan_command(loaded, gpu) else EXIT_FAILED)
