"""The one configuration: every key, its unit, its bounds, and why its default is what it is.

`configs/*.yaml` state only what differs from these defaults. Loading (files, `key.sub=value` overrides, the nearest
valid key for a typo) is in `config_loading.py`; this module is the schema and the arithmetic between keys. It imports
nothing heavy, so that `rayapp --help` is instant.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rayapp.algo.names import NEEDS_NO_GROUP
from rayapp.config_agent import AgentSection, DataSection, RewardSection
from rayapp.errors import StorageConfigError
from rayapp.sandbox.config import SandboxConfig
from rayapp.storage.location import Location

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
Dtype = Literal["float32", "bfloat16"]
CheckpointContent = Literal["model", "optimizer", "hf_model"]


class FrozenModel(BaseModel):
    """A section of the configuration: immutable, and a key it doesn't know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RunSection(FrozenModel):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Names the run folder, the Ray namespace and the sandboxes' labels."""
    output_dir: str = Field("outputs", min_length=1)
    """The run folder is `<output_dir>/<name>`: a path, or s3://bucket/prefix. Credentials are in the environment."""
    staging_dir: Path = Path("~/.cache/rayapp/runs")
    """For a run folder on s3://: where its files are until they are uploaded. The driver and the learners must share
    it. It is emptied when a run ends and all of it is uploaded."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the last whole checkpoint if there is one. never: refuse a folder that has a run in it.
    must: refuse to start from nothing."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Draws prompts' order, sampling, hidden tests. The same seed and config give the same run (synchronous CPU)."""

    @field_validator("output_dir", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("output_dir", mode="after")
    @classmethod
    def _location(cls, value: str) -> str:
        try:
            Location.parse(value)
        except StorageConfigError as error:
            raise ValueError(str(error)) from error
        return value


class ModelSection(FrozenModel):
    path: str = "models/smollm2-135m"
    """A local Hugging Face folder, one on s3://, or a hub id. `rayapp model fetch smollm2-135m` makes the default."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. It has your credentials: leave it off for models you don't know."""


class RolloutCorrectionSection(FrozenModel):
    """Importance sampling between the engine that sampled and the learner that trains (verl's rollout correction)."""

    level: Literal["none", "token", "sequence"] = "none"
    """none measures the difference but does not correct it."""
    threshold: float = Field(2.0, gt=1.0)
    """Weights above it are truncated to it (TIS)."""


class DynamicSamplingSection(FrozenModel):
    """DAPO's dynamic sampling."""

    enabled: bool = False
    """Replace groups whose rewards are all equal by further prompts: every group of a step then teaches something."""
    max_dropped_per_step: int = Field(8, ge=1)
    """Past it groups are kept as they are, so that a step ends when every prompt is solved, or none is."""


class CurriculumSection(FrozenModel):
    """Prompts by difficulty."""

    enabled: bool = False
    """Draw each group's prompt by weight instead of going through all in turn: 4 p (1 - p) of the share p of its
    trajectories that were solved so far, so that what is always or never solved comes less often."""
    min_weight: float = Field(0.1, gt=0.0, le=1.0)
    """Of a prompt that is always or never solved; one that was never tried has 1."""


class OverlongSection(FrozenModel):
    """DAPO's treatment of completions that run into rollout.max_completion_tokens."""

    filter: bool = False
    """Leave truncated trajectories out of the loss. They stay in their group's baseline."""
    buffer_tokens: int = Field(0, ge=0)
    """Soft punishment: the last so many tokens before the limit cost reward, linearly. 0 punishes nothing."""
    penalty: float = Field(1.0, gt=0.0)
    """Reward lost at the limit."""


class AlgorithmSection(FrozenModel):
    adv_estimator: str = "grpo"
    """A name of verl's ADV_ESTIMATOR_REGISTRY that needs no critic."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO."""
    gdpo_reward_terms: tuple[str, ...] = ()
    """For gdpo: the reward terms that are normalised one by one. Empty normalises the total."""
    policy_loss: str = "vanilla"
    """A name of verl's POLICY_LOSS_REGISTRY."""
    policy_loss_options: dict[str, float | int | str | bool] = {}
    """Further keys of verl's PolicyLossConfig, for the losses that have their own (clip_cov, kl_cov, …)."""
    loss_agg_mode: LossAggMode = "token-mean"
    clip_ratio_low: float = Field(0.2, ge=0.0)
    clip_ratio_high: float = Field(0.2, ge=0.0)
    """Above clip_ratio_low it is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1.0)
    """Dual clip: bound of the loss for negative advantages."""
    kl_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the frozen reference. At 0 no reference model is loaded."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus. Entropy is measured every step whatever this is."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    curriculum: CurriculumSection = CurriculumSection()
    overlong: OverlongSection = OverlongSection()


FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Of vLLM's sampling. Each makes it sample from another distribution than the one that is trained."""


class RolloutSection(FrozenModel):
    group_size: int = Field(16, ge=2)
    """Trajectories per prompt (G). At 1 every group-relative advantage is zero."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is refused before training starts."""
    max_completion_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0.0)
    """Log-probs are those of this temperature, in the engine and in the learner."""
    num_workers: int = Field(1, ge=1)
    """Rollout worker processes; each runs many groups at once."""
    group_deadline_s: float = Field(300.0, gt=0)
    """A group not finished by then is a failed rollout. Longer than the slowest honest group."""
    max_failed_ratio: float = Field(0.3, ge=0.0, le=1.0)
    """Share of trajectories of the last ten steps that may fail for reasons that are not the policy's. Past it the
    run stops."""

    @model_validator(mode="before")
    @classmethod
    def _no_filters(cls, values: Any) -> Any:
        found = [name for name in FILTERS if isinstance(values, dict) and name in values]
        if found:
            raise ValueError(
                f"{', '.join(found)} would bias training: the engine would sample another distribution, and the "
                "importance ratio would divide by log-probs that the learner's model does not have. Leave it out; "
                "temperature is taken into account in both places."
            )
        return values


class TrainSection(FrozenModel):
    num_steps: int = Field(100, ge=1)
    groups_per_step: int = Field(2, ge=1)
    """Prompts per optimizer step (P)."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps made from one batch. 1 is on-policy: old log-probs are those of the update itself."""
    max_staleness: int = Field(0, ge=0)
    """Optimizer steps between the weights that sampled a group and those that train on it. 0 is synchronous."""
    straggler_window: int | None = Field(None, ge=0)
    """Groups that may be trained before one that is still being generated, as long as that one does not grow staler
    than max_staleness. None: as many as a step has. 0: strictly in order. Synchronous runs are in order anyway."""


class OptimizerSection(FrozenModel):
    lr: float = Field(1e-6, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """The schedule ends at lr * min_lr_ratio."""


class LoraSection(FrozenModel):
    """Low-rank adapters instead of all weights."""

    rank: int = Field(0, ge=0)
    """0 trains all weights."""
    alpha: int = Field(32, ge=1)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = Field(("all-linear",), min_length=1)
    """Names of linear layers, e.g. q_proj; all-linear takes all of the decoder."""
    send: Literal["adapter", "merged"] = "adapter"
    """What servers get after each step. adapter: the low-rank matrices alone. merged: whole weights with them merged
    in, for models that vLLM serves without LoRA, and where the bytes don't matter: it generates faster."""

    @property
    def sends_adapter(self) -> bool:
        """Servers hold the model's own weights and an adapter."""
        return self.rank > 0 and self.send == "adapter"

    @model_validator(mode="after")
    def _vllm_has_the_rank(self) -> Self:
        if self.sends_adapter and self.rank > 512:
            raise ValueError(
                f"learner.lora.rank is {self.rank}, but vLLM serves adapters of at most 512. Lower it, or set "
                "learner.lora.send: merged."
            )
        return self


class LearnerSection(FrozenModel):
    num_learners: int = Field(1, ge=1)
    """FSDP2 world size."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] | Literal["auto"] = 8192
    """Tokens that one forward computes: the memory of activations grows with it, nothing else does. auto measures at
    the start how many fit, and takes a power of two; where that differs, runs differ in their last digits."""
    compute_dtype: Dtype = "bfloat16"
    """Of the forward and backward. Parameters and optimizer state are float32."""
    share_prefixes: bool = True
    """Compute tokens that several trajectories of a group share, such as the prompt, once. Exact."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, a third more time."""
    log_prob_chunk_tokens: int = Field(1024, ge=16)
    """Tokens whose logits exist at once: vocabulary x this x 4 bytes."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of a learner on CPU; 0 divides the cores among the learners."""
    step_timeout_s: float = Field(1800.0, gt=0)
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2), for models that don't fit: slower."""
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()

    @property
    def token_budget(self) -> int:
        """`max_tokens_per_microbatch` as a number; a learner replaces auto before anybody asks."""
        assert isinstance(self.max_tokens_per_microbatch, int), "auto was not replaced by a number"
        return self.max_tokens_per_microbatch


class ServerSection(FrozenModel):
    num_servers: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    dtype: Dtype = "bfloat16"
    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of the GPU's memory that vLLM takes; unused on CPU."""
    kv_cache_gib: int = Field(2, ge=1)
    """KV cache on CPU; unused on GPU."""
    kv_block_tokens: Literal[0, 16, 32, 64, 128] = 0
    """Tokens of one block of the KV cache. Only whole blocks of a prompt are computed once for a group. 0 is vLLM's
    choice: on CPU 128, which is more than many prompts have."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded at once."""
    enforce_eager: bool = True
    """Skip compilation: on CPU it adds 45 s to the start for 10% of speed."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of a server on CPU; 0 divides the cores among the servers."""
    start_timeout_s: float = Field(600.0, gt=0)
    request_timeout_s: float = Field(300.0, gt=0)
    sync_timeout_s: float = Field(120.0, gt=0)
    """Deadline of each phase of a weight sync: forming the group, exporting, loading. A server that misses it is
    replaced."""
    weight_transport: Literal["auto", "object_store", "gloo", "nccl", "ipc"] = "auto"
    """How weights reach the servers. auto: object_store on CPU, nccl where servers have GPUs of their own, ipc where
    they share the learners'. gloo is nccl's twin for machines without GPUs."""
    weight_bucket_mib: int = Field(256, ge=1)
    """Weights of this size travel at once: no device ever holds a second whole copy."""


class CheckpointSection(FrozenModel):
    every_steps: int = Field(10, ge=0)
    """0 saves only at the end."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints that stay."""
    keep_best: int = Field(0, ge=0)
    """Further ones that stay because `best_metric` was highest when they were saved."""
    best_metric: str = "reward/mean"
    """A metric of the step, e.g. eval/reward/mean; the highest is the best. Steps without it have no score. A name that
    no step has ends the run after the first one, when keep_best is not 0."""
    save_contents: tuple[CheckpointContent, ...] = Field(("model", "optimizer"), min_length=1)
    """hf_model adds a Hugging Face folder to each checkpoint. Without model and optimizer a run can't be resumed."""
    asynchronous: bool = True
    """Training goes on while a checkpoint is written: the weights are copied to host memory first."""


class EvalSection(FrozenModel):
    every_steps: int = Field(0, ge=0)
    """Evaluate during training after every so many steps and after the last one, as metrics `eval/*`. Nothing of it is
    trained on, and it changes nothing that is. 0 never evaluates."""
    before_training: bool = False
    """Evaluate the model a run starts from too, as step 0."""
    samples_per_task: int = Field(16, ge=1)
    """Completions per task or data row: pass@k is given for k = 1, 2, 4, … up to this."""
    temperature: float = Field(1.0, ge=0.0)
    """0 is greedy."""


class ClusterSection(FrozenModel):
    address: str = ""
    """Ray address to attach to. Empty: RAY_ADDRESS, else a Ray already running here, else one of our own."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes GPUs if the cluster has any."""
    placement: Literal["split", "colocated"] = "split"
    """split: servers and learners have GPUs of their own. colocated: they share all of them, and the servers sleep
    while the learners train; synchronous only. Without GPUs there is no difference."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs this run may use; None asks the cluster. Given, the arithmetic is checked before anything starts."""
    wait_for_gpus_s: float = Field(0.0, ge=0, le=86400)
    """Seconds to wait until the cluster has the GPUs this run needs; 0 refuses at once. For clusters whose workers come
    after the head, or that scale themselves."""
    object_store_mib: int = Field(1024, ge=100)
    """Object store of a Ray that we start. It holds two copies of the weights and the groups in flight."""
    log_to_driver: bool = False
    """Show what the actors print. It is in Ray's logs and the dashboard anyway."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Deadline for placing each actor."""


class RecoverySection(FrozenModel):
    max_restarts: int = Field(3, ge=0)
    """Times that each process is started again within a run, learners together; one more ends the run. 0: never."""
    ping_every_s: float = Field(2.0, gt=0)
    """How often each process is asked whether it works."""
    ping_timeout_s: float = Field(60.0, gt=0)
    """One that does not answer for this long hangs and is replaced. Far above what a healthy process on a busy machine
    needs; one that is being started has server.start_timeout_s instead."""
    stall_replace_s: float = Field(180.0, gt=0)
    """A server that answers, but samples no token for this long although it has requests, is replaced. Below
    server.request_timeout_s, past which requests fail."""
    stall_report_s: float = Field(600.0, gt=0)
    """When nothing was finished for this long (no group, no phase of a step), say who waits for what."""
    stall_stop_s: float = Field(3600.0, gt=0)
    """When nothing was finished for this long, write the stacks of all actors and stop. Longer than the slowest honest
    step."""


class TrackingSection(FrozenModel):
    trackers: tuple[Literal["console", "jsonl", "tensorboard", "mlflow", "wandb"], ...] = ("console", "jsonl")
    """Where each step's metrics go. One that fails is told once and counted in `tracking/failed`; training goes on."""
    project: str = Field("rayapp", min_length=1)
    """MLflow experiment and W&B project."""
    mlflow_uri: str = ""
    """MLflow tracking server. Empty: MLFLOW_TRACKING_URI, else `mlflow.db` in the run folder."""
    trace_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the rollouts that MLflow, where it is a tracker, gets as traces: turns, generations, tool calls and
    sandboxes with their texts. One takes about 15 ms, beside the training."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline keeps files in the run folder for `wandb sync`; online needs WANDB_API_KEY."""
    trajectories: bool = True
    """Write trajectories/step=NNNNNN.parquet."""
    log_format: Literal["text", "json"] = "text"
    """json: every process logs an object per line, with the ids of run, step, group, actor and task."""

    @model_validator(mode="before")
    @classmethod
    def _list_means_trackers(cls, values: Any) -> Any:
        """`tracking: [console, mlflow]` in a file is short for `tracking: {trackers: [console, mlflow]}`."""
        return {"trackers": values} if isinstance(values, list | tuple) else values


FEWER_GPUS = "Lower server.num_servers, server.tensor_parallel_size or learner.num_learners"


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
        self._tasks_or_data()
        self._placement_fits()
        self._gpus_suffice()
        self._minibatches_divide()
        self._sequence_fits_microbatch()
        self._dapo_fits()
        self._best_metric_exists()
        return self

    def _best_metric_exists(self) -> None:
        metric, keep_best = self.checkpoint.best_metric, self.checkpoint.keep_best
        if keep_best and metric.startswith("eval/") and self.eval.every_steps == 0:
            raise ValueError(
                f"checkpoint.best_metric is {metric}, but eval.every_steps is 0: nothing is evaluated during training, "
                f"and checkpoint.keep_best = {keep_best} would keep nothing. Set eval.every_steps, or use reward/mean."
            )

    def _dapo_fits(self) -> None:
        buffer, longest = self.algorithm.overlong.buffer_tokens, self.rollout.max_completion_tokens
        if buffer >= longest:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens is {buffer}, but rollout.max_completion_tokens is {longest}: every "
                f"completion would be punished. Use less than {longest}."
            )
        estimator = self.algorithm.adv_estimator
        if self.algorithm.dynamic_sampling.enabled and estimator in ("gdpo", *NEEDS_NO_GROUP):
            raise ValueError(
                f"algorithm.dynamic_sampling drops groups of equal rewards, which teach {estimator} something: its "
                "baseline is not the mean of the group's rewards. Turn it off, or use grpo."
            )

    def _tasks_or_data(self) -> None:
        if self.uses_data and self.tasks:
            raise ValueError(
                f"tasks ({', '.join(self.tasks)}) and data.train_files or data.eval_files are both set: a run has one "
                "or the other. Leave one out."
            )
        if self.agent.tool_file and not self.uses_data:
            raise ValueError(
                f"agent.tool_file is {self.agent.tool_file!r}, but tools are for data rows and this run has none: set "
                "data.train_files (docs/data.md), or leave agent.tool_file empty."
            )

    def _gpus_suffice(self) -> None:
        have = self.cluster.num_gpus
        if have is None or self.cluster.device == "cpu":
            return
        if self.num_gpus_needed > have:
            raise ValueError(f"{self.gpu_arithmetic}, but cluster.num_gpus is {have}. {FEWER_GPUS}.")

    def _placement_fits(self) -> None:
        if self.cluster.placement == "split":
            return
        servers, tp, learners = self.server.num_servers, self.server.tensor_parallel_size, self.learner.num_learners
        if servers * tp != learners:
            raise ValueError(
                f"cluster.placement is colocated: {servers} servers x TP {tp} = {servers * tp} GPUs must be those of "
                f"{learners} learners, one each. Make learner.num_learners {servers * tp}, or use placement split."
            )
        if self.train.max_staleness > 0:
            raise ValueError(
                f"cluster.placement is colocated and train.max_staleness is {self.train.max_staleness}: on shared GPUs "
                "nothing is generated while the learners train. Use max_staleness 0, or placement split."
            )

    def _minibatches_divide(self) -> None:
        groups, minibatches = self.train.groups_per_step, self.train.num_minibatches
        if groups % minibatches:
            raise ValueError(
                f"train.groups_per_step = {groups} groups x rollout.group_size = {self.rollout.group_size} cannot be "
                f"split into train.num_minibatches = {minibatches} equal parts of whole groups: "
                f"{groups} / {minibatches} = {groups / minibatches:g}. Use a divisor of {groups}."
            )

    def _sequence_fits_microbatch(self) -> None:
        longest, budget = self.max_model_tokens, self.learner.max_tokens_per_microbatch
        if isinstance(budget, int) and longest > budget:
            raise ValueError(
                f"rollout.max_prompt_tokens {self.rollout.max_prompt_tokens} + rollout.max_completion_tokens "
                f"{self.rollout.max_completion_tokens} = {longest} tokens, but learner.max_tokens_per_microbatch is "
                f"{budget}: the longest trajectory would fit in no micro-batch. Raise it to at least {longest}."
            )
