"""How long the phases of a step take on GPUs, and how much of the GPUs that uses: arithmetic before anything runs.

A roofline with fixed shares: what must be multiplied over what a GPU multiplies in practice, what must be moved over
what its memory moves in practice, and the larger of computing and gathering. `ASSUMPTIONS` is printed beside every
number. The passes are fitted to one step on an H100 (docs/results.md); the rest is not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayapp.config.algorithm_names import BATCH_COUPLED_LOSSES, NEEDS_LOG_PROBS
from rayapp.config.config import Config
from rayapp.learner.memory.gpus import NODE_GPUS, NODE_LINK_GB_S, Gpu
from rayapp.learner.memory.plan import (
    ADAM,
    ELEMENT_BYTES,
    FLOAT32,
    MASTER,
    ServerPlan,
    frozen_shapes,
    layer_bytes_per_token,
)
from rayapp.learner.memory.shape import ModelShape

GEMM_SHARE, ATTENTION_SHARE, MEMORY_SHARE, LINK_SHARE = 0.68, 0.45, 0.7, 0.7
"""Of the maker's figures, what large matrix products, flash attention, plain reads and writes, and NCCL reach."""
FORWARD_PASSES, BACKWARD_PASSES = 5, 11
"""Times that a layer's kept activations are read or written by operators that are not fused."""
HEAD_FORWARD_PASSES, HEAD_BACKWARD_PASSES = 13, 18
"""Times that the logits, in float32, are read or written."""
DECODE_S, EAGER_DECODE_S = 0.002, 0.015
"""Of a decoding step what is not the GPU's: scheduling and launches, with CUDA graphs and without."""
HOST_GB_S = 20.0
"""A process towards host memory: AdamW there, and weights through the object store."""
ASSUMPTIONS = (
    "every prompt and completion has its full length; sequences are dealt evenly; tools and sandboxes cost no time",
    f"products reach {GEMM_SHARE:.0%} of the figure, attention {ATTENTION_SHARE:.0%}, memory, links {MEMORY_SHARE:.0%}",
    f"gathering overlaps computing; a GPU has {NODE_LINK_GB_S:.0f} GB/s towards other nodes of {NODE_GPUS} GPUs",
    "MFU counts each product once, recomputed ones not, over all GPUs of the phase",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One phase: its time, and what of it was useful."""

    seconds: float
    flops: float
    """Of all GPUs; 0 for phases that only move data."""
    num_gpus: int

    def mfu(self, gpu: Gpu) -> float:
        return self.flops / (self.seconds * self.num_gpus * gpu.tflops * 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Tokens of one step, all GPUs together, every sequence at its longest."""

    prompts: int
    sequences: int
    computed_tokens: int
    """Tokens that the learners compute: shared prompts once."""
    predicted_tokens: int
    attended: float
    """Pairs of a computed token and one that it sees."""


def step_load(config: Config) -> StepLoad:
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    prompts = config.train.groups_per_step
    sequences = prompts * config.rollout.group_size
    computed_prompts = prompts if config.learner.share_prefixes else sequences
    return StepLoad(
        prompts=prompts,
        sequences=sequences,
        computed_tokens=computed_prompts * prompt + sequences * completion,
        predicted_tokens=sequences * completion,
        attended=computed_prompts * prompt**2 / 2 + sequences * (completion * prompt + completion**2 / 2),
    )


def step_speeds(shape: ModelShape, config: Config, gpu: Gpu, server: ServerPlan) -> dict[str, Speed]:
    """The phases of a step in their order."""
    speeds = {"generate": generate(shape, config, gpu, server)}
    scored = score(shape, config, gpu)
    if (
        config.train.num_minibatches > 1
        or config.algorithm.policy_loss in BATCH_COUPLED_LOSSES
        or config.algorithm.adv_estimator in NEEDS_LOG_PROBS
    ):
        speeds["old log-probs"] = scored
    if config.distillation.is_policy:
        speeds["teacher"] = scored
    for name, own in frozen_shapes(shape, config).items():
        speeds[name] = score(own, config, gpu)
    speeds["train"] = train(shape, config, gpu)
    speeds["optimizer"] = optimizer(shape, config, gpu)
    speeds["weight sync"] = weight_sync(shape, config, gpu)
    return speeds


def generate(shape: ModelShape, config: Config, gpu: Gpu, server: ServerPlan) -> Speed:
    """Prompts once, then decoding: each step reads the weights, and the keys and values of what it decodes."""
    load, section = step_load(config), config.server
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    num_gpus = section.num_servers * section.tensor_parallel_size
    mine = math.ceil(load.sequences / section.num_servers)
    at_once = max(1, min(mine, section.max_num_seqs, server.num_sequences))
    flops_per_token = 2 * (shape.num_computed + shape.vocabulary * shape.hidden)
    moved = server.weights + at_once * (prompt + completion / 2) * server.kv_token_bytes
    computed = at_once * flops_per_token / section.tensor_parallel_size
    launch = EAGER_DECODE_S if section.enforce_eager else DECODE_S
    step_s = launch + max(moved / (MEMORY_SHARE * gpu.memory_gb_s * 1e9), computed / (GEMM_SHARE * gpu.tflops * 1e12))
    # Sequences come and go one by one, so that a wave need not be full.
    decode_s = max(1.0, mine / at_once) * completion * step_s
    flops = flops_per_token * load.predicted_tokens + 2 * shape.num_computed * load.prompts * prompt
    prefill_s = 2 * shape.num_computed * load.prompts * prompt / (num_gpus * GEMM_SHARE * gpu.tflops * 1e12)
    return Speed(seconds=prefill_s + decode_s, flops=flops + _attention_flops(shape, load), num_gpus=num_gpus)


def score(shape: ModelShape, config: Config, gpu: Gpu) -> Speed:
    """A forward over the whole step."""
    return _learner_speed(
        shape,
        config,
        gpu,
        products=1.0,
        attention=1.0,
        passes=FORWARD_PASSES,
        head_passes=HEAD_FORWARD_PASSES,
        useful=1.0,
    )


def train(shape: ModelShape, config: Config, gpu: Gpu) -> Speed:
    """Forward and backward over the whole step. A frozen weight has no gradient: its product is saved."""
    backward = 1.0 if shape.num_adapter_parameters else 2.0
    again = 1.0 if config.learner.activation_checkpointing else 0.0
    return _learner_speed(
        shape,
        config,
        gpu,
        products=1.0 + backward + again,
        attention=3.5 + again,
        passes=FORWARD_PASSES * (1 + again) + BACKWARD_PASSES,
        head_passes=HEAD_FORWARD_PASSES + HEAD_BACKWARD_PASSES,
        useful=1.0 + backward,
    )


def _learner_speed(
    shape: ModelShape,
    config: Config,
    gpu: Gpu,
    *,
    products: float,
    attention: float,
    passes: float,
    head_passes: float,
    useful: float,
) -> Speed:
    load, section = step_load(config), config.learner
    num_gpus, element = section.num_learners, ELEMENT_BYTES[section.compute_dtype]
    peak = gpu.tflops * 1e12
    layers = 2 * shape.num_computed * load.computed_tokens
    head = 2 * shape.vocabulary * shape.hidden * load.predicted_tokens
    attended = _attention_flops(shape, load)
    moved = passes * layer_bytes_per_token(shape, element) * shape.num_layers * load.computed_tokens
    moved += head_passes * FLOAT32 * shape.vocabulary * load.predicted_tokens
    compute_s = (
        (products * layers + products * head) / (GEMM_SHARE * peak)
        + attention * attended / (ATTENTION_SHARE * peak)
        + moved / (MEMORY_SHARE * gpu.memory_gb_s * 1e9)
    ) / num_gpus
    micro_batches = max(1, math.ceil(load.computed_tokens / num_gpus / section.token_budget))
    gathers_s = micro_batches * _gather_s(shape, config, gpu, is_backward=useful > 1.0)
    return Speed(
        seconds=max(compute_s, gathers_s), flops=useful * (layers + head) + useful * attended, num_gpus=num_gpus
    )


def _attention_flops(shape: ModelShape, load: StepLoad) -> float:
    """Of a forward: scores and their sum over the values."""
    return 4 * shape.num_layers * shape.num_heads * shape.head_size * load.attended


def _gather_s(shape: ModelShape, config: Config, gpu: Gpu, *, is_backward: bool) -> float:
    """Seconds that the collectives of one micro-batch take: weights for each pass, and gradients."""
    section = config.learner
    if section.num_learners == 1:
        return 0.0
    gathered = ELEMENT_BYTES[section.compute_dtype] * shape.num_parameters * (2 if is_backward else 1)
    reduced = FLOAT32 * shape.num_trained if is_backward else 0
    return (gathered + reduced) / (LINK_SHARE * _link_gb_s(config, gpu) * 1e9)


def _link_gb_s(config: Config, gpu: Gpu) -> float:
    return gpu.link_gb_s if config.learner.num_learners <= NODE_GPUS else min(gpu.link_gb_s, NODE_LINK_GB_S)


def optimizer(shape: ModelShape, config: Config, gpu: Gpu) -> Speed:
    """Clipping reads and writes gradients; AdamW reads them, and reads and writes weights and moments."""
    section = config.learner
    moved = (2 * (MASTER + ADAM) + 3 * FLOAT32) * shape.num_trained / section.num_learners
    gb_s = HOST_GB_S if section.cpu_offload else MEMORY_SHARE * gpu.memory_gb_s
    return Speed(seconds=config.train.num_minibatches * moved / (gb_s * 1e9), flops=0.0, num_gpus=section.num_learners)


def weight_sync(shape: ModelShape, config: Config, gpu: Gpu) -> Speed:
    """Weights in bfloat16 gathered by the learners, then sent: two passes over the slowest link."""
    section = config.learner
    num_bytes = 2 * (shape.num_adapter_parameters if section.lora.sends_adapter else shape.num_parameters)
    gb_s = LINK_SHARE * _link_gb_s(config, gpu)
    if config.server.weight_transport == "object_store":
        gb_s = HOST_GB_S / 10  # export, the store, shared memory, and each server's copy to its GPU
    return Speed(seconds=2 * num_bytes / (gb_s * 1e9), flops=0.0, num_gpus=section.num_learners)
