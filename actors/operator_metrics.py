"""Metrics for operators: the one definition of every Prometheus metric of a run.

Processes report scalars such as `reward/mean` (docs/run-folder.md); each metric names those that it shows. The
dashboard and the alerts are generated from this table. Names carry units by Prometheus's rules; Ray adds the prefix
`ray_`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

Kind = Literal["gauge", "counter", "timestamp", "histogram"]
Unit = Literal["", "s", "share", "bytes", "tokens/s", "time"]
_LABEL = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    # timestamp: Unix time at which `source` was last reported. counter: `source` counts up from the start of its
    # process. histogram: fed by `actors.metrics`.
    kind: Kind
    help: str
    source: str = ""  # name of the scalar, with `{label}` for a part that becomes a label
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    is_zero_when_absent: bool = False  # a label value that is no longer reported counts as 0; else its last value stays

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"ray_{self.name}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression for the names of its scalars, with a group per label."""
        parts = _LABEL.split(self.source)
        return re.compile("".join(f"(?P<{p}>[^/]+)" if i % 2 else re.escape(p) for i, p in enumerate(parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value to report."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


def _of_scalar(kind: Kind, name: str, source: str, text: str, **more: Any) -> Metric:
    """Make a metric from one scalar, or from all that match `source`, whose parts in braces are labels."""
    return Metric(name=name, kind=kind, source=source, help=text, labels=tuple(_LABEL.findall(source)), **more)


_gauge, _counter = partial(_of_scalar, "gauge"), partial(_of_scalar, "counter")
_timestamp = partial(_of_scalar, "timestamp", unit="time")
METRICS: tuple[Metric, ...] = (
    # The driver, once a step.
    _gauge("rl_step", "step", "Optimizer steps done"),
    _gauge("rl_steps_planned", "run/num_steps", "train.num_steps of the run"),
    _timestamp("rl_last_step_timestamp_seconds", "timing_s/step", "When the last step ended"),
    _timestamp("rl_last_checkpoint_timestamp_seconds", "timing_s/checkpoint_write",
               "Time at which the last checkpoint was saved, or the run started; later work is lost in a crash"),
    _gauge("rl_reward_mean", "reward/mean", "Mean reward of valid trajectories"),
    _gauge("rl_pass_rate", "reward/pass_rate/mean", "Mean share of tests passed", unit="share"),
    _gauge("rl_solved_share", "reward/solved/mean", "Trajectories that pass every test", unit="share"),
    _gauge("rl_no_signal_share", "groups/zero_variance",
           "Groups whose rewards are all equal, from which GRPO learns nothing", unit="share"),
    _gauge("rl_tokens_per_second", "throughput/response_tokens_per_s",
           "Sampled tokens over the whole step", unit="tokens/s"),
    _gauge("rl_mfu", "perf/mfu",
           "Useful operations of the learners' forward and backward over their GPUs' peak", unit="share"),
    _gauge("rl_entropy", "learner/entropy", "Entropy of the policy in nats"),
    _gauge("rl_grad_norm", "learner/grad_norm", "Norm of the gradient before clipping"),
    _gauge("rl_phase_seconds", "timing_s/{phase}",
           "Seconds of the last step by phase; `step` is the whole", unit="s", is_zero_when_absent=True),
    _gauge("rl_idle_share", "idle/{role}",
           "Share of the last step in which servers generated nothing, or learners trained on nothing", unit="share"),
    _gauge("rl_staleness_steps", "staleness/{stat}",
           "Optimizer steps between the weights that sampled and the weights that were trained"),
    _gauge("rl_groups", "ledger/{state}", "Groups by state; `ready` is the queue between rollouts and training"),
    _gauge("rl_queue_age_seconds", "queue/oldest_ready_s",
           "Wait of the oldest finished group for training", unit="s"),
    _gauge("rl_weight_sync_seconds", "timing_s/weight_sync", "Time until every server had the last weights", unit="s"),
    _gauge("rl_weight_sync_bytes", "weight_sync/bytes", "Weights sent to each server", unit="bytes"),
    _gauge("rl_failed_share", "failure/{cause}",
           "Trajectories of the last step without a verdict, by cause, such as sandbox or engine",
           unit="share", is_zero_when_absent=True),
    _gauge("rl_failed_share_10_steps", "rollout/failed_ratio_10_steps",
           "Trajectories of the last ten steps without a verdict; above rollout.max_failed_ratio the "
           "run stops", unit="share"),
    _counter("rl_tracker_failures_total", "tracking/failed", "Steps that a tracker failed to record"),
    # The sandbox pool, every few seconds.
    _gauge("rl_sandbox_leased", "sandbox/leased", "Sandboxes in use"),
    _gauge("rl_sandbox_waiting", "sandbox/waiting", "Callers that wait for a sandbox"),
    _gauge("rl_sandbox_wait_seconds", "sandbox/wait_{quantile}_s",
           "Wait for a sandbox, over the last 2048 leases", unit="s"),
    _gauge("rl_sandbox_alive", "sandbox/{provider}/alive", "Remote sandboxes that exist"),
    _gauge("rl_sandbox_limit", "sandbox/{provider}/limit", "Sandboxes that the provider permits"),
    _counter("rl_sandbox_created_total", "sandbox/{provider}/created", "Sandboxes created"),
    _counter("rl_sandbox_failures_total", "sandbox/{provider}/failed_{cause}", "Creations that failed, by cause"),
    _counter("rl_sandbox_strays_total", "sandbox/{provider}/strays_ended",
             "Stray sandboxes that were found at the provider and ended"),
    # Rollout workers, at every call.
    Metric(
        name="rl_sandbox_exec_seconds", kind="histogram", unit="s", labels=("provider",),
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
        help="Seconds of one call into a sandbox, measured by the worker",
    ),
    # vLLM servers, every few seconds.
    _gauge("rl_server_running", "server/{server}/running", "Requests being decoded"),
    _gauge("rl_server_waiting", "server/{server}/waiting", "Requests that wait for the engine"),
    _gauge("rl_server_kv_used_share", "server/{server}/kv_used", "Share of the KV cache in use", unit="share"),
    _counter("rl_server_prefix_queries_total", "server/{server}/prefix_queries",
             "Prompt tokens looked up in the prefix cache"),
    _counter("rl_server_prefix_hits_total", "server/{server}/prefix_hits", "Prompt tokens found in the prefix cache"),
    _counter("rl_server_preempted_total", "server/{server}/preempted",
             "Requests preempted because the KV cache was full, and computed again"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def samples(scalars: Mapping[str, float], *, now: float) -> Iterator[Sample]:
    """Yield the samples of these scalars, except NaN and scalars that no metric shows. `now`: Unix time."""
    for metric in METRICS:
        if not metric.source:
            continue
        for name, value in scalars.items():
            found = metric.pattern.fullmatch(name)
            if found is not None and value == value:
                labels = tuple((label, found[label]) for label in metric.labels)
                yield Sample(metric=metric, labels=labels, value=now if metric.kind == "timestamp" else value)


def of_step(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics, extended for operators: the step itself, and the idle shares."""
    step_s = metrics.get("timing_s/step", 0.0)
    busy = {"servers": "timing_s/generate", "learners": "timing_s/train"}
    idle = {
        f"idle/{role}": min(1.0, max(0.0, 1.0 - metrics[key] / step_s))
        for role, key in busy.items()
        if key in metrics and step_s > 0
    }
    return dict(metrics) | idle | {"step": float(step)}
