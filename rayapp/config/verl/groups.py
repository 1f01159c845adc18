"""Rules of the import for whole features: DAPO's groups and lengths, reward managers, traces. Used by
`keys_without_counterpart.py`."""

from __future__ import annotations

from typing import Any

from rayapp.config.verl.rules import Landing, Rule, Values
from rayapp.core.errors import ConfigError

_FILTER = "algorithm.filter_groups"
_TRACE = "actor_rollout_ref.rollout.trace"
_BATCHES_WITHOUT_LIMIT = 10
_REWARD_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")
_MANAGERS = ("naive", "batch", "prime", "dapo")


def filter_groups(key: str, value: Any, values: Values) -> Landing:
    """Groups of equal rewards are replaced; verl counts batches that it may generate, we count groups replaced."""
    settings: dict[str, Any] = {"algorithm.dynamic_sampling.enabled": bool(value)}
    if not value:
        return Landing(settings=settings)
    batch = int(values["data.train_batch_size"])
    generated = int(values.get("data.gen_batch_size") or batch)
    most = int(values.get(f"{_FILTER}.max_num_gen_batches") or 0)
    dropped = (most or _BATCHES_WITHOUT_LIMIT) * generated - batch
    settings["algorithm.dynamic_sampling.max_dropped_per_step"] = max(1, dropped)
    limit = f"{most} batches" if most > 0 else f"no limit in verl, {_BATCHES_WITHOUT_LIMIT} batches here"
    return Landing(settings=settings, note=f"{limit}; past it groups are kept, where verl stops")


def filter_metric(key: str, value: Any, values: Values) -> Landing:
    """Rewards are what is compared here."""
    if values.get(f"{_FILTER}.enable") and value not in (None, *_REWARD_METRICS):
        raise ConfigError(
            f"{key} = {value!r} can't be imported: groups are compared by their rewards. Set it to reward; where "
            "rewards are right or wrong only, that is the same."
        )
    return Landing(note="groups are compared by their rewards")


def reward_manager(key: str, value: Any, values: Values) -> Landing:
    """verl's managers differ in how they go about it; `dapo` can punish long answers too, see `reward_kwargs`."""
    if value not in (None, *_MANAGERS):
        raise ConfigError(
            f"{key} = {value!r} can't be imported; known here are: {', '.join(_MANAGERS)}. Give a function of your own "
            "as rayapp.reward.custom."
        )
    return Landing(note="rows are scored one by one, by the rule of their data_source")


def reward_kwargs(key: str, value: Any, values: Values) -> Landing:
    """`overlong_buffer_cfg` of the manager `dapo`, wherever a version of verl keeps it."""
    section, _, name = key.rpartition(".")
    if not section.endswith(("overlong_buffer_cfg", "overlong_buffer")):
        if name == "max_resp_len":
            return same_as("data.max_response_length")(key, value, values)
        raise ConfigError(f"{key} = {value!r} can't be imported: no reward here takes it")
    is_on = bool(values.get(f"{section}.enable"))
    if name == "len":
        return Landing(settings={"algorithm.overlong.buffer_tokens": int(value) if is_on else 0})
    if name == "penalty_factor" and is_on:
        return Landing(settings={"algorithm.overlong.penalty": float(value)})
    if name not in ("enable", "log", "penalty_factor"):
        raise ConfigError(f"{key} = {value!r} can't be imported: known here are enable, len, penalty_factor and log")
    return Landing(note="goes with overlong_buffer.len")


def loss_option(key: str, value: Any, values: Values) -> Landing:
    """An option of a policy loss that is not the plain one."""
    name = key.rpartition(".")[2]
    mode = values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if mode == "vanilla" or value is None:
        return Landing(note="the vanilla loss has no such option" if mode == "vanilla" else "not set")
    return Landing(settings={f"algorithm.policy_loss_options.{name}": value})


def trace(key: str, value: Any, values: Values) -> Landing:
    """MLflow traces; verl counts prompts of each worker, we take a share of all trajectories."""
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
    """A key that repeats another one; verl fills it in from there.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value != values.get(other):
            raise ConfigError(f"{key} = {value!r} can't be imported: it must be {other} = {values.get(other)!r}")
        return Landing(note=f"{other} counts")

    return rule
