"""Estimates the phases of a step on GPUs before anything runs: time, utilization, and memory by owner.

A roofline model with fixed shares of the manufacturer's figures (`ASSUMPTIONS` is printed with the numbers). The
numbers of eager passes are fitted to one step on an H100 (docs/results.md), those of compiled ones are counted operator
by operator on fake tensors; the other constants are not measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rayapp.config.bundles import bundles_of, num_gpus_of
from rayapp.config.config import Config, frozen_models, with_number_formats
from rayapp.config.learner import LearnerSection
from rayapp.config.sections import ServerSection
from rayapp.core.machine import num_cores
from rayapp.learner.memory.plan import (
    ADAM,
    ELEMENT_BYTES,
    FLOAT32,
    MASTER,
    RUNTIME_BYTES,
    GpuPlan,
    ServerPlan,
    frozen_shapes,
    layer_bytes_per_token,
    weight_bytes,
)
from rayapp.learner.memory.shape import NODE_GPUS, NODE_LINK_GB_S, Gpu, ModelShape

# Shares of the manufacturer's figures: large products, flash attention, memory, NCCL.
GEMM_SHARE, ATTENTION_SHARE, MEMORY_SHARE, LINK_SHARE = 0.68, 0.45, 0.7, 0.7
FORWARD_PASSES, BACKWARD_PASSES = 5, 11  # times that unfused operators read or write a layer's kept activations
HEAD_FORWARD_PASSES, HEAD_BACKWARD_PASSES = 13, 18  # times that the logits, in float32, are read or written
# The same with `learner.compile`, which fuses norms, rotary positions, gated MLPs and the softmax.
COMPILED_FORWARD_PASSES, COMPILED_BACKWARD_PASSES = 1.2, 2.2
COMPILED_HEAD_FORWARD_PASSES, COMPILED_HEAD_BACKWARD_PASSES = 1, 1
# Overhead of a decoding step with CUDA graphs and without, on an H100 (docs/results.md).
DECODE_S, EAGER_DECODE_S = 0.0035, 0.010
HOST_GB_S = 20.0  # to host memory, for AdamW there and for weights through the object store
ASSUMPTIONS = (
    "every prompt and completion has its full length; sequences are dealt evenly; tools and sandboxes cost no time",
    (
        f"matrix products reach {GEMM_SHARE:.0%} of the figure, attention {ATTENTION_SHARE:.0%}, memory, links "
        f"{MEMORY_SHARE:.0%}"
    ),
    (
        "gathering overlaps computing, sending tokens to experts does not; a GPU has "
        f"{NODE_LINK_GB_S:.0f} GB/s towards other nodes of {NODE_GPUS} GPUs"
    ),
    "MFU counts each product once, without recomputation, over all GPUs of the phase",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    seconds: float
    flops: float  # useful operations of all GPUs; 0 for phases that only move data
    num_gpus: int

    def mfu(self, gpu: Gpu) -> float:
        return self.flops / (self.seconds * self.num_gpus * gpu.tflops * 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Tokens of one step over all GPUs, with every sequence at its full length."""

    prompts: int
    sequences: int
    prompt_tokens: int  # of one sequence
    completion_tokens: int
    computed_tokens: int  # a shared prompt counts once
    predicted_tokens: int
    attended: float  # pairs of a computed token and a token that it attends to


def step_load(config: Config) -> StepLoad:
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    prompts = config.train.groups_per_step
    sequences = prompts * config.rollout.group_size
    computed_prompts = prompts if config.learner.share_prefixes else sequences
    return StepLoad(
        prompts=prompts,
        sequences=sequences,
        prompt_tokens=prompt,
        completion_tokens=completion,
        computed_tokens=computed_prompts * prompt + sequences * completion,
        predicted_tokens=sequences * completion,
        attended=computed_prompts * prompt**2 / 2 + sequences * (completion * prompt + completion**2 / 2),
    )


def step_speeds(shape: ModelShape, config: Config, gpu: Gpu, server: ServerPlan) -> dict[str, Speed]:
    load, learner, is_compiled = step_load(config), config.learner, config.compiles(on_gpu=True)
    speeds = {"generate": generate(shape, config.server, load, gpu, server)}
    scored = score(shape, learner, load, gpu, is_compiled=is_compiled)
    if config.scores_old_log_probs:
        speeds["old log-probs"] = scored
    for name, own in frozen_shapes(shape, frozen_models(config)).items():
        speeds[name] = score(own, learner, load, gpu, is_compiled=is_compiled)
    speeds["train"] = train(shape, learner, load, gpu, is_compiled=is_compiled)
    speeds["optimizer"] = optimizer(shape, learner, config.train.num_minibatches, gpu)
    num_gpus = num_gpus_of(bundles_of(config, on_gpu=True))
    speeds["weight sync"] = weight_sync(shape, learner, config.server.weight_transport, gpu, num_gpus=num_gpus)
    if config.cluster.placement == "colocated":
        speeds["sleep, wake"] = sleep_and_wake(shape, learner, server)
    return speeds


def seconds_on_cpu(shape: ModelShape, config: Config) -> tuple[float, float]:
    """Estimate the seconds in which this machine's processor generates and trains a step, from the measured speed of a
    linear layer in the formats of the config (takes a fraction of a second)."""
    config = with_number_formats(config, on_gpu=False)
    load, rates = step_load(config), dict[str, float]()
    for dtype in {config.learner.compute_dtype, config.server.dtype}:
        rates[dtype] = _products_per_s(shape, dtype)
    layers, head = product_flops(shape, load.computed_tokens, load.predicted_tokens)
    return (layers + head) / rates[config.server.dtype], 3 * (layers + head) / rates[config.learner.compute_dtype]


def _products_per_s(shape: ModelShape, dtype: str, rows: int = 128) -> float:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    layer = torch.nn.Linear(shape.hidden, 2 * shape.hidden, bias=False, dtype=getattr(torch, dtype))
    inputs = torch.randn(rows, shape.hidden, dtype=layer.weight.dtype, requires_grad=True)
    times = []
    for _ in range(20):  # the first call prepares the kernels, and other programs may slow down some
        started = time.perf_counter()
        layer(inputs).sum().backward()
        times.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 3 * 2 * rows * layer.weight.numel() / min(times)


def late_generation(shape: ModelShape, config: Config, gpu: Gpu, server: ServerPlan) -> Iterator[str]:
    """Yield a message for each deadline that a step's estimated generation misses."""
    deadlines = {
        "rollout.group_deadline_s": config.group_deadline_s,
        "recovery.stall_stop_s": config.recovery.stall_stop_s,
    }
    return late(generate(shape, config.server, step_load(config), gpu, server).seconds, deadlines)


def late(generate_s: float, deadlines: Mapping[str, float]) -> Iterator[str]:
    """Yield a message, with the way out, for each deadline that a step's generation misses, by key."""
    for key, deadline_s in deadlines.items():
        if generate_s > deadline_s:
            yield f"generating takes about {generate_s:.0f} s, but {key} is {deadline_s:g}: use {2 * generate_s:.0f}"


def sleep_and_wake(shape: ModelShape, learner: LearnerSection, server: ServerPlan) -> Speed:
    """Estimate moving a server's weights to host memory and back, and parking the learners' tensors."""
    parked = (weight_bytes(shape, learner, shape.num_parameters) + ADAM * shape.num_trained) / learner.num_learners
    moved = server.weights + (parked if learner.offload_when_idle else 0)
    return Speed(seconds=2 * moved / (HOST_GB_S * 1e9), flops=0.0, num_gpus=learner.num_learners)


def generate(shape: ModelShape, section: ServerSection, load: StepLoad, gpu: Gpu, server: ServerPlan) -> Speed:
    """Estimate prefill, and decoding steps that each read the weights and the KV cache of their sequences."""
    prompt, completion = load.prompt_tokens, load.completion_tokens
    num_gpus = section.num_servers * section.tensor_parallel_size
    mine = math.ceil(load.sequences / section.num_servers)
    at_once = max(1, min(mine, section.max_num_seqs, server.num_sequences))
    flops_per_s, flops_per_token = GEMM_SHARE * gpu.tflops * 1e12, 2 * (shape.num_computed + shape.num_in_head)
    # A decoding step reads the weights, and the cache of sequences that are half done in the mean.
    read_s = (server.weights + at_once * (prompt + completion / 2) * server.kv_token_bytes) / _memory_bytes_s(gpu)
    products_s = at_once * flops_per_token / section.tensor_parallel_size / flops_per_s
    launch_s = EAGER_DECODE_S if section.is_eager(on_gpu=True) else DECODE_S
    # Sequences start and end one by one, so the number of waves may be a fraction.
    decode_s = max(1.0, mine / at_once) * completion * (launch_s + max(read_s, products_s))
    prefill = 2 * shape.num_computed * load.prompts * prompt + _tower_flops(shape, load)
    flops = flops_per_token * load.predicted_tokens + prefill + attention_flops(shape, load.attended)
    return Speed(seconds=prefill / (num_gpus * flops_per_s) + decode_s, flops=flops, num_gpus=num_gpus)


def _memory_bytes_s(gpu: Gpu) -> float:
    return MEMORY_SHARE * gpu.memory_gb_s * 1e9


def score(shape: ModelShape, learner: LearnerSection, load: StepLoad, gpu: Gpu, *, is_compiled: bool) -> Speed:
    """Estimate a forward over the whole step."""
    return _learner_speed(
        shape,
        learner,
        load,
        gpu,
        products=1.0,
        attention=1.0,
        passes=COMPILED_FORWARD_PASSES if is_compiled else FORWARD_PASSES,
        head_passes=COMPILED_HEAD_FORWARD_PASSES if is_compiled else HEAD_FORWARD_PASSES,
        useful=1.0,
        exchanges=1.0,
    )


def train(shape: ModelShape, learner: LearnerSection, load: StepLoad, gpu: Gpu, *, is_compiled: bool) -> Speed:
    """Estimate forward and backward over the whole step. Frozen weights have no gradient: one product less."""
    backward = 1.0 if shape.num_adapter_parameters else 2.0
    again = learner.num_recomputed(shape.num_layers) / shape.num_layers
    forward = COMPILED_FORWARD_PASSES if is_compiled else FORWARD_PASSES
    backward_passes = COMPILED_BACKWARD_PASSES if is_compiled else BACKWARD_PASSES
    head = HEAD_FORWARD_PASSES + HEAD_BACKWARD_PASSES
    compiled_head = COMPILED_HEAD_FORWARD_PASSES + COMPILED_HEAD_BACKWARD_PASSES
    speed = _learner_speed(
        shape,
        learner,
        load,
        gpu,
        products=1.0 + backward + again,
        attention=3.5 + again,
        passes=forward * (1 + again) + backward_passes,
        head_passes=compiled_head if is_compiled else head,
        useful=1.0 + backward,
        exchanges=2.0 + again,
    )
    seen = _tower_flops(shape, load)
    seen_s = seen / (GEMM_SHARE * gpu.tflops * 1e12 * learner.num_learners)
    return replace(speed, seconds=speed.seconds + seen_s, flops=speed.flops + seen)


def _tower_flops(shape: ModelShape, load: StepLoad) -> int:
    """Return the flops of the vision tower, as if all tokens of prompts stood for pictures."""
    return shape.tower_flops * load.prompts * load.prompt_tokens


def _learner_speed(
    shape: ModelShape,
    section: LearnerSection,
    load: StepLoad,
    gpu: Gpu,
    *,
    products: float,
    attention: float,
    passes: float,
    head_passes: float,
    useful: float,
    exchanges: float,
) -> Speed:
    num_gpus, element = section.num_learners, ELEMENT_BYTES[section.compute_dtype]
    peak = gpu.tflops * 1e12
    layers, head = product_flops(shape, load.computed_tokens, load.predicted_tokens)
    attended = attention_flops(shape, load.attended)
    moved = passes * layer_bytes_per_token(shape, element) * shape.num_layers * load.computed_tokens
    moved += head_passes * FLOAT32 * shape.vocabulary * load.predicted_tokens
    micro_batches = max(1, math.ceil(load.computed_tokens / num_gpus / section.token_budget))
    moved += _copied_bytes(shape, section, micro_batches, is_backward=useful > 1.0)
    compute_s = (
        products * (layers + head) / (GEMM_SHARE * peak)
        + attention * attended / (ATTENTION_SHARE * peak)
        + moved / _memory_bytes_s(gpu)
    ) / num_gpus
    gathers_s = micro_batches * _gather_s(shape, section, gpu, is_backward=useful > 1.0)
    # A row travels to its expert and back. Layers wait for it, so computing does not hide it.
    travelling = 2 * exchanges * element * shape.hidden * shape.rows_elsewhere * load.computed_tokens / num_gpus
    exchange_s = travelling / (LINK_SHARE * _link_gb_s(section.expert_parallel_size, gpu) * 1e9)
    seconds = max(compute_s, gathers_s) + exchange_s
    return Speed(seconds=seconds, flops=useful * (layers + head + attended), num_gpus=num_gpus)


def _copied_bytes(shape: ModelShape, learner: LearnerSection, micro_batches: int, *, is_backward: bool) -> int:
    """Return the bytes that a lone GPU moves to cast and copy its weights, and to add up gradients in float32."""
    if learner.num_learners > 1:
        return 0
    element, trained = ELEMENT_BYTES[learner.compute_dtype], shape.num_trained
    times = 1 if learner.keeps_gathered(shape.num_layers) else micro_batches * (2 if is_backward else 1)
    copied = times * (3 * element * shape.num_parameters + (0 if shape.num_adapter_parameters else MASTER * trained))
    # Each gradient is added to the sum; after the last micro-batch FSDP copies the sum twice.
    return copied + is_backward * trained * (micro_batches * (2 * FLOAT32 + element) + 4 * FLOAT32)


def product_flops(shape: ModelShape, num_tokens: int, num_predicted: int) -> tuple[int, int]:
    """Return the flops of a forward's products in layers and head: 2 for each parameter and (computed, predicted)
    token."""
    return 2 * shape.num_computed * num_tokens, 2 * shape.num_in_head * num_predicted


def attention_flops(shape: ModelShape, num_attended: float) -> float:
    """Return the flops of attention in a forward, scores and weighted sums, for pairs of tokens."""
    return 4 * shape.num_layers * shape.num_heads * shape.head_size * num_attended


def _gather_s(shape: ModelShape, learner: LearnerSection, gpu: Gpu, *, is_backward: bool) -> float:
    """Return the seconds of a micro-batch's collectives: weights for each pass within a replica, and gradients, whose
    shards the replicas add up."""
    num_shards = learner.num_learners // learner.replicas
    own = shape.num_parameters - shape.num_elsewhere
    gathered = ELEMENT_BYTES[learner.compute_dtype] * own * (2 if is_backward else 1)
    reduced = FLOAT32 * (shape.num_adapter_parameters or own) if is_backward else 0
    within_s = (gathered + reduced) / _link_gb_s(num_shards, gpu) if num_shards > 1 else 0.0
    between_s = 2 * reduced / num_shards / _link_gb_s(learner.num_learners, gpu) if learner.replicas > 1 else 0.0
    return (within_s + between_s) / (LINK_SHARE * 1e9)


def _link_gb_s(num_gpus: int, gpu: Gpu) -> float:
    return gpu.link_gb_s if num_gpus <= NODE_GPUS else min(gpu.link_gb_s, NODE_LINK_GB_S)


def optimizer(shape: ModelShape, section: LearnerSection, num_minibatches: int, gpu: Gpu) -> Speed:
    """Estimate clipping and AdamW: bytes of gradients, weights and moments."""
    moved = (2 * (MASTER + ADAM) + 3 * FLOAT32) * shape.num_trained / section.num_learners
    gb_s = HOST_GB_S if section.cpu_offload else MEMORY_SHARE * gpu.memory_gb_s
    return Speed(seconds=num_minibatches * moved / (gb_s * 1e9), flops=0.0, num_gpus=section.num_learners)


def weight_sync(shape: ModelShape, section: LearnerSection, transport: str, gpu: Gpu, *, num_gpus: int) -> Speed:
    """Estimate gathering and sending the weights in bfloat16: two passes over the slowest link of all GPUs."""
    num_bytes = 2 * (shape.num_adapter_parameters if section.lora.sends_adapter else shape.num_parameters)
    gb_s = LINK_SHARE * _link_gb_s(num_gpus, gpu)
    if transport == "object_store":
        gb_s = HOST_GB_S / 10  # 4 copies: export, object store, shared memory, the servers' GPUs
    return Speed(seconds=2 * num_bytes / (gb_s * 1e9), flops=0.0, num_gpus=section.num_learners)


HOLDERS = ("learner_stays", "learner_works", "engine", "kv_cache", "graphs", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """Bytes on one GPU during a phase of a step."""

    phase: str
    gpu: str  # `shared`, `server` or `learner`
    speed: Speed
    learner_stays: int = 0  # shards, AdamW's moments, CUDA
    learner_works: int = 0  # gradients, gathered weights, activations and logits at their peak
    engine: int = 0  # vLLM's weights, temporary tensors and CUDA; asleep only CUDA
    kv_cache: int = 0
    graphs: int = 0
    buffer: int = 0  # weights being sent or exported

    @property
    def total(self) -> int:
        return sum(getattr(self, holder) for holder in HOLDERS)


def step_timeline(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[PhaseRow]:
    """Yield the phases of a step in their order. Without shared GPUs a row is for the GPU that works."""
    learner, server = plan.learner, plan.server
    stays = learner.resident
    beside = learner.idle if plan.is_shared else 0
    asleep = {"engine": RUNTIME_BYTES, "graphs": server.graphs} if plan.is_shared else {}
    for phase, speed in step_speeds(shape, config, gpu, server).items():
        if phase == "generate":
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "server", speed=speed, learner_stays=beside,
                           engine=server.weights + server.runtime, kv_cache=max(0, server.kv_cache),
                           graphs=server.graphs)  # fmt: skip
        elif phase == "weight sync":
            awake = {"engine": RUNTIME_BYTES + server.weights, "graphs": server.graphs} if plan.is_shared else {}
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "learner", speed=speed,
                           learner_stays=learner.giving, buffer=plan.transfer, **awake)  # fmt: skip
        else:
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "learner", speed=speed,
                           learner_stays=stays, learner_works=_works(phase, plan), **asleep)  # fmt: skip


def _works(phase: str, plan: GpuPlan) -> int:
    learner = plan.learner
    if phase == "sleep, wake":
        return 0
    if phase == "train":
        return learner.gradients + learner.peak.total
    if phase == "optimizer":
        return learner.gradients
    # A forward without backward keeps no activations: only gathered weights, and the logits of one chunk.
    first = learner.moments[0]
    return first.gathered + first.head
