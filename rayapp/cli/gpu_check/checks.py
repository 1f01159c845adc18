"""The checks in their order: what each needs, how long it may take, and where its code is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from rayapp.cli.gpu_check.outcome import CheckContext, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    what: str
    function: str
    """`module:function` below this package: it takes a CheckContext and returns an Outcome."""
    deadline_s: float
    min_gpus: int = 1
    runs_on_cpu: bool = True

    def why_not(self, context: CheckContext) -> str:
        """Why it can't run here; empty where it can."""
        if not context.on_gpu:
            return "" if self.runs_on_cpu else "needs a GPU"
        return "" if context.num_gpus >= self.min_gpus else f"needs {self.min_gpus} GPUs"

    def run(self, context: CheckContext) -> Outcome:
        """Run it in this process."""
        module, _, function = self.function.partition(":")
        found: Callable[[CheckContext], Outcome] = getattr(import_module(f"{__package__}.{module}"), function)
        return found(context)


CHECKS = (
    Check(name="versions", what="driver, CUDA, packages", function="hardware:versions", deadline_s=120),
    Check(name="gemm", what="bfloat16 products", function="hardware:gemm", deadline_s=180),
    Check(name="p2p", what="GPU to GPU", function="hardware:peer_access", deadline_s=180, min_gpus=2,
          runs_on_cpu=False),
    Check(name="all-reduce", what="collectives", function="hardware:all_reduce", deadline_s=300, min_gpus=2),
    Check(name="memory", what="a learner beside its plan", function="engine:memory_against_plan", deadline_s=600,
          runs_on_cpu=False),
    Check(name="vllm", what="an engine, asleep and awake, log-probs", function="engine:engine_tp1", deadline_s=900),
    Check(name="vllm-tp2", what="an engine over two GPUs", function="engine:engine_tp2", deadline_s=900, min_gpus=2,
          runs_on_cpu=False),
    Check(name="split", what="three steps, GPUs apart", function="training:train_split", deadline_s=1200, min_gpus=2),
    Check(name="split-store", what="the same, weights through Ray", function="training:train_split_store",
          deadline_s=1200, min_gpus=2),
    Check(name="colocated", what="three steps, GPUs shared", function="training:train_colocated", deadline_s=1200),
)  # fmt: skip
BY_NAME = {check.name: check for check in CHECKS}
