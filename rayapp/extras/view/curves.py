"""Curves of a run's metrics.jsonl: read incrementally, thinned to the resolution of a screen; and the panels for them.

A resumed run cuts the file; then it is read from the start. The page shows the panels that have data.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.runs.source import RunSource
from rayapp.runs.tracking.metrics import read_records

MAX_POINTS = 600
Curves = dict[str, dict[str, list[float]]]  # Metric -> {"steps": [...], "values": [...]}.


class Metrics:
    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._records: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._last_line = b""
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """Return all logged records, in the order of steps."""
        with self._lock:
            stamp = self._source.stamp("metrics.jsonl")
            if stamp != self._stamp:
                self._read_on()
                self._stamp = stamp
            return self._records

    def _read_on(self) -> None:
        """Read the lines added since the last call; read all again if the file was cut."""
        start = self._num_bytes - len(self._last_line)
        new = self._source.read_bytes("metrics.jsonl", offset=start) or b""
        if not new.startswith(self._last_line):
            self._records, start = [], 0
            new = self._source.read_bytes("metrics.jsonl") or b""
        elif self._last_line:
            new, start = new[len(self._last_line) :], self._num_bytes
        whole = new[: new.rfind(b"\n") + 1]  # a line that is being written has no end yet
        self._num_bytes = start + len(whole)
        self._last_line = next(reversed(whole.splitlines(keepends=True)), self._last_line if start else b"")
        self._records = [*self._records, *read_records(whole.splitlines())]


def keys_of(records: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({key for record in records for key in record} - {"step", "time"})


def curve(
    records: Sequence[dict[str, Any]], key: str, *, max_points: int = MAX_POINTS, absent: float | None = None
) -> dict[str, list[float]]:
    """Return {"steps": [...], "values": [...]} of a metric; means of equal ranges if there are more steps than points.

    Args:
        absent: value for a step without the metric; None leaves the step out.
    """
    values: list[tuple[Any, Any]] = [(record["step"], record.get(key, absent)) for record in records]
    found = [(float(step), float(value)) for step, value in values if _is_number(value)]
    size = max(1, math.ceil(len(found) / max_points))
    stretches = [found[start : start + size] for start in range(0, len(found), size)]
    means = [(_mean([s for s, _ in stretch]), _mean([v for _, v in stretch])) for stretch in stretches]
    return {"steps": [step for step, _ in means], "values": [value for _, value in means]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, e.g. `Panel(title="Reward", keys=("reward/mean",), section="Reward")`."""

    section: str
    title: str
    keys: tuple[str, ...]  # Metrics; a name that ends in `*` stands for all with that prefix.
    meaning: str = ""  # Sentence that explains the panel to readers who don't know the terms.
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None  # Fixed upper end of the axis, for shares.
    omits: tuple[str, ...] = ()  # Metrics that the patterns match but another panel shows.
    absent_is_zero: bool = False  # True if a missing metric means 0: statuses are logged only when they occur.


# Meaning of each panel, by title: its tooltip on the page.
MEANINGS = {
    "Reward": "Mean, lowest and highest reward of the step's valid completions.",
    "Tests passed": "Mean share of hidden tests passed, and share of completions that pass all of them.",
    "Reward by task": "Mean reward of each task.",
    "Reward by source": "Mean reward of each source of the run.",
    "Solved by source": "Share of completions that pass every test, for each source.",
    "Reward terms": "The named parts of the reward, each as its mean.",
    "Verdicts": "Shares of the results of scoring: scored, timeout, no code, …",
    "Evaluation": "Reward, tests passed and solved on the evaluation's prompts, with the new weights.",
    "Groups without signal": "Share of groups whose rewards are all equal (nothing to learn), or all invalid.",
    "Completion length": "Sampled tokens of a trajectory. A mean near the limit: completions are cut off.",
    "Groups without signal by source": "Share of groups without signal, for each source.",
    "Completion length by source": "Mean sampled tokens of a trajectory, for each source.",
    "How trajectories ended": "Shares: completed, truncated (no tokens left), max turns, or an error.",
    "Failures": "Share of trajectories that a failed sandbox, engine or tool left without a reward.",
    "Staleness": "Optimizer steps between the weights that sampled and those trained; 0 in a synchronous run.",
    "Kept over weight syncs": "Share of trajectories that outlived a weight sync, and of tokens sampled before it.",
    "Agents' calls": "External agents: trajectories that forked, repeated calls, calls under other models' names, and "
    "calls that asked for a form.",
    "Why trajectories forked": "External agents' calls that continue no recorded conversation, by reason. The page of "
    "a trajectory shows the first text that differs.",
    "Entropy": "Entropy of the policy's next token. Near 0 the policy writes the same text again and again.",
    "KL": "Distance of the policy from the weights that sampled, from the reference, and from the teacher.",
    "Clip share": "Share of tokens whose ratio the policy loss clips.",
    "Gradient norm": "Size of the gradient before clipping.",
    "Loss": "Loss of the update. It may rise while the policy improves: watch the reward.",
    "Demonstrations": "Cross-entropy of demonstrations in supervised steps: of trained rows, and of rows held out.",
    "Engine against learner": "Difference of the two probabilities of a sampled token; the mean should be below 0.01.",
    "Seconds of a step": "The step and its parts. Generating and scoring are parts of the rollout.",
    "Tokens per second": "Sampled tokens per second of the whole step, and of generating alone.",
    "MFU": "Useful operations of forward and backward over the GPUs' peak; unshared counts shared prompts repeatedly.",
    "Cost": "Cost of the run so far, in the unit of the prices, and its parts.",
    "Weights": "Seconds of exporting the weights, and until the slowest server has loaded them.",
}


def _panel(section: str, title: str, *keys: str, **more: Any) -> Panel:
    return Panel(section=section, title=title, meaning=MEANINGS[title], keys=keys, **more)


def _share(section: str, title: str, *keys: str) -> Panel:
    counts = any("*" in key for key in keys)
    return _panel(section, title, *keys, unit="share", floor=0.0, ceiling=1.0, absent_is_zero=counts)


_PHASES = ("step", "generate", "score", "train", "weight_sync", "eval", "checkpoint", "other")
_AGENTS_COUNTS = ("forked", "repeated", "side_calls", "endpoint_errors", "structured_dropped", "structured_guided")
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
    _share("Rollout", "Kept over weight syncs", "kept/tokens", "kept/trajectories"),
    _panel("Rollout", "Agents' calls", *(f"agent/{name}" for name in _AGENTS_COUNTS), floor=0.0, absent_is_zero=True),
    _panel("Rollout", "Why trajectories forked", "agent/forks/*", unit="calls", floor=0.0, absent_is_zero=True),
    _panel("Learner", "Entropy", "learner/entropy", "sft/entropy", unit="nats", floor=0.0),
    _panel("Learner", "KL", "learner/ppo_kl", "learner/kl_to_reference", "distillation/*kl", "rollout_corr/kl"),
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
    _panel("Time", "MFU", "perf/mfu", "perf/mfu_unshared", unit="share", floor=0.0),
    _panel("Time", "Cost", "cost/total", "cost/*", floor=0.0),
    _panel("Time", "Weights", "weight_sync/export_s", "weight_sync/load_s", unit="s", floor=0.0),
)


def keys_of_panel(panel: Panel, known: Sequence[str]) -> list[str]:
    """Return the metrics of `known` that a panel shows, in its order: `reward/*/mean` excludes `reward/mean`."""
    shown: dict[str, None] = {}
    for pattern in panel.keys:
        head, star, tail = pattern.partition("*")
        if star:  # the star must match at least one character
            long = (key for key in known if len(key) > len(head) + len(tail))
            shown |= dict.fromkeys(key for key in long if key.startswith(head) and key.endswith(tail))
        elif pattern in known:
            shown[pattern] = None
    return [key for key in shown if key not in panel.omits]
