"""Rules of the import that need more than one key: batches, GPUs, steps, schedules. Used by `keys.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rayapp.config.agent import is_data_file
from rayapp.config.algorithm import NEEDS_GREEDY_BASELINE, NEEDS_GROUP, NEEDS_NO_GROUP, POLICY_LOSSES
from rayapp.config.engine_args import HAS_KEY, REFUSED
from rayapp.config.foreign_keys import Landing, Values, as_list, tracked
from rayapp.core.errors import ConfigError

_BATCH = "data.train_batch_size"
_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MODEL = "actor_rollout_ref.model"
_KL_CTRL, _CORRECTION = "algorithm.kl_ctrl", "algorithm.rollout_correction"
_REWARD_WEIGHT = "rayapp.distillation.reward_weight"  # an override of ours
_TRAINER_GPUS = ("trainer.n_gpus_per_node", "trainer.nnodes")
# Keys of verl for the GPUs of the servers, in one_step_off_policy.
_ROLLOUT_GPUS = ("rollout.n_gpus_per_node", "rollout.nnodes")
# Name of a KL estimator in verl -> rayapp's name.
KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "low_var_kl", "abs": "abs",
}  # fmt: skip
ROUNDINGS = ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor")
STEPS = "trainer.total_training_steps"
_MAX_TURNS_WITHOUT_LIMIT = 32


def advantage(key: str, value: Any, values: Values) -> Landing:
    """Map the advantage estimator. verl's default needs a critic and is refused."""
    if value == "gae":
        raise ConfigError(f"{key} = gae (verl's default) needs a critic, which rayapp doesn't train. Set {key}=grpo.")
    return Landing(settings={"algorithm.adv_estimator": value})


def group_size(key: str, value: Any, values: Values) -> Landing:
    """Map the trajectories per prompt. For remax verl samples a greedy baseline in addition, which rayapp counts."""
    size, estimator = int(value), values["algorithm.adv_estimator"]
    if estimator in NEEDS_GREEDY_BASELINE:
        return Landing(settings={"rollout.group_size": size + 1}, note=f"{size} sampled trajectories and a greedy one")
    if size > 1 or estimator in NEEDS_NO_GROUP or not values.get(_REWARD_WEIGHT, 1.0):
        return Landing(settings={"rollout.group_size": size}, note="trajectories per prompt")
    if estimator in NEEDS_GROUP:
        raise ConfigError(
            f"{key} = {value} can't be imported: {estimator} compares the trajectories of a prompt, and needs at least "
            f"2. Set {key}=8."
        )
    return Landing(
        settings={"rollout.group_size": size},
        note=f"warning: {estimator} has no other trajectory to compare with, so rewards are the advantages, as in "
        f"verl; set {key}=8",
    )


def sequence_parallel(key: str, value: Any, values: Values) -> Landing:
    """Map the number of learners that share a micro-batch; verl's older key is used if it is above 1."""
    return Landing(settings={"learner.sequence_parallel": _sequence_parallel(values)})


def _sequence_parallel(values: Values) -> int:
    older = int(values.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1))
    newer = int(values.get("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 1))
    return older if older > 1 else newer


def engine_argument(key: str, value: Any, values: Values) -> Landing:
    """Map an argument of vLLM to rayapp's key, or to server.engine_args. Raises ConfigError: a run can't have it."""
    name, _, rest = key.partition(".engine_kwargs.vllm.")[2].partition(".")
    own = HAS_KEY.get(name, f"server.engine_args.{name}")
    if value in (None, {}):
        return Landing(note="vLLM's default is used")
    if name in REFUSED or not re.fullmatch(r"server\.[a-z_.]+", own):
        why = REFUSED.get(name, f"rayapp sets it from {own}")
        raise ConfigError(f"{key} = {value!r} can't be imported: {why}. Leave it out.")
    if name == "quantization":
        return quantization(key, value, values)
    return Landing(settings={f"{own}.{rest}" if rest else own: value}, note="passed to vLLM unchanged")


def quantization(key: str, value: Any, values: Values) -> Landing:
    """Map the quantization of the servers' weights; verl's fp8 has a scale for each block of 128 x 128."""
    names: dict[Any, str] = {None: "none", "fp8": "fp8_per_block"} | {name: name for name in ROUNDINGS}
    if value not in names:
        raise ConfigError(f"{key} = {value!r} can't be imported: use {', '.join(ROUNDINGS)}, or leave it out.")
    return Landing(
        settings={"server.quantization": names[value]}, note="corrected as with rollout_correction.rollout_is=token"
    )


def minibatches(key: str, value: Any, values: Values) -> Landing:
    """Map mini-batches: verl sets their prompts, rayapp their number in a step."""
    batch = int(values[_BATCH])
    if batch % min(int(value), batch):
        raise ConfigError(
            f"{key} = {value} does not divide {_BATCH} = {batch}: all mini-batches of a step must have the same size. "
            f"Use a divisor of {batch}."
        )
    return Landing(settings={"train.num_minibatches": batch // min(int(value), batch)}, note=f"{batch} / {value}")


def microbatch_tokens(key: str, value: Any, values: Values) -> Landing:
    """Map micro-batches: verl sets sequences, rayapp tokens, enough for that many of the longest sequences."""
    both = int(values["data.max_prompt_length"]) + int(values["data.max_response_length"])
    longest = -(-both // _sequence_parallel(values))
    older = values.get("actor_rollout_ref.actor.ppo_micro_batch_size")
    if value is None and older is not None:
        value = max(1, int(older) // num_gpus(values))
    if value is None or values["actor_rollout_ref.actor.use_dynamic_bsz"]:
        tokens = int(values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"])
        note = "from ppo_max_token_len_per_gpu"
    else:
        tokens, note = int(value) * longest, f"{value} x {longest} tokens"
    return Landing(settings={"learner.max_tokens_per_microbatch": max(tokens, longest, 16)}, note=note)


def num_gpus(values: Values, names: tuple[str, str] = _TRAINER_GPUS) -> int:
    """Return the product of two keys: GPUs per node, and nodes."""
    return int(values[names[0]]) * int(values[names[1]])


def gpus(key: str, value: Any, values: Values) -> Landing:
    """Map GPUs: servers and learners share them, unless rollouts have separate ones."""
    learners, tp = num_gpus(values), int(values[_TP])
    is_split = all(values.get(name) for name in _ROLLOUT_GPUS)
    served, names = (num_gpus(values, _ROLLOUT_GPUS), _ROLLOUT_GPUS) if is_split else (learners, _TRAINER_GPUS)
    if served % tp:
        raise ConfigError(
            f"{' x '.join(names)} = {served} GPUs can't be divided into servers of {_TP} = {tp} GPUs each. Set {_TP} "
            f"to a divisor of {served}."
        )
    settings = {
        "cluster.device": "gpu",
        "cluster.placement": "split" if is_split else "colocated",
        "cluster.num_gpus": learners + (served if is_split else 0),
        "server.num_servers": served // tp,
        "learner.num_learners": learners,
    }
    shared = "beside" if is_split else "on the GPUs of"
    return Landing(settings=settings, note=f"{served // tp} servers x TP {tp} {shared} {learners} learners")


def rollout_gpus(key: str, value: Any, values: Values) -> Landing:
    """Map one_step_off_policy: the batch of the next step is sampled while the learners train."""
    if not all(values.get(name) for name in _ROLLOUT_GPUS):
        raise ConfigError(f"{key} = {value!r} can't be imported alone: give both {' and '.join(_ROLLOUT_GPUS)}")
    return Landing(settings={"train.max_staleness": 1}, note="servers have separate GPUs, and sample one step ahead")


def workers(key: str, value: Any, values: Values) -> Landing:
    """Map rollout workers: verl's default of 8 is for a node with 8 GPUs; one worker plays many groups at once."""
    most = num_gpus(values)
    note = f"no more than GPUs: {most}" if int(value) > most else ""
    return Landing(settings={"rollout.num_workers": min(int(value), most)}, note=note)


def lora(key: str, value: Any, values: Values) -> Landing:
    """Map adapters; verl's default alpha is 16."""
    if not value:
        return Landing(settings={"learner.lora.rank": 0})
    settings = {
        "learner.lora.rank": int(value),
        "learner.lora.alpha": int(values.get(f"{_MODEL}.lora_alpha", 16)),
        "learner.lora.target_modules": as_list(values.get(f"{_MODEL}.target_modules", "all-linear")),
    }
    if values.get(f"{_MODEL}.lora.merge"):
        settings["learner.lora.send"] = "merged"
    return Landing(settings=settings)


def num_steps(key: str, value: Any, values: Values) -> Landing:
    """Map the number of steps: `trainer.total_training_steps`, else epochs x rows of the training files."""
    if value is not None:
        return Landing(settings={"train.num_steps": int(value)})
    epochs, batch = int(values["trainer.total_epochs"]), int(values[_BATCH])
    if not values.get("data.train_files"):
        return Landing(note="the steps of an epoch can't be computed, because data.train_files is not set")
    files = [str(file) for file in as_list(values["data.train_files"])]
    if absent := [file for file in files if not Path(file).is_file()]:
        return Landing(
            note=f"the steps of {epochs} epochs can't be computed, because the file {absent[0]} is not on this machine",
        )
    rows = sum(map(_num_rows, files))
    if rows < batch:
        raise ConfigError(
            f"data.train_files hold {rows} rows, fewer than {_BATCH} = {batch}. Lower {_BATCH}, or give more rows."
        )
    note = f"{epochs} epochs x {rows} rows / {batch}; the rows include those that are filtered for their length"
    return Landing(settings={"train.num_steps": epochs * (rows // batch)}, note=note)


def _num_rows(file: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(file).num_rows)
    except pa.ArrowException as error:
        raise ConfigError(f"data.train_files: {file} is not a parquet file: {error}") from error


def warmup(key: str, value: Any, values: Values) -> Landing:
    """Map warm-up steps, or their share of all steps. rayapp counts optimizer steps, several in a training step."""
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
    """Map one side of the clip range; clip_ratio is the default of both sides."""
    side = value if value is not None else values["actor_rollout_ref.actor.clip_ratio"]
    note = "" if value is not None else "from clip_ratio"
    return Landing(settings={f"algorithm.{key.rpartition('.')[2]}": float(side)}, note=note)


def correction_threshold(key: str, value: Any, values: Values) -> Landing:
    """Map importance weights' upper bound, or `lower_upper`, outside of which verl's weights are 0 (IcePop)."""
    if value is None:
        return Landing(note="our default stays")
    lower, _, upper = str(value).rpartition("_")
    settings = {"algorithm.rollout_correction.threshold": float(upper)}
    if lower:
        settings["algorithm.rollout_correction.min_weight"] = float(lower)
    return Landing(settings=settings)


def kl_loss(key: str, value: Any, values: Values) -> Landing:
    """Map the KL coefficient, which verl reads only with use_kl_loss."""
    used = bool(values["actor_rollout_ref.actor.use_kl_loss"])
    coef = float(values["actor_rollout_ref.actor.kl_loss_coef"]) if used else 0.0
    return Landing(settings={"algorithm.kl_loss_coef": coef}, note="" if used else "use_kl_loss is off")


def kl_in_reward(key: str, value: Any, values: Values) -> Landing:
    """Map all keys of the KL that is subtracted from the reward of each token, with verl's defaults.
    The "+" of verl's estimators has no effect here, because it changes only the gradient of a loss.
    """
    if not value:
        return Landing(note="no KL is subtracted from rewards")
    kind, control = values.get("algorithm.kl_penalty", "kl"), values.get(f"{_KL_CTRL}.type", "fixed")
    if control != "fixed":
        raise ConfigError(
            f"{_KL_CTRL}.type = {control!r} can't be imported: rayapp keeps the coefficient. It must be fixed."
        )
    estimator = KL_ESTIMATORS.get(str(kind).removesuffix("+"))
    if estimator is None:
        known = ", ".join(KL_ESTIMATORS)
        raise ConfigError(f"algorithm.kl_penalty = {kind!r} can't be imported; supported values are {known}")
    settings = {"coef": float(values.get(f"{_KL_CTRL}.kl_coef", 0.001)), "type": estimator}
    return Landing(settings={f"algorithm.kl_in_reward.{name}": setting for name, setting in settings.items()})


def bypass_mode(key: str, value: Any, values: Values) -> Landing:
    """Map bypass_mode: the engine's log-probs are the old log-probs. verl uses this loss whatever loss_mode is."""
    if not value:
        return Landing(note="the learner computes old log-probs")
    options = {name: values.get(f"{_CORRECTION}.{name}") for name in POLICY_LOSSES["bypass_mode"].options}
    settings = {f"algorithm.policy_loss_options.{name}": each for name, each in options.items() if each is not None}
    return Landing(settings=settings | {"algorithm.policy_loss": "bypass_mode"}, note="loss_mode does not count")


def policy_loss(key: str, value: Any, values: Values) -> Landing:
    """Map the policy loss; rollout_correction.bypass_mode takes precedence over it."""
    if values.get(f"{_CORRECTION}.bypass_mode"):
        return Landing(note="rollout_correction.bypass_mode counts")
    return Landing(settings={"algorithm.policy_loss": value})


def rejection(key: str, value: Any, values: Values) -> Landing:
    """Refuse rejection criteria, unless bypass_mode, whose rule maps them, is on."""
    if value is not None and not values.get(f"{_CORRECTION}.bypass_mode"):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: rayapp rejects trajectories only with "
            f"{_CORRECTION}.bypass_mode=True, and otherwise weights them (rollout_is). Set bypass_mode, or leave {key} "
            "out."
        )
    return Landing(note="goes with bypass_mode" if value is not None else "nothing is rejected")


def replicas(key: str, value: Any, values: Values) -> Landing:
    """Map the learners that shard one copy of the model; -1, or the number of GPUs, means all."""
    total, size = num_gpus(values), int(value)
    if size > 0 and total % min(size, total):
        raise ConfigError(
            f"{key} = {value} can't be imported: it does not divide the trainer's {total} GPUs. Use a divisor of "
            f"{total}."
        )
    copies = total // min(size, total) if size > 0 else 1
    return Landing(settings={"learner.replicas": copies}, note=f"{copies} whole copies of the model")


def eval_temperature(key: str, value: Any, values: Values) -> Landing:
    """Map the temperature of evaluations; verl's agent loops don't read do_sample."""
    return Landing(settings={"eval.temperature": float(value)}, note="" if float(value) else "greedy")


def before_training(key: str, value: Any, values: Values) -> Landing:
    """Map evaluation before training, which is on by default in verl, as are validation files."""
    has_files = bool(values.get("data.val_files"))
    note = "" if has_files else "no data.val_files"
    return Landing(settings={"eval.before_training": bool(value) and has_files}, note=note)


def turns(key: str, value: Any, values: Values) -> Landing:
    """Map the limit of turns, which verl 0.9.1 applies even if multi_turn.enable is off; 0 and null are no limit.

    A user turn is the tools' answer to an assistant turn, so N user turns allow N + 1 assistant turns.
    """
    section = key.rpartition(".")[0]
    assistant, user = (int(values.get(f"{section}.max_{who}_turns") or 0) for who in ("assistant", "user"))
    limits = [limit for limit in (assistant, user and user + 1) if limit]
    note = "no limit in verl" if not limits else f"max_user_turns = {user}" if min(limits) != assistant else ""
    return Landing(settings={"agent.max_assistant_turns": min(limits, default=_MAX_TURNS_WITHOUT_LIMIT)}, note=note)


def custom_reward(key: str, value: Any, values: Values) -> Landing:
    section = key.rpartition(".")[0]
    path = values.get(f"{section}.path")
    if path is None:
        return Landing(note="none given")
    name = values.get(f"{section}.name") or "compute_score"
    return Landing(settings={"reward.custom": f"{path}:{name}"})


def trackers(key: str, value: Any, values: Values) -> Landing:
    """Map verl's loggers to rayapp's trackers, as far as they exist; metrics.jsonl is always written."""
    # Traces can go only to MLflow.
    traces = ["mlflow"] if values.get("actor_rollout_ref.rollout.trace.backend") == "mlflow" else []
    return tracked(*as_list(value), *traces)


def run_name(key: str, value: Any, values: Values) -> Landing:
    """Map the run's name to a valid folder name: at most 63 letters, digits, `.`, `_` or `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).lstrip("._-")[:63]
    return Landing(settings={"run.name": name}, note="" if name == value else f"from {value!r}")


def contents(key: str, value: Any, values: Values) -> Landing:
    """Map the contents of checkpoints; `extra` (generators, the loader's position) follows from seed and step."""
    kept = [name for name in as_list(value) if name != "extra"]
    if not kept:
        raise ConfigError(f"{key} = {value!r} can't be imported: name at least one of model, optimizer, hf_model")
    note = "" if {"model", "optimizer"} <= set(kept) else "a run can't resume from such a checkpoint"
    return Landing(settings={"checkpoint.save_contents": kept}, note=note)


def data_files(value: Any) -> list[str]:
    """Return verl's data files, which it reads as parquet whatever their names; rayapp goes by the ending."""
    return [file if is_data_file(file) else f"{file}.parquet" for file in map(str, as_list(value))]


def at_least_zero(value: Any) -> int:
    """Return the number; 0 for verl's -1, which means never."""
    return max(0, int(value))
