"""The rule of the import for verl's `distillation`. Used by `keys_without_counterpart.py`."""

from __future__ import annotations

from typing import Any

from rayapp.config.verl.rules import Landing, Values
from rayapp.core.errors import ConfigError

_LOSS = "distillation.distillation_loss"
_ESTIMATED = {
    # As an advantage the log-ratio itself; as a loss, the estimator whose gradient is that advantage's.
    (True, "k1"): "reverse",
    (True, "kl"): "reverse",
    (False, "k2"): "reverse",
    (False, "mse"): "reverse",
    (False, "k3"): "forward",
    (False, "low_var_kl"): "forward",
}
"""Of sampled tokens alone: by use_policy_gradient and loss_mode, the KL whose gradient it is."""


def distillation(key: str, value: Any, values: Values) -> Landing:
    """All keys of the section at once: they mean something together."""
    if not value:
        return Landing(note="no teacher")
    settings = {f"distillation.{name}": setting for name, setting in _kl(values).items()}
    takes_rewards = bool(values.get(f"{_LOSS}.use_task_rewards", True))
    settings |= {
        "distillation.teacher": _teacher(values),
        "distillation.weight": float(values.get(f"{_LOSS}.distillation_loss_coef", 1.0)) if takes_rewards else 1.0,
        "distillation.reward_weight": float(takes_rewards),
    }
    return Landing(settings=settings, note="the learners hold the teacher, and it has no servers of its own")


def _kl(values: Values) -> dict[str, Any]:
    mode, as_advantage = values.get(f"{_LOSS}.loss_mode", "k3"), bool(values.get(f"{_LOSS}.use_policy_gradient", False))
    clamp, floor = values.get(f"{_LOSS}.loss_max_clamp"), values.get(f"{_LOSS}.log_prob_min_clamp")
    if floor is not None or (clamp is not None and not as_advantage):
        name, found = ("log_prob_min_clamp", floor) if floor is not None else ("loss_max_clamp", clamp)
        raise ConfigError(f"{_LOSS}.{name} = {found!r} can't be imported: no such limit is here. Set it to null.")
    if mode == "forward_kl_topk" and not as_advantage:
        return {"kl": "forward", "kl_over": "top_k", "top_k": int(values.get(f"{_LOSS}.topk", 32))}
    if (as_advantage, mode) not in _ESTIMATED:
        known = ", ".join(f"{known} with use_policy_gradient={on}" for on, known in _ESTIMATED)
        raise ConfigError(
            f"{_LOSS}.loss_mode = {mode!r} with use_policy_gradient={as_advantage} can't be imported; known here are: "
            f"{known}, forward_kl_topk with use_policy_gradient=False"
        )
    return {"kl": _ESTIMATED[as_advantage, mode], "kl_over": "sampled", "max_log_ratio": clamp}


def _teacher(values: Values) -> str:
    """The one model that teaches; verl's own entry counts where there is no other."""
    models = {
        key.split(".")[2]: str(path)
        for key, path in values.items()
        if key.startswith("distillation.teacher_models.") and key.endswith(".model_path") and path
    }
    if len(models) > 1:
        models.pop("teacher_model", None)
    if len(models) != 1:
        found = f"teachers {', '.join(models)} are named" if models else "no teacher_models.*.model_path is set"
        raise ConfigError(f"distillation.enabled = True can't be imported: {found}, and a run here has one teacher.")
    return next(iter(models.values()))
