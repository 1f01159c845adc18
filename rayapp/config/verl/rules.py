"""Rules of the import, and four functions that make nearly all of them. Used by the table in `keys.py`.

A rule takes a key's value and all values, and returns our settings, or why the key has no effect. For an unsupported
value it raises: nothing that changes the training is dropped silently.

Rules of the import for whole features: DAPO's groups and lengths, reward managers, traces. Used by
`keys_without_counterpart.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayapp.config.algorithm import options_of
from rayapp.core.errors import ConfigError

Values = Mapping[str, Any]
"""All keys with their values: verl's defaults, overridden by what the user set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The outcome of one key: our settings, and a remark."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with their values; empty if the key has no effect in rayapp."""
    note: str = ""
    """Why the key has no effect, or how its meaning differs."""


Rule = Callable[[str, Any, Values], Landing]
Convert = Callable[[Any], Any]


def to(target: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    """Return a rule that passes the value to one of our keys."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(settings={target: convert(value)}, note=note)

    return rule


def optional(target: str, convert: Convert = lambda value: value) -> Rule:
    """A rule like `to`, but None keeps our default."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note="our default stays") if value is None else Landing(settings={target: convert(value)})

    return rule


def no_effect(why: str) -> Rule:
    """Return a rule for a key that means nothing in rayapp, whatever its value."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note=why)

    return rule


def only(*allowed: Any, why: str) -> Rule:
    """Return a rule that accepts only these values, whose meaning is the same in rayapp.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in allowed:
            shown = " or ".join(str(item) for item in allowed)
            raise ConfigError(f"{key} = {value!r} can't be imported: {why}. It must be {shown}.")
        return Landing(note=why)

    return rule


def choice(target: str, names: Mapping[Any, Any], *, note: str = "") -> Rule:
    """Return a rule that maps verl's names to ours.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in names:
            known = ", ".join(str(name) for name in names)
            raise ConfigError(f"{key} = {value!r} can't be imported; supported are: {known}")
        return Landing(settings={target: names[value]}, note=note)

    return rule


def choice_without_effect(names: Mapping[Any, Any], *, note: str) -> Rule:
    """Return a rule for names of verl that change nothing in rayapp; any other value is refused.

    Raises (the rule): ConfigError.
    """
    chosen = choice("", names)

    def rule(key: str, value: Any, values: Values) -> Landing:
        chosen(key, value, values)
        return Landing(note=note)

    return rule


def refused(section: str, *, why: str) -> Rule:
    """Return a rule for a section that can't be imported at all: all of its keys give one message.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value is None:
            return Landing(note=why)
        raise ConfigError(f"{section}.* can't be imported: {why}.")

    return rule


_FILTER = "algorithm.filter_groups"
_TRACE = "actor_rollout_ref.rollout.trace"
_BATCHES_WITHOUT_LIMIT = 10
_REWARD_METRICS = (None, "reward", "seq_reward", "seq_final_reward")
_MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo", "remote")


def filter_groups(key: str, value: Any, values: Values) -> Landing:
    """Map the replacement of groups with equal rewards: verl limits generated batches, we limit replaced groups."""
    settings: dict[str, Any] = {"algorithm.dynamic_sampling.enabled": bool(value)}
    if not value:
        return Landing(settings=settings)
    batch = int(values["data.train_batch_size"])
    generated = int(values.get("data.gen_batch_size") or batch)
    most = int(values.get(f"{_FILTER}.max_num_gen_batches") or 0)
    dropped = (most or _BATCHES_WITHOUT_LIMIT) * generated - batch
    settings["algorithm.dynamic_sampling.max_dropped_per_step"] = max(1, dropped)
    limit = f"{most} batches" if most > 0 else f"no limit in verl, {_BATCHES_WITHOUT_LIMIT} batches in rayapp"
    return Landing(settings=settings, note=f"{limit}; past it groups are kept, where verl stops")


def filter_metric(key: str, value: Any, values: Values) -> Landing:
    """Map the reward term that groups are compared by; verl's names of the reward itself are the default."""
    if not values.get(f"{_FILTER}.enable") or value in _REWARD_METRICS:
        return Landing(note="groups are compared by their rewards")
    return Landing(settings={"algorithm.dynamic_sampling.metric": str(value)})


def template_variable(key: str, value: Any, values: Values) -> Landing:
    """Map one variable of the chat template."""
    name = key.removeprefix("data.apply_chat_template_kwargs.")
    if "." in name or not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{key} = {value!r} can't be imported: it must be a text, a number, true or false")
    return Landing(settings={f"agent.chat_template_kwargs.{name}": value})


def reward_manager(key: str, value: Any, values: Values) -> Landing:
    """Map the reward manager: verl's differ only in how they compute; `dapo` can also penalize long answers, see
    `reward_kwargs`."""
    if value not in (None, *_MANAGERS):
        raise ConfigError(
            f"{key} = {value!r} can't be imported; supported are: {', '.join(_MANAGERS)}. Give a function of your own "
            "as rayapp.reward.custom."
        )
    return Landing(note="rows are scored one by one, by the rule of their data_source")


REWARD_MODELS = {"reward.reward_model": "model_path", "reward_model": "model.path"}
"""Sections of a reward model, today's and the older one, and the key of its path in it."""
_JUDGE = "reward_model"
"""Name of the judge, and of its server."""


def reward_model_gpus(section: str, values: Values) -> int:
    """Return the GPUs of a section's reward model; 0 if it is off."""
    size = values.get(f"{section}.rollout.tensor_model_parallel_size") or 2  # verl's default
    return int(size) if values.get(f"{section}.enable") else 0


def reward_model(key: str, value: Any, values: Values) -> Landing:
    """Map a model that classifies answers: a judge behind a server of the run, whose number is the reward, as in verl.

    A generative reward model is asked by a function of the user, through a router of verl's.
    """
    section = key.rpartition(".")[0]
    if not value:
        return Landing(note="no reward model")
    path_key = f"{section}.{REWARD_MODELS[section]}"
    if any(values.get(f"{part}custom_reward_function.path") for part in ("", "reward.")):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: your custom_reward_function sends requests to verl's router. Let it "
            f"send them to a server of your own and set {key}=False, or make the model a judge (docs/judges.md)."
        )
    if not values.get(path_key):
        raise ConfigError(f"{key} = {value!r} can't be imported: {path_key} is not set. Set it.")
    lengths = [values.get(f"{section}.rollout.{name}") for name in ("prompt_length", "response_length")]
    longest = {"max-model-len": sum(int(each) for each in lengths if each)} if all(lengths) else {}
    server = {
        "name": _JUDGE,
        "path": values[path_key],
        "tensor_parallel_size": reward_model_gpus(section, values),
        "gpu_memory_utilization": float(values.get(f"{section}.rollout.gpu_memory_utilization") or 0.5),
        "options": {"runner": "pooling", **longest},
    }
    judge = {"name": _JUDGE, "kind": "reward_model", "base_url": f"run://{_JUDGE}", "model": _JUDGE}
    settings = {"model_servers": [server], "judges": [judge], "reward.judges": {_JUDGE: 1.0}}
    note = "one vLLM server of the run on GPUs of its own; its number is the reward"
    return Landing(settings=settings | {"reward.verdict_weight": 0.0}, note=note)


def reward_kwargs(key: str, value: Any, values: Values) -> Landing:
    """Map `overlong_buffer_cfg` of the manager `dapo`, wherever this version of verl keeps it."""
    section, _, name = key.rpartition(".")
    if not section.endswith(("overlong_buffer_cfg", "overlong_buffer")):
        if name == "max_resp_len":
            return same_as("data.max_response_length")(key, value, values)
        raise ConfigError(f"{key} = {value!r} can't be imported: no reward of rayapp reads it")
    is_on = bool(values.get(f"{section}.enable"))
    if name == "len":
        return Landing(settings={"algorithm.overlong.buffer_tokens": int(value) if is_on else 0})
    if name == "penalty_factor" and is_on:
        return Landing(settings={"algorithm.overlong.penalty": float(value)})
    if name not in ("enable", "log", "penalty_factor"):
        raise ConfigError(f"{key} = {value!r} can't be imported: supported are enable, len, penalty_factor and log")
    return Landing(note="goes with overlong_buffer.len")


def loss_option(key: str, value: Any, values: Values) -> Landing:
    """Map an option of a policy loss; kept if the configured loss reads it."""
    name = key.rpartition(".")[2]
    mode = values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if values.get("algorithm.rollout_correction.bypass_mode"):
        mode = "bypass_mode"
    if value is None or name not in options_of(str(mode)):
        return Landing(note="not set" if value is None else f"the loss {mode} does not read it")
    return Landing(settings={f"algorithm.policy_loss_options.{name}": value})


def trace(key: str, value: Any, values: Values) -> Landing:
    """Map MLflow traces: verl counts prompts of each worker, we trace a share of all trajectories."""
    if value is None:
        return Landing(settings={"tracking.trace_ratio": 0.0})
    if value != "mlflow":
        raise ConfigError(
            f"{key} = {value!r} can't be imported: traces go to MLflow. Set it to mlflow, or leave it out."
        )
    most = values.get(f"{_TRACE}.max_samples_per_step_per_worker")
    prompts = int(values["data.train_batch_size"])
    workers = int(values["actor_rollout_ref.rollout.agent.num_workers"])
    ratio = 1.0 if most is None else min(1.0, int(most) * workers / prompts)
    settings: dict[str, Any] = {"tracking.trace_ratio": ratio}
    if "trainer.logger" not in values:
        settings["tracking.trackers"] = ["console", "mlflow", "jsonl"]
    note = "" if most is None else f"{most} prompts x {workers} workers of {prompts} prompts"
    return Landing(settings=settings, note=note)


def same_as(other: str) -> Rule:
    """Return a rule for a key whose value verl copies from another one.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value != values.get(other):
            raise ConfigError(f"{key} = {value!r} can't be imported: it must be {other} = {values.get(other)!r}")
        return Landing(note=f"{other} counts")

    return rule
