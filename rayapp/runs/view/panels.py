"""Which curves the page and the report show, in which order, under which names. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart.

    Example: `Panel(title="Reward", keys=("reward/mean",), section="Reward")`.
    """

    section: str
    title: str
    keys: tuple[str, ...]
    """Metrics; one that ends in `*` stands for all that begin so."""
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    """Fixed ends of the axis, for shares."""
    omits: tuple[str, ...] = ()
    """Metrics that its patterns match but another panel shows."""
    absent_is_zero: bool = False
    """A step that lacks one of the metrics had none of it: statuses are logged only where they occur."""


def _panel(section: str, title: str, *keys: str, **more: Any) -> Panel:
    return Panel(section=section, title=title, keys=keys, **more)


def _share(section: str, title: str, *keys: str) -> Panel:
    counts = any("*" in key for key in keys)
    return _panel(section, title, *keys, unit="share", floor=0.0, ceiling=1.0, absent_is_zero=counts)


_PHASES = ("step", "generate", "score", "train", "weight_sync", "eval", "checkpoint", "other")
PANELS = (
    _panel("Reward", "Reward", "reward/mean", "reward/min", "reward/max"),
    _share("Reward", "Tests passed", "reward/pass_rate/mean", "reward/solved/mean"),
    _panel("Reward", "Reward by task", "task/*/reward/mean"),
    _panel("Reward", "Reward by source", "source/*/reward/mean"),
    _share("Reward", "Solved by source", "source/*/reward/solved/mean"),
    _panel("Reward", "Reward terms", "reward/*/mean", omits=("reward/pass_rate/mean", "reward/solved/mean")),
    _share("Reward", "Verdicts", "reward_status/*"),
    _panel("Reward", "Evaluation", "eval/reward/mean", "eval/reward/pass_rate/mean", "eval/reward/solved/mean"),
    _share("Rollout", "Groups without signal", "groups/zero_variance", "groups/all_invalid"),
    _panel("Rollout", "Completion length", "length/response/mean", "length/response/max", unit="tokens", floor=0.0),
    _share("Rollout", "Groups without signal by source", "source/*/groups/zero_variance"),
    _panel("Rollout", "Completion length by source", "source/*/length/response/mean", unit="tokens", floor=0.0),
    _share("Rollout", "How trajectories ended", "status/*"),
    _share("Rollout", "Failures", "rollout/invalid", "rollout/failed_ratio_10_steps", "failure/*"),
    _panel("Rollout", "Staleness", "staleness/mean", "staleness/max", unit="optimizer steps", floor=0.0),
    _panel("Learner", "Entropy", "learner/entropy", "sft/entropy", unit="nats", floor=0.0),
    _panel("Learner", "KL", "learner/ppo_kl", "learner/kl_to_reference", "distillation/kl", "rollout_corr/kl"),
    _panel("Learner", "Clip share", "learner/pg_clipfrac", "learner/pg_clipfrac_lower", floor=0.0),
    _panel("Learner", "Gradient norm", "learner/grad_norm", floor=0.0),
    _panel("Learner", "Loss", "learner/loss"),
    _panel("Learner", "Demonstrations", "sft/loss", "sft/validation_loss", unit="nats", floor=0.0),
    _panel(
        "Learner",
        "Engine against learner",
        "rollout_probs_diff/mean",
        "rollout_probs_diff/max",
        unit="probability",
        floor=0.0,
    ),
    _panel("Time", "Seconds of a step", *(f"timing_s/{name}" for name in _PHASES), unit="s", floor=0.0),
    _panel(
        "Time",
        "Tokens per second",
        "throughput/response_tokens_per_s",
        "throughput/generated_tokens_per_s",
        unit="tokens/s",
        floor=0.0,
    ),
    _panel("Time", "Weights", "weight_sync/export_s", "weight_sync/load_s", unit="s", floor=0.0),
)


def keys_of_panel(panel: Panel, known: Sequence[str]) -> list[str]:
    """The metrics of `known` that a panel shows, in the panel's order.

    Example: `reward/*/mean` of [reward/solved/mean, reward/mean] is [reward/solved/mean].
    """
    shown: dict[str, None] = {}
    for pattern in panel.keys:
        head, star, tail = pattern.partition("*")
        if star:  # stands for something that is not empty
            long = (key for key in known if len(key) > len(head) + len(tail))
            shown |= dict.fromkeys(key for key in long if key.startswith(head) and key.endswith(tail))
        elif pattern in known:
            shown[pattern] = None
    return [key for key in shown if key not in panel.omits]
