"""Rules for every field of TRL's `GRPOConfig`. fields.yaml has those that need no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.foreign_keys import Landing, Rule, Values, as_list, choice, rules_of, to, tracked
from rayapp.core.errors import ConfigError

# Arguments of `trl_config` that rules read, in addition to the fields.
NUM_GPUS, NUM_ROWS = "num_gpus", "number of rows"


def _batch(key: str, value: Any, values: Values) -> Landing:
    groups, minibatches, note = _sizes(values)
    settings = {
        "rollout.group_size": int(values["num_generations"]),
        "train.groups_per_step": groups,
        "train.num_minibatches": minibatches,
    }
    return Landing(settings=settings, note=note)


def _sizes(values: Values) -> tuple[int, int, str]:
    """Return the prompts in a generation batch, its optimizer steps, and the arithmetic as text."""
    per_pass = int(values["per_device_train_batch_size"]) * int(values[NUM_GPUS])
    accumulated = int(values["gradient_accumulation_steps"])
    sampled = values["generation_batch_size"] or per_pass * int(values["steps_per_generation"] or accumulated)
    per_update, group = per_pass * accumulated, int(values["num_generations"])
    whole = max(int(sampled), per_update)
    if whole % group:
        wrong = f"is not a multiple of num_generations = {group}"
    elif whole % per_update:
        wrong = f"is not a multiple of the {per_update} completions of an optimizer step"
    elif (whole // group) % (whole // per_update):
        wrong = f"has {whole // group} groups, which can't be divided among {whole // per_update} optimizer steps"
    else:
        wrong = ""
    if wrong:
        raise ConfigError(
            f"a generation batch of {whole} completions {wrong}. Change gradient_accumulation_steps or "
            "steps_per_generation."
        )
    return whole // group, whole // per_update, f"{whole} completions / {group}, {whole // per_update} optimizer steps"


def _num_steps(key: str, value: Any, values: Values) -> Landing:
    """Translate max_steps, which counts optimizer steps, or epochs into steps, which are generation batches."""
    groups, minibatches, _ = _sizes(values)
    if int(value) > 0:
        steps = -(-int(value) // minibatches)
        return Landing(settings={"train.num_steps": steps}, note=f"{value} optimizer steps / {minibatches} of a batch")
    epochs, rows = float(values["num_train_epochs"]), int(values[NUM_ROWS])
    if not rows:
        return Landing(note="the number of steps is unknown without train_dataset: train.num_steps keeps its default")
    if rows < groups:
        raise ConfigError(
            f"train_dataset has {rows} rows, fewer than the {groups} prompts of a generation batch. Give more rows, or "
            "lower per_device_train_batch_size."
        )
    return Landing(
        settings={"train.num_steps": max(1, int(epochs * (rows // groups)))},
        note=f"{epochs:g} epochs x {rows} rows / {groups}",
    )


def _every(target: str, strategy: str) -> Rule:
    def rule(key: str, value: Any, values: Values) -> Landing:
        when = str(getattr(values[strategy], "value", values[strategy]))
        if when == "no":
            return Landing(settings={target: 0}, note=f"{strategy} is no")
        every = value if value is not None else values["logging_steps"]
        if when != "steps":
            raise ConfigError(f"{strategy} = {when!r} can't be imported: it must be steps or no")
        if float(every) != int(every):
            name = key if value is not None else "logging_steps"
            raise ConfigError(f"{name} = {every!r} can't be imported: give a whole number of steps")
        return Landing(settings={target: max(1, int(every) // _sizes(values)[1])})

    return rule


def _warmup(key: str, value: Any, values: Values) -> Landing:
    share = float(values["warmup_ratio"] or 0.0) or (float(value or 0) if float(value or 0) < 1 else 0.0)
    if not share:
        return Landing(settings={"learner.optimizer.warmup_steps": int(value or 0)})
    steps = _num_steps("max_steps", values["max_steps"], values)
    if not steps.settings:
        name = "warmup_ratio" if values["warmup_ratio"] else key
        raise ConfigError(
            f"{name} = {share:g} can't be converted to steps: without train_dataset the number of optimizer steps is "
            "unknown. Give max_steps."
        )
    total = int(steps.settings["train.num_steps"]) * _sizes(values)[1]
    return Landing(settings={"learner.optimizer.warmup_steps": int(share * total)}, note=f"{share:g} of {total}")


def _lengths(key: str, value: Any, values: Values) -> Landing:
    """Translate a completion's length; a prompt's follows from vLLM's longest sequence."""
    completion = int(value)
    settings = {"rollout.max_completion_tokens": completion}
    whole = values["vllm_max_model_length"]
    if whole is not None:
        settings["rollout.max_prompt_tokens"] = int(whole) - completion
    longest = int(whole or 512 + completion)
    settings["learner.max_tokens_per_microbatch"] = max(16, longest * int(values["per_device_train_batch_size"]))
    return Landing(
        settings=settings, note="" if whole else "TRL doesn't limit prompts; rollout.max_prompt_tokens is 512"
    )


def _gpus(key: str, value: Any, values: Values) -> Landing:
    if values["use_cpu"]:
        return Landing(settings={"cluster.device": "cpu", "learner.num_learners": int(values[NUM_GPUS])})
    total, tp = int(values[NUM_GPUS]), int(values["vllm_tensor_parallel_size"])
    is_split = bool(values["use_vllm"]) and value == "server"
    if value not in ("server", "colocate"):
        raise ConfigError(f"{key} = {value!r} can't be imported: it must be server or colocate")
    if not is_split and total % tp:
        raise ConfigError(
            f"num_gpus = {total} can't be divided into servers of vllm_tensor_parallel_size = {tp} GPUs each. "
            f"Make num_gpus a multiple of {tp}."
        )
    settings = {
        "cluster.device": "gpu",
        "cluster.placement": "split" if is_split else "colocated",
        "cluster.num_gpus": total + tp if is_split else total,
        "learner.num_learners": total,
        "server.num_servers": 1 if is_split else total // tp,
        "server.tensor_parallel_size": tp,
    }
    note = (
        "one vLLM server of the run, on separate GPUs from the learners"
        if is_split
        else "servers and learners take turns on the same GPUs"
    )
    return Landing(settings=settings, note=note)


_LOSSES: Mapping[str, dict[str, Any]] = {
    "dapo": {"loss_agg_mode": "token-mean"},
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "cispo": {"loss_agg_mode": "token-mean", "policy_loss": "cispo"},
    "sapo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": "sapo"},
}


def _loss(key: str, value: Any, values: Values) -> Landing:
    by_sequence = values["importance_sampling_level"] == "sequence"
    if value not in _LOSSES:
        raise ConfigError(f"{key} = {value!r} can't be imported; supported values are {', '.join(_LOSSES)}")
    if by_sequence and value != "grpo":
        raise ConfigError(
            f"importance_sampling_level = 'sequence' can be imported only with {key} = 'grpo', not with {value!r}"
        )
    settings = {f"algorithm.{name}": setting for name, setting in _LOSSES[value].items()}
    if by_sequence:
        settings["algorithm.policy_loss"] = "gspo"
    if value == "sapo":
        taus = {"tau_pos": values["sapo_temperature_pos"], "tau_neg": values["sapo_temperature_neg"]}
        settings["algorithm.policy_loss_options"] = taus
    return Landing(settings=settings)


def _clip(key: str, value: Any, values: Values) -> Landing:
    """Translate the clip range. TRL's cispo clips the importance weight itself, only from above, at epsilon_high."""
    low = float(values["epsilon"])
    high = float(values["epsilon_high"] if values["epsilon_high"] is not None else low)
    if values["loss_type"] == "cispo":
        low, high = 1.0, high - 1.0
    return Landing(settings={"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high})


def _delta(key: str, value: Any, values: Values) -> Landing:
    note = "no second bound" if value is None else "bound of the ratio for negative advantages"
    return Landing(settings={"algorithm.clip_ratio_c": 1e6 if value is None else float(value)}, note=note)


def _kl(key: str, value: Any, values: Values) -> Landing:
    """Translate the KL. At an importance ratio of 1, TRL's bias correction has the gradient of verl's `k3+`."""
    corrected = bool(values["use_bias_correction_kl"])
    settings = {"algorithm.kl_loss_coef": float(value), "algorithm.kl_loss_type": "k3+" if corrected else "k3"}
    return Landing(settings=settings, note="" if float(value) else "no reference is loaded")


def _correction(key: str, value: Any, values: Values) -> Landing:
    """Translate the importance weights of vLLM and learner. TRL's mask modes set those outside the bounds to 0."""
    section = "algorithm.rollout_correction"
    if not values["use_vllm"] or not values["vllm_importance_sampling_correction"]:
        return Landing(
            settings={f"{section}.level": "none"}, note="TRL reads it only with use_vllm and the correction turned on"
        )
    level, _, kind = str(value).partition("_")
    cap, floor = values["vllm_importance_sampling_cap"], values["vllm_importance_sampling_clip_min"]
    top = cap if cap is not None else values["vllm_importance_sampling_clip_max"]
    if level not in ("token", "sequence"):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: use token_truncate, token_mask, sequence_truncate or sequence_mask"
        )
    if top is None:
        raise ConfigError(f"{key} = {value!r} can't be imported without vllm_importance_sampling_clip_max: set it")
    if kind == "truncate" and floor is not None:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min = {floor} can't be imported with {key} = {value!r}: only masks have a "
            "lower bound. Leave it out"
        )
    settings = {f"{section}.level": level, f"{section}.threshold": float(top)}
    if kind == "mask":
        settings[f"{section}.min_weight"] = float(floor or 1e-6)
    return Landing(settings=settings)


def _std(key: str, value: Any, values: Values) -> Landing:
    named = {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    if named not in ("group", "none"):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: advantages can be scaled only by the group's standard deviation "
            "('group') or not at all ('none')"
        )
    return Landing(
        settings={"algorithm.norm_adv_by_std": named == "group"},
        note="rayapp adds 1e-6 to the standard deviation, like verl",
    )


def _turns(key: str, value: Any, values: Values) -> Landing:
    """Translate rounds of tool calls into turns, which are one more: the last turn is the answer."""
    settings = {"agent.max_assistant_turns": 32 if value is None else int(value) + 1}
    return Landing(
        settings=settings,
        note="no limit in TRL" if value is None else "rounds of tool calls, and one turn for the answer",
    )


def _dtype(key: str, value: Any, values: Values) -> Landing:
    if values["fp16"]:
        raise ConfigError("fp16 = True can't be imported: learners compute in bfloat16 or float32. Give bf16=True")
    return Landing(settings={"learner.compute_dtype": "float32" if value is False else "bfloat16"})


def _trackers(key: str, value: Any, values: Values) -> Landing:
    asked = [name for name in as_list(value or ()) if name != "none"]
    return tracked("console", *asked)


def _variables(key: str, value: Any, values: Values) -> Landing:
    return Landing(settings={f"agent.chat_template_kwargs.{name}": each for name, each in dict(value or {}).items()},
                   note="" if value else "none given")  # fmt: skip


def _model_options(key: str, value: Any, values: Values) -> Landing:
    more = set(dict(value or {})) - {"dtype", "torch_dtype", "attn_implementation", "use_cache", "device_map"}
    if more:
        raise ConfigError(
            f"{key} has {', '.join(sorted(more))}, which can't be imported: edit config.json in a copy of the model"
        )
    return Landing(note="the learner has its own attention, and its parameters are float32")


_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_YAML = yaml.safe_load((Path(__file__).parent / "fields.yaml").read_text())
DEFAULTS: Mapping[str, Any] = _YAML["defaults"]  # Defaults of TRL, for mappings that omit these fields.
ARGUMENTS: Mapping[str, str] = _YAML["arguments"]  # Argument of GRPOTrainer that rayapp lacks -> what to use instead.
PEFT: Mapping[str, Any] = _YAML["peft"]  # Field of peft's LoraConfig -> the only value that rayapp supports.
# Field of TRL 1.16's GRPOConfig -> its rule.
FIELDS: dict[str, Rule] = dict(rules_of(_YAML["fields"])) | {
    "output_dir": lambda key, value, values: Landing(settings={"run.output_dir": str(value or "trainer_output")}),
    "model_init_kwargs": _model_options,
    "num_generations": _batch,
    "max_steps": _num_steps,
    "lr_scheduler_type": choice("learner.optimizer.schedule", _SCHEDULES),
    "warmup_steps": _warmup,
    "adam_beta1": lambda key, value, values: Landing(
        settings={"learner.optimizer.betas": [float(value), float(values["adam_beta2"])]}
    ),
    "bf16": _dtype,
    "torch_compile": to("learner.compile", lambda value: bool(value) or "auto"),
    "temperature": lambda key, value, values: Landing(
        settings={"rollout.temperature": float(value), "eval.temperature": float(value)}
    ),
    "chat_template_kwargs": _variables,
    "max_completion_length": _lengths,
    "vllm_mode": _gpus,
    "beta": _kl,
    "epsilon": _clip,
    "delta": _delta,
    "loss_type": _loss,
    "scale_rewards": _std,
    "vllm_importance_sampling_mode": _correction,
    "max_tool_calling_iterations": _turns,
    "eval_steps": _every("eval.every_steps", "eval_strategy"),
    "num_generations_eval": lambda key, value, values: Landing(
        settings={"eval.samples_per_task": int(value or values["num_generations"])}
    ),
    "save_steps": _every("checkpoint.every_steps", "save_strategy"),
    "report_to": _trackers,
}
