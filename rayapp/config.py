"""The one configuration: every key, its unit, its bounds, and why its default is what it is.

`configs/*.yaml` state only what differs from these defaults. Loading (files, `key.sub=value` overrides, the nearest
valid key for a typo) is in `config_loading.py`; this module and the `config_*` it imports are the schema and the
arithmetic between keys. They import nothing heavy, so that `rayapp --help` is instant.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from rayapp import config_checks
from rayapp.config_agent import AgentSection, DataSection, RewardSection
from rayapp.config_algorithm import AlgorithmSection
from rayapp.config_base import FrozenModel
from rayapp.config_learner import LearnerSection
from rayapp.config_sections import (
    CheckpointSection,
    ClusterSection,
    EvalSection,
    ModelSection,
    RecoverySection,
    RolloutSection,
    RunSection,
    ServerSection,
    TrackingSection,
    TrainSection,
)
from rayapp.sandbox.config import SandboxConfig
from rayapp.storage.location import Location


class Config(FrozenModel):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: tuple[str, ...] = ("sort_numbers", "max_subarray_sum")
    """Names of shipped tasks, or paths of .yaml or .py files. Prompts go round them in a seeded order. Not with
    data files: with those, none is the default."""
    data: DataSection = DataSection()
    agent: AgentSection = AgentSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    learner: LearnerSection = LearnerSection()
    server: ServerSection = ServerSection()
    sandbox: SandboxConfig = SandboxConfig()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    cluster: ClusterSection = ClusterSection()
    recovery: RecoverySection = RecoverySection()
    tracking: TrackingSection = TrackingSection()

    @property
    def uses_data(self) -> bool:
        """True for a run on data files, False for one on tasks."""
        return bool(self.data.train_files or self.data.eval_files)

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence the engine must hold."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def num_gpus_needed(self) -> int:
        """GPUs of servers and learners together, where there are GPUs."""
        servers, learners = self.server.num_servers * self.server.tensor_parallel_size, self.learner.num_learners
        return max(servers, learners) if self.cluster.placement == "colocated" else servers + learners

    @property
    def gpu_arithmetic(self) -> str:
        """`GPUs: 4 servers x TP 2 + 8 learners = 16`, for messages."""
        servers, tp, learners = self.server.num_servers, self.server.tensor_parallel_size, self.learner.num_learners
        if self.cluster.placement == "colocated":
            return f"GPUs: {servers} servers x TP {tp} on those of {learners} learners = {self.num_gpus_needed}"
        return f"GPUs: {servers} servers x TP {tp} + {learners} learners = {self.num_gpus_needed}"

    @property
    def run_uri(self) -> str:
        """Where the run is kept: `<output_dir>/<name>`."""
        return str(Location.parse(self.run.output_dir).join(self.run.name))

    @property
    def run_folder(self) -> Path:
        """Where the run is written on this machine: `run_uri`, or the staging folder of a run on s3://."""
        if not Location.parse(self.run.output_dir).is_remote:
            return Path(self.run_uri)
        # Two buckets may hold runs of one name.
        digest = hashlib.sha256(self.run_uri.encode()).hexdigest()[:12]
        return self.run.staging_dir.expanduser() / f"{self.run.name}-{digest}"

    @model_validator(mode="before")
    @classmethod
    def _data_in_place_of_tasks(cls, values: Any) -> Any:
        """Data files without a word about tasks mean: no tasks."""
        data = values.get("data") if isinstance(values, dict) and "tasks" not in values else None
        has_files = isinstance(data, dict) and (data.get("train_files") or data.get("eval_files"))
        return values | {"tasks": []} if has_files else values

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        config_checks.check(self)
        return self
