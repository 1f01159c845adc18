"""Rules for whole features of verl: DAPO's groups and lengths, pictures, options of losses."""

from __future__ import annotations

from typing import Any

from rayapp.config.algorithm import options_of
from rayapp.config.foreign_keys import Landing, Rule, Values
from rayapp.core.errors import ConfigError

_FILTER = "algorithm.filter_groups"
_BATCHES_WITHOUT_LIMIT = 10
_REWARD_METRICS = (None, "reward", "seq_reward", "seq_final_reward")


def filter_groups(key: str, value: Any, values: Values) -> Landing:
    """Map the replacement of groups with equal rewards: verl limits generated batches, rayapp replaced groups."""
    settings: dict[str, Any] = {"algorithm.dynamic_sampling.enabled": bool(value)}
    if not value:
        return Landing(settings=settings)
    batch = int(values["data.train_batch_size"])
    generated = int(values.get("data.gen_batch_size") or batch)
    most = int(values.get(f"{_FILTER}.max_num_gen_batches") or 0)
    dropped = (most or _BATCHES_WITHOUT_LIMIT) * generated - batch
    settings["algorithm.dynamic_sampling.max_dropped_per_step"] = max(1, dropped)
    limit = f"{most} batches" if most > 0 else f"verl has no limit; rayapp's limit is {_BATCHES_WITHOUT_LIMIT} batches"
    return Landing(settings=settings, note=f"{limit}; beyond the limit rayapp keeps groups, whereas verl stops")


def filter_metric(key: str, value: Any, values: Values) -> Landing:
    """Map the reward term by which groups are compared; verl's names for the reward itself select the default."""
    if not values.get(f"{_FILTER}.enable") or value in _REWARD_METRICS:
        return Landing(note="groups are compared by their rewards")
    return Landing(settings={"algorithm.dynamic_sampling.metric": str(value)})


def template_variable(key: str, value: Any, values: Values) -> Landing:
    name = key.removeprefix("data.apply_chat_template_kwargs.")
    if "." in name:
        raise ConfigError(f"{key} = {value!r} can't be imported: a template variable can't be a mapping")
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{key} = {value!r} can't be imported: it must be a string, a number, true or false")
    return Landing(settings={f"agent.chat_template_kwargs.{name}": value})


def image_key(key: str, value: Any, values: Values) -> Landing:
    """Map the column of pictures. A command that names it trains on pictures, and verl then also trains the tower,
    unless it trains adapters."""
    if value not in ("images", "image"):
        raise ConfigError(f"{key} = {value!r} can't be imported: name the column images (docs/pictures.md).")
    if values.get("actor_rollout_ref.model.lora_rank"):
        return Landing(settings={"model.freeze_vision": True}, note="only the language model gets adapters")
    is_frozen = bool(values.get("actor_rollout_ref.actor.freeze_vision_tower"))
    return Landing(
        settings={"model.freeze_vision": is_frozen}, note="the vision tower is trained unless verl freezes it"
    )


def reward_kwargs(key: str, value: Any, values: Values) -> Landing:
    """Map `overlong_buffer_cfg` of the reward manager `dapo`, from the section of any version of verl."""
    section, _, name = key.rpartition(".")
    if not section.endswith(("overlong_buffer_cfg", "overlong_buffer")):
        if name == "max_resp_len":
            return same_as("data.max_response_length")(key, value, values)
        raise ConfigError(f"{key} = {value!r} can't be imported: rayapp's rewards have no such argument. Leave it out.")
    is_on = bool(values.get(f"{section}.enable"))
    if name == "len":
        return Landing(settings={"algorithm.overlong.buffer_tokens": int(value) if is_on else 0})
    if name == "penalty_factor" and is_on:
        return Landing(settings={"algorithm.overlong.penalty": float(value)})
    if name not in ("enable", "log", "penalty_factor"):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: {section} has only the keys enable, len, penalty_factor and log"
        )
    return Landing(note="goes with overlong_buffer.len")


def loss_option(key: str, value: Any, values: Values) -> Landing:
    """Map an option of a policy loss, if the configured loss reads it."""
    name = key.rpartition(".")[2]
    mode = values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if values.get("algorithm.rollout_correction.bypass_mode"):
        mode = "bypass_mode"
    if value is None or name not in options_of(str(mode)):
        return Landing(note="not set" if value is None else f"the loss {mode} does not read it")
    return Landing(settings={f"algorithm.policy_loss_options.{name}": value})


def same_as(other: str) -> Rule:
    """Return a rule for a key that must equal another, from which verl copies it."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value != values.get(other):
            raise ConfigError(
                f"{key} = {value!r} can't be imported: it must equal {other}, which is {values.get(other)!r}"
            )
        return Landing(note=f"{other} counts")

    return rule


def kept_checkpoints(key: str, value: Any, values: Values) -> Landing:
    if value is None:
        return Landing(note="verl keeps every checkpoint, and checkpoint.keep_last the last ones: raise it")
    return Landing(settings={"checkpoint.keep_last": int(value)})
