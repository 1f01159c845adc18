"""How much GPU memory a configuration takes, by kind, before anything is allocated: `rayapp plan CONFIG --gpu h200`.

Arithmetic on the model's shape and the config, nothing else: `plan_learner` and `plan_server` are pure. Each formula
says what it counts; docs/learner.md says what they were compared with. All sizes are bytes per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.imports import large_imports
from rayapp.storage.models.prefetch import with_local_model

GIB = 2**30
GPU_BYTES = {"h200": 139 * GIB, "h100": 79 * GIB, "a100": 79 * GIB, "rtx4090": 23 * GIB}
"""Memory that a process can use of an H200 141 GB, an H100 80 GB, an A100 80 GB and an RTX 4090 24 GB."""
RUNTIME_BYTES = 3 * GIB // 2
"""CUDA context, kernels and nccl's buffers: an assumption, not measured here."""
FLOAT32, MASTER, ADAM = 4, 4, 8
AUTO_SHARE = 0.9
"""Share of a GPU that `learner.max_tokens_per_microbatch: auto` fills."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that its memory depends on."""

    num_parameters: int
    """All parameters, tied ones once."""
    num_layer_parameters: int
    """Parameters of one decoder layer, the largest."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_key_heads: int
    head_size: int
    vocabulary: int
    num_adapter_parameters: int = 0
    """Parameters of the adapters that `learner.lora` adds; 0 trains all weights."""
    adapter_rank_sum: int = 0
    """Sum of the ranks of all adapters of one layer: the numbers that they keep of a token."""

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient and an optimizer state."""
        return self.num_adapter_parameters or self.num_parameters

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the layers: embeddings, head and the last norm."""
        return self.num_parameters - self.num_layers * self.num_layer_parameters


LEARNER_KINDS = ("weights", "reference", "gradients", "optimizer", "activations", "head", "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """Bytes on each learner's GPU, at the peak of a step."""

    weights: int
    """Float32 shards, and what FSDP gathers in the compute dtype: everything outside the layers, and two layers."""
    reference: int
    """Weights of the frozen reference, when there is a KL loss."""
    gradients: int
    """Float32 shards, and one layer's before it is reduced, in the compute dtype and in float32."""
    optimizer: int
    """AdamW's two moments."""
    activations: int
    """Activations that the backward of a full micro-batch needs."""
    head: int
    """Logits of the chunks that exist at once, and the head's gradient while it is summed."""
    resident: int
    """Part of the above that stays between steps: shards, moments and the runtime."""
    host: int
    """Bytes of host memory: what `learner.cpu_offload` keeps there. Not in `total`."""
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in LEARNER_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Bytes on each GPU of a server."""

    weights: int
    kv_cache: int
    """KV cache: what server.gpu_memory_utilization leaves beside the weights."""
    runtime: int
    kv_tokens: int
    """Tokens that the cache holds, over all GPUs of the server."""
    num_sequences: int
    """Sequences of the longest kind that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """Bytes on each GPU that a learner and a server share (`cluster.placement: colocated`)."""

    training: int
    """The learner's peak in a step, plus the runtime of the sleeping server."""
    generating: int
    """The server's share, plus what stays of the learner between steps."""
    host: int
    """Weights of the sleeping server, in host memory."""

    @property
    def total(self) -> int:
        return max(self.training, self.generating)


def plan_learner(shape: ModelShape, config: Config) -> LearnerPlan:
    """Memory of one learner."""
    section = config.learner
    element = ELEMENT_BYTES[section.compute_dtype]
    layer_adapters = shape.num_adapter_parameters // shape.num_layers
    gathered = gathered_bytes(shape, config)
    frozen = MASTER * _shard(shape.num_parameters, config)
    masters = frozen + MASTER * _shard(shape.num_adapter_parameters, config)
    gradients, optimizer = (kind * _shard(shape.num_trained, config) for kind in (MASTER, ADAM))
    unreduced = (element + FLOAT32) * (layer_adapters or shape.num_layer_parameters)
    has_reference = config.algorithm.kl_loss_coef > 0
    on_gpu = 0 if section.cpu_offload else 1
    reference_masters = frozen if has_reference else 0
    return LearnerPlan(
        weights=on_gpu * masters + gathered,
        reference=(on_gpu * frozen + gathered) if has_reference else 0,
        gradients=on_gpu * gradients + unreduced,
        optimizer=on_gpu * optimizer,
        activations=activation_bytes(shape, config),
        head=head_bytes(shape, config),
        resident=on_gpu * (masters + reference_masters + optimizer) + RUNTIME_BYTES,
        host=(1 - on_gpu) * (masters + reference_masters + gradients + optimizer),
    )


def _shard(num_parameters: int, config: Config) -> int:
    return -(-num_parameters // config.learner.num_learners)


def plan_shared(learner: LearnerPlan, server: ServerPlan, config: Config, gpu_bytes: int) -> SharedPlan:
    """Memory of a GPU that a learner and a server share."""
    return SharedPlan(
        training=learner.total + server.runtime,
        generating=int(gpu_bytes * config.server.gpu_memory_utilization) + learner.resident,
        host=server.weights,
    )


def with_token_budget(shape: ModelShape, config: Config, gpu_bytes: int) -> Config:
    """The config with a number in place of `learner.max_tokens_per_microbatch: auto`, if any fits.

    The number is the largest power of two that fits by this plan's formulas. A learner measures it instead, see
    `rayapp.learner.memory.token_budget`.
    """
    if config.learner.max_tokens_per_microbatch != "auto":
        return config

    def having(tokens: int) -> Config:
        return config.model_copy(
            update={"learner": config.learner.model_copy(update={"max_tokens_per_microbatch": tokens})}
        )

    sizes = [having(1 << power) for power in range(16, 3, -1) if 1 << power >= config.max_model_tokens]
    fitting = (sized for sized in sizes if plan_learner(shape, sized).total <= AUTO_SHARE * gpu_bytes)
    return next(fitting, having(config.max_model_tokens))


def activation_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes that a forward of `learner.max_tokens_per_microbatch` tokens keeps for its backward, without the head."""
    tokens, element = config.learner.token_budget, ELEMENT_BYTES[config.learner.compute_dtype]
    per_layer = tokens * (layer_bytes_per_token(shape, element) + adapter_bytes_per_token(shape, element))
    # The last norm: its input in float32, its output, and the part of that which the head reads.
    last_norm = tokens * (FLOAT32 + 2 * element) * shape.hidden
    if config.learner.activation_checkpointing:
        # With checkpointing: the inputs of all layers, and everything of the one that is being computed again.
        return shape.num_layers * tokens * element * shape.hidden + per_layer + last_norm
    return shape.num_layers * per_layer + last_norm


def layer_bytes_per_token(shape: ModelShape, element: int) -> int:
    """Bytes that a layer of the Llama kind keeps of one token.

    Two norms: the input in float32, and the normed values before their weight. Their outputs feed the projections.
    Attention: queries, keys, values, and its output. The MLP: gate, its activation, up, and their product.
    """
    hidden = shape.hidden
    norms = 2 * (FLOAT32 * hidden + element * hidden)
    projections = 2 * element * hidden
    attention = element * shape.head_size * (2 * shape.num_heads + 2 * shape.num_key_heads)
    return norms + projections + attention + 4 * element * shape.intermediate


def adapter_bytes_per_token(shape: ModelShape, element: int) -> int:
    """Bytes that a layer keeps more of a token (below 0: less) when only its adapters are trained.

    The output of each first matrix comes on top. The normed values are not needed: a frozen norm has no gradient.
    """
    if not shape.num_adapter_parameters:
        return 0
    return element * shape.adapter_rank_sum - 2 * element * shape.hidden


def head_bytes(shape: ModelShape, config: Config) -> int:
    """Peak of the chunked log-probs with more rows than are kept: see `rayapp.learner.log_probs`."""
    rows, element = config.learner.log_prob_chunk_tokens, ELEMENT_BYTES[config.learner.compute_dtype]
    logits = rows * shape.vocabulary
    # Kept from forward to backward: as many rows as take 4 bytes an entry for one chunk.
    kept = FLOAT32 * logits
    # One more chunk, and while its softmax is taken a float32 copy and the result.
    softmax = (element + 2 * FLOAT32) * logits
    if shape.num_adapter_parameters:
        return kept + softmax  # a frozen head has no gradient
    # The float32 sum of its gradient is there from the first chunk on; a chunk's own share comes after its softmax.
    weight = shape.vocabulary * shape.hidden
    return kept + FLOAT32 * weight + max(softmax, element * (logits + weight))


def head_bytes_per_token(shape: ModelShape, config: Config) -> int:
    """Bytes of a predicted position beside its logits: hidden state, its gradient, eight indices and scores."""
    return 2 * ELEMENT_BYTES[config.learner.compute_dtype] * shape.hidden + 64


def gathered_bytes(shape: ModelShape, config: Config, num_layers: int = 2) -> int:
    """Bytes that FSDP gathers in the compute dtype: all outside the layers, and two layers at once (on CPU all)."""
    layer = shape.num_layer_parameters + shape.num_adapter_parameters // shape.num_layers
    return ELEMENT_BYTES[config.learner.compute_dtype] * (shape.num_root_parameters + num_layers * layer)


def plan_server(shape: ModelShape, config: Config, gpu_bytes: int) -> ServerPlan:
    """Memory of one GPU of a server; `kv_cache` is negative when the weights don't fit."""
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


def model_shape(config: Config) -> ModelShape:
    """Shape of the model at `config.model.path`, made on torch's meta device: nothing is allocated.

    Raises:
        InputError: there is no such model.
    """
    with large_imports():
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
    from rayapp.learner.state.lora import ADAPTER, add_adapters

    if config.learner.lora.rank == 0:
        return []
    add_adapters(model, config.learner.lora)
    return [parameter for name, parameter in model.named_parameters() if ADAPTER in name]
