"""The sections of a run that are neither algorithm, learner, agent nor sandbox. See `config.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rayapp.config.base import Dtype, FrozenModel
from rayapp.config.learner import OptimizerSection
from rayapp.core.errors import StorageConfigError
from rayapp.core.location import Location
from rayapp.core.names.plugins import check_name

TRACKERS = ("console", "jsonl", "tensorboard", "mlflow", "wandb")
CheckpointContent = Literal["model", "optimizer", "hf_model"]


FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Options of vLLM's sampling. Each makes it sample from another distribution than the one that is trained."""


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
    allow_changed: tuple[str, ...] = ()
    """Keys or sections, e.g. learner.optimizer.lr, that may differ from what the run folder was made with. Without it a
    run goes on only under a configuration that trains the same."""
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
    """A run may go on to another number while learner.optimizer.schedule is constant."""
    groups_per_step: int = Field(2, ge=1)
    """Prompts per optimizer step (P)."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps made from one batch. 1 is on-policy: old log-probs are those of the update itself."""
    max_staleness: int = Field(0, ge=0)
    """Optimizer steps between the weights that sampled a group and those that train on it. 0 is synchronous. On one
    CPU more than 0 is slower: sampling and training share its cores."""
    straggler_window: int | None = Field(None, ge=0)
    """Groups that may be trained before one that is still being generated, as long as that one does not grow staler
    than max_staleness. None: as many as a step has. 0: strictly in order. Synchronous runs are in order anyway."""


class WarmupSection(FrozenModel):
    """Supervised steps on demonstrations before GRPO's first step (docs/sft.md)."""

    num_steps: int = Field(0, ge=0)
    """Optimizer steps on demonstrations, by the same learners. 0: none."""
    files: tuple[str, ...] = ()
    """JSONL or parquet: conversations, prompts with completions, or trajectories of `rayapp data from-run`. Empty: the
    demonstrations of the run's tasks."""
    eval_files: tuple[str, ...] = ()
    """Rows whose loss is computed, never trained on: `sft/validation_loss`."""
    eval_every_steps: int = Field(0, ge=0)
    """Compute it after every so many steps, too. 0: before the first and after the last alone."""
    rows_per_step: int = Field(4, ge=1)
    """Demonstrations per optimizer step. Each epoch takes all of them, in an order of its own from run.seed."""
    max_tokens: int = Field(0, ge=0)
    """A longer row is refused. 0: rollout.max_prompt_tokens + rollout.max_completion_tokens."""
    filter_overlong: bool = False
    """Leave longer rows out instead, and say how many."""
    optimizer: OptimizerSection = OptimizerSection(lr=2e-5)
    """Of the supervised steps. GRPO starts with an optimizer that has not stepped."""


class ServerSection(FrozenModel):
    num_servers: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    dtype: Dtype = "bfloat16"
    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of the GPU's memory that vLLM takes; unused on CPU."""
    kv_cache_gib: float = Field(2.0, gt=0.0, allow_inf_nan=False)
    """KV cache of a rank on CPU, in fractions too: zeroing a GiB takes seconds of each start. Unused on GPU."""
    kv_block_tokens: Literal[0, 16, 32, 64, 128] = 0
    """Tokens of one block of the KV cache. Only whole blocks of a prompt are computed once for a group. 0 is vLLM's
    choice: on CPU 128, which is more than many prompts have."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded at once."""
    enforce_eager: bool = True
    """Skip compilation: on CPU it adds 45 s to the start for 10% of speed."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of a server on CPU; 0 divides the cores among the servers, or half of them where learners compute beside
    them (train.max_staleness above 0)."""
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
    tasks: tuple[str, ...] = ()
    """Tasks that evaluation takes in place of those of training, e.g. the same with another wording."""
    every_steps: int = Field(0, ge=0)
    """Evaluate during training after every so many steps and after the last one, as metrics `eval/*`. Nothing of it is
    trained on, and it changes nothing that is. 0 never evaluates."""
    before_training: bool = False
    """Evaluate the model a run starts from too, as step 0; with a warm-up also before that, as its step 0."""
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
    dashboard: bool = True
    """In a Ray that we start: Ray's dashboard, a process that takes memory and a core's seconds."""
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
    """A process that does not answer for this long hangs and is replaced. Far above what a healthy process on a busy
    machine needs; one that is being started has server.start_timeout_s instead."""
    stall_replace_s: float = Field(180.0, gt=0)
    """A server that answers, but samples no token for this long although it has requests, is replaced. Below
    server.request_timeout_s, past which requests fail. Requests that start together wait half of it for each other."""
    stall_report_s: float = Field(600.0, gt=0)
    """When nothing was finished for this long (no group, no phase of a step), say who waits for what."""
    stall_stop_s: float = Field(3600.0, gt=0)
    """When nothing was finished for this long, write the stacks of all processes, save what is whole, and stop. Longer
    than the slowest honest step."""


class TrackingSection(FrozenModel):
    trackers: tuple[str, ...] = ("console", "jsonl")
    """Where each step's metrics go: console, jsonl, tensorboard, mlflow, wandb, or plug-ins (docs/plugins.md). One that
    fails is told once and counted in `tracking/failed`; training goes on."""
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

    @field_validator("trackers", mode="after")
    @classmethod
    def _known_trackers(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for name in values:
            check_name("trackers", name, TRACKERS)
        return values

    @model_validator(mode="before")
    @classmethod
    def _list_means_trackers(cls, values: Any) -> Any:
        """`tracking: [console, mlflow]` in a file is short for `tracking: {trackers: [console, mlflow]}`."""
        return {"trackers": values} if isinstance(values, list | tuple) else values
