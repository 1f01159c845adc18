"""Rules of the import that need more than one key: batches, GPUs, steps, schedules. Used by `keys.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rayapp.config.agent import DATA_FILES, is_data_file
from rayapp.config.verl.rules import Landing, Values
from rayapp.core.errors import ConfigError

_BATCH = "data.train_batch_size"
_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MODEL = "actor_rollout_ref.model"
STEPS = "trainer.total_training_steps"
_MAX_TURNS_WITHOUT_LIMIT = 32


def advantage(key: str, value: Any, values: Values) -> Landing:
    """Names are verl's; its default needs a critic."""
    if value == "gae":
        raise ConfigError(f"{key} = gae (verl's default) needs a critic, which is not trained here. Set {key}=grpo.")
    return Landing(settings={"algorithm.adv_estimator": value})


def group_size(key: str, value: Any, values: Values) -> Landing:
    """Trajectories per prompt; verl's default of 1 leaves nothing to compare them with."""
    if int(value) < 2:
        raise ConfigError(f"{key} = {value} can't be imported: a group needs at least 2 to compare. Set {key}=8.")
    return Landing(settings={"rollout.group_size": int(value)}, note="trajectories per prompt")


def sequence_parallel(key: str, value: Any, values: Values) -> Landing:
    """Learners of a micro-batch: verl's older key wins where it is above 1."""
    return Landing(settings={"learner.sequence_parallel": _sequence_parallel(values)})


def _sequence_parallel(values: Values) -> int:
    older = int(values.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1))
    newer = int(values.get("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 1))
    return older if older > 1 else newer


def determinism(key: str, value: Any, values: Values) -> Landing:
    """Repeating a run bit by bit, which runs on GPUs don't."""
    if value and values.get("rayapp.cluster.device") != "cpu":
        raise ConfigError(
            f"{key} = {value!r} can't be imported: runs on GPUs don't repeat exactly here. Leave it out, or give "
            "rayapp.cluster.device=cpu, where synchronous runs repeat."
        )
    return Landing(note="synchronous runs on CPU repeat anyway")


def minibatches(key: str, value: Any, values: Values) -> Landing:
    """verl counts prompts in a mini-batch; we count mini-batches in a batch."""
    batch = int(values[_BATCH])
    if batch % min(int(value), batch):
        raise ConfigError(f"{key} = {value} does not divide {_BATCH} = {batch}: parts of whole groups are needed here")
    return Landing(settings={"train.num_minibatches": batch // min(int(value), batch)}, note=f"{batch} / {value}")


def microbatch_tokens(key: str, value: Any, values: Values) -> Landing:
    """verl counts sequences in a micro-batch, we count its tokens: enough for as many of the longest."""
    both = int(values["data.max_prompt_length"]) + int(values["data.max_response_length"])
    longest = -(-both // _sequence_parallel(values))
    if value is None or values["actor_rollout_ref.actor.use_dynamic_bsz"]:
        tokens = int(values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"])
        note = "from ppo_max_token_len_per_gpu"
    else:
        tokens, note = int(value) * longest, f"{value} x {longest} tokens"
    return Landing(settings={"learner.max_tokens_per_microbatch": max(tokens, longest, 16)}, note=note)


def gpus(key: str, value: Any, values: Values) -> Landing:
    """Servers and learners take turns on the same GPUs, as in verl."""
    total, tp = int(values["trainer.n_gpus_per_node"]) * int(values["trainer.nnodes"]), int(values[_TP])
    if total % tp:
        raise ConfigError(
            f"trainer.n_gpus_per_node x trainer.nnodes = {total} GPUs can't be split into servers of {_TP} = {tp}. "
            f"Use a divisor of {total}."
        )
    settings = {
        "cluster.device": "gpu",
        "cluster.placement": "colocated",
        "cluster.num_gpus": total,
        "server.num_servers": total // tp,
        "learner.num_learners": total,
    }
    return Landing(settings=settings, note=f"{total // tp} servers x TP {tp} on the GPUs of {total} learners")


def workers(key: str, value: Any, values: Values) -> Landing:
    """verl's default of 8 is for a node of 8 GPUs; one worker plays many groups at once."""
    most = max(1, int(values["trainer.n_gpus_per_node"]) * int(values["trainer.nnodes"]))
    note = f"no more than GPUs: {most}" if int(value) > most else ""
    return Landing(settings={"rollout.num_workers": min(int(value), most)}, note=note)


def lora(key: str, value: Any, values: Values) -> Landing:
    """Adapters; verl's alpha is 16 where none is given."""
    if not value:
        return Landing(settings={"learner.lora.rank": 0})
    settings = {"learner.lora.rank": int(value), "learner.lora.alpha": int(values.get(f"{_MODEL}.lora_alpha", 16))}
    modules = values.get(f"{_MODEL}.target_modules", "all-linear")
    return Landing(settings=settings | {"learner.lora.target_modules": as_list(modules)})


def num_steps(key: str, value: Any, values: Values) -> Landing:
    """`trainer.total_training_steps`, else epochs x the rows of the training files."""
    if value is not None:
        return Landing(settings={"train.num_steps": int(value)})
    epochs, batch = int(values["trainer.total_epochs"]), int(values[_BATCH])
    files = [str(file) for file in as_list(values["data.train_files"])]
    if absent := [file for file in files if not Path(file).is_file()]:
        return Landing(note=f"{epochs} epochs can't be counted, as {absent[0]} is not here; {STEPS} says how many")
    rows = sum(map(_num_rows, files))
    if rows < batch:
        raise ConfigError(f"data.train_files hold {rows} rows, fewer than {_BATCH} = {batch}")
    note = f"{epochs} epochs x {rows} rows / {batch}; rows that are filtered for their length are counted"
    return Landing(settings={"train.num_steps": epochs * (rows // batch)}, note=note)


def _num_rows(file: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(file).num_rows)
    except pa.ArrowException as error:
        raise ConfigError(f"data.train_files: {file} is no parquet file: {error}") from error


def warmup(key: str, value: Any, values: Values) -> Landing:
    """Training steps, or where there are none a share of all; we count optimizer steps, of which each has several."""
    optim = "actor_rollout_ref.actor.optim"
    steps = max(0, int(values[f"{optim}.lr_warmup_steps"] or 0))
    ratio = float(values[f"{optim}.lr_warmup_steps_ratio"] or 0.0)
    if steps == 0 and ratio > 0.0:
        total = num_steps(STEPS, values[STEPS], values)
        if not total.settings:
            return Landing(note=f"a share of the steps, and {total.note}")
        steps = int(ratio * total.settings["train.num_steps"])
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    count = int(minibatches(size, values[size], values).settings["train.num_minibatches"])
    note = f"{steps} training steps x {count} mini-batches; verl's first step is at 0" if steps else ""
    return Landing(settings={"learner.optimizer.warmup_steps": steps * count}, note=note)


def clip_ratio(key: str, value: Any, values: Values) -> Landing:
    """One side of the clip; without a value of its own it is clip_ratio."""
    side = value if value is not None else values["actor_rollout_ref.actor.clip_ratio"]
    note = "" if value is not None else "from clip_ratio"
    return Landing(settings={f"algorithm.{key.rpartition('.')[2]}": float(side)}, note=note)


def correction_threshold(key: str, value: Any, values: Values) -> Landing:
    """Take the upper bound of the weights, or `lower_upper`, outside of which verl sets them to 0 (IcePop)."""
    lower, _, upper = str(value).rpartition("_")
    settings = {"algorithm.rollout_correction.threshold": float(upper)}
    if lower:
        settings["algorithm.rollout_correction.min_weight"] = float(lower)
    return Landing(settings=settings)


def kl_loss(key: str, value: Any, values: Values) -> Landing:
    """A coefficient that verl reads only with use_kl_loss."""
    used = bool(values["actor_rollout_ref.actor.use_kl_loss"])
    coef = float(values["actor_rollout_ref.actor.kl_loss_coef"]) if used else 0.0
    return Landing(settings={"algorithm.kl_loss_coef": coef}, note="" if used else "use_kl_loss is off")


def kl_in_reward(key: str, value: Any, values: Values) -> Landing:
    """A KL taken from the reward of each token; nothing where its coefficient is 0."""
    coef, kind = values.get("algorithm.kl_ctrl.kl_coef", 0.001), values.get("algorithm.kl_ctrl.type", "fixed")
    if value and (float(coef) != 0.0 or kind != "fixed"):
        raise ConfigError(
            f"{key} = {value!r} with kl_ctrl.kl_coef = {coef} can't be imported: the KL is a term of the loss here, "
            f"not of the reward. Set {key}=False, and actor_rollout_ref.actor.use_kl_loss=True for a KL in the loss."
        )
    return Landing(note="kl_ctrl.kl_coef is 0" if value else "no KL is taken from rewards")


def replicas(key: str, value: Any, values: Values) -> Landing:
    """Learners that shard one copy of the model; -1, or as many as there are GPUs, is all of them."""
    total, size = int(values["trainer.n_gpus_per_node"]) * int(values["trainer.nnodes"]), int(value)
    if size > 0 and total % min(size, total):
        raise ConfigError(f"{key} = {value} can't be imported: it must divide the {total} GPUs of the trainer")
    copies = total // min(size, total) if size > 0 else 1
    return Landing(settings={"learner.replicas": copies}, note=f"{copies} whole copies of the model")


def eval_temperature(key: str, value: Any, values: Values) -> Landing:
    """Take the temperature of evaluations; verl's agent loops don't read do_sample."""
    return Landing(settings={"eval.temperature": float(value)}, note="" if float(value) else "greedy")


def before_training(key: str, value: Any, values: Values) -> Landing:
    """On by default in verl, which has validation files by default too."""
    has_files = bool(values.get("data.val_files"))
    note = "" if has_files else "no data.val_files"
    return Landing(settings={"eval.before_training": bool(value) and has_files}, note=note)


def turns(key: str, value: Any, values: Values) -> Landing:
    """verl 0.9.1's agent loops count these whether multi_turn.enable is on or not; 0 and null are no limit.

    A user turn is the tools' answer to an assistant turn, so that N of them allow N + 1 assistant turns.
    """
    section = key.rpartition(".")[0]
    assistant, user = (int(values.get(f"{section}.max_{who}_turns") or 0) for who in ("assistant", "user"))
    limits = [limit for limit in (assistant, user and user + 1) if limit]
    note = "no limit in verl" if not limits else f"max_user_turns = {user}" if min(limits) != assistant else ""
    return Landing(settings={"agent.max_assistant_turns": min(limits, default=_MAX_TURNS_WITHOUT_LIMIT)}, note=note)


def custom_reward(key: str, value: Any, values: Values) -> Landing:
    """A file and a function's name."""
    section = key.rpartition(".")[0]
    path = values.get(f"{section}.path")
    if path is None:
        return Landing(note="none given")
    name = values.get(f"{section}.name") or "compute_score"
    return Landing(settings={"reward.custom": f"{path}:{name}"})


def trackers(key: str, value: Any, values: Values) -> Landing:
    """The trackers that we have of verl's loggers; metrics.jsonl is always written."""
    from rayapp.config.sections import TRACKERS

    known, asked = TRACKERS, as_list(value)
    kept = [name for name in asked if name in known]
    if values.get("actor_rollout_ref.rollout.trace.backend") == "mlflow":
        kept.append("mlflow")  # traces have no other place to go
    missing = [name for name in asked if name not in known]
    note = f"not here: {', '.join(missing)}; the same numbers are in metrics.jsonl" if missing else ""
    return Landing(settings={"tracking.trackers": list(dict.fromkeys([*kept, "jsonl"]))}, note=note)


def run_name(key: str, value: Any, values: Values) -> Landing:
    """A run's name is a folder's name here: 63 letters, digits, `.`, `_` or `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).lstrip("._-")[:63]
    return Landing(settings={"run.name": name}, note="" if name == value else f"from {value!r}")


def output_dir(key: str, value: Any, values: Values) -> Landing:
    """Runs of a project lie side by side."""
    return Landing(settings={"run.output_dir": f"outputs/{value}"}, note="folder of the project's runs")


def contents(key: str, value: Any, values: Values) -> Landing:
    """`extra` (generators, the loader's place) follows from seed and step here, so nothing of it is saved."""
    kept = [name for name in as_list(value) if name != "extra"]
    if not kept:
        raise ConfigError(f"{key} = {value!r} can't be imported: name at least one of model, optimizer, hf_model")
    note = "" if {"model", "optimizer"} <= set(kept) else "such a checkpoint can't be resumed from"
    return Landing(settings={"checkpoint.save_contents": kept}, note=note)


def as_list(value: Any) -> list[Any]:
    """verl takes one or several in many places."""
    return list(value) if isinstance(value, list | tuple) else [value]


def data_files(value: Any) -> list[Any]:
    """verl reads any file as rows; here a task is a data file by its name."""
    files = as_list(value)
    if others := [file for file in files if isinstance(file, str) and not is_data_file(file)]:
        raise ValueError(f"the name of a data file ends in {', '.join(DATA_FILES)} here; rename {others[0]}")
    return files


def at_least_zero(value: Any) -> int:
    """verl says -1 for never, we say 0."""
    return max(0, int(value))
