"""All keys of a run in one model: its sections, and the values that follow from several of them.

`configs/*.yaml` hold only settings that differ from these defaults. No heavy package is imported.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from rayapp.config.agent import (
    AGENTS,
    AUTO,
    AgentSection,
    DataSection,
    RewardSection,
    SourceSection,
    filled_in,
    is_data_file,
)
from rayapp.config.algorithm import (
    ADV_ESTIMATORS,
    NEEDS_GROUP,
    NEEDS_LOG_PROBS,
    NEEDS_NO_GROUP,
    AlgorithmSection,
)
from rayapp.config.base import FrozenModel
from rayapp.config.learner import LearnerSection
from rayapp.config.other_models import DistillationSection, JudgeSection, ModelServerSection
from rayapp.config.sandbox import SandboxConfig
from rayapp.config.sections import (
    BudgetSection,
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
    WarmupSection,
    rounded_keys,
)
from rayapp.core.files import Location

LEAST_DEADLINE_S = 300.0
SLOWEST_TOKEN_S = 0.25  # bound for a healthy server's full batch: 20 times an 8B model's on an H100
LACKS_BASELINE = (
    "rollout.group_size is 1, so a trajectory's advantage is its reward, without a baseline: rewards that are never "
    "negative can only make answers likelier. Raise rollout.group_size, e.g. to 8."
)


class Keys(FrozenModel):
    """All keys of a run, each validated separately; `Config` also checks that they agree."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: tuple[str, ...] = ("sort_numbers", "max_subarray_sum")
    """Tasks to train on. Either names of shipped tasks, .yaml or .py files, task folders, benchmarks, generators and
    data sets in SWE-bench's form, swe:FILE (docs/tasks.md); or data files in verl's schema: .parquet, .jsonl or .json,
    local, on s3://, or on the Hugging Face hub as hf://datasets/OWNER/NAME/FILE (docs/data.md). Prompts come in a
    seeded order. To combine tasks and data files, use `sources` and leave `tasks` empty."""
    sources: tuple[SourceSection, ...] = ()
    """Several sets of tasks in one run, each with a share of the groups and its own settings (docs/tasks.md). Replaces
    `tasks`, which is short for one source with the run's settings."""
    data: DataSection = DataSection()
    agent: AgentSection = AgentSection()
    reward: RewardSection = RewardSection()
    judges: tuple[JudgeSection, ...] = ()
    """Judge models behind HTTP, which `reward.judges` refers to by name (docs/judges.md)."""
    model_servers: tuple[ModelServerSection, ...] = ()
    """Models that the run serves itself, for judges and agents (docs/judges.md#servers-of-the-run)."""
    algorithm: AlgorithmSection = AlgorithmSection()
    distillation: DistillationSection = DistillationSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    warmup: WarmupSection = WarmupSection()
    learner: LearnerSection = LearnerSection()
    server: ServerSection = ServerSection()
    sandbox: SandboxConfig = SandboxConfig()
    budget: BudgetSection = BudgetSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    cluster: ClusterSection = ClusterSection()
    recovery: RecoverySection = RecoverySection()
    tracking: TrackingSection = TrackingSection()

    @property
    def profile_note(self) -> str:
        """Sentence about `train.profile_steps` for users; empty if no step is profiled."""
        if not (steps := self.train.profile_steps):
            return ""
        shown = f"train.profile_steps is [{', '.join(map(str, steps))}]"
        if late := [step for step in steps if step > self.train.num_steps]:
            return f"{shown}, but the run ends at step {self.train.num_steps}: {late[0]} is never profiled."
        return (
            f"{shown}: these steps take longer; learner 0 and server 0 keep their traces in memory until the step ends."
        )

    @property
    def rounding_note(self) -> str:
        """Sentence about formats in which servers and learners differ, and their correction; empty without any."""
        found = [f"server.{key}={value}" for key, value in rounded_keys(self.server.model_dump()).items()]
        if not found:
            return ""
        return (
            f"servers round what learners don't ({', '.join(found)}): importance weights correct every token "
            "(algorithm.rollout_correction.level=token); rollout_probs_diff/* measure the difference"
        )

    @property
    def judges_read_references(self) -> bool:
        """True if a judge of this source reads its rows' ground truths."""
        return any(judge.reference for judge in self.judges if judge.name in self.reward.judges)

    @property
    def uses_data(self) -> bool:
        return any(map(is_data_file, (*self.tasks, *self.eval.tasks)))

    @property
    def agent_name(self) -> str:
        """Agent of tasks, and of data rows that name no agent: tool_agent, single_turn_agent or external_agent."""
        tool_agent, single_turn_agent = AGENTS
        usual = tool_agent if self.uses_data else single_turn_agent
        return usual if self.agent.name == AUTO else self.agent.name

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence that the engine must hold, in tokens."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def compares_groups(self) -> bool:
        """True if advantages compare the trajectories of a group, so that a single trajectory has no advantage."""
        is_alone = self.rollout.group_size == 1 and self.algorithm.adv_estimator not in NEEDS_GROUP
        uses_rewards = self.distillation.reward_weight > 0
        return uses_rewards and not is_alone and self.algorithm.adv_estimator not in NEEDS_NO_GROUP

    @property
    def lacks_baseline(self) -> bool:
        """True if advantages are plain rewards, because a group has only one trajectory."""
        others = (*NEEDS_NO_GROUP, *NEEDS_GROUP)
        uses_rewards = self.distillation.reward_weight > 0
        return self.rollout.group_size == 1 and uses_rewards and self.algorithm.adv_estimator not in others

    @property
    def pulls_at_zero_advantage(self) -> bool:
        """True if a trajectory without an advantage may have a gradient."""
        return self.algorithm.pulls_at_zero_advantage or bool(self.distillation.teacher)

    @property
    def skips_equal_rewards(self) -> bool:
        """True if a group whose rewards are all equal has no gradient."""
        algorithm, looks_beyond = self.algorithm, ("gdpo", "reinforce_plus_plus_baseline", *NEEDS_NO_GROUP)
        if algorithm.adv_estimator in looks_beyond or algorithm.adv_estimator not in ADV_ESTIMATORS:
            return False
        return not (self.lacks_baseline or algorithm.scores_before_advantages or self.pulls_at_zero_advantage)

    @property
    def scores_old_log_probs(self) -> bool:
        """True if old log-probs need a separate forward pass; otherwise the update computes them."""
        algorithm = self.algorithm
        return (
            self.train.num_minibatches > 1
            or algorithm.is_batch_coupled
            or algorithm.normalizes_by_step
            or algorithm.adv_estimator in NEEDS_LOG_PROBS
            or (algorithm.kl_in_reward.coef > 0 and algorithm.policy_loss != "bypass_mode")
        )

    def compiles(self, *, on_gpu: bool) -> bool:
        if self.learner.compile == "auto":
            return on_gpu and not self.run.deterministic
        return self.learner.compile

    @property
    def group_deadline_s(self) -> float:
        """Maximum seconds from a group's start to its end; see rollout.group_deadline_s."""
        rollout, server, train = self.rollout, self.server, self.train
        if rollout.group_deadline_s is not None:
            return rollout.group_deadline_s
        sequences = train.max_groups_in_flight * rollout.group_size
        rounds = max(1.0, sequences / (server.num_servers * server.max_num_seqs))
        # With partial rollouts, a paused group also waits while the learners train.
        frozen_s = train.max_staleness * self.recovery.stall_stop_s if train.partial_rollouts else 0.0
        return max(LEAST_DEADLINE_S, SLOWEST_TOKEN_S * rollout.max_completion_tokens * rounds) + frozen_s

    @property
    def max_demonstration_tokens(self) -> int:
        return self.warmup.max_tokens or self.max_model_tokens

    @property
    def run_uri(self) -> str:
        """`<output_dir>/<name>`."""
        return str(Location.parse(self.run.output_dir).join(self.run.name))

    @property
    def run_folder(self) -> Path:
        """Folder of the run on this machine: `run_uri`, or the staging folder of a run on s3://."""
        if not Location.parse(self.run.output_dir).is_remote:
            return Path(self.run_uri)
        # The folder's name includes a hash of the location: two buckets may hold runs of the same name.
        digest = hashlib.sha256(self.run_uri.encode()).hexdigest()[:12]
        return self.run.staging_dir.expanduser() / f"{self.run.name}-{digest}"

    @model_validator(mode="before")
    @classmethod
    def _no_default_tasks(cls, values: Any) -> Any:
        """Make `tasks` empty for `sources`, or for data files in `eval.tasks`."""
        if not isinstance(values, dict) or "tasks" in values:
            return values
        section = values.get("eval")
        evaluated = section.get("tasks") if isinstance(section, dict) else ()
        has_files = any(isinstance(task, str) and is_data_file(task) for task in evaluated or ())
        return values | {"tasks": []} if has_files or values.get("sources") else values

    @model_validator(mode="before")
    @classmethod
    def _rounded_servers_are_corrected(cls, values: Any) -> Any:
        """Correct every token if servers round what learners don't, and the user sets no level."""
        if not isinstance(values, dict) or not rounded_keys(values.get("server")):
            return values
        algorithm = values.get("algorithm") or {}
        correction = algorithm.get("rollout_correction") or {} if isinstance(algorithm, dict) else None
        if not isinstance(correction, dict) or "level" in correction:
            return values
        return values | {"algorithm": algorithm | {"rollout_correction": correction | {"level": "token"}}}

    @model_validator(mode="before")
    @classmethod
    def _sources_filled_in(cls, values: Any) -> Any:
        has_sources = isinstance(values, dict) and "sources" in values
        return values | {"sources": filled_in(values["sources"], values)} if has_sources else values

    def by_source(self) -> list[tuple[str, Self]]:
        """Return the name of each source and the keys with only its tasks and its settings; a run without `sources` has
        one source without a name."""
        return [(each.name, self.with_source(each)) for each in self.sources] or [("", self)]

    def with_source(self, source: SourceSection) -> Self:
        own = {"sources": (), "tasks": source.tasks, "data": source.data, "agent": source.agent}
        limits = self.rollout.model_copy(update=source.rollout.model_dump(exclude_none=True))
        evaluation = self.eval.model_copy(update=source.eval.model_dump(exclude_none=True))
        return self.model_copy(update=own | {"reward": source.reward, "rollout": limits, "eval": evaluation})


def all_tasks(keys: Keys) -> tuple[str, ...]:
    """Return the tasks of all sources, each once, without data files."""
    found = dict.fromkeys(name for _, own in keys.by_source() for name in own.tasks)
    return tuple(name for name in found if not is_data_file(name))
