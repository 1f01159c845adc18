"""Load a `Config` from a YAML file and `key.sub=value` overrides.

configs/x.yaml (with the files it includes) <- overrides -> OmegaConf (parses, merges, ${…}) -> Config (validates)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from pydantic import ValidationError

from rayapp.config.algorithm import ADV_ESTIMATORS, POLICY_LOSSES, AlgorithmSection
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, first_line
from rayapp.core.names import Kind, did_you_mean, is_plugin
from rayapp.core.validation import explain

# Key of TRL or verl -> key of rayapp, without names that are also the last part of a key of rayapp.
ALIASES: Mapping[str, str] = {
    "adam_beta1": "learner.optimizer.betas",
    "batch_size": "train.groups_per_step",
    "beta": "algorithm.kl_loss_coef",
    "bf16": "learner.compute_dtype",
    "dataset_name": "tasks",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon": "algorithm.clip_ratio_low",
    "epsilon_high": "algorithm.clip_ratio_high",
    "eval_dataset": "eval.tasks",
    "eval_steps": "eval.every_steps",
    "experiment_name": "run.name",
    "generation_batch_size": "train.groups_per_step",
    "grad_clip": "learner.optimizer.max_grad_norm",
    "gradient_accumulation_steps": "train.groups_per_step",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "importance_sampling_level": "algorithm.policy_loss",
    "learning_rate": "learner.optimizer.lr",
    "logger": "tracking.trackers",
    "lora_alpha": "learner.lora.alpha",
    "lora_r": "learner.lora.rank",
    "lora_rank": "learner.lora.rank",
    "loss_type": "algorithm.loss_agg_mode",
    "lr_scheduler_type": "learner.optimizer.schedule",
    "lr_warmup_steps": "learner.optimizer.warmup_steps",
    "mask_truncated_completions": "algorithm.overlong.filter",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_completion_tokens",
    "max_steps": "train.num_steps",
    "max_tool_calling_iterations": "agent.max_assistant_turns",
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "n_gpus_per_node": "cluster.num_gpus",
    "num_epochs": "train.num_steps",
    "num_generations": "rollout.group_size",
    "num_generations_eval": "eval.samples_per_task",
    "num_train_epochs": "train.num_steps",
    "peft_config": "learner.lora.rank",
    "per_device_train_batch_size": "train.groups_per_step",
    "ppo_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch",
    "ppo_mini_batch_size": "train.num_minibatches",
    "project_name": "tracking.project",
    "report_to": "tracking.trackers",
    "resume_from_checkpoint": "run.resume",
    "reward_funcs": "reward.custom",
    "run_name": "run.name",
    "save_freq": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "scale_rewards": "algorithm.norm_adv_by_std",
    "tensor_model_parallel_size": "server.tensor_parallel_size",
    "test_freq": "eval.every_steps",
    "tool_config_path": "agent.tool_file",
    "total_epochs": "train.num_steps",
    "total_training_steps": "train.num_steps",
    "train_batch_size": "train.groups_per_step",
    "train_dataset": "tasks",
    "val_files": "eval.tasks",
    "val_max_samples": "eval.max_problems",
    "vllm_gpu_memory_utilization": "server.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "server.tensor_parallel_size",
}
# Key of an earlier version -> its name now, in the configuration and in each of its sources.
RENAMED: Mapping[str, str] = {
    "agent.agent_name": "agent.name",
    "agent.task_agent": "agent.name",
    "data.eval_files": "eval.tasks",
    "data.max_eval_rows": "eval.max_problems",
    "data.train_files": "tasks",
    "warmup.optimizer": "warmup.lr",
}


_IN_LIST = re.compile(r"[A-Za-z_][\w.]*\[\d+\][^=]*=")
# Begin of a shell's expansion: `${HOME}`, or a name with an operator (`${name:-default}`).
_OF_SHELLS = re.compile(r"(?<!\\)\$\{(?=[A-Z0-9_]+\}|(?!oc\.)\w+(\[[^\]]*\])?[:%#/^,@+?=-]|\w+\[[@*]\]|[#!*@?$-])")
_REFERENCE = re.compile(r"\$\{")
INCLUDE = "include"  # lists other config files (paths relative to this file), which this file's settings override


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Load and validate the configuration of a run: a YAML file (None: all defaults) and overrides in YAML, of list
    items last. A ConfigError has a line for each wrong key or value."""
    where = "the overrides" if path is None else str(path)
    try:
        in_lists = [override for override in overrides if _IN_LIST.match(override)]
        others = [override for override in overrides if override not in in_lists]
        merged = OmegaConf.merge(_read(Path(path)) if path is not None else {}, _parse_overrides(others))
        for override in in_lists:
            _change_in_list(merged, override)
        values = OmegaConf.to_container(merged, resolve=True)
        if old := renamed_keys(values):
            raise ConfigError(f"{where}: " + "; ".join(f"{key} is now called {name}" for key, name in old.items()))
        config = Config.model_validate(values)
    except OmegaConfBaseException as error:
        is_of_reference = isinstance(error, GrammarParseError) or "nterpolation" in str(error)
        escape = ". Write a literal ${ as \\${" if is_of_reference else ""
        raise ConfigError(f"{where}: {first_line(error)}{escape}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}:{_indented(explain(error, Config, ALIASES))}") from error
    _check_names(config.algorithm)
    return config


def renamed_keys(values: Any) -> dict[str, str]:
    """Return the old keys in unvalidated settings, each with its present name: `{"sources[0].data.train_files":
    "sources[0].tasks"}`."""
    sources = values.get("sources") if isinstance(values, dict) else None
    places = {"": values} | {
        f"sources[{i}].": each for i, each in enumerate(sources if isinstance(sources, list) else ())
    }
    found = {}
    for place, settings in places.items():
        for old, new in RENAMED.items():
            section, _, key = old.partition(".")
            if isinstance(settings, dict) and isinstance(held := settings.get(section), dict) and key in held:
                found[f"{place}{old}"] = f"{place}{new}"
    return found


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML with every default filled in; loading it gives an equal one."""
    values = _escaped(config.model_dump(mode="json"), _REFERENCE)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path, parents: tuple[Path, ...] = ()) -> DictConfig:
    path = path.resolve() if parents else path
    if path.resolve() in parents:
        raise ConfigError(
            f"config file {path} includes itself, by way of {' -> '.join(str(parent) for parent in parents)}"
        )
    loaded = _load_yaml(path)
    includes = loaded.pop(INCLUDE, [])
    chain = (*parents, path.resolve())
    below = [_read(path.parent / name, chain) for name in ([includes] if isinstance(includes, str) else includes)]
    merged = OmegaConf.merge(*below, loaded)
    assert isinstance(merged, DictConfig)
    return merged


def _load_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.create(_escaped(_plain(path.read_text(encoding="utf-8"))) or {})
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}. {_files_nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {path} must hold sections such as `train:`, not a list")
    return loaded


def _plain(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader())


def _escaped(value: Any, pattern: re.Pattern[str] = _OF_SHELLS) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(each, pattern) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each, pattern) for each in value]
    return pattern.sub(r"\\${", value) if isinstance(value, str) else value


def _change_in_list(merged: DictConfig | ListConfig, override: str) -> None:
    key, _, text = override.partition("=")
    try:
        OmegaConf.update(merged, key, _parse_overrides([f"value={text}"])["value"])
    except (OmegaConfBaseException, IndexError) as error:
        raise ConfigError(f"override {override!r}: the configuration has no {key.rpartition('.')[0] or key}") from error


def _files_nearby(path: Path) -> str:
    names = sorted({str(file) for folder in (Path("configs"), path.parent) for file in folder.glob("*.yaml")})
    if near := difflib.get_close_matches(str(path), names, n=1):
        return f"Did you mean {near[0]}?"
    return f"The files here are {', '.join(names)}." if names else "Run this command in the folder that holds configs/."


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key.sub=value, e.g. train.num_steps=50")
    try:
        parsed = OmegaConf.create()
        for override in overrides:
            key, _, text = override.partition("=")
            OmegaConf.update(parsed, key, _escaped(_plain(text)))
        return parsed
    except yaml.YAMLError as error:
        raise ConfigError(f"overrides {' '.join(overrides)}: a value is not YAML: {error}") from error


def _check_names(section: AlgorithmSection) -> None:
    """Check names of registries, which the schema doesn't import."""
    checked: tuple[tuple[str, Kind, str, tuple[str, ...]], ...] = (
        ("algorithm.adv_estimator", "estimators", section.adv_estimator, ADV_ESTIMATORS),
        ("algorithm.policy_loss", "losses", section.policy_loss, tuple(POLICY_LOSSES)),
    )
    for key, kind, name, known in checked:
        if name not in known and not is_plugin(kind, name):
            raise ConfigError(
                f"{key} = {name!r} is unknown{did_you_mean(name, known)} Use one of {', '.join(known)}, or a plug-in's "
                "name."
            )


def _indented(lines: str) -> str:
    return f" {lines}" if "\n" not in lines else "\n  " + lines.replace("\n", "\n  ")
