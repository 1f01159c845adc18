"""Monitoring: the table of metrics, and the dashboard, alerts and reports made from it.

promtool (of the Debian package prometheus) parses every query. For each alert it plays a fault that must fire it, and a
healthy run that must not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.operator_metrics import METRICS, Sample, of_step, samples
from rayapp.driver.group_rules import FailureBudget
from rayapp.engine.vllm_output import EngineLoad
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.sandbox.pool.pool import PoolStats
from scripts.monitoring.alerts import ALERTS, rule_file
from scripts.monitoring.dashboard import ROWS, queries
from scripts.monitoring.write import CONFIGS, files
from support import make

STEP = {
    "reward/mean": 0.5,
    "reward/pass_rate/mean": 0.25,
    "timing_s/step": 10.0,
    "timing_s/generate": 4.0,
    "timing_s/train": 3.0,
    "timing_s/learner/total": 2.9,
    "failure/sandbox_gone": 0.1,
    "ledger/ready": 2.0,
    "learner/entropy": float("nan"),
}


@pytest.fixture
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    return program


def reported(scalars: dict[str, float]) -> dict[tuple[str, str], float]:
    def key(sample: Sample) -> tuple[str, str]:
        return sample.metric.name, ",".join(value for _, value in sample.labels)

    return {key(sample): sample.value for sample in samples(scalars, now=1000.0)}


def test_a_step_is_reported_under_the_metrics_names() -> None:
    assert reported(of_step(3, STEP)) == {
        ("rl_step", ""): 3.0,
        ("rl_last_step_timestamp_seconds", ""): 1000.0,
        ("rl_reward_mean", ""): 0.5,
        ("rl_pass_rate", ""): 0.25,
        ("rl_phase_seconds", "step"): 10.0,
        ("rl_phase_seconds", "generate"): 4.0,
        ("rl_phase_seconds", "train"): 3.0,
        # Servers were idle for 1 - 4/10 of the step, learners for 1 - 3/10.
        ("rl_idle_share", "servers"): pytest.approx(0.6),
        ("rl_idle_share", "learners"): pytest.approx(0.7),
        ("rl_groups", "ready"): 2.0,
        ("rl_failed_share", "sandbox_gone"): 0.1,
    }
    # Generation overlaps training in an asynchronous run and may last longer than the step.
    assert of_step(1, {"timing_s/step": 2.0, "timing_s/generate": 5.0})["idle/servers"] == 0.0


def test_providers_and_causes_become_labels() -> None:
    scalars = {"sandbox/e2b/failed_quota": 4.0, "sandbox/e2b/created": 7.0, "sandbox/wait_p99_s": 1.5}

    assert reported(scalars) == {
        ("rl_sandbox_failures_total", "e2b,quota"): 4.0,
        ("rl_sandbox_created_total", "e2b"): 7.0,
        ("rl_sandbox_wait_seconds", "p99"): 1.5,
    }


def test_engine_load_is_read_off_vllms_statistics() -> None:
    stats = pytest.importorskip("vllm.v1.metrics.stats")
    load = EngineLoad()
    logger = load.factory(None, 0)
    for _ in range(2):
        cache = stats.PrefixCacheStats(queries=10, hits=4)
        logger.record(
            stats.SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5, prefix_cache_stats=cache),
            None,
        )
    logger.record(None, None)

    assert load.scalars() == {
        "running": 3.0,
        "waiting": 1.0,
        "kv_used": 0.5,
        "prefix_queries": 20.0,
        "prefix_hits": 8.0,
        "preempted": 0.0,
    }
    assert all(reported({f"server/vllm-server-0/{name}": 1.0}) for name in load.scalars())


def test_written_files_are_those_of_the_definition() -> None:
    for path, text in files().items():
        assert path.read_text() == text, "run `python -m scripts.monitoring.write`"


def test_the_workstations_prometheus_loads_the_charts_alerts() -> None:
    path = CONFIGS / "monitoring" / "prometheus.yml"

    [rules] = yaml.safe_load(path.read_text())["rule_files"]

    assert (path.parent / rules).resolve() in files()


# --- dashboard


def test_descriptions_are_ascii_because_ray_makes_no_metric_with_another() -> None:
    assert [metric.name for metric in METRICS if not metric.help.isascii()] == []


def test_every_metric_is_on_the_dashboard() -> None:
    drawn = " ".join(expr for _, panels in ROWS for panel in panels for expr, _, _ in queries(panel))

    assert [metric.name for metric in METRICS if metric.exported not in drawn] == []


def test_every_query_of_the_dashboard_parses(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": expr.replace("$run", ".*").replace("$cluster", ".*")}
        for index, expr in enumerate(e for _, panels in ROWS for panel in panels for e, _, _ in queries(panel))
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rules) > 35


# --- alerts

HOURS_3 = 180
FAULTS: dict[str, dict[str, str]] = {
    # Series in promtool's notation, one value a minute for three hours: `a+bxN` is a, a+b, …; `axN` is constant.
    "RunStalled": {
        'ray_rl_last_step_timestamp_seconds{run="x"}': "0x180",
        'ray_rl_phase_seconds{run="x",phase="step"}': "20x180",
    },
    "CheckpointOld": {'ray_rl_last_checkpoint_timestamp_seconds{run="x"}': "0x180"},
    "RolloutsFail": {'ray_rl_failed_share_10_steps{run="x"}': "0.2x180"},
    "NoLearningSignal": {'ray_rl_no_signal_share{run="x"}': "1x180"},
    "WeightSyncSlow": {
        'ray_rl_phase_seconds{run="x",phase="step"}': "40x180",
        'ray_rl_phase_seconds{run="x",phase="weight_sync"}': "20x180",
    },
    "LearnersIdle": {'ray_rl_idle_share{run="x",role="learners"}': "0.95x180"},
    "SandboxesScarce": {
        'ray_rl_sandbox_wait_seconds{run="x",quantile="p99"}': "90x180",
        'ray_rl_sandbox_waiting{run="x"}': "5x180",
    },
    "SandboxCreationFails": {
        'ray_rl_sandbox_failures_total{run="x",provider="e2b",cause="quota"}': "0+6x180",
        'ray_rl_sandbox_created_total{run="x",provider="e2b"}': "0+6x180",
    },
    "SandboxesStray": {'ray_rl_sandbox_strays_total{run="x",provider="e2b"}': "0x140 1x38"},
    "ServerOverloaded": {
        'ray_rl_server_kv_used_share{run="x",server="vllm-server-0"}': "0.99x180",
        'ray_rl_server_waiting{run="x",server="vllm-server-0"}': "7x180",
    },
    "TrackerFails": {'ray_rl_tracker_failures_total{run="x"}': "0x160 3x20"},
}
HEALTHY = {
    'ray_rl_last_step_timestamp_seconds{run="x"}': "0+60x180",
    'ray_rl_last_checkpoint_timestamp_seconds{run="x"}': "0+60x180",
    'ray_rl_phase_seconds{run="x",phase="step"}': "60x180",
    'ray_rl_phase_seconds{run="x",phase="weight_sync"}': "6x180",
    'ray_rl_failed_share_10_steps{run="x"}': "0.01x180",
    'ray_rl_no_signal_share{run="x"}': "0.4x180",
    'ray_rl_idle_share{run="x",role="learners"}': "0.6x180",
    'ray_rl_sandbox_wait_seconds{run="x",quantile="p99"}': "2x180",
    'ray_rl_sandbox_waiting{run="x"}': "3x180",
    'ray_rl_sandbox_failures_total{run="x",provider="e2b",cause="quota"}': "0+1x180",
    'ray_rl_sandbox_created_total{run="x",provider="e2b"}': "0+60x180",
    'ray_rl_sandbox_strays_total{run="x",provider="e2b"}': "0x180",
    'ray_rl_server_kv_used_share{run="x",server="vllm-server-0"}': "0.99x180",
    'ray_rl_server_waiting{run="x",server="vllm-server-0"}': "0x180",
    'ray_rl_tracker_failures_total{run="x"}': "3x180",
}


def fired(promtool: str, folder: Path, series: dict[str, str], expected: dict[str, Any] | None, name: str) -> str:
    """Return promtool's complaint; empty if the alert was as expected at the end of the three hours."""
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rule_file()))
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{HOURS_3}m", "alertname": name, "exp_alerts": [] if expected is None else [expected]}
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=240, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_fires_on_its_fault_and_not_on_a_healthy_run(alert: Any, promtool: str, tmp_path: Path) -> None:
    # exp_alerts compares annotations too, whose values differ by fault: a complaint that got the alert says so.
    complaint = fired(promtool, tmp_path, FAULTS[alert.name], None, alert.name)

    assert f'alertname="{alert.name}"' in complaint.partition("got:")[2]
    assert 'run="x"' in complaint
    assert fired(promtool, tmp_path, HEALTHY, None, alert.name) == ""


def test_alerts_name_only_metrics_that_a_run_reports() -> None:
    stats = pytest.importorskip("vllm.v1.metrics.stats")
    budget, pool, load = FailureBudget(max_ratio=1.0), PoolStats(), EngineLoad()
    groups = [make.summary([0.0, 1.0])]
    budget.record(groups)
    pool.waits_s.append(2.0)
    load.record(stats.SchedulerStats(num_running_reqs=9, num_waiting_reqs=7, kv_cache_usage=0.99), None)
    timing = dict.fromkeys(
        ("timing_s/step", "timing_s/train", "timing_s/weight_sync", "timing_s/checkpoint_write"), 1.0
    )
    step = timing | {"tracking/failed": 3.0} | summarize_step(groups, version=1) | budget.metrics()
    provider = {f"sandbox/e2b/{name}": 1.0 for name in ("created", "failed_quota", "strays_ended")}
    server = {f"server/vllm-server-0/{name}": value for name, value in load.scalars().items()}
    known = reported(of_step(3, step) | pool.scalars(num_leased=8, num_waiting=3) | provider | server)

    for alert in ALERTS:
        assert set(re.findall(r"ray_(rl_\w+)", alert.expr)) <= {name for name, _ in known}, alert.name
