"""Computes the host memory that a configuration takes: of a node of GPUs, and of a machine that runs it on its CPU."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config.config import Config, frozen_models, with_number_formats, with_values
from rayapp.config.learner import CPU_SOFTMAX_ROWS
from rayapp.learner.memory.plan import (
    ADAM,
    ELEMENT_BYTES,
    FLOAT32,
    MASTER,
    frozen_shapes,
    head_bytes,
    kept_bytes,
    longest_part,
    plan_learner,
    server_weight_bytes,
    shard,
    stored_bytes,
    tower_bytes,
    weight_bytes,
    with_learner_numbers,
    working_bytes,
)
from rayapp.learner.memory.shape import GIB, NODE_GPUS, ModelShape

# resident before weights: a learner; a server's three processes (vLLM 0.30, torch 2.13)
LEARNER_BYTES, SERVER_BYTES = 7 * GIB // 10, 21 * GIB // 10
WORKER_BYTES, RAY_BYTES = GIB, 4 * GIB  # assumed: a rollout worker with its groups; Ray and the driver together
PINNED_FACTOR = 1.5  # of pinned host memory for each byte kept there: torch rounds blocks up to powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """Bytes of host memory on a node of GPUs, without code in sandboxes."""

    backups: int  # weights of sleeping servers, in pinned memory
    learners: int  # kept or parked in host memory
    staging: int  # copies from which a checkpoint is written
    processes: int
    object_store: int

    @property
    def total(self) -> int:
        return self.backups + self.learners + self.staging + self.processes + self.object_store

    def described(self) -> str:
        names = {
            "backups": "sleeping servers' weights",
            "learners": "parked by learners",
            "staging": "checkpoint being written",
            "processes": "processes",
            "object_store": "object store",
        }
        parts = [f"{getattr(self, key) / GIB:.0f} {name}" for key, name in names.items() if getattr(self, key)]
        return f"{self.total / GIB:.0f} GiB = {' + '.join(parts)}"


def plan_node(shape: ModelShape, config: Config, node_gpus: int = NODE_GPUS) -> NodePlan:
    learners = min(config.learner.num_learners, node_gpus)
    server_gpus = min(config.server.num_servers * config.server.tensor_parallel_size, node_gpus)
    longest = longest_part(config.learner, config.max_model_tokens)
    plan = plan_learner(shape, with_values(config, learner={"max_tokens_per_microbatch": longest}))
    weights = server_weight_bytes(shape, config.server)
    sleeps = config.cluster.placement == "colocated"
    parked = plan.resident - plan.runtime if plan.is_parked else plan.host
    trained, contents = shard(shape.num_trained, config.learner), config.checkpoint.save_contents
    staged = trained * (MASTER * ("model" in contents) + ADAM * ("optimizer" in contents))
    exported = 2 * shape.num_parameters // config.learner.num_learners if "hf_model" in contents else 0
    return NodePlan(
        backups=int(PINNED_FACTOR * weights) * server_gpus if sleeps else 0,
        learners=int(PINNED_FACTOR * parked) * learners,
        staging=(staged + exported) * learners,
        processes=learners * LEARNER_BYTES
        + server_gpus * SERVER_BYTES
        + config.rollout.num_workers * WORKER_BYTES
        + RAY_BYTES,
        object_store=config.cluster.object_store_mib << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Bytes of this machine's memory that a run on its CPU takes."""

    learners: int  # at the peak of a step
    activations: int  # of `learners`, taken only by the largest micro-batch
    servers: int
    object_store: int

    @property
    def total(self) -> int:
        return self.learners + self.servers + self.object_store

    @property
    def least(self) -> int:
        """Bytes needed even with the shortest micro-batches."""
        return self.total - self.activations


def plan_host(shape: ModelShape, config: Config, have: int) -> HostPlan:
    """Plan a run on one machine's CPU with `have` bytes. All layers stay gathered there, gradients are summed before
    they are reduced, and malloc keeps freed memory."""
    config = with_number_formats(config, on_gpu=False)
    if config.learner.activation_checkpointing == "auto":
        config = with_values(config, learner={"activation_checkpointing": 0})
    config = with_learner_numbers(shape, config, have // 2)
    section, server = config.learner, config.server
    element = ELEMENT_BYTES[section.compute_dtype]
    models = frozen_shapes(shape, frozen_models(config)).values()
    frozen = sum(stored_bytes(own, element, own.num_parameters) for own in models)
    adapters = MASTER * shape.num_adapter_parameters
    shards = weight_bytes(shape, config.learner, shape.num_parameters) + adapters + frozen
    shards += (ADAM + FLOAT32) * shape.num_trained
    gathered = stored_bytes(shape, element, shape.num_parameters) + frozen
    each = LEARNER_BYTES + gathered + element * shape.num_trained
    each += sum(tower_bytes(shape, config).values())
    needs_logits = config.distillation.needs_logits
    head = head_bytes(shape, section, needs_logits=needs_logits, softmax_rows=CPU_SOFTMAX_ROWS)
    batch = kept_bytes(shape, config.learner) + working_bytes(shape, config.learner) + head
    rank = SERVER_BYTES + (server.kv_cache_bytes(on_gpu=False) or 0)
    weights = ELEMENT_BYTES[server.dtype] * (shape.num_parameters + shape.num_frozen_in_tower)
    serving = weights + server.tensor_parallel_size * rank
    return HostPlan(
        learners=shards + section.num_learners * (each + batch),
        activations=section.num_learners * batch,
        servers=server.num_servers * serving,
        object_store=config.cluster.object_store_mib << 20,
    )
