"""Computes the memory that a configuration takes, by kind, before anything is allocated. All sizes are bytes per GPU.

The formulas use only the model's shape and the config; tests on fake tensors find them within 10% of a step's peak.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rayapp.config.bundles import asked_servers
from rayapp.config.config import Config, alone, frozen_models, with_values
from rayapp.config.learner import GPU_SOFTMAX_ROWS, LearnerSection
from rayapp.config.other_models import ModelServerSection
from rayapp.config.sections import ServerSection
from rayapp.learner.memory.shape import GIB, Gpu, ModelShape, model_shape
from rayapp.storage.models.nf4 import BYTES_PER_VALUE

RUNTIME_BYTES = 3 * GIB // 2  # assumed: CUDA context, kernels, NCCL's buffers; 0.8 GiB on an H100 without NCCL
GRAPH_BYTES = GIB  # assumed: vLLM's CUDA graphs, beyond server.gpu_memory_utilization, also asleep
FLOAT32, MASTER, ADAM = 4, 4, 8
AUTO_SHARE = 0.9  # of a GPU, for learners' `auto` values
# Largest share of a GPU for vLLM, and the margin below what fits, if `server.gpu_memory_utilization` is auto.
LARGEST_SHARE, AUTO_MARGIN = 0.95, 0.03
# Tokens with which products are fast: layers are recomputed until a micro-batch may have as many, if both are auto.
ENOUGH_TOKENS = 8192
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "auto": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes on a learner's GPU at one moment of a step, beside the bytes that stay between steps."""

    name: str
    gathered: int = 0  # weights in the compute dtype, and FSDP's buffers
    activations: int = 0  # kept for the backward, and temporary tensors of an operator or two
    head: int = 0  # logits of the chunks that exist at once, and the head's gradient
    unreduced: int = 0  # gradients before they are reduced over the ranks, in the compute dtype and in float32

    @property
    def total(self) -> int:
        return self.gathered + self.activations + self.head + self.unreduced


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """Bytes on each learner's GPU."""

    weights: int  # shards: trained parameters in float32, frozen ones in the compute dtype
    frozen: dict[str, int]  # shards of the models that don't learn, by name
    gradients: int  # float32 shards, from the first micro-batch of a step to its end
    optimizer: int  # AdamW's two moments
    moments: tuple[Moment, ...]  # of a full micro-batch, at which the peak can be
    host: int  # kept in host memory by `learner.cpu_offload`, not part of `total`
    is_parked: bool = False  # weights and moments are in host memory while servers generate
    runtime: int = RUNTIME_BYTES

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def resident(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + sum(self.frozen.values()) + self.optimizer + self.runtime

    @property
    def total(self) -> int:
        return self.resident + self.gradients + self.peak.total

    @property
    def idle(self) -> int:
        """Bytes on the GPU while a server that shares it generates."""
        return self.runtime if self.is_parked else self.resident

    @property
    def giving(self) -> int:
        """Bytes on the GPU while weights are sent or exported, without the buffers for sending."""
        return self.runtime + self.weights if self.is_parked else self.resident


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Bytes on each GPU of a server."""

    weights: int
    kv_cache: int  # below 0 if the weights don't fit
    runtime: int  # CUDA, and temporary tensors of the largest prefill and of sampling a full batch
    graphs: int
    kv_token_bytes: int  # one token's keys and values
    kv_tokens: int  # that the KV cache of all GPUs of the server holds
    num_sequences: int  # of full length, that it holds

    @property
    def awake(self) -> int:
        """Bytes that vLLM takes, without CUDA graphs."""
        return self.weights + self.kv_cache + self.runtime

    @property
    def asleep(self) -> int:
        """Bytes on the GPU of a sleeping server, whose weights are in host memory."""
        return RUNTIME_BYTES + self.graphs


def graph_bytes(server: ServerSection) -> int:
    return 0 if server.is_eager(on_gpu=True) else GRAPH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Memory of GPUs during a step: of one that server and learner share (colocated), or of one of each."""

    learner: LearnerPlan
    server: ServerPlan
    room: int
    is_shared: bool
    transfer: int  # largest full tensor and the buckets, while weights are sent
    export: int  # largest full tensor, while weights are exported

    @property
    def training(self) -> int:
        """Bytes at the learner's peak."""
        return self.learner.total + (self.server.asleep if self.is_shared else 0)

    @property
    def beside_server(self) -> int:
        """Most bytes beside the server's share while it generates. Learners may export for a restarted server then."""
        learner = max(self.learner.idle, self.learner.giving + self.export)
        return self.server.graphs + (learner if self.is_shared else 0)

    @property
    def generating(self) -> int:
        return self.server.awake + self.beside_server

    @property
    def sending(self) -> int:
        """Bytes while weights are sent; a server that shares the GPU has no KV cache then."""
        server = self.server.asleep + self.server.weights if self.is_shared else 0
        return self.learner.giving + self.transfer + server

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
    return GpuPlan(
        learner=plan_learner(shape, config),
        server=plan_server(shape, config.server, config.max_model_tokens, gpu.room),
        room=gpu.room,
        is_shared=config.cluster.placement == "colocated",
        transfer=transfer_bytes(shape, config.learner, config.server.weight_bucket_mib),
        export=export_bytes(shape, config.learner),
    )


def plan_learner(shape: ModelShape, config: Config) -> LearnerPlan:
    config = with_values(config, learner={"compile": config.compiles(on_gpu=True)})
    masters = weight_bytes(shape, config.learner, shard(shape.num_parameters, config.learner)) + MASTER * shard(
        shape.num_adapter_parameters, config.learner
    )
    gradients, optimizer = (kind * shard(shape.num_trained, config.learner) for kind in (MASTER, ADAM))
    element = ELEMENT_BYTES[config.learner.compute_dtype]
    frozen = {
        name: stored_bytes(own, element, shard(own.num_parameters, config.learner))
        for name, own in frozen_shapes(shape, frozen_models(config)).items()
    }
    on_gpu = 0 if config.learner.cpu_offload else 1
    return LearnerPlan(
        weights=on_gpu * masters,
        frozen={name: on_gpu * size for name, size in frozen.items()} | tower_bytes(shape, config),
        gradients=on_gpu * gradients,
        optimizer=on_gpu * optimizer,
        moments=learner_moments(shape, config.learner, needs_logits=config.distillation.needs_logits),
        host=(1 - on_gpu) * (masters + sum(frozen.values()) + gradients + optimizer),
        is_parked=config.learner.offload_when_idle,
    )


def tower_bytes(shape: ModelShape, config: Config) -> dict[str, int]:
    """Return the bytes of a frozen vision tower, which each learner holds whole, and of a step's features of pictures,
    if all prompts consist of pictures."""
    if not shape.num_frozen_in_tower:
        return {}
    element, num_ranks = ELEMENT_BYTES[config.learner.compute_dtype], config.learner.num_learners
    groups = 1 + -(-config.train.groups_per_step * config.learner.sequence_parallel // num_ranks)
    features = groups * config.rollout.max_prompt_tokens * shape.num_picture_layers * shape.hidden
    towers = shape.num_frozen_in_tower + (shape.teacher.num_frozen_in_tower if shape.teacher is not None else 0)
    return {"vision tower": element * towers, "features of pictures": element * features}


def weight_bytes(shape: ModelShape, learner: LearnerSection, num_parameters: int) -> int:
    """Return bytes of the policy's own weights: in the compute dtype if only adapters are trained, else in float32."""
    element = ELEMENT_BYTES[learner.compute_dtype] if shape.num_adapter_parameters else MASTER
    return stored_bytes(shape, element, num_parameters)


def stored_bytes(shape: ModelShape, element: int, num_parameters: int) -> int:
    # of some of a model's weights; those in 4 bits are an equal share of them
    saved = (element - BYTES_PER_VALUE) * shape.num_packed / shape.num_parameters
    return int((element - saved) * num_parameters)


def learner_moments(shape: ModelShape, learner: LearnerSection, *, needs_logits: bool) -> tuple[Moment, ...]:
    element = ELEMENT_BYTES[learner.compute_dtype]
    teacher = _teacher_bytes(shape, learner) if needs_logits else 0
    trained_in_layer = shape.num_adapter_parameters // shape.num_layers or shape.num_gathered_in_layer
    trained_in_root = 0 if shape.num_adapter_parameters else shape.num_root_parameters
    kept = shape.num_layers if learner.keeps_gathered(shape.num_layers) else 0
    return (
        # All layers have run; the buffer of the last gathered layer still exists.
        Moment(
            name="the head's forward and backward",
            gathered=gathered_bytes(shape, learner, kept or 1) + teacher,
            activations=kept_bytes(shape, learner),
            head=head_bytes(shape, learner, learner.token_budget, needs_logits=needs_logits),
        ),
        # The backward of the last layer, which comes first, while the layer before it is gathered.
        Moment(
            name="the backward of a layer",
            gathered=gathered_bytes(shape, learner, kept or 2) + teacher,
            activations=kept_bytes(shape, learner)
            + working_bytes(shape, learner)
            + (element * shape.hidden * shape.intermediate if shape.num_packed else 0),  # the matrix being unpacked
            head=element * (shape.vocabulary * shape.hidden if trained_in_root else 0),
            # Gradients of one layer in float32, which are being reduced, and gradients of the first matrix of the layer
            # that is computed.
            unreduced=FLOAT32 * trained_in_layer + min(element * shape.hidden * shape.intermediate, trained_in_layer),
        ),
        # The activations are freed; the gradients of embeddings and head are reduced together.
        Moment(
            name="reducing the gradients of embeddings and head",
            unreduced=(element + FLOAT32) * trained_in_root + FLOAT32 * shard(trained_in_root, learner),
        ),
    )


def frozen_shapes(shape: ModelShape, names: Iterable[str]) -> dict[str, ModelShape]:
    shapes = {"reference": shape, "teacher": shape.teacher or shape}
    return {name: shapes[name] for name in names}


def _teacher_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes of the teacher's head, last gathered layer and hidden states."""
    teacher, element = shape.teacher or shape, ELEMENT_BYTES[learner.compute_dtype]
    weights = teacher.num_root_parameters + teacher.num_layer_parameters
    return element * (weights + learner.token_budget * teacher.hidden)


def shard(num_parameters: int, learner: LearnerSection) -> int:
    return -(-num_parameters // (learner.num_learners // learner.replicas))


def transfer_bytes(shape: ModelShape, learner: LearnerSection, bucket_mib: int) -> int:
    """Return the bytes of the largest tensor and two buckets; a bucket holds at least the largest tensor."""
    largest = export_bytes(shape, learner)
    return largest if learner.lora.sends_adapter else largest + 2 * max(bucket_mib << 20, largest)


def export_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes of the largest tensor in bfloat16, or of all adapters."""
    if learner.lora.sends_adapter:
        return 2 * shape.num_adapter_parameters
    return 2 * max(shape.vocabulary * shape.hidden, shape.hidden * shape.intermediate)


def with_learner_numbers(shape: ModelShape, config: Config, gpu_bytes: int) -> Config:
    """Replace `auto` of activation_checkpointing and max_tokens_per_microbatch by these formulas' numbers (the largest
    power of two that fits); a run measures the tokens (`token_budget`)."""
    if config.learner.activation_checkpointing == "auto":
        config = with_values(config, learner={"activation_checkpointing": least_recomputed(shape, config, gpu_bytes)})
    if config.learner.max_tokens_per_microbatch != "auto":
        return config

    def having(tokens: int) -> Config:
        return with_values(config, learner={"max_tokens_per_microbatch": tokens})

    longest = longest_part(config.learner, config.max_model_tokens)
    sizes = [having(1 << power) for power in range(16, 3, -1) if 1 << power >= longest]
    fitting = (sized for sized in sizes if plan_learner(shape, sized).total <= AUTO_SHARE * gpu_bytes)
    return next(fitting, having(longest))


def without_autos(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    """Replace `auto` by numbers in the learner's section and in `server.gpu_memory_utilization`."""
    config = with_learner_numbers(shape, config, gpu.room)
    if config.server.gpu_memory_utilization != "auto":
        return config
    any_share = with_values(config, server={"gpu_memory_utilization": 0.5})  # the memory beside it stays the same
    free = (gpu.room - plan_gpu(shape, any_share, gpu).beside_server) / gpu.room
    largest = max(0.05, min(LARGEST_SHARE, int(free * 100) / 100))
    return with_values(config, server={"gpu_memory_utilization": max(0.05, round(largest - AUTO_MARGIN, 2))})


def least_recomputed(shape: ModelShape, config: Config, gpu_bytes: int) -> int:
    """Return the smallest number of recomputed layers with which a learner fits; all layers if none fits."""
    if config.learner.max_tokens_per_microbatch == "auto":
        tokens = max(longest_part(config.learner, config.max_model_tokens), ENOUGH_TOKENS)
        config = with_values(config, learner={"max_tokens_per_microbatch": tokens})
    room = AUTO_SHARE * gpu_bytes
    if config.cluster.placement == "colocated":
        room -= RUNTIME_BYTES + graph_bytes(config.server)  # of the sleeping server

    def fits(number: int) -> bool:
        return plan_learner(shape, with_values(config, learner={"activation_checkpointing": number})).total <= room

    return next(filter(fits, range(shape.num_layers)), shape.num_layers)


def longest_part(learner: LearnerSection, max_model_tokens: int) -> int:
    """Return the tokens of the longest trajectory that one learner computes."""
    return -(-max_model_tokens // learner.sequence_parallel)


def kept_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes that a forward of a full micro-batch keeps for the backward, without the output head."""
    tokens, element = learner.token_budget, ELEMENT_BYTES[learner.compute_dtype]
    # The last norm: its input in float32, its output, and the rows of the output that the head reads.
    last_norm = tokens * (FLOAT32 + 2 * element) * shape.hidden
    recomputed = learner.num_recomputed(shape.num_layers)
    inputs = recomputed * tokens * element * shape.hidden
    tower = tokens * kept_in_tower(shape, learner)
    return inputs + (shape.num_layers - recomputed) * _layer_bytes(shape, learner) + last_norm + tower


def kept_in_tower(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes that a trained vision tower keeps for the backward for each token of a picture."""
    recomputes = learner.num_recomputed(shape.num_layers) > 0
    return ELEMENT_BYTES[learner.compute_dtype] * shape.tower_values[recomputes]


def working_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes that the backward of one layer takes beside all kept activations.

    The first layers are recomputed last, when all other activations are freed. So their activations come on top of what
    is kept only if every layer is recomputed.
    """
    tokens, element = learner.token_budget, ELEMENT_BYTES[learner.compute_dtype]
    recomputes_all = learner.num_recomputed(shape.num_layers) == shape.num_layers
    again = _layer_bytes(shape, learner) if recomputes_all else 0
    return again + tokens * element * 2 * (shape.intermediate + shape.hidden)


def _layer_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    tokens, element, is_compiled = learner.token_budget, ELEMENT_BYTES[learner.compute_dtype], learner.compile is True
    own = layer_bytes_per_token(shape, element, is_compiled=is_compiled)
    return tokens * (own + adapter_bytes_per_token(shape, element, is_compiled=is_compiled))


def layer_bytes_per_token(shape: ModelShape, element: int, *, is_compiled: bool = False) -> int:
    """Return the bytes that a layer of Llama's kind keeps for one token.

    Norms (also of queries and keys): the input in float32, normed values, output. Attention: queries, keys, values,
    output. The MLP: gate, its activation, up, and their product. Compiled norms keep only the input, in the compute
    dtype, and the output; a compiled MLP computes the activation again.
    """
    hidden = shape.hidden
    norms = (element if is_compiled else FLOAT32 + element) * (2 * hidden + _normed_heads(shape))
    projections = 2 * element * hidden
    attention = element * shape.head_size * (2 * shape.num_heads + 2 * shape.num_key_heads)
    is_plain = not is_compiled or shape.num_idle_parameters  # experts are not compiled
    return norms + projections + attention + (4 if is_plain else 3) * element * shape.intermediate


def adapter_bytes_per_token(shape: ModelShape, element: int, *, is_compiled: bool = False) -> int:
    """Return the change if only adapters are trained: plus their first outputs, minus the values of frozen norms."""
    if not shape.num_adapter_parameters:
        return 0
    saved = 0 if is_compiled else 2 * shape.hidden + _normed_heads(shape)
    return element * (shape.adapter_rank_sum - saved)


def _normed_heads(shape: ModelShape) -> int:
    return shape.head_size * (shape.num_heads + shape.num_key_heads) if shape.norms_heads else 0


def head_bytes(
    shape: ModelShape,
    learner: LearnerSection,
    num_tokens: int | None = None,
    *,
    needs_logits: bool,
    softmax_rows: int | None = None,
) -> int:
    """Return the peak bytes of computing log-probs in chunks (`rayapp.learner.log_probs`). `num_tokens` None: more than
    the number whose logits are kept; `softmax_rows` None: as on a GPU; `needs_logits`: the loss needs a
    teacher's distribution."""
    own = _own_head_bytes(shape, learner, num_tokens, softmax_rows or GPU_SOFTMAX_ROWS)
    return own + (_teacher_head_bytes(shape, learner, num_tokens) if needs_logits else 0)


def _own_head_bytes(shape: ModelShape, learner: LearnerSection, num_tokens: int | None, softmax_rows: int) -> int:
    rows, element = learner.log_prob_chunk_tokens, ELEMENT_BYTES[learner.compute_dtype]
    # Number of rows whose logits are kept from forward to backward: as many as fit into the memory of one float32
    # chunk.
    kept_rows = rows * FLOAT32 // element
    weight = 0 if shape.num_adapter_parameters else shape.vocabulary * shape.hidden  # a frozen head has no gradient
    if num_tokens is not None and num_tokens <= kept_rows:
        kept = element * num_tokens * shape.vocabulary
        softmax = 2 * FLOAT32 * min(rows, num_tokens, softmax_rows) * shape.vocabulary
        # The float32 sum of the head's gradient exists from the second chunk on.
        return kept + max(softmax, element * weight) + (FLOAT32 * weight if num_tokens > rows else 0)
    logits = rows * shape.vocabulary
    kept = FLOAT32 * logits
    # One more chunk of logits, and during its softmax a float32 copy and the result.
    softmax = element * logits + 2 * FLOAT32 * min(rows, softmax_rows) * shape.vocabulary
    if not weight:
        return kept + softmax
    # The float32 sum of the head's gradient exists from the first chunk on. Each chunk adds its share after its
    # softmax.
    return kept + FLOAT32 * weight + max(softmax, element * (logits + weight))


def _teacher_head_bytes(shape: ModelShape, learner: LearnerSection, num_tokens: int | None) -> int:
    """Return the bytes of log-probs of both, their ratio, and the gradient."""
    rows = min(learner.log_prob_chunk_tokens, num_tokens or sys.maxsize)
    return (3 * FLOAT32 + ELEMENT_BYTES[learner.compute_dtype]) * rows * shape.vocabulary


def head_bytes_per_token(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes of a predicted position without its logits: hidden state, its gradient, indices and scores."""
    return 2 * ELEMENT_BYTES[learner.compute_dtype] * shape.hidden + 64


def gathered_bytes(shape: ModelShape, learner: LearnerSection, num_layers: int = 2) -> int:
    """Return the bytes that FSDP gathers in the compute dtype: all parameters outside the layers, and some layers."""
    layer = shape.num_gathered_in_layer + shape.num_adapter_parameters // shape.num_layers
    element = ELEMENT_BYTES[learner.compute_dtype]
    saved = int((element - BYTES_PER_VALUE) * shape.num_packed / shape.num_layers)
    return element * shape.num_root_parameters + num_layers * (element * layer - saved)


def plan_server(shape: ModelShape, section: ServerSection, max_model_tokens: int, gpu_bytes: int) -> ServerPlan:
    parallel = section.tensor_parallel_size
    element = ELEMENT_BYTES[section.dtype]
    weights = server_weight_bytes(shape, section)
    # A layer's inputs and products in the largest prefill. For sampling: logits in float32, their softmax, and the log
    # of it.
    prefill = element * section.gpu_batched_tokens * (4 * shape.hidden + 2 * shape.intermediate // parallel)
    sampling = 3 * FLOAT32 * section.max_num_seqs * shape.vocabulary
    runtime = RUNTIME_BYTES + prefill + sampling
    kv_cache = section.kv_cache_bytes(on_gpu=True)
    if kv_cache is None:
        kv_cache = int(gpu_bytes * section.gpu_share) - weights - runtime
    # Every layer holds a key and a value for every key head; the heads are divided among the GPUs.
    cached = 1 if section.kv_cache_dtype == "fp8" else element
    per_token = 2 * cached * shape.num_layers * max(1, shape.num_key_heads // parallel) * shape.head_size
    tokens = max(0, kv_cache) // per_token
    return ServerPlan(
        weights=weights,
        kv_cache=kv_cache,
        runtime=runtime,
        graphs=graph_bytes(section),
        kv_token_bytes=per_token,
        kv_tokens=tokens,
        num_sequences=tokens // max_model_tokens,
    )


def server_weight_bytes(shape: ModelShape, server: ServerSection) -> int:
    """Return the bytes on each GPU. Quantization rounds the layers' matrices to a byte a value; scales take 1%."""
    in_layers = shape.num_layers * shape.num_layer_parameters if server.quantization != "none" else 0
    beside = max(0, shape.num_parameters + shape.num_frozen_in_tower - in_layers)
    whole = ELEMENT_BYTES[server.dtype] * beside + in_layers
    return whole // server.tensor_parallel_size


def plan_model_servers(config: Config, gpu_bytes: int) -> Iterator[tuple[ModelServerSection, ServerPlan]]:
    """Plan the servers of models other than the policy, on GPUs of their own. CUDA graphs are in vLLM's share."""
    for section in asked_servers(config):
        own = alone(config, section)
        yield section, plan_server(model_shape(own), own.server, own.max_model_tokens, gpu_bytes)
