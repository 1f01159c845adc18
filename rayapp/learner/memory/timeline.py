"""A step, phase by phase: who holds what on a GPU, how long it takes, and how much of the GPU that uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayapp.config.config import Config
from rayapp.learner.memory.gpus import Gpu
from rayapp.learner.memory.plan import RUNTIME_BYTES, GpuPlan
from rayapp.learner.memory.shape import ModelShape
from rayapp.learner.memory.speed import Speed, step_speeds

HOLDERS = ("learner_stays", "learner_works", "engine", "kv_cache", "graphs", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """Bytes on one GPU during a phase of a step."""

    phase: str
    gpu: str
    """Whose it is: shared, server or learner."""
    speed: Speed
    learner_stays: int = 0
    """Shards, AdamW's moments, CUDA."""
    learner_works: int = 0
    """Gradients, gathered weights, activations and logits, at their peak."""
    engine: int = 0
    """vLLM's weights, its working memory and CUDA; asleep only the last."""
    kv_cache: int = 0
    graphs: int = 0
    buffer: int = 0
    """Weights on their way."""

    @property
    def total(self) -> int:
        return sum(getattr(self, holder) for holder in HOLDERS)


def step_timeline(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[PhaseRow]:
    """The phases of a step in their order. Where servers and learners share no GPU, of the one that works."""
    learner, server = plan.learner, plan.server
    stays = learner.resident
    beside = stays if plan.is_shared else 0
    asleep = {"engine": RUNTIME_BYTES, "graphs": server.graphs} if plan.is_shared else {}
    for phase, speed in step_speeds(shape, config, gpu, server).items():
        if phase == "generate":
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "server", speed=speed, learner_stays=beside,
                           engine=server.weights + server.runtime, kv_cache=max(0, server.kv_cache),
                           graphs=server.graphs)  # fmt: skip
        elif phase == "weight sync":
            awake = {"engine": RUNTIME_BYTES + server.weights, "graphs": server.graphs} if plan.is_shared else {}
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "learner", speed=speed,
                           learner_stays=stays, buffer=plan.transfer, **awake)  # fmt: skip
        else:
            yield PhaseRow(phase=phase, gpu="shared" if plan.is_shared else "learner", speed=speed,
                           learner_stays=stays, learner_works=_works(phase, plan), **asleep)  # fmt: skip


def _works(phase: str, plan: GpuPlan) -> int:
    """What the learner holds at this phase's peak beside what stays."""
    learner = plan.learner
    if phase == "train":
        return learner.gradients + learner.peak.total
    if phase == "optimizer":
        return learner.gradients
    # A forward alone keeps nothing: gathered weights, and the logits of a chunk at most.
    first = learner.moments[0]
    return first.gathered + first.head
