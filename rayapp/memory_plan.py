"""How much GPU memory a configuration takes, by kind, before anything is allocated: `rayapp plan CONFIG --gpu h200`.

Arithmetic on the model's shape and the config, nothing else: `plan_learner` and `plan_server` are pure. Each formula
says what it counts; docs/learner.md says what they were compared with. All sizes are bytes per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from rayapp.config import Config

GIB = 2**30
GPU_BYTES = {"h200": 139 * GIB, "h100": 79 * GIB, "a100": 79 * GIB}
"""What a process sees of an H200 141 GB, an H100 80 GB and an A100 80 GB."""
RUNTIME_BYTES = 3 * GIB // 2
"""CUDA context, kernels and nccl's buffers: an assumption, not measured here."""
FLOAT32, MASTER, ADAM = 4, 4, 8
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory depends on."""

    num_parameters: int
    """Tied weights once."""
    num_layer_parameters: int
    """Of one decoder layer; the largest."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_key_heads: int
    head_size: int
    vocabulary: int

    @property
    def num_root_parameters(self) -> int:
        """Outside the layers: embeddings, head and the last norm."""
        return self.num_parameters - self.num_layers * self.num_layer_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """Bytes on each learner's GPU, at the peak of a step."""

    weights: int
    """Float32 shards, and what FSDP gathers in the compute dtype: everything outside the layers, and two layers."""
    reference: int
    """The frozen reference's, when there is a KL loss."""
    gradients: int
    """Float32 shards, and one layer's before it is reduced, in the compute dtype and in float32."""
    optimizer: int
    """AdamW's two moments."""
    activations: int
    """What the backward of a full micro-batch needs."""
    head: int
    """Logits of the chunks that exist at once, and the head's gradient while it is summed."""
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Bytes on each GPU of a server."""

    weights: int
    kv_cache: int
    """What server.gpu_memory_utilization leaves."""
    runtime: int
    kv_tokens: int
    """Tokens that the cache holds, over all GPUs of the server."""
    num_sequences: int
    """Sequences of the longest kind that it holds."""


def plan_learner(shape: ModelShape, config: Config) -> LearnerPlan:
    """Of one learner."""
    section = config.learner
    world, element = section.num_learners, ELEMENT_BYTES[section.compute_dtype]
    gathered = element * (shape.num_root_parameters + 2 * shape.num_layer_parameters)
    shard = -(-shape.num_parameters // world)
    has_reference = config.algorithm.kl_loss_coef > 0
    return LearnerPlan(
        weights=MASTER * shard + gathered,
        reference=MASTER * shard + gathered if has_reference else 0,
        gradients=MASTER * shard + (element + FLOAT32) * shape.num_layer_parameters,
        optimizer=ADAM * shard,
        activations=activation_bytes(shape, config),
        head=head_bytes(shape, config),
    )


def activation_bytes(shape: ModelShape, config: Config) -> int:
    """What one forward of `learner.max_tokens_per_microbatch` tokens keeps for its backward, without the head."""
    tokens, element = config.learner.max_tokens_per_microbatch, ELEMENT_BYTES[config.learner.compute_dtype]
    per_layer = tokens * layer_bytes_per_token(shape, element)
    # Its input in float32, the normed values, and those of them that the head reads.
    last_norm = tokens * (FLOAT32 + 2 * element) * shape.hidden
    if config.learner.activation_checkpointing:
        # The inputs of all layers, and everything of the one that is being computed again.
        return shape.num_layers * tokens * element * shape.hidden + per_layer + last_norm
    return shape.num_layers * per_layer + last_norm


def layer_bytes_per_token(shape: ModelShape, element: int) -> int:
    """What a layer of the Llama kind keeps of one token.

    Two norms: the input in float32, and the normed values before their weight. Their outputs feed the projections.
    Attention: queries, keys, values, and its output. The MLP: gate, its activation, up, and their product.
    """
    hidden = shape.hidden
    norms = 2 * (FLOAT32 * hidden + element * hidden)
    projections = 2 * element * hidden
    attention = element * shape.head_size * (2 * shape.num_heads + 2 * shape.num_key_heads)
    return norms + projections + attention + 4 * element * shape.intermediate


def head_bytes(shape: ModelShape, config: Config) -> int:
    """Peak of the chunked log-probs: see `rayapp.learner.log_probs`."""
    rows, element = config.learner.log_prob_chunk_tokens, ELEMENT_BYTES[config.learner.compute_dtype]
    # Kept from forward to backward: as many rows as take 4 bytes an entry for one chunk.
    kept = FLOAT32 * rows * shape.vocabulary
    # One more chunk: logits, and on GPU its float32 copy and the softmax of that.
    chunk = (element + 2 * FLOAT32) * rows * shape.vocabulary
    gradient = (element + FLOAT32) * shape.vocabulary * shape.hidden
    return kept + max(chunk, gradient)


def plan_server(shape: ModelShape, config: Config, gpu_bytes: int) -> ServerPlan:
    """Of one GPU of a server; `kv_cache` is negative when the weights don't fit."""
    section, parallel = config.server, config.server.tensor_parallel_size
    element = ELEMENT_BYTES[section.dtype]
    weights = element * shape.num_parameters // parallel
    kv_cache = int(gpu_bytes * section.gpu_memory_utilization) - weights - RUNTIME_BYTES
    # A key and a value of every key head in every layer; heads are dealt out among the GPUs.
    per_token = 2 * element * shape.num_layers * max(1, shape.num_key_heads // parallel) * shape.head_size
    tokens = max(0, kv_cache) // per_token
    return ServerPlan(
        weights=weights,
        kv_cache=kv_cache,
        runtime=RUNTIME_BYTES,
        kv_tokens=tokens,
        num_sequences=tokens // config.max_model_tokens,
    )
