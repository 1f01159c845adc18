"""How much GPU memory a configuration takes, by kind, before anything is allocated: `rayapp plan CONFIG --gpu h200`.

Arithmetic on the model's shape and the config, nothing else. Each formula says what it counts; they are compared with
the learner's own step on fake tensors (`simulation.py`), within 10% of its peak. All sizes are bytes per GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rayapp.config.config import Config, alone, asked_servers, frozen_models, with_values
from rayapp.config.model_servers import ModelServerSection
from rayapp.learner.memory.gpus import GIB, Gpu
from rayapp.learner.memory.shape import ModelShape, model_shape

RUNTIME_BYTES = 3 * GIB // 2
"""CUDA context, kernels and nccl's buffers: an assumption. One H100 without nccl took 0.8 GiB."""
GRAPH_BYTES = GIB
"""vLLM's CUDA graphs, beside server.gpu_memory_utilization and there too while it sleeps: an assumption."""
PREFILL_TOKENS = 8192
"""Tokens that vLLM computes at once by default on a GPU of 80 GB or so; it reserves what they take."""
LEARNER_BYTES, SERVER_BYTES = 7 * GIB // 10, 21 * GIB // 10
"""Resident memory of a process with its libraries imported and no weights yet: 0.5 and 0.7 GiB a process, of which a
server has three; measured with vLLM 0.30 and torch 2.13."""
FLOAT32, MASTER, ADAM = 4, 4, 8
AUTO_SHARE = 0.9
"""Share of a GPU that `learner.max_tokens_per_microbatch: auto` fills."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a learner's GPU holds at one moment of a step, beside what stays there."""

    name: str
    gathered: int = 0
    """What FSDP has gathered in the compute dtype, and its buffers."""
    activations: int = 0
    """Kept for the backward, and what an operator or two need meanwhile."""
    head: int = 0
    """Logits of the chunks that exist at once, and the head's gradient."""
    unreduced: int = 0
    """Gradients before they are reduced over the ranks, in the compute dtype and in float32."""

    @property
    def total(self) -> int:
        return self.gathered + self.activations + self.head + self.unreduced


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """Bytes on each learner's GPU."""

    weights: int
    """Shards in float32, of adapters too."""
    frozen: dict[str, int]
    """Shards of the models that don't learn, by name (`frozen_models`)."""
    gradients: int
    """Shards in float32: there from the first micro-batch of a step to its end."""
    optimizer: int
    """AdamW's two moments."""
    moments: tuple[Moment, ...]
    """Those of a full micro-batch at which the peak can be."""
    host: int
    """Bytes of host memory: what `learner.cpu_offload` keeps there. Not in `total`."""
    runtime: int = RUNTIME_BYTES

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def resident(self) -> int:
        """What stays between steps."""
        return self.weights + sum(self.frozen.values()) + self.optimizer + self.runtime

    @property
    def total(self) -> int:
        return self.resident + self.gradients + self.peak.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Bytes on each GPU of a server."""

    weights: int
    kv_cache: int
    """KV cache: what server.gpu_memory_utilization leaves; below 0 when the weights don't fit."""
    runtime: int
    """CUDA, and what the largest prefill and the sampling of a full batch take."""
    graphs: int
    """CUDA graphs, beside server.gpu_memory_utilization."""
    kv_token_bytes: int
    """Bytes of one token's keys and values on one GPU."""
    kv_tokens: int
    """Tokens that the cache holds, over all GPUs of the server."""
    num_sequences: int
    """Sequences of the longest kind that it holds."""

    @property
    def asleep(self) -> int:
        """What a sleeping server leaves on its GPU; its weights are in host memory then."""
        return RUNTIME_BYTES + self.graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """A GPU through a step: with `cluster.placement: colocated` one for both, else one of each."""

    learner: LearnerPlan
    server: ServerPlan
    room: int
    is_shared: bool
    server_share: int
    """What vLLM takes: room x server.gpu_memory_utilization."""
    transfer: int
    """While weights are sent: the largest tensor whole, and the buckets."""

    @property
    def training(self) -> int:
        """The learner's peak, beside the sleeping server where they share."""
        return self.learner.total + (self.server.asleep if self.is_shared else 0)

    @property
    def beside_server(self) -> int:
        """What is on a server's GPU beside its share while it generates."""
        return self.server.graphs + (self.learner.resident if self.is_shared else 0)

    @property
    def generating(self) -> int:
        return self.server_share + self.beside_server

    @property
    def sending(self) -> int:
        """While weights are sent, on the learner's GPU. A server that shares it is awake but for its KV cache."""
        server = self.server.asleep + self.server.weights if self.is_shared else 0
        return self.learner.resident + self.transfer + server

    @property
    def learner_fits(self) -> bool:
        return max(self.training, self.sending) <= self.room

    @property
    def server_fits(self) -> bool:
        return self.generating <= self.room and self.server.num_sequences > 0

    @property
    def fits(self) -> bool:
        return self.learner_fits and self.server_fits


def plan_gpu(shape: ModelShape, config: Config, gpu: Gpu) -> GpuPlan:
    """Everything that GPUs of this kind hold."""
    return GpuPlan(
        learner=plan_learner(shape, config),
        server=plan_server(shape, config, gpu.room),
        room=gpu.room,
        is_shared=config.cluster.placement == "colocated",
        server_share=int(gpu.room * config.server.gpu_memory_utilization),
        transfer=transfer_bytes(shape, config),
    )


def plan_learner(shape: ModelShape, config: Config) -> LearnerPlan:
    """Memory of one learner."""
    masters = MASTER * (_shard(shape.num_parameters, config) + _shard(shape.num_adapter_parameters, config))
    gradients, optimizer = (kind * _shard(shape.num_trained, config) for kind in (MASTER, ADAM))
    frozen = {name: MASTER * _shard(own.num_parameters, config) for name, own in frozen_shapes(shape, config).items()}
    on_gpu = 0 if config.learner.cpu_offload else 1
    return LearnerPlan(
        weights=on_gpu * masters,
        frozen={name: on_gpu * size for name, size in frozen.items()},
        gradients=on_gpu * gradients,
        optimizer=on_gpu * optimizer,
        moments=learner_moments(shape, config),
        host=(1 - on_gpu) * (masters + sum(frozen.values()) + gradients + optimizer),
    )


def learner_moments(shape: ModelShape, config: Config) -> tuple[Moment, ...]:
    """The moments of a micro-batch at which the most may be allocated."""
    element = ELEMENT_BYTES[config.learner.compute_dtype]
    layer = shape.num_layer_parameters + shape.num_adapter_parameters // shape.num_layers
    trained_in_layer = shape.num_adapter_parameters // shape.num_layers or shape.num_layer_parameters
    trained_in_root = 0 if shape.num_adapter_parameters else shape.num_root_parameters
    return (
        # All layers have run; the buffer that the last one was gathered in is still there.
        Moment(
            name="the head's forward and backward",
            gathered=element * (shape.num_root_parameters + layer) + _teacher_bytes(shape, config),
            activations=kept_bytes(shape, config),
            head=head_bytes(shape, config, config.learner.token_budget),
        ),
        # The last layer of all, whose gradients come first, and the next one being gathered.
        Moment(
            name="the backward of a layer",
            gathered=gathered_bytes(shape, config) + _teacher_bytes(shape, config),
            activations=kept_bytes(shape, config) + working_bytes(shape, config),
            head=element * (shape.vocabulary * shape.hidden if trained_in_root else 0),
            # The layer behind it in float32, on its way to the other ranks, and the first of its own matrices.
            unreduced=FLOAT32 * trained_in_layer + min(element * shape.hidden * shape.intermediate, trained_in_layer),
        ),
        # Activations are gone; the gradients of embeddings and head are reduced together.
        Moment(
            name="reducing the gradients of embeddings and head",
            unreduced=(element + FLOAT32) * trained_in_root + FLOAT32 * _shard(trained_in_root, config),
        ),
    )


def frozen_shapes(shape: ModelShape, config: Config) -> dict[str, ModelShape]:
    """Shapes of the models that don't learn, by name."""
    shapes = {"reference": shape, "teacher": shape.teacher or shape}
    return {name: shapes[name] for name in frozen_models(config)}


def _teacher_bytes(shape: ModelShape, config: Config) -> int:
    """What the teacher leaves beside a micro-batch of the policy, where its whole distribution counts: its head, the
    buffer that its last layer was gathered in, and its hidden states."""
    if not config.distillation.needs_logits:
        return 0
    teacher, element = shape.teacher or shape, ELEMENT_BYTES[config.learner.compute_dtype]
    return element * (
        teacher.num_root_parameters + teacher.num_layer_parameters + config.learner.token_budget * teacher.hidden
    )


def _shard(num_parameters: int, config: Config) -> int:
    return -(-num_parameters // (config.learner.num_learners // config.learner.replicas))


def transfer_bytes(shape: ModelShape, config: Config) -> int:
    """What sending weights takes on a learner's GPU: the largest tensor gathered in bfloat16, and two buckets of it.

    A bucket is no smaller than the largest tensor, mostly the embedding.
    """
    if config.learner.lora.sends_adapter:
        return 2 * shape.num_adapter_parameters
    largest = 2 * max(shape.vocabulary * shape.hidden, shape.hidden * shape.intermediate)
    return largest + 2 * max(config.server.weight_bucket_mib << 20, largest)


def with_token_budget(shape: ModelShape, config: Config, gpu_bytes: int) -> Config:
    """The config with a number in place of `learner.max_tokens_per_microbatch: auto`, if any fits.

    The number is the largest power of two that fits by this plan's formulas. A learner measures it instead, see
    `rayapp.learner.memory.token_budget`.
    """
    if config.learner.max_tokens_per_microbatch != "auto":
        return config

    def having(tokens: int) -> Config:
        return with_values(config, learner={"max_tokens_per_microbatch": tokens})

    sizes = [having(1 << power) for power in range(16, 3, -1) if 1 << power >= config.max_learner_tokens]
    fitting = (sized for sized in sizes if plan_learner(shape, sized).total <= AUTO_SHARE * gpu_bytes)
    return next(fitting, having(config.max_learner_tokens))


def kept_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes that a forward of `learner.max_tokens_per_microbatch` tokens keeps for its backward, without the head."""
    tokens, element = config.learner.token_budget, ELEMENT_BYTES[config.learner.compute_dtype]
    # The last norm: its input in float32, its output, and the part of that which the head reads.
    last_norm = tokens * (FLOAT32 + 2 * element) * shape.hidden
    if config.learner.activation_checkpointing:
        return shape.num_layers * tokens * element * shape.hidden + last_norm
    return shape.num_layers * _layer_bytes(shape, config) + last_norm


def working_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes that the backward of one layer takes beside what all have kept.

    The layer itself, where it is computed again, and the gradients of the MLP's products.
    """
    tokens, element = config.learner.token_budget, ELEMENT_BYTES[config.learner.compute_dtype]
    again = _layer_bytes(shape, config) if config.learner.activation_checkpointing else 0
    return again + tokens * element * 2 * (shape.intermediate + shape.hidden)


def _layer_bytes(shape: ModelShape, config: Config) -> int:
    tokens, element = config.learner.token_budget, ELEMENT_BYTES[config.learner.compute_dtype]
    return tokens * (layer_bytes_per_token(shape, element) + adapter_bytes_per_token(shape, element))


def layer_bytes_per_token(shape: ModelShape, element: int) -> int:
    """Bytes that a layer of the Llama kind keeps of one token.

    Two norms, and those of queries and keys where there are some: the input in float32, and the normed values before
    their weight. Their outputs feed the projections. Attention: queries, keys, values, and its output. The MLP: gate,
    its activation, up, and their product.
    """
    hidden = shape.hidden
    norms = (FLOAT32 + element) * (2 * hidden + _normed_heads(shape))
    projections = 2 * element * hidden
    attention = element * shape.head_size * (2 * shape.num_heads + 2 * shape.num_key_heads)
    return norms + projections + attention + 4 * element * shape.intermediate


def adapter_bytes_per_token(shape: ModelShape, element: int) -> int:
    """Bytes that a layer keeps more of a token (below 0: less) when only its adapters are trained.

    The output of each first matrix comes on top. The normed values are not needed: a frozen norm has no gradient.
    """
    if not shape.num_adapter_parameters:
        return 0
    return element * (shape.adapter_rank_sum - 2 * shape.hidden - _normed_heads(shape))


def _normed_heads(shape: ModelShape) -> int:
    """Numbers of a token's queries and keys, where they have norms."""
    return shape.head_size * (shape.num_heads + shape.num_key_heads) if shape.norms_heads else 0


def head_bytes(shape: ModelShape, config: Config, num_tokens: int | None = None) -> int:
    """Peak of the chunked log-probs of so many tokens: see `rayapp.learner.log_probs`.

    Args:
        num_tokens: None for more than are kept.
    """
    return _own_head_bytes(shape, config, num_tokens) + _teacher_head_bytes(shape, config, num_tokens)


def _own_head_bytes(shape: ModelShape, config: Config, num_tokens: int | None) -> int:
    rows, element = config.learner.log_prob_chunk_tokens, ELEMENT_BYTES[config.learner.compute_dtype]
    # Kept from forward to backward: as many rows as take 4 bytes an entry for one chunk.
    kept_rows = rows * FLOAT32 // element
    weight = 0 if shape.num_adapter_parameters else shape.vocabulary * shape.hidden  # a frozen head has no gradient
    if num_tokens is not None and num_tokens <= kept_rows:
        kept = element * num_tokens * shape.vocabulary
        forward = 2 * FLOAT32 * min(rows, num_tokens) * shape.vocabulary
        return kept + max(forward, (element + (FLOAT32 if num_tokens > rows else 0)) * weight)
    logits = rows * shape.vocabulary
    kept = FLOAT32 * logits
    # One more chunk, and while its softmax is taken a float32 copy and the result.
    softmax = (element + 2 * FLOAT32) * logits
    if not weight:
        return kept + softmax
    # The float32 sum of its gradient is there from the first chunk on; a chunk's own share comes after its softmax.
    return kept + FLOAT32 * weight + max(softmax, element * (logits + weight))


def _teacher_head_bytes(shape: ModelShape, config: Config, num_tokens: int | None) -> int:
    """What a chunk's comparison with the teacher takes more: log-probs of both, their ratio, and the gradient."""
    if not config.distillation.needs_logits:
        return 0
    rows = min(config.learner.log_prob_chunk_tokens, num_tokens or sys.maxsize)
    return (3 * FLOAT32 + ELEMENT_BYTES[config.learner.compute_dtype]) * rows * shape.vocabulary


def head_bytes_per_token(shape: ModelShape, config: Config) -> int:
    """Bytes of a predicted position beside its logits: hidden state, its gradient, eight indices and scores."""
    return 2 * ELEMENT_BYTES[config.learner.compute_dtype] * shape.hidden + 64


def gathered_bytes(shape: ModelShape, config: Config, num_layers: int = 2) -> int:
    """Bytes that FSDP gathers in the compute dtype: all outside the layers, and two layers at once (on CPU all)."""
    layer = shape.num_layer_parameters + shape.num_adapter_parameters // shape.num_layers
    return ELEMENT_BYTES[config.learner.compute_dtype] * (shape.num_root_parameters + num_layers * layer)


def plan_server(shape: ModelShape, config: Config, gpu_bytes: int) -> ServerPlan:
    """Memory of one GPU of a server."""
    section, parallel = config.server, config.server.tensor_parallel_size
    element = ELEMENT_BYTES[section.dtype]
    weights = element * shape.num_parameters // parallel
    # A layer's inputs and products of the largest prefill; logits in float32, their softmax, and its log.
    prefill = element * PREFILL_TOKENS * (4 * shape.hidden + 2 * shape.intermediate // parallel)
    sampling = 3 * FLOAT32 * section.max_num_seqs * shape.vocabulary
    runtime = RUNTIME_BYTES + prefill + sampling
    kv_cache = int(gpu_bytes * section.gpu_memory_utilization) - weights - runtime
    # A key and a value of every key head in every layer; heads are dealt out among the GPUs.
    per_token = 2 * element * shape.num_layers * max(1, shape.num_key_heads // parallel) * shape.head_size
    tokens = max(0, kv_cache) // per_token
    return ServerPlan(
        weights=weights,
        kv_cache=kv_cache,
        runtime=runtime,
        graphs=0 if section.enforce_eager else GRAPH_BYTES,
        kv_token_bytes=per_token,
        kv_tokens=tokens,
        num_sequences=tokens // config.max_model_tokens,
    )


def plan_model_servers(config: Config, gpu_bytes: int) -> Iterator[tuple[ModelServerSection, ServerPlan]]:
    """Those that serve other models than the policy, each on GPUs of its own; graphs are in vLLM's share."""
    for section in asked_servers(config):
        own = alone(config, section)
        yield section, plan_server(model_shape(own), own, gpu_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Bytes of this machine's memory in a run on its CPU."""

    learners: int
    """At the peak of a step."""
    activations: int
    """Of these, what the largest micro-batch takes: few steps have one as large."""
    servers: int
    object_store: int

    @property
    def total(self) -> int:
        return self.learners + self.servers + self.object_store

    @property
    def least(self) -> int:
        """What is taken however short a micro-batch is."""
        return self.total - self.activations


def plan_host(shape: ModelShape, config: Config, have: int) -> HostPlan:
    """Memory of a run on one machine's CPU, of which so many bytes are available.

    There all layers stay gathered, gradients are summed before they are reduced, and malloc keeps what was freed.
    """
    if config.learner.max_tokens_per_microbatch == "auto":
        config = with_token_budget(shape, config, have // 2)
    section, server = config.learner, config.server
    element = ELEMENT_BYTES[section.compute_dtype]
    frozen = sum(own.num_parameters for own in frozen_shapes(shape, config).values())
    shards = MASTER * (shape.num_parameters + frozen) + (ADAM + FLOAT32) * shape.num_trained
    each = LEARNER_BYTES + element * (shape.num_parameters + frozen + shape.num_trained)
    batch = kept_bytes(shape, config) + working_bytes(shape, config) + head_bytes(shape, config)
    rank = SERVER_BYTES + int(server.kv_cache_gib * GIB)
    serving = ELEMENT_BYTES[server.dtype] * shape.num_parameters + server.tensor_parallel_size * rank
    return HostPlan(
        learners=shards + section.num_learners * (each + batch),
        activations=section.num_learners * batch,
        servers=server.num_servers * serving,
        object_store=config.cluster.object_store_mib << 20,
    )
