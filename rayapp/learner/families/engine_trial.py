"""A tiny model in vLLM: does it compute what the learner computes? Used by `models check`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayapp.config.config import Config, with_values
from rayapp.core.types import FloatArray, Group
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.buckets import WeightBucket, pack
from rayapp.learner.families.trial import learner_of
from rayapp.learner.scoring import log_probs_of
from rayapp.learner.state.export import export_hf, sent_weights

MAX_ENGINE_ERROR = {"float32": 1e-4, "bfloat16": 0.2}
"""Of log-probs, by the engine's dtype: families served rightly differ by 2e-5 at most in float32, and by 0.12 in
bfloat16 where a router's choice is close; wrong ones by 0.7 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineErrors:
    """The largest difference of a log-prob between engine and learner."""

    at_start: float
    """With what the learner has written as `final/`."""
    after_syncs: tuple[float, ...]
    """Of other weights, and of those that it began with."""
    unseen: int
    """Sampled tensors of a sync that the engine's check of what it holds does not see."""

    @property
    def largest(self) -> float:
        return max(self.at_start, *self.after_syncs)


async def engine_errors(configs: tuple[Config, Config], groups: list[Group], final: Path) -> EngineErrors:
    """Start vLLM with a model that a learner has written, and give it weights twice.

    Args:
        configs: over two models of one architecture; the engine starts with the first.
        final: folder to be written.
    Raises:
        EngineError: vLLM can't load the model.
        WeightSyncError: it refused the weights.
    """
    first, second = _sent(configs[0], groups, final), _sent(configs[1], groups)
    engine = await VllmEngine.start(with_values(configs[0], model={"path": str(final)}))
    try:
        at_start = await _error(engine, groups, first[1])
        after, unseen = [], 0
        for version, (bucket, expected) in enumerate((second, first), start=1):
            unseen = len(bucket.checksums) - await _load(engine, version, bucket)
            after.append(await _error(engine, groups, expected))
    finally:
        engine.close()
    return EngineErrors(at_start=at_start, after_syncs=tuple(after), unseen=unseen)


def _sent(config: Config, groups: list[Group], final: Path | None = None) -> tuple[WeightBucket, list[FloatArray]]:
    """What a learner of this model sends, and its log-probs."""
    with learner_of(config) as learner:
        if final is not None:
            export_hf(config, learner.model, final, learner.ranks)
        tensors = list(sent_weights(learner.model, config.learner.lora))
        log_probs = [row for group in groups for row in log_probs_of(learner, group)]
    # Room for each to begin on a cache line, as `pack` lays them out.
    num_bytes = sum(tensor.numel() * tensor.element_size() + 64 for _, tensor in tensors)
    return next(pack(tensors, num_bytes)), log_probs


async def _load(engine: VllmEngine, version: int, bucket: WeightBucket) -> int:
    with tempfile.NamedTemporaryFile() as file:
        bucket.data.tofile(file.name)
        return await engine.load_weights(version, file.name, bucket.entries, dict(bucket.checksums))


async def _error(engine: VllmEngine, groups: list[Group], expected: list[FloatArray]) -> float:
    rows = [t for group in groups for t in group.trajectories]
    found = [(await engine.prompt_log_probs(t.token_ids.tolist()))[t.response_mask[1:]] for t in rows]
    return max(float(np.abs(own - theirs).max()) for own, theirs in zip(found, expected, strict=True))
