"""Sections run, model, rollout, train, warmup, server, checkpoint, eval, cluster, recovery and tracking. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayapp.config.base import AutoDtype, Dtype, FrozenModel
from rayapp.config.engine_args import check_engine_args
from rayapp.core.errors import StorageConfigError
from rayapp.core.files import Location
from rayapp.core.names import check_name

TRACKERS = ("console", "jsonl", "tensorboard", "mlflow", "wandb")
CheckpointContent = Literal["model", "optimizer", "hf_model"]


# Options that change the sampled distribution, which would then differ from the trained one.
FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


# Default of `vllm serve`; an engine made in a program defaults to 2048, which slows prompts down.
GPU_BATCHED_TOKENS = 8192
CPU_CACHE_GIB = 2


class RunSection(FrozenModel):
    """Name, folder, resume and seed of the run (docs/run-folder.md)."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the run, of its folder and of its Ray namespace; also in the labels of its sandboxes."""
    output_dir: str = Field("outputs", min_length=1)
    """Folder that holds the run folder `<output_dir>/<name>`: a path, or s3://bucket/prefix, whose credentials are in
    the environment (docs/object-storage.md)."""
    staging_dir: Path = Path("~/.cache/rayapp/runs")
    """Local folder for the files of a run on s3:// until they are uploaded. The driver and the learners must share this
    folder. It is emptied when the run has ended and all its files are uploaded."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Treatment of an existing run folder. auto: continue from the last complete checkpoint, if there is a checkpoint.
    never: refuse a folder that holds a run. must: refuse to start without a checkpoint."""
    allow_changed: tuple[str, ...] = ()
    """Keys or sections, e.g. learner.optimizer.lr, that may differ from the config with which the run folder was made.
    A run resumes only if all other keys that affect training are unchanged."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of prompt order, sampling and hidden tests. On a CPU, a synchronous run repeats exactly with the same seed
    and configuration; on GPUs also set `deterministic`."""
    deterministic: bool = False
    """Repeat synchronous runs on GPUs bit by bit, with batch-invariant and deterministic kernels and NCCL's ring.
    Slower (docs/scale.md#the-same-bits-on-gpus). Synchronous runs on a CPU repeat without it."""

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
    """The policy (docs/models.md)."""

    path: str = "models/smollm2-135m"
    """Hugging Face model: a local folder, an s3:// folder, or a hub id. `rayapp model fetch smollm2-135m` fetches the
    default."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. The code has access to your credentials: set true only for models that
    you trust."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Longest sequence of the model in tokens. null: as in the model's config.json. Sequences longer than those in the
    model's own training lower its quality."""
    quantization: Literal["none", "nf4"] = "none"
    """Format of the frozen weights under adapters. nf4: learners keep the matrices of the decoder's layers in 4 bits
    (QLoRA); norms, embeddings and head keep learner.compute_dtype. Servers compute with the same rounded weights, but
    `rayapp eval` with the model's own. Needs learner.lora.rank, and bitsandbytes (docs/learner.md#four-bits)."""
    freeze_vision: bool = True
    """Don't train the part of a model that reads pictures (vision tower and projection). Its weights are not sent to
    the servers then."""


class RolloutSection(FrozenModel):
    """Sampling of groups of trajectories."""

    group_size: int = Field(16, ge=1)
    """Trajectories sampled for each prompt (G). Advantages compare them; with remax the last one is the greedy
    baseline. 1 only if nothing is compared: with reinforce_plus_plus, or distillation without rewards."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt in tokens. Longer prompts are refused before training starts; rows of data files can be cut
    or dropped instead (data.truncation, data.filter_overlong_prompts)."""
    max_completion_tokens: int = Field(256, ge=1)
    """Maximum number of completion tokens of a trajectory, over all its turns and tool results. Longer trajectories are
    cut off."""
    temperature: float = Field(1.0, gt=0.0)
    """Sampling temperature of training. Servers and learners compute log-probs at this temperature."""
    num_workers: int = Field(1, ge=1)
    """Number of rollout worker processes; each plays many groups at once."""
    group_deadline_s: float | None = Field(None, gt=0)
    """Time limit of a group, from its start to its last verdict; a group that exceeds it counts as failed. null: 0.25 s
    per token of max_completion_tokens, times the batches that the servers need for all sequences in flight; at least
    300 s."""
    max_failed_ratio: float = Field(0.3, ge=0.0, le=1.0)
    """Largest share of the last ten steps' trajectories that may fail for reasons other than the policy. Above it, the
    run stops."""

    @model_validator(mode="before")
    @classmethod
    def _no_filters(cls, values: Any) -> Any:
        found = [name for name in FILTERS if isinstance(values, dict) and name in values]
        if found:
            raise ValueError(
                f"{', '.join(found)} can't be set for training: the engine would sample from a distribution other "
                "than the one whose log-probs the learner computes. Leave it out. (temperature is allowed: engine and "
                "learner both apply it.)"
            )
        return values


class TrainSection(FrozenModel):
    """Number and size of the training steps, and how far generation may run ahead of them (docs/concepts.md)."""

    num_steps: int = Field(100, ge=1)
    """Training steps of the run. May change on resume while learner.optimizer.schedule is constant."""
    groups_per_step: int = Field(2, ge=1)
    """Groups that each training step trains on, one for each prompt (P)."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per training step, each on an equal part of the step's groups. 1 is on-policy: the
    weights change once, after all groups of the step are computed."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of optimizer steps between the weights that sampled a group and the weights that train on it. 0 is
    synchronous. Above 0, turn on algorithm.rollout_correction: with num_minibatches 1 every ratio to the learner's old
    log-probs is 1, so clipping has no effect. On a single CPU, values above 0 are slower."""
    partial_rollouts: bool = False
    """Partial rollouts: when groups_per_step groups are complete, pause the others, train, and continue them with the
    new weights. Needs max_staleness above 0, which bounds the age of kept tokens. Servers and learners take turns, so
    they may share GPUs (docs/scale.md#partial-rollouts)."""
    extra_groups: int | None = Field(None, ge=1)
    """Groups in flight beyond groups_per_step, if max_staleness is above 0. null: max_staleness x groups_per_step,
    which is also the maximum."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps to profile with torch's profiler, e.g. [3, 50]: traces of learner 0 and server 0 in
    profiles/ of the run folder. A profiled step is slower."""

    @property
    def takes_turns(self) -> bool:
        """True if servers and learners never compute at the same time."""
        return self.max_staleness == 0 or self.partial_rollouts

    @property
    def max_groups_in_flight(self) -> int:
        """Maximum number of groups that are admitted and not yet trained."""
        most = self.max_staleness * self.groups_per_step
        return self.groups_per_step + (most if self.extra_groups is None else self.extra_groups)

    @model_validator(mode="after")
    def _groups_in_flight_fit(self) -> Self:
        most = self.max_staleness * self.groups_per_step
        if self.partial_rollouts and self.max_staleness == 0:
            raise ValueError(
                "partial_rollouts is true and max_staleness is 0: a paused trajectory keeps tokens of older weights, "
                "which max_staleness 0 forbids. Set max_staleness: 1 or more."
            )
        if self.extra_groups is not None and self.extra_groups > most:
            raise ValueError(
                f"extra_groups is {self.extra_groups}, which is above max_staleness {self.max_staleness} x "
                f"groups_per_step {self.groups_per_step} = {most}: more groups would exceed max_staleness before they "
                f"are trained. Use {f'at most {most}' if most else 'a larger max_staleness'}."
            )
        return self


class WarmupSection(FrozenModel):
    """Supervised steps on demonstrations before GRPO's first step (docs/sft.md)."""

    num_steps: int = Field(0, ge=0)
    """Optimizer steps on demonstrations, on the run's learners. 0: no warm-up."""
    files: tuple[str, ...] = ()
    """JSONL or parquet files of conversations, prompts with completions, or token ids with a mask.
    Empty: the demonstrations of the run's tasks."""
    eval_files: tuple[str, ...] = ()
    """Files of validation rows, never trained on. Their loss is the metric `sft/validation_loss`."""
    rows_per_step: int = Field(4, ge=1)
    """Demonstrations per optimizer step. Each epoch takes all demonstrations in a new order, drawn from run.seed."""
    max_tokens: int = Field(0, ge=0)
    """Longest row in tokens; longer rows are refused, or dropped with data.filter_overlong_prompts. 0:
    rollout.max_prompt_tokens + rollout.max_completion_tokens."""
    lr: float = Field(2e-5, gt=0)
    """Learning rate of the supervised steps. GRPO starts with a fresh optimizer."""


def rounded_keys(server: Any) -> dict[str, Any]:
    """Return the keys and values of a server's section, as a mapping, that make it round what learners don't."""
    usual = {"quantization": "none", "kv_cache_dtype": "auto"}
    return (
        {key: server[key] for key in usual if server.get(key, usual[key]) != usual[key]}
        if isinstance(server, dict)
        else {}
    )


class ServerSection(FrozenModel):
    """vLLM servers that sample, and the transport of new weights to them (docs/scale.md)."""

    num_servers: int = Field(1, ge=1)
    """Number of vLLM servers that sample; each holds the whole model."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs of one node over which a server splits the model."""
    dtype: AutoDtype = "auto"
    """Number format of the servers' weights and computation; learners send weights in this format. auto: as
    learner.compute_dtype."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] = 0.85
    """Share of the GPU's memory that vLLM takes; unused on CPU, and on GPUs where server.kv_cache_gib is a number.
    auto: the largest share that `rayapp plan` allows, minus 3% of the GPU (docs/scale.md)."""
    kv_cache_gib: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Size of the KV cache of each server process, in GiB; may be fractional. On CPU each GiB adds seconds to the
    start. auto: 2 on CPU; on GPU what server.gpu_memory_utilization leaves beside weights and activations."""
    max_num_seqs: int = Field(64, ge=1)
    """Maximum number of sequences that a server decodes at once; further sequences wait."""
    max_num_batched_tokens: int = Field(0, ge=0)
    """Maximum number of tokens that a server computes in one engine step, decoded tokens and prompt chunks together. 0:
    8192 on GPUs, vLLM's default on CPU."""
    enforce_eager: bool | Literal["auto"] = "auto"
    """Skip compilation and CUDA graphs. auto: only on CPU, where compiling adds 45 s to the start for 10% more
    speed."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of each server on CPU. 0: the cores (or the container's quota) divided by the number of servers, half if
    learners compute at the same time (train.max_staleness above 0); at most 4, or one per 32 MiB of weights if that is
    more."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time limit for a server to load the model and be ready. Ray has a fifth of it to place each process of the run,
    and so has each phase of a weight sync (forming the group, exporting, loading); a server that misses one is
    replaced."""
    weight_transport: Literal["auto", "object_store", "nccl", "ipc"] = "auto"
    """Transport of weights to the servers. auto: object_store on CPU, nccl if servers have their own GPUs, ipc if they
    share the learners'."""
    weight_bucket_mib: int = Field(256, ge=1)
    """Size in MiB of the parts in which weights are sent; no device ever holds a second full copy of the model."""
    quantization: Literal["none", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor"] = "none"
    """Format to which servers round their linear layers after each sync, by vLLM's names; the learner's weights are not
    rounded. With fp8_per_block every 128 x 128 block has a scale, as in DeepSeek's models. Needs GPUs and
    algorithm.rollout_correction.level: token (docs/scale.md#fp8)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Number format of the KV cache. auto: as server.dtype. fp8: half the bytes, so twice the tokens; needs GPUs and
    algorithm.rollout_correction.level: token."""
    engine_args: Mapping[str, Any] = {}
    """Further arguments of the installed vLLM's AsyncEngineArgs by their own names, e.g. {attention_backend:
    FLASH_ATTN}. Arguments that have a key of rayapp, or contradict what the run relies on, are refused with the reason
    (docs/scale.md#arguments-of-vllm)."""

    @property
    def place_timeout_s(self) -> float:
        """Time limit for Ray to place each process of the run."""
        return self.start_timeout_s / 5

    @property
    def sync_timeout_s(self) -> float:
        """Time limit of each phase of a weight sync."""
        return self.start_timeout_s / 5

    @property
    def is_rounded(self) -> bool:
        """True if servers round weights, or keys and values, that the learner does not round."""
        return bool(rounded_keys(self.model_dump()))

    def is_eager(self, *, on_gpu: bool) -> bool:
        return not on_gpu if self.enforce_eager == "auto" else self.enforce_eager

    @property
    def gpu_share(self) -> float:
        """`gpu_memory_utilization` as a number. A server replaces auto before this is read."""
        assert not isinstance(self.gpu_memory_utilization, str), "auto was not replaced by a number"
        return self.gpu_memory_utilization

    def kv_cache_bytes(self, *, on_gpu: bool) -> int | None:
        """Return the size of a process's KV cache; None: what the GPU's share of memory leaves."""
        if self.kv_cache_gib == "auto":
            return None if on_gpu else CPU_CACHE_GIB << 30
        return int(self.kv_cache_gib * 2**30)

    @property
    def gpu_batched_tokens(self) -> int:
        return self.max_num_batched_tokens or max(GPU_BATCHED_TOKENS, self.max_num_seqs)

    @field_validator("engine_args", mode="after")
    @classmethod
    def _vllm_has_them(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        check_engine_args(values)
        return values

    @model_validator(mode="after")
    def _batch_holds_sequences(self) -> Self:
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs = "
                f"{self.max_num_seqs}, because every sequence of a batch needs a token in an engine step. Raise "
                "max_num_batched_tokens, or lower max_num_seqs."
            )
        return self


class CheckpointSection(FrozenModel):
    """Saving and keeping of checkpoints (docs/learner.md#checkpoints)."""

    every_steps: int = Field(10, ge=0)
    """Training steps between checkpoints. 0: save only at the end."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(0, ge=0)
    """Number of further checkpoints to keep: those with the highest eval/reward/mean at their step, or reward/mean if
    eval.every_steps is 0."""
    save_contents: tuple[CheckpointContent, ...] = Field(("model", "optimizer"), min_length=1)
    """Parts of a checkpoint. model, optimizer: a resume needs both. hf_model: also a Hugging Face folder of the
    weights."""
    final_dtype: Dtype = "bfloat16"
    """Number format of the weights in final/, which the last evaluation measures too. Checkpoints, and the model that a
    warm-up hands over to GRPO, are always float32, as the learner holds them."""


class BudgetSection(FrozenModel):
    """Prices of a run, and its maximum cost (docs/operate.md#budget), all in the unit of judges' prices. Without prices
    nothing is counted."""

    gpu_hour: float = Field(0.0, ge=0)
    """Price of one GPU of the run for an hour."""
    node_hour: float = Field(0.0, ge=0)
    """Price of one node of the Ray cluster for an hour, in addition to its GPUs. Every node that is alive counts."""
    cap: float = Field(0.0, ge=0)
    """Maximum cost of the run, with judges; a resumed run continues to count. At 80% the run warns; at the cap it saves
    and ends with exit code 3. 0: no limit."""

    @property
    def has_prices(self) -> bool:
        return bool(self.gpu_hour or self.node_hour or self.cap)


class EvalSection(FrozenModel):
    """Tasks and times of evaluations (docs/data.md#evaluation)."""

    tasks: tuple[str, ...] = ()
    """Tasks or data files to evaluate, e.g. the training tasks in other words; never trained on. Empty: evaluate the
    training tasks, but no rows of data files."""
    max_problems: int = Field(0, ge=0)
    """Maximum number of tasks or rows to evaluate; the first ones are taken. 0: all."""
    every_steps: int = Field(0, ge=0)
    """Training steps between evaluations (metrics `eval/*`); the last step is always evaluated. Evaluation doesn't
    affect training. 0: never evaluate."""
    before_training: bool = False
    """Also evaluate the model from which GRPO starts, after a warm-up, as step 0."""
    samples_per_task: int = Field(16, ge=1)
    """Completions per task or data row. pass@k is reported for k = 1, 2, 4, … up to this number."""
    temperature: float = Field(1.0, ge=0.0)
    """Sampling temperature of evaluations; 0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Total probability of the most likely tokens from which evaluations sample. 1: all tokens. Training always samples
    from all tokens."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens from which evaluations sample. 0: all tokens."""


class ClusterSection(FrozenModel):
    """The Ray cluster and its GPUs (docs/scale.md)."""

    address: str = ""
    """Address of a Ray cluster to attach to. Empty: RAY_ADDRESS, else a Ray that runs on this machine, else a new
    one."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on. auto: GPUs if the cluster has any."""
    placement: Literal["split", "colocated"] = "split"
    """GPUs of servers and learners. split: separate GPUs. colocated: shared GPUs, on which servers sleep while learners
    train; only for synchronous runs and train.partial_rollouts. Without GPUs both are the same."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs that this run may use, checked before anything starts. null: as many as the cluster has."""
    wait_for_gpus_s: float = Field(0.0, ge=0, le=86400)
    """Seconds to wait until the cluster has the GPUs that the run needs; 0: refuse immediately. For clusters that
    autoscale, or whose workers join after the head."""
    object_store_mib: int = Field(1536, ge=100)
    """Size in MiB of the object store, if the run starts Ray. The store has to hold two copies of the weights and the
    groups in flight."""
    dashboard: bool = True
    """Start Ray's dashboard if the run starts Ray. The dashboard takes some memory and CPU time."""


class RecoverySection(FrozenModel):
    """Detection and replacement of processes that are dead or hang (docs/recover.md)."""

    max_restarts: int = Field(3, ge=0)
    """Maximum number of restarts of each process (all learners count as one); one more failure ends the run. 0: never
    restart."""
    ping_timeout_s: float = Field(60.0, gt=0)
    """Time without an answer after which a process counts as hanging and is replaced. Keep it far above the pauses of a
    healthy process on a busy machine. While a process starts, server.start_timeout_s applies instead."""
    stall_replace_s: float = Field(180.0, gt=0)
    """Time after which a server that has requests but samples no token is replaced. Keep it below
    rollout.group_deadline_s, after which requests fail. Requests of groups that start together wait for each other for
    at most half of it."""
    stall_stop_s: float = Field(3600.0, gt=0)
    """Time without a finished group or phase of a step after which the run writes the stacks of all processes, saves
    all complete work, and stops. Learners that take half of it for one step are replaced. Keep it longer than twice the
    slowest healthy step."""

    @property
    def step_timeout_s(self) -> float:
        """Time limit of one training step. Learners that exceed it are replaced."""
        return self.stall_stop_s / 2


class TrackingSection(FrozenModel):
    """Metrics, traces, trajectories and logs of the run (docs/operate.md)."""

    trackers: tuple[str, ...] = ("console", "jsonl")
    """Trackers that record each step's metrics: console, jsonl, tensorboard, mlflow, wandb, or plug-ins
    (docs/plugins.md). A failing tracker is reported once and counted in `tracking/failed`; training continues."""
    project: str = Field("rayapp", min_length=1)
    """Name of the MLflow experiment and of the W&B project."""
    trace_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the trajectories that are sent to MLflow as traces, if MLflow is a tracker: turns, generations, tool
    calls and sandbox runs with their texts. Writing one takes about 15 ms, in parallel with training."""
    log_format: Literal["text", "json"] = "text"
    """Format of logs. json: every process logs one object per line, with the ids of run, step, group, actor and
    task."""

    @field_validator("trackers", mode="after")
    @classmethod
    def _known_trackers(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for name in values:
            check_name("trackers", name, TRACKERS)
        return values

    @model_validator(mode="before")
    @classmethod
    def _list_means_trackers(cls, values: Any) -> Any:
        """Read `tracking: [console, mlflow]`, which is short for `tracking: {trackers: [console, mlflow]}`."""
        return {"trackers": values} if isinstance(values, list | tuple) else values
