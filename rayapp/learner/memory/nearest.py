"""Finds the config that fits into memory with the fewest changes, by the formulas of `rayapp.learner.memory.plan`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from rayapp.config.config import Config, with_values
from rayapp.learner.memory.plan import longest_part, plan_gpu, with_learner_numbers
from rayapp.learner.memory.shape import Gpu, ModelShape

MICRO_BATCH_STEP, LARGEST_MICRO_BATCH = 256, 1 << 18
LARGEST_SHARE = 0.95
"""Largest share of a GPU that vLLM may get: other programs and fragmentation take the rest."""
AUTO_MARGIN = 0.03
"""`server.gpu_memory_utilization: auto` becomes the largest share that fits by the plan, minus this margin."""
SMALL_CHUNK = 256
"""Minimum number of rows in a chunk of logits: with fewer rows, matrix products are slow."""

Change = Callable[[ModelShape, Config, Gpu], Config]


def largest_micro_batch(shape: ModelShape, config: Config, gpu: Gpu) -> int:
    """Return the largest `learner.max_tokens_per_microbatch` with which the learner fits; 0 if the longest sequence
    does not fit.
    """

    def fits(tokens: int) -> bool:
        return plan_gpu(shape, with_values(config, learner={"max_tokens_per_microbatch": tokens}), gpu).learner_fits

    low, high = 0, LARGEST_MICRO_BATCH // MICRO_BATCH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * MICRO_BATCH_STEP) else (low, middle - 1)
    found = low * MICRO_BATCH_STEP
    return found if found >= longest_part(config) else 0


def largest_server_share(shape: ModelShape, config: Config, gpu: Gpu) -> float:
    """Return the largest `server.gpu_memory_utilization` with which a server fits, in whole hundredths."""
    config = with_learner_numbers(shape, config, gpu.room)
    if config.server.gpu_memory_utilization == "auto":
        config = with_values(config, server={"gpu_memory_utilization": 0.5})  # the memory beside it stays the same
    free = (gpu.room - plan_gpu(shape, config, gpu).beside_server) / gpu.room
    return max(0.05, min(LARGEST_SHARE, int(free * 100) / 100))


def without_autos(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    """Replace `auto` by numbers in the learner's section and in `server.gpu_memory_utilization`."""
    config = with_learner_numbers(shape, config, gpu.room)
    if config.server.gpu_memory_utilization != "auto":
        return config
    share = round(largest_server_share(shape, config, gpu) - AUTO_MARGIN, 2)
    return with_values(config, server={"gpu_memory_utilization": max(0.05, share)})


def nearest_that_fits(shape: ModelShape, config: Config, gpu: Gpu) -> Config | None:
    """Return a config that fits with the fewest changes; None if no combination of changes fits."""
    for size in range(len(CHANGES) + 1):
        for changes in itertools.combinations(CHANGES, size):
            changed = config
            for change in changes:
                changed = change(shape, changed, gpu)
            changed = _with_smaller_micro_batch(shape, changed, gpu)
            if plan_gpu(shape, changed, gpu).fits:
                return changed
    return None


def overrides_between(before: Config, after: Config) -> list[str]:
    """Return the differences as `key.sub=value`, as the command line takes them."""
    return [f"{key}={str(new).lower()}" for key, old, new in _leaves(before, after) if old != new]


def _leaves(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    for section in ("server", "learner"):
        old, new = getattr(before, section), getattr(after, section)
        yield from ((f"{section}.{key}", getattr(old, key), getattr(new, key)) for key in type(old).model_fields)


def _with_smaller_micro_batch(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    most = largest_micro_batch(shape, config, gpu)
    if most == 0 or most >= config.learner.token_budget:
        return config
    return with_values(config, learner={"max_tokens_per_microbatch": max(most, longest_part(config))})


def _with(section: str, **values: Any) -> Change:
    return lambda shape, config, gpu: with_values(config, **{section: values})


def _small_chunks(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    return with_values(
        config, learner={"log_prob_chunk_tokens": min(config.learner.log_prob_chunk_tokens, SMALL_CHUNK)}
    )


def _smaller_server(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    """Give the server at most the share that the learner leaves."""
    share = min(config.server.gpu_share, largest_server_share(shape, config, gpu))
    return with_values(config, server={"gpu_memory_utilization": share})


def _larger_server(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    return with_values(config, server={"gpu_memory_utilization": max(0.9, config.server.gpu_share)})


def _wider_servers(shape: ModelShape, config: Config, gpu: Gpu) -> Config:
    """Double the tensor parallelism. An even number of servers is halved, so that they keep their GPUs; an odd number
    stays.
    """
    tp, servers = config.server.tensor_parallel_size, config.server.num_servers
    if shape.num_heads % (2 * tp):
        return config
    if servers % 2 == 0:
        return with_values(config, server={"tensor_parallel_size": 2 * tp, "num_servers": servers // 2})
    wider = with_values(config, server={"tensor_parallel_size": 2 * tp})
    return _with_learners(wider, 2) if config.cluster.placement == "colocated" else wider


def _more_learners(factor: int) -> Change:
    return lambda shape, config, gpu: _with_servers(_with_learners(config, factor), factor)


def _with_learners(config: Config, factor: int) -> Config:
    return with_values(config, learner={"num_learners": factor * config.learner.num_learners})


def _with_servers(config: Config, factor: int) -> Config:
    """Multiply the servers by `factor` if they share the learners' GPUs."""
    if config.cluster.placement == "split":
        return config
    return with_values(config, server={"num_servers": factor * config.server.num_servers})


CHANGES: tuple[Change, ...] = (
    _with("learner", activation_checkpointing=True), _small_chunks, _smaller_server, _larger_server, _wider_servers,
    _more_learners(2), _with("learner", cpu_offload=True), _more_learners(4),
)  # fmt: skip
"""Changes to try, cheapest first."""
