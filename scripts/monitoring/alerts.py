"""Prometheus alerts of a run, each with steps to take. They are made from `operator_metrics`; `write.py` writes them.

An alert reports a fault of *this run*; Ray and nodes have their own alerts. Each `expr` names metrics through `m`,
which fails for a metric that is not defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actors.operator_metrics import BY_NAME

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alerting rule of Prometheus."""

    name: str
    expr: str
    for_: str
    """Time for which the expression must hold before the alert fires, in Prometheus' notation."""
    severity: Severity
    summary: str
    """Sentence that describes the alert. It may contain Prometheus' templates."""
    runbook: tuple[str, ...]
    """Steps to take, in order."""


def m(name: str, labels: str = "") -> str:
    """Return a metric's exported name, with a selector if `labels` is given."""
    return BY_NAME[name].exported + (f"{{{labels}}}" if labels else "")


def _by_run(expr: str) -> str:
    return f"max by (run) ({expr})"


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({m(name)}[10m]))"


_STEP_S = _by_run(m("rl_phase_seconds", 'phase="step"'))
_SINCE_STEP_S = f"(time() - {_by_run(m('rl_last_step_timestamp_seconds'))})"
_SYNC_S = _by_run(m("rl_phase_seconds", 'phase="weight_sync"'))
_LEARNERS_IDLE = _by_run(m("rl_idle_share", 'role="learners"'))
_SANDBOX_WAIT_S = _by_run(m("rl_sandbox_wait_seconds", 'quantile="p99"'))
_CREATION_FAILS = _rate("rl_sandbox_failures_total", "run, provider")
_CREATIONS = _rate("rl_sandbox_created_total", "run, provider")
_TEN_MINUTES_S = 600

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="RunStalled",
        expr=f"{_SINCE_STEP_S} > {_TEN_MINUTES_S} and {_SINCE_STEP_S} > 5 * {_STEP_S}",
        for_="1m",
        severity="critical",
        summary="{{ $labels.run }}: no step for {{ $value | humanizeDuration }}, five times as long as the last one",
        runbook=(
            "Ray dashboard, Actors: is a server, a learner or the sandbox pool dead or pending?",
            (
                "Panels of sandboxes: if callers wait and no sandbox is created, the provider is down or its quota "
                "is used up."
            ),
            "Job page, stack trace of a learner: if it waits in a collective, another rank is gone.",
            "Stop the job; the same command continues from the last checkpoint.",
        ),
    ),
    Alert(
        name="CheckpointOld",
        expr=f"time() - {_by_run(m('rl_last_checkpoint_timestamp_seconds'))} > 7200",
        for_="1m",
        severity="warning",
        summary="{{ $labels.run }}: the last checkpoint is {{ $value | humanizeDuration }} old",
        runbook=(
            "checkpoint.every_steps of the config times seconds per step: is this intended?",
            "Is the disk of the run folder full? A full disk stops the run at the next checkpoint, not before.",
        ),
    ),
    Alert(
        name="RolloutsFail",
        expr=f"{_by_run(m('rl_failed_share_10_steps'))} > 0.1",
        for_="1m",
        severity="warning",
        summary="{{ $labels.run }}: {{ $value | humanizePercentage }} of ten steps' trajectories failed",
        runbook=(
            "Panel `failed trajectories by cause`: sandbox_* is the provider, engine_* a server.",
            "trajectories/ of the run folder, column reward_detail, has a line for each failure.",
            "Above rollout.max_failed_ratio the run stops and keeps its last checkpoint.",
        ),
    ),
    Alert(
        name="NoLearningSignal",
        expr=f"{_by_run(m('rl_no_signal_share'))} > 0.9",
        for_="30m",
        severity="warning",
        summary="{{ $labels.run }}: {{ $value | humanizePercentage }} of the groups have equal rewards",
        runbook=(
            (
                "If the pass rate is near 1, the tasks are solved. If it is near 0, they are too hard, or the "
                "verdicts are wrong: check with `rayapp score`."
            ),
            "Raise rollout.group_size or rollout.temperature, or change the tasks.",
        ),
    ),
    Alert(
        name="WeightSyncSlow",
        expr=f"{_SYNC_S} > 0.3 * {_STEP_S} and {_SYNC_S} > 5",
        for_="15m",
        severity="warning",
        summary="{{ $labels.run }}: servers wait {{ $value | humanizeDuration }} for weights in every step",
        runbook=(
            "Does the object store of the servers' nodes (Ray dashboard, Cluster) spill to disk? Spilling is slow.",
            "Are servers and learners on different networks? Put them on one network.",
        ),
    ),
    Alert(
        name="LearnersIdle",
        expr=f"{_LEARNERS_IDLE} > 0.8",
        for_="30m",
        severity="info",
        summary="{{ $labels.run }}: learners do nothing for {{ $value | humanizePercentage }} of each step",
        runbook=(
            "Add servers, or raise train.max_staleness so that servers sample during training.",
            "Panel `seconds by phase`: if most of the step is `score`, sandboxes are the limit, not servers.",
        ),
    ),
    Alert(
        name="SandboxesScarce",
        expr=f"{_SANDBOX_WAIT_S} > 60 and on (run) {_by_run(m('rl_sandbox_waiting'))} > 0",
        for_="5m",
        severity="warning",
        summary="{{ $labels.run }}: rollouts wait {{ $value | humanizeDuration }} for a sandbox",
        runbook=(
            (
                "Panel `sandboxes by provider`: if a provider is at its limit, ask for more quota, or add a second "
                "provider."
            ),
            "If it is below its limit, creation is slow: raise sandbox.min_ready, or the warm pool of the SandboxSet.",
        ),
    ),
    Alert(
        name="SandboxCreationFails",
        expr=f"{_CREATION_FAILS} > 0.2 * ({_CREATIONS} + {_CREATION_FAILS})",
        for_="5m",
        severity="warning",
        summary="{{ $labels.run }}: over a fifth of the sandboxes at {{ $labels.provider }} can't be created",
        runbook=(
            (
                "Panel `failed creations by cause`: failures by quota and rate limits are temporary; for `config` "
                "check key and template."
            ),
            "Look at the provider's status page. The next provider in sandbox.providers is used meanwhile.",
        ),
    ),
    Alert(
        name="SandboxesStray",
        expr=f"sum by (run, provider) (increase({m('rl_sandbox_strays_total')}[1h])) > 0",
        for_="1m",
        severity="info",
        summary="{{ $labels.run }}: stray sandboxes were found at {{ $labels.provider }} and ended",
        runbook=(
            "After a crash this is expected once. If it repeats, another run has the same run.name.",
            "`rayapp sandbox reap --dry-run` lists the sandboxes that are left.",
        ),
    ),
    Alert(
        name="ServerOverloaded",
        expr=f"max by (run, server) ({m('rl_server_kv_used_share')}) > 0.95 "
        f"and max by (run, server) ({m('rl_server_waiting')}) > 0",
        for_="10m",
        severity="info",
        summary="{{ $labels.run }}: {{ $labels.server }} has a full KV cache, and requests wait",
        runbook=(
            "Requests are preempted and computed again: lower server.max_num_seqs, or add servers.",
            "Or enlarge the cache: server.kv_cache_gib, or on a GPU server.gpu_memory_utilization.",
        ),
    ),
    Alert(
        name="TrackerFails",
        expr=f"sum by (run) (increase({m('rl_tracker_failures_total')}[30m])) > 0",
        for_="1m",
        severity="info",
        summary="{{ $labels.run }}: a tracker fails to record the run's metrics",
        runbook=("The job's log names the tracker and the error. metrics.jsonl in the run folder has every step.",),
    ),
)


def rule_file() -> dict[str, Any]:
    """Return the alerts as a Prometheus rule file."""
    return {"groups": [{"name": "rayapp", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    runbook = " ".join(f"{number}. {line}" for number, line in enumerate(alert.runbook, start=1))
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": runbook},
    }
