"""Translates a GRPO run of TRL: `rayapp.trl_config(GRPOConfig(...), ...)` returns a run for `rayapp.train`.

`FIELDS` has a rule for every field of TRL's `GRPOConfig`. A rule gives the key that the value sets, or the reason why
the field has no effect in rayapp, or raises an error if the value is not supported. The functions of verl's import make
the rules. TRL itself is never imported. Reward functions are called as TRL calls them, for one completion at a time.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from rayapp.api.arguments import GivenRun
from rayapp.config.foreign_keys import (
    KeyRow,
    Landing,
    Rule,
    Values,
    as_list,
    landing_of,
    load_settings,
    no_effect,
    only,
    optional,
    settings_of,
    to,
    tracked,
)
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names import PREFIX, did_you_mean

DATA_SOURCE = "trl"
NUM_GPUS, NUM_ROWS = "num_gpus", "number of rows"
"""Names under which rules read arguments of `trl_config`, in addition to the fields."""
_FOLDER = "trl_data"
_NOT_PASSED = ("completion_ids", "trainer_state", "log_extra", "log_metric")
_PEFT = {
    "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "exclude_modules": None, "layers_to_transform": None, "init_lora_weights":
    True, "layer_replication": None, "fan_in_fan_out": False,
}  # fmt: skip
"""Field of peft's LoraConfig -> the only value that rayapp supports."""


def trl_config(
    args: Any,
    *,
    model: str,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | None = None,
    peft_config: Any = None,
    num_gpus: int = 1,
    overrides: Sequence[str] = (),
) -> GivenRun:
    """Translate the arguments of TRL's `GRPOTrainer` into a run for `rayapp.train`.

    The datasets are written to `<output_dir>/trl_data`. Nothing else is written, and nothing is started.

    Args:
        args: TRL's GRPOConfig, or a mapping of its fields. Fields that the mapping omits have TRL's defaults.
        model: a model folder or hub id.
        train_dataset, eval_dataset: rows as mappings, such as a datasets.Dataset, with a column `prompt`.
        reward_funcs: functions in TRL's form, which the field `reward_weights` weighs.
        environment_factory: a class in TRL's form. Its rows are those of the training set.
        peft_config: a LoraConfig, or a mapping of its fields.
        num_gpus: number of training processes of the TRL run. The processes of a vLLM server don't count.
        overrides: settings of rayapp that replace the translated ones, e.g. ["run.name=math"].
    Returns:
        The run. Its attribute `rows` lists each field with the keys that it sets.
    Raises:
        ConfigError: fields are unknown, or their values can't be imported. One message names all of them.
        InputError: a dataset can't be used.
    """
    given = _fields_of(args)
    rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    train_rows = _rows(train_dataset, "train_dataset")
    known = dict(DEFAULTS) | given | {NUM_GPUS: num_gpus, NUM_ROWS: len(train_rows), "reward_funcs": _names(rewards)}
    rows, problems = _landings(given, known)
    problems += _problems_of_rewards(rewards, known) + ([] if train_rows or environment_factory else [_NO_ROWS])
    adapters = _adapters(peft_config, problems)
    if problems:
        raise ConfigError("settings of TRL that can't be imported:\n  " + "\n  ".join(dict.fromkeys(problems)))
    settings = settings_of(rows) | adapters | {"model.path": model}
    folder = Path(str(settings["run.output_dir"])) / _FOLDER
    weighted = WeightedRewards(tuple(rewards), tuple(known["reward_weights"] or [1.0] * len(rewards)))
    objects: dict[str, object] = {}
    if environment_factory is not None:
        settings |= _environment(environment_factory, train_rows, weighted, folder, objects)
    else:
        objects[f"{PREFIX}trl_rewards"] = _Answers(weighted)
        settings["reward.custom"] = f"{PREFIX}trl_rewards"
        settings["tasks"] = [_write_rows(folder / "train.parquet", train_rows)]
        if eval_rows := _rows(eval_dataset, "eval_dataset"):
            settings["eval.tasks"] = [_write_rows(folder / "eval.parquet", eval_rows)]
    return GivenRun(config=load_settings(settings, rows, overrides), objects=objects, rows=tuple(rows))


_NO_ROWS = "train_dataset is empty: give rows with a column `prompt`, e.g. load_dataset(...)"


def _fields_of(args: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        args = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if not isinstance(args, Mapping):
        raise ConfigError(f"args is a {type(args).__name__}: give TRL's GRPOConfig, or a mapping of its fields")
    return {str(name): value.value if isinstance(value, Enum) else value for name, value in args.items()}


def _landings(given: Mapping[str, Any], known: Values) -> tuple[list[KeyRow], list[str]]:
    rows, problems = [], []
    for name, value in (dict(given) | {name: value for name, value in DEFAULTS.items() if name not in given}).items():
        try:
            if name not in FIELDS:
                raise ConfigError(
                    f"{name} is not a field of TRL's GRPOConfig that rayapp knows{did_you_mean(name, FIELDS)}"
                )
            landing = landing_of(FIELDS[name], name, value, known)
            rows.append(KeyRow(key=name, value=value, landing=landing, is_default=name not in given))
        except ConfigError as error:
            problems.append(str(error))
    return rows, problems


def _names(rewards: Sequence[Callable[..., Any]]) -> list[str]:
    return [getattr(reward, "__name__", type(reward).__name__) for reward in rewards]


def _problems_of_rewards(rewards: Sequence[Any], known: Values) -> list[str]:
    weights, problems = known["reward_weights"], []
    if weights is not None and len(weights) != len(rewards):
        problems.append(f"reward_weights has {len(weights)} weights for {len(rewards)} reward_funcs: give one for each")
    for reward, name in zip(rewards, _names(rewards), strict=True):
        if not callable(reward):
            problems.append(f"reward_funcs: {reward!r} is a model: make it a judge with a weight (docs/judges.md)")
            continue
        needs = [part.name for part in inspect.signature(reward).parameters.values() if part.name in _NOT_PASSED]
        if needs:
            problems.append(f"reward_funcs: {name} reads {needs[0]}, which rayapp doesn't pass to reward functions")
    return problems


def _adapters(peft_config: Any, problems: list[str]) -> dict[str, Any]:
    if peft_config is None:
        return {}
    fields = dict(peft_config) if isinstance(peft_config, Mapping) else vars(peft_config)
    for name, value in _PEFT.items():
        if (found := fields.get(name, value)) != value:
            problems.append(f"peft_config.{name} = {found!r} can't be imported: rayapp supports only {value!r}")
    targets = fields.get("target_modules")
    if not targets or (isinstance(targets, str) and targets != "all-linear"):
        problems.append(f"peft_config.target_modules = {targets!r} can't be imported: name the layers, or 'all-linear'")
        return {}
    return {
        "learner.lora.rank": int(fields.get("r", 8)),
        "learner.lora.alpha": int(fields.get("lora_alpha", 8)),
        "learner.lora.target_modules": [targets] if isinstance(targets, str) else sorted(targets),
    }


def _rows(dataset: Any, what: str) -> list[dict[str, Any]]:
    if dataset is None:
        return []
    if isinstance(dataset, str | Path | Mapping) or not isinstance(dataset, Iterable):
        raise InputError(
            f"{what} is a {type(dataset).__name__}: give an iterable of rows, e.g. load_dataset(..., split=...)"
        )
    rows = [dict(row) if isinstance(row, Mapping) else row for row in dataset]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{what}, row {index}: a row must be a mapping, not {row!r:.80}")
        if not row.get("prompt"):
            raise InputError(f"{what}, row {index} has no prompt: {row!r:.80}")
    return rows


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows in verl's schema. TRL's columns are stored as one JSON text, which `_Answers` reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = []
    for index, row in enumerate(rows):
        prompt = row["prompt"]
        try:
            columns = json.dumps(row)
        except TypeError as error:
            raise InputError(f"{path.stem}_dataset, row {index}: a value can't be written as JSON: {error}") from error
        made.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                "ability": "own",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "columns": columns},
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(made), path)
    return str(path)


def _environment(
    factory: Callable[[], Any],
    rows: Sequence[Mapping[str, Any]],
    weighted: WeightedRewards,
    folder: Path,
    objects: dict[str, object],
) -> dict[str, Any]:
    """Write the environment's task file. Return the settings that name this file."""
    name = _names([factory])[0]
    objects[f"{PREFIX}{name}"] = factory
    task = {"environment": "trl", "factory": f"{PREFIX}{name}"}
    folder.mkdir(parents=True, exist_ok=True)
    if rows:
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        task["rows"] = "rows.jsonl"
    if weighted.functions:
        objects[f"{PREFIX}trl_rewards"] = weighted
        task["reward"] = f"{PREFIX}trl_rewards"
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(task), encoding="utf-8")  # JSON is also valid YAML
    return {"tasks": [str(file)]}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedRewards:
    """A reward function in TRL's form that returns the weighted sum of several reward functions. As in TRL, a reward of
    None adds nothing.
    """

    functions: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]

    def terms(self, **arguments: Any) -> Any:
        """Return name of a function -> its reward for one completion, or an awaitable of this mapping."""
        found = [function(**arguments) for function in self.functions]
        return self._awaited(found) if any(map(inspect.isawaitable, found)) else self._named(found)

    async def _awaited(self, found: Sequence[Any]) -> dict[str, float]:
        return self._named([await each if inspect.isawaitable(each) else each for each in found])

    def _named(self, found: Sequence[Any]) -> dict[str, float]:
        return {
            name: float(value) for name, [value] in zip(_names(self.functions), found, strict=True) if value is not None
        }

    def total(self, terms: Mapping[str, float]) -> float:
        """Return the weighted sum of the terms."""
        return sum(
            weight * terms.get(name, 0.0) for name, weight in zip(_names(self.functions), self.weights, strict=True)
        )

    def __call__(self, **arguments: Any) -> Any:
        """Return a list with the reward of the only completion, or an awaitable of this list."""
        terms = self.terms(**arguments)
        return self._total_of(terms) if inspect.isawaitable(terms) else [self.total(terms)]

    async def _total_of(self, terms: Any) -> list[float]:
        return [self.total(await terms)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Answers:
    """TRL's reward functions as one function for `reward.custom`. Its score is their weighted sum; the reward of each
    function is also a term.
    """

    rewards: WeightedRewards

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
        columns = json.loads(extra_info["columns"])
        prompt = columns.pop("prompt")
        said: Any = solution_str if isinstance(prompt, str) else [{"role": "assistant", "content": solution_str}]
        each = {name: [value] for name, value in columns.items()}
        terms = self.rewards.terms(prompts=[prompt], completions=[said], **each)
        return self._awaited(terms) if inspect.isawaitable(terms) else self._scored(terms)

    async def _awaited(self, terms: Any) -> dict[str, float]:
        return self._scored(await terms)

    def _scored(self, terms: Mapping[str, float]) -> dict[str, float]:
        return {**terms, "score": self.rewards.total(terms)}


def _batch(key: str, value: Any, values: Values) -> Landing:
    """Translate the batch: the number of prompts in a generation batch, and the number of optimizer steps that train on
    it.
    """
    groups, minibatches, note = _sizes(values)
    settings = {
        "rollout.group_size": int(values["num_generations"]),
        "train.groups_per_step": groups,
        "train.num_minibatches": minibatches,
    }
    return Landing(settings=settings, note=note)


def _sizes(values: Values) -> tuple[int, int, str]:
    """Return the number of prompts in a generation batch, the number of its optimizer steps, and the arithmetic as
    text.
    """
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
    """Translate max_steps, which counts optimizer steps, or epochs into a number of steps. rayapp counts generation
    batches as steps.
    """
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
    """Return a rule that translates the number of optimizer steps between two saves, or between two evaluations."""

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


def _schedule(key: str, value: Any, values: Values) -> Landing:
    more = dict(values["lr_scheduler_kwargs"] or {})
    floor = more.pop("min_lr_rate", 0.0) if value in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") else 0.0
    names = {
        "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
    }  # fmt: skip
    if value not in names:
        raise ConfigError(f"{key} = {value!r} can't be imported; supported values are {', '.join(names)}")
    if more:
        raise ConfigError(f"lr_scheduler_kwargs has {', '.join(more)}, which can't be imported for {key} = {value!r}")
    settings = {"learner.optimizer.schedule": names[value], "learner.optimizer.min_lr_ratio": float(floor)}
    return Landing(settings=settings)


def _lengths(key: str, value: Any, values: Values) -> Landing:
    """Translate the maximum length of a completion. The maximum length of a prompt follows from vLLM's maximum sequence
    length.
    """
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
    """Translate both sides of the clip range. TRL's cispo clips the importance weight itself, and only from above, at
    epsilon_high.
    """
    low = float(values["epsilon"])
    high = float(values["epsilon_high"] if values["epsilon_high"] is not None else low)
    if values["loss_type"] == "cispo":
        low, high = 1.0, high - 1.0
    return Landing(settings={"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high})


def _delta(key: str, value: Any, values: Values) -> Landing:
    note = "no second bound" if value is None else "bound of the ratio for negative advantages"
    return Landing(settings={"algorithm.clip_ratio_c": 1e6 if value is None else float(value)}, note=note)


def _kl(key: str, value: Any, values: Values) -> Landing:
    """Translate the coefficient and the estimator of the KL. At an importance ratio of 1, TRL's bias correction has the
    gradient of verl's estimator `k3+`.
    """
    corrected = bool(values["use_bias_correction_kl"])
    settings = {"algorithm.kl_loss_coef": float(value), "algorithm.kl_loss_type": "k3+" if corrected else "k3"}
    return Landing(settings=settings, note="" if float(value) else "no reference is loaded")


def _correction(key: str, value: Any, values: Values) -> Landing:
    """Translate the importance weights between vLLM and the learner. TRL's mask modes set weights outside the bounds to
    0.
    """
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


def _several(key: str, value: Any, values: Values) -> Landing:
    if value == "sum_then_normalize":
        return Landing(note="rewards are summed, and the sums are compared within the group")
    weights = values["reward_weights"] or [1.0]
    if value != "normalize_then_sum":
        raise ConfigError(f"{key} = {value!r} can't be imported: it must be sum_then_normalize or normalize_then_sum")
    if set(weights) != {1.0}:
        raise ConfigError(
            f"reward_weights = {weights} can't be imported with {key} = {value!r}: all weights must then be 1"
        )
    settings = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_terms": values["reward_funcs"]}
    return Landing(settings=settings)


def _turns(key: str, value: Any, values: Values) -> Landing:
    """Translate the number of rounds of tool calls into a number of turns, which is one more: the last turn is the
    answer.
    """
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


def _resume(key: str, value: Any, values: Values) -> Landing:
    if isinstance(value, str):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: a run resumes only from its own folder; give the checkpoint's model "
            "as `model`"
        )
    return Landing(note="the same call continues from the last checkpoint")


def _all(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_FILTERS = "it would bias the importance ratio, so training samples the model's own distribution"
_MACHINERY = "concerns only the internals of transformers or accelerate"
_GOES_WITH = "included in groups_per_step and num_minibatches"

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "generation_batch_size": None,
    "steps_per_generation": None, "num_generations": 8, "max_steps": -1, "num_train_epochs": 3.0, "output_dir": None,
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "warmup_ratio": None, "max_completion_length": 512, "vllm_max_model_length": None, "use_vllm": False,
    "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.3, "use_cpu": False,
    "beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "loss_type": "dapo", "importance_sampling_level": "token", "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None, "bf16": None, "fp16": False,
    "gradient_checkpointing": True, "eval_strategy": "no", "eval_steps": None, "save_strategy": "steps",
    "save_steps": 500, "logging_steps": 10, "num_generations_eval": None, "temperature": 1.0, "seed": 42,
    "max_tool_calling_iterations": None, "adam_beta1": 0.9, "adam_beta2": 0.999,
}  # fmt: skip
"""TRL 1.16's defaults of the fields that rayapp reads, for mappings that omit these fields."""

FIELDS: dict[str, Rule] = {
    "output_dir": lambda key, value, values: Landing(settings={"run.output_dir": str(value or "trainer_output")}),
    "run_name": optional("run.name"),
    "project": optional("tracking.project"),
    "seed": to("run.seed", int),
    "data_seed": only(None, why="run.seed determines the order of rows"),
    "model_init_kwargs": _model_options,
    "trust_remote_code": to("model.trust_remote_code", bool),
    "num_generations": _batch,
    **_all(
        no_effect(_GOES_WITH),
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation",
    ),
    "num_iterations": only(1, why="each batch is trained on once; steps_per_generation splits it"),
    "max_steps": _num_steps,
    "num_train_epochs": no_effect("used if max_steps is -1"),
    "learning_rate": to("learner.optimizer.lr", float),
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": no_effect("goes with lr_scheduler_type"),
    "warmup_steps": _warmup,
    "warmup_ratio": no_effect("goes with warmup_steps"),
    "weight_decay": to("learner.optimizer.weight_decay", float),
    "max_grad_norm": to("learner.optimizer.max_grad_norm", float),
    "adam_beta1": lambda key, value, values: Landing(
        settings={"learner.optimizer.betas": [float(value), float(values["adam_beta2"])]}
    ),
    "adam_beta2": no_effect("goes with adam_beta1"),
    "adam_epsilon": to("learner.optimizer.eps", float),
    "optim": only("adamw_torch", "adamw_torch_fused", why="the optimizer is torch's AdamW"),
    **_all(only(None, why="the optimizer is torch's AdamW"), "optim_args optim_target_modules"),
    "bf16": _dtype,
    "fp16": no_effect("goes with bf16"),
    "tf32": only(None, False, why="float32 is computed in full precision"),
    "gradient_checkpointing": to("learner.activation_checkpointing", bool),
    "torch_compile": to("learner.compile", lambda value: bool(value) or "auto"),
    "temperature": lambda key, value, values: Landing(
        settings={"rollout.temperature": float(value), "eval.temperature": float(value)}
    ),
    **_all(only(1, 1.0, why=_FILTERS), "top_p repetition_penalty"),
    **_all(only(0, None, -1, why=_FILTERS), "top_k min_p"),
    "generation_kwargs": only(None, {}, why=_FILTERS),
    "vllm_structured_outputs_regex": only(None, why=_FILTERS),
    "chat_template_kwargs": _variables,
    "max_completion_length": _lengths,
    "vllm_max_model_length": no_effect("minus max_completion_length it gives rollout.max_prompt_tokens"),
    "use_vllm": no_effect("rayapp always uses vLLM, in separate processes"),
    "vllm_mode": _gpus,
    "vllm_tensor_parallel_size": no_effect("goes with vllm_mode"),
    "vllm_gpu_memory_utilization": to("server.gpu_memory_utilization", float),
    "vllm_model_impl": only("vllm", why="servers use vLLM's implementation of the model"),
    "vllm_enable_sleep_mode": no_effect("colocated servers always sleep while learners train"),
    **_all(
        no_effect("the run starts its servers itself"),
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
    ),
    "beta": _kl,
    "use_bias_correction_kl": no_effect("has no effect if a batch has one optimizer step"),
    "epsilon": _clip,
    "epsilon_high": no_effect("goes with epsilon"),
    "delta": _delta,
    "loss_type": _loss,
    "importance_sampling_level": no_effect("goes with loss_type"),
    **_all(no_effect("goes with loss_type=sapo"), "sapo_temperature_pos sapo_temperature_neg"),
    **_all(
        no_effect("TRL reads it only with loss_type=vespo"), "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    ),
    "reward_weights": no_effect("weigh reward_funcs"),
    "multi_objective_aggregation": _several,
    "scale_rewards": _std,
    "mask_truncated_completions": to("algorithm.overlong.filter", bool),
    "entropy_coef": to("algorithm.entropy_coef", float),
    "use_adaptive_entropy": only(False, why="the coefficient of the entropy is fixed"),
    **_all(
        no_effect("TRL reads it only with use_adaptive_entropy"),
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    ),
    "top_entropy_quantile": only(1.0, why="all tokens are trained on"),
    "off_policy_mask_threshold": only(None, why="rayapp masks no trajectory because of its KL"),
    "sync_ref_model": only(False, why="the reference is always the start model"),
    **_all(no_effect("TRL reads it only with sync_ref_model"), "ref_model_mixup_alpha ref_model_sync_steps"),
    "vllm_importance_sampling_mode": _correction,
    **_all(
        no_effect("goes with vllm_importance_sampling_mode"),
        "vllm_importance_sampling_correction vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap",
    ),
    "router_aux_loss_coef": only(None, 0.0, why="rayapp has no balancing loss for experts"),
    "disable_dropout": no_effect("dropout is always 0"),
    "cast_lm_head_to_fp32": only(False, why="logits are computed in learner.compute_dtype"),
    "max_tool_calling_iterations": _turns,
    "eval_steps": _every("eval.every_steps", "eval_strategy"),
    "eval_strategy": no_effect("goes with eval_steps"),
    "eval_on_start": to("eval.before_training", bool),
    "eval_delay": only(0, 0.0, why="eval_steps sets the interval of evaluations"),
    "num_generations_eval": lambda key, value, values: Landing(
        settings={"eval.samples_per_task": int(value or values["num_generations"])}
    ),
    "save_steps": _every("checkpoint.every_steps", "save_strategy"),
    "save_strategy": no_effect("goes with save_steps"),
    "save_total_limit": optional("checkpoint.keep_last", int),
    "save_only_model": only(
        False, why="resuming needs the optimizer state; checkpoint.save_contents sets a checkpoint's contents"
    ),
    "load_best_model_at_end": only(False, why="set checkpoint.keep_best"),
    "resume_from_checkpoint": _resume,
    "report_to": _trackers,
    "shuffle_dataset": to("data.shuffle", bool),
    "train_sampling_strategy": only("random", why="data.shuffle orders the rows"),
    "use_cpu": no_effect("goes with vllm_mode"),
    "full_determinism": to("run.deterministic", bool),
    "push_to_hub": only(False, why="the model is in the run folder: `rayapp model export`"),
    "neftune_noise_alpha": only(None, why="rayapp adds no noise to embeddings"),
    "label_smoothing_factor": only(0.0, why="the loss has no labels"),
    "auto_find_batch_size": only(False, why="learner.max_tokens_per_microbatch=auto measures the size that fits"),
    "parallelism_config": only(None, why="set learner.sequence_parallel and learner.replicas"),
    "remove_unused_columns": no_effect("reward functions always get all columns"),
    "log_completions": no_effect("completions are always recorded; see `rayapp view`"),
    "log_completions_hub_repo": only(None, why="completions are in the run folder"),
    "logging_steps": no_effect("every step is recorded"),
    **_all(no_effect("learners shard with FSDP2"), "fsdp fsdp_config deepspeed ds3_gather_for_generation"),
    **_all(
        no_effect(_MACHINERY),
        """accelerator_config average_tokens_across_devices batch_eval_metrics bf16_full_eval cache_implementation
        dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
        dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_static_graph ddp_timeout debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
        eval_accumulation_steps eval_do_concat_batches eval_use_gather_object fp16_full_eval
        gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
        hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
        length_column_name liger_kernel_config local_rank log_level log_level_replica log_multimodal log_on_each_node
        log_unique_prompts logging_dir logging_first_step logging_nan_inf_filter logging_strategy
        metric_for_best_model num_completions_to_print pad_to_multiple_of per_device_eval_batch_size
        prediction_loss_only restore_callback_states_from_checkpoint save_on_each_node skip_memory_metrics
        torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
        trackio_static_space_id transformers_continuous_batching_config use_cache use_liger_kernel
        use_transformers_continuous_batching use_transformers_paged""",
    ),
}
"""Every field of TRL 1.16's GRPOConfig -> its rule."""
