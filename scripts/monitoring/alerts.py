"""Prometheus alerts of a run, each with what to do about it. Made from `operator_metrics`; see `write.py`.

An alert reports what is wrong with *this run*; faults of Ray or the node are left to their own alerts. Each `expr`
names metrics through `m`, which fails for one that is not defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rayapp.runs.tracking.operator_metrics import BY_NAME

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert."""

    name: str
    expr: str
    for_: str
    """Time for which the expression must hold, in Prometheus' notation."""
    severity: Severity
    summary: str
    """One sentence, which may use Prometheus' templates."""
    runbook: tuple[str, ...]
    """Steps to take, in this order."""


def m(name: str, labels: str = "") -> str:
    """Return a metric's exported name, with an optional selector."""
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
            "Panels of sandboxes: with callers waiting and none created, the provider is down or its quota is used up.",
            "Job page, stack trace of a learner: if it waits in a collective, another rank is gone.",
            "Stop the job; the same command goes on from the last checkpoint.",
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
            "Disk of the run folder: a full one stops the run at the next checkpoint, not before.",
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
            "trajectories/ of the run folder, column reward_detail, has one line for each.",
            "Past rollout.max_failed_ratio the run stops by itself and keeps its last checkpoint.",
        ),
    ),
    Alert(
        name="NoLearningSignal",
        expr=f"{_by_run(m('rl_no_signal_share'))} > 0.9",
        for_="30m",
        severity="warning",
        summary="{{ $labels.run }}: {{ $value | humanizePercentage }} of the groups have equal rewards",
        runbook=(
            "Pass rate near 1: the tasks are solved. Near 0: too hard, or the verdicts are wrong: `rayapp score`.",
            "Raise rollout.group_size or rollout.temperature, or change the tasks.",
        ),
    ),
    Alert(
        name="WeightSyncSlow",
        expr=f"{_SYNC_S} > 0.3 * {_STEP_S} and {_SYNC_S} > 5",
        for_="15m",
        severity="warning",
        summary="{{ $labels.run }}: servers wait {{ $value | humanizeDuration }} of every step for weights",
        runbook=(
            "Object store of the servers' nodes (Ray dashboard, Cluster): spilling to disk makes it slow.",
            "Servers on nodes of another network than the learners: put them together.",
        ),
    ),
    Alert(
        name="LearnersIdle",
        expr=f"{_LEARNERS_IDLE} > 0.8",
        for_="30m",
        severity="info",
        summary="{{ $labels.run }}: learners do nothing for {{ $value | humanizePercentage }} of each step",
        runbook=(
            "Add servers, or raise train.max_staleness so that rollouts go on during training.",
            "Panel `seconds by phase`: with most of it in score, sandboxes are the limit, not servers.",
        ),
    ),
    Alert(
        name="SandboxesScarce",
        expr=f"{_SANDBOX_WAIT_S} > 60 and on (run) {_by_run(m('rl_sandbox_waiting'))} > 0",
        for_="5m",
        severity="warning",
        summary="{{ $labels.run }}: rollouts wait {{ $value | humanizeDuration }} for a sandbox",
        runbook=(
            "Panel `sandboxes by provider`: at its limit, ask for more quota, or add a second provider.",
            "Below the limit: creation is slow; raise sandbox.min_ready, or the warm pool of the SandboxSet.",
        ),
    ),
    Alert(
        name="SandboxCreationFails",
        expr=f"{_CREATION_FAILS} > 0.2 * ({_CREATIONS} + {_CREATION_FAILS})",
        for_="5m",
        severity="warning",
        summary="{{ $labels.run }}: over a fifth of the sandboxes at {{ $labels.provider }} can't be created",
        runbook=(
            "Panel `failed creations by cause`: quota and rate limits pass, config does not: check key and template.",
            "The provider's status page. A provider after it in sandbox.providers serves meanwhile.",
        ),
    ),
    Alert(
        name="SandboxesStray",
        expr=f"sum by (run, provider) (increase({m('rl_sandbox_strays_total')}[1h])) > 0",
        for_="1m",
        severity="info",
        summary="{{ $labels.run }}: sandboxes that nobody knew of were found at {{ $labels.provider }} and ended",
        runbook=(
            "After a crash this is expected once. Again and again: another run has the same run.name.",
            "`rayapp sandbox list` shows what is left.",
        ),
    ),
    Alert(
        name="ServerOverloaded",
        expr=f"max by (run, server) ({m('rl_server_kv_used_share')}) > 0.95 "
        f"and max by (run, server) ({m('rl_server_waiting')}) > 0",
        for_="10m",
        severity="info",
        summary="{{ $labels.run }}: {{ $labels.server }} has no room in its KV cache and requests waiting",
        runbook=(
            "Requests are preempted and computed again: lower server.max_num_seqs, or add servers.",
            "Or give it more cache: server.gpu_memory_utilization, on CPU server.kv_cache_gib.",
        ),
    ),
    Alert(
        name="TrackerFails",
        expr=f"sum by (run) (increase({m('rl_tracker_failures_total')}[30m])) > 0",
        for_="1m",
        severity="info",
        summary="{{ $labels.run }}: a tracker does not take the run's metrics",
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
