"""Every alert fires on its fault, live: our own metrics code in a real Ray, scraped by a real Prometheus.

`tests/unit/runs/test_monitoring.py` plays the same faults at the rules' own speed, on made-up series. Here the series
are what a run with the fault reports, and the rules wait `SPEED` times less: their `for` and the windows of their
queries. What they compare with is as shipped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from actors.metrics import Reporter
from rayapp.core.types import GroupSummary
from rayapp.driver.group_rules import FailureBudget
from rayapp.engine.vllm_output import EngineLoad
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.runs.tracking.operator_metrics import of_step
from rayapp.runs.tracking.trackers import RunTracker
from rayapp.sandbox.pool.pool import PoolStats
from scripts.monitoring.alerts import ALERTS, rule_file
from support import make
from support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]
SPEED = 20
SCRAPE_EVERY = "5s"
"""Also how long one may take, which on a busy machine is seconds."""
HEALTHY_RUN = "healthy"
HOURS_3 = 3 * 3600.0
Scalars = dict[str, float]


def group(rewards: list[float], *, num_failed: int = 0) -> GroupSummary:
    count = len(rewards)
    valid = np.arange(count) >= num_failed
    return make.summary(
        rewards,
        valid=valid,
        statuses=tuple("completed" if ok else "error_sandbox" for ok in valid),
        reward_statuses=tuple("scored" if ok else "invalid" for ok in valid),
        failure_kinds=tuple("" if ok else "sandbox_gone" for ok in valid),
    )


def step(timing: Scalars, groups: list[GroupSummary]) -> Scalars:
    """What the driver reports after a step with these seconds and groups."""
    failures = FailureBudget(max_ratio=1.0)
    failures.record(groups)
    return of_step(3, timing | summarize_step(groups, version=1) | failures.metrics())


def sandboxes(wait_s: float, num_waiting: int) -> Scalars:
    stats = PoolStats()
    stats.waits_s.append(wait_s)
    return stats.scalars(num_leased=8, num_waiting=num_waiting)


def created(num_created: float, num_failed: float, num_strays: float) -> Scalars:
    return {
        "sandbox/e2b/created": num_created,
        "sandbox/e2b/failed_quota": num_failed,
        "sandbox/e2b/strays_ended": num_strays,
    }


def server(num_waiting: int) -> Scalars:
    stats = pytest.importorskip("vllm.v1.metrics.stats")
    load = EngineLoad()
    load.record(stats.SchedulerStats(num_running_reqs=9, num_waiting_reqs=num_waiting, kv_cache_usage=0.99), None)
    return {f"server/vllm-server-0/{name}": value for name, value in load.scalars().items()}


class Broken:
    """A tracker whose service is away."""

    def log(self, step: int, metrics: Any) -> None:
        raise OSError("no route to the tracker")

    def close(self) -> None: ...


class Taken:
    """Keeps what a tracker is given."""

    def __init__(self) -> None:
        self.metrics: Scalars = {}

    def log(self, step: int, metrics: Any) -> None:
        self.metrics = of_step(step, metrics)

    def close(self) -> None: ...


def beside_a_broken_tracker() -> Callable[[float], Scalars]:
    """What the driver reports after each of its steps."""
    taken = Taken()
    tracker = RunTracker({"broken": Broken(), "ray metrics": taken}, None)

    def after_one_more(seconds: float) -> Scalars:
        tracker.log(int(seconds), {})
        return taken.metrics

    return after_one_more


GOOD = [group([0.0, 1.0, 0.0, 1.0])]
STABLE = {"tracking/failed": 3.0}
TIMING = {"timing_s/step": 60.0, "timing_s/train": 24.0, "timing_s/weight_sync": 6.0, "timing_s/checkpoint_write": 1.0}


@dataclass(frozen=True)
class Fault:
    """What a run reports that has it."""

    scalars: Callable[[float], Scalars]
    """At this many seconds since the test began."""
    age_s: float = 0.0
    """How long ago the run last reported."""


FAULTS: dict[str, Fault] = {
    HEALTHY_RUN: Fault(
        lambda t: (
            step(TIMING, GOOD) | sandboxes(2.0, 3) | created(10 * t, t, 0.0) | server(0) | {"tracking/failed": 3.0}
        )
    ),
    "RunStalled": Fault(lambda t: step(TIMING, GOOD), age_s=HOURS_3),
    "CheckpointOld": Fault(lambda t: {"timing_s/checkpoint_write": 1.0}, age_s=HOURS_3),
    "RolloutsFail": Fault(lambda t: step(TIMING, [group([0.0, 1.0, 0.0, 1.0], num_failed=1)])),
    "NoLearningSignal": Fault(lambda t: step(TIMING, [group([1.0, 1.0, 1.0, 1.0])])),
    "WeightSyncSlow": Fault(lambda t: step(TIMING | {"timing_s/weight_sync": 30.0}, GOOD)),
    "LearnersIdle": Fault(lambda t: step(TIMING | {"timing_s/train": 3.0}, GOOD)),
    "SandboxesScarce": Fault(lambda t: sandboxes(90.0, 5)),
    "SandboxCreationFails": Fault(lambda t: created(t, t, 0.0)),
    "SandboxesStray": Fault(lambda t: created(t, 0.0, t // 20)),
    "ServerOverloaded": Fault(lambda t: server(7)),
    "TrackerFails": Fault(beside_a_broken_tracker()),
}


@pytest.fixture
def metrics_port(start_ray: Callable[..., None]) -> int:
    """Port at which a Ray of this test's own shows what this process reports."""
    port = free_port()
    start_ray(
        num_cpus=1,
        object_store_memory=100_000_000,
        include_dashboard=False,
        _metrics_export_port=port,
        # On a busy machine Ray's own agent is late, and Ray gives itself up for dead.
        _system_config={"metrics_report_interval_ms": 500, "agent_register_timeout_ms": 600_000},
    )
    return port


def faster(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules with every time they wait or look back divided by `SPEED`."""
    unit_s = {"s": 1, "m": 60, "h": 3600}

    def shorter(text: str) -> str:
        return re.sub(r"(\d+)([smh])", lambda found: f"{int(found[1]) * unit_s[found[2]] // SPEED}s", text)

    [group_of_rules] = rules["groups"]
    for rule in group_of_rules["rules"]:
        rule["for"] = shorter(rule["for"])
        rule["expr"] = re.sub(r"\[\w+\]", lambda found: shorter(found[0]), rule["expr"])
    return rules


def test_windows_and_waits_are_shortened_and_thresholds_are_not() -> None:
    rules = {rule["alert"]: rule for rule in faster(rule_file())["groups"][0]["rules"]}

    assert (rules["NoLearningSignal"]["for"], rules["RunStalled"]["for"]) == ("90s", "3s")
    assert "[180s]" in rules["SandboxesStray"]["expr"]
    assert "> 7200" in rules["CheckpointOld"]["expr"]


def test_each_alert_fires_on_the_run_with_its_fault_and_none_on_a_healthy_one(
    metrics_port: int, start_prometheus: Any
) -> None:
    assert set(FAULTS) == {alert.name for alert in ALERTS} | {HEALTHY_RUN}
    reporters = {
        run: Reporter(run, clock=lambda age_s=fault.age_s: time.time() - age_s) for run, fault in FAULTS.items()
    }
    started = time.monotonic()
    prometheus = start_prometheus(metrics_port, faster(rule_file()), every=SCRAPE_EVERY)
    fired: dict[str, set[str]] = {run: set() for run in FAULTS}

    def all_fired() -> bool:
        for run, fault in FAULTS.items():
            reporters[run].report(fault.scalars(time.monotonic() - started))
        for rule in prometheus.rules():
            for alert in rule["alerts"]:
                if alert["state"] == "firing":
                    fired[alert["labels"]["run"]].add(rule["name"])
        return all(run in fired[run] for run in FAULTS if run != HEALTHY_RUN)

    prometheus.wait_until(all_fired, lambda: f"did not fire: {sorted(run for run in fired if run not in fired[run])}")
    # Longer than the longest wait of any rule by now: what a healthy run would set off had its time.
    assert prometheus.query(f'ray_rl_reward_mean{{run="{HEALTHY_RUN}"}}')
    assert fired[HEALTHY_RUN] == set()
