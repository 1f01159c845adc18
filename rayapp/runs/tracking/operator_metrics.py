"""What an operator watches: the one definition of every Prometheus metric of a run.

    driver, sandbox-pool, vllm-server-N, rollout-worker-N            Prometheus
      {"reward/mean": 0.4, …} --samples()--> Sample --actors/metrics.py--> ray_rl_reward_mean{run="x"} 0.4

The parts of a run already count in slash-named scalars (docs/run-folder.md); a metric says which of those it shows. The
dashboard and the alerts are made from this table too (`write.py`), so that none of them can name what isn't there.
Pure; it never talks to Ray. Names carry units as Prometheus wants them; Ray puts `ray_` before each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["gauge", "counter", "timestamp", "histogram"]
Unit = Literal["", "s", "share", "bytes", "tokens/s", "time"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One Prometheus metric."""

    name: str
    kind: Kind
    """timestamp: a gauge with the Unix time at which `source` was last there. counter: `source` counts up from the
    start of its process. histogram: fed by `actors.metrics` itself."""
    help: str
    source: str = ""
    """Name of the scalar, with `{label}` for a part of it that becomes a label."""
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    is_zero_when_absent: bool = False
    """A label value that is not reported any more counts as 0; otherwise its last value stays."""

    @property
    def exported(self) -> str:
        """Its name in Prometheus."""
        return f"ray_{self.name}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the scalars it shows, with a group per label."""
        parts = re.split(r"\{(\w+)\}", self.source)
        return re.compile("".join(f"(?P<{p}>[^/]+)" if i % 2 else re.escape(p) for i, p in enumerate(parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value to report."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


METRICS: tuple[Metric, ...] = (
    # The driver, once a step.
    Metric(name="rl_step", kind="gauge", source="step", help="Optimizer steps done"),
    Metric(name="rl_steps_planned", kind="gauge", source="run/num_steps", help="train.num_steps of the run"),
    Metric(
        name="rl_last_step_timestamp_seconds", kind="timestamp", source="timing_s/step", unit="time",
        help="When the last step ended",
    ),
    Metric(
        name="rl_last_checkpoint_timestamp_seconds", kind="timestamp", source="timing_s/checkpoint_write", unit="time",
        help="When the last checkpoint was saved, or the run started: work after it is lost in a crash",
    ),
    Metric(name="rl_reward_mean", kind="gauge", source="reward/mean", help="Mean reward of valid trajectories"),
    Metric(
        name="rl_pass_rate", kind="gauge", source="reward/pass_rate/mean", unit="share",
        help="Mean share of tests passed",
    ),
    Metric(
        name="rl_solved_share", kind="gauge", source="reward/solved/mean", unit="share",
        help="Trajectories that pass every test",
    ),
    Metric(
        name="rl_no_signal_share", kind="gauge", source="groups/zero_variance", unit="share",
        help="Groups whose rewards are all equal: they teach nothing",
    ),
    Metric(
        name="rl_tokens_per_second", kind="gauge", source="throughput/response_tokens_per_s", unit="tokens/s",
        help="Sampled tokens over the whole step",
    ),
    Metric(name="rl_entropy", kind="gauge", source="learner/entropy", help="Entropy of the policy in nats"),
    Metric(name="rl_grad_norm", kind="gauge", source="learner/grad_norm", help="Norm of the gradient before clipping"),
    Metric(
        name="rl_phase_seconds", kind="gauge", source="timing_s/{phase}", unit="s", labels=("phase",),
        is_zero_when_absent=True, help="Seconds of the last step by phase; `step` is the whole",
    ),
    Metric(
        name="rl_idle_share", kind="gauge", source="idle/{role}", unit="share", labels=("role",),
        help="Share of the last step in which servers generated, or learners trained, nothing",
    ),
    Metric(
        name="rl_staleness_steps", kind="gauge", source="staleness/{stat}", labels=("stat",),
        help="Optimizer steps between the weights that sampled and those that trained",
    ),
    Metric(
        name="rl_groups", kind="gauge", source="ledger/{state}", labels=("state",),
        help="Groups by state; `ready` is the queue between rollouts and training",
    ),
    Metric(
        name="rl_queue_age_seconds", kind="gauge", source="queue/oldest_ready_s", unit="s",
        help="How long the oldest finished group has waited for training",
    ),
    Metric(
        name="rl_weight_sync_seconds", kind="gauge", source="timing_s/weight_sync", unit="s",
        help="Until every server held the last weights",
    ),
    Metric(
        name="rl_weight_sync_bytes", kind="gauge", source="weight_sync/bytes", unit="bytes",
        help="Weights sent to each server",
    ),
    Metric(
        name="rl_failed_share", kind="gauge", source="failure/{cause}", unit="share", labels=("cause",),
        is_zero_when_absent=True, help="Trajectories of the last step that infrastructure failed, by cause",
    ),
    Metric(
        name="rl_failed_share_10_steps", kind="gauge", source="rollout/failed_ratio_10_steps", unit="share",
        help="The same over ten steps, all causes; past rollout.max_failed_ratio the run stops",
    ),
    Metric(
        name="rl_tracker_failures_total", kind="counter", source="tracking/failed",
        help="Steps that a tracker failed to record",
    ),
    # The sandbox pool, every few seconds.
    Metric(name="rl_sandbox_leased", kind="gauge", source="sandbox/leased", help="Sandboxes in use"),
    Metric(name="rl_sandbox_waiting", kind="gauge", source="sandbox/waiting", help="Callers that wait for a sandbox"),
    Metric(
        name="rl_sandbox_wait_seconds", kind="gauge", source="sandbox/wait_{quantile}_s", unit="s",
        labels=("quantile",), help="Wait for a sandbox, over the last 2048 leases",
    ),
    Metric(
        name="rl_sandbox_fallbacks_total", kind="counter", source="sandbox/fallbacks",
        help="Leases that another provider had to serve",
    ),
    Metric(
        name="rl_sandbox_alive", kind="gauge", source="sandbox/{provider}/alive", labels=("provider",),
        help="Remote sandboxes that exist",
    ),
    Metric(
        name="rl_sandbox_limit", kind="gauge", source="sandbox/{provider}/limit", labels=("provider",),
        help="Sandboxes that the provider lets us have",
    ),
    Metric(
        name="rl_sandbox_created_total", kind="counter", source="sandbox/{provider}/created", labels=("provider",),
        help="Sandboxes created",
    ),
    Metric(
        name="rl_sandbox_failures_total", kind="counter", source="sandbox/{provider}/failed_{cause}",
        labels=("provider", "cause"), help="Creations that failed, by cause",
    ),
    Metric(
        name="rl_sandbox_strays_total", kind="counter", source="sandbox/{provider}/strays_ended", labels=("provider",),
        help="Sandboxes found at the provider that nobody knew of, and ended",
    ),
    # Rollout workers, at every call.
    Metric(
        name="rl_sandbox_exec_seconds", kind="histogram", unit="s", labels=("provider",),
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
        help="Seconds of one call into a sandbox, as the worker saw it",
    ),
    # vLLM servers, every few seconds.
    Metric(
        name="rl_server_running", kind="gauge", source="server/{server}/running", labels=("server",),
        help="Requests being decoded",
    ),
    Metric(
        name="rl_server_waiting", kind="gauge", source="server/{server}/waiting", labels=("server",),
        help="Requests that wait for the engine",
    ),
    Metric(
        name="rl_server_kv_used_share", kind="gauge", source="server/{server}/kv_used", unit="share",
        labels=("server",), help="Share of the KV cache in use",
    ),
    Metric(
        name="rl_server_prefix_queries_total", kind="counter", source="server/{server}/prefix_queries",
        labels=("server",), help="Prompt tokens looked up in the prefix cache",
    ),
    Metric(
        name="rl_server_prefix_hits_total", kind="counter", source="server/{server}/prefix_hits", labels=("server",),
        help="Prompt tokens found there",
    ),
    Metric(
        name="rl_server_preempted_total", kind="counter", source="server/{server}/preempted", labels=("server",),
        help="Requests thrown out and computed again, for want of KV cache",
    ),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def samples(scalars: Mapping[str, float], *, now: float) -> Iterator[Sample]:
    """What to report for these scalars; those that no metric shows are passed over, and so is not-a-number.

    Args:
        now: Unix time, for the metrics that say when something last happened.
    """
    for metric in METRICS:
        if not metric.source:
            continue
        for name, value in scalars.items():
            found = metric.pattern.fullmatch(name)
            if found is not None and value == value:
                labels = tuple((label, found[label]) for label in metric.labels)
                yield Sample(metric=metric, labels=labels, value=now if metric.kind == "timestamp" else value)


def of_step(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics with what an operator reads off them: the step itself, and who waited for whom."""
    step_s = metrics.get("timing_s/step", 0.0)
    busy = {"servers": "timing_s/generate", "learners": "timing_s/train"}
    idle = {
        f"idle/{role}": min(1.0, max(0.0, 1.0 - metrics[key] / step_s))
        for role, key in busy.items()
        if key in metrics and step_s > 0
    }
    return dict(metrics) | idle | {"step": float(step)}
