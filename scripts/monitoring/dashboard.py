"""The Grafana dashboard of a run. It is made from `operator_metrics`; `write.py` writes it.

A panel names metrics and their unit. The queries follow from the kind of metric. Series of several processes are merged
into one series per run, or one per label. Pure functions, which return plain dicts in Grafana's JSON model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.operator_metrics import BY_NAME, Metric, Unit

FILTER = 'run=~"$run",ray_io_cluster=~"$cluster"'
"""Selector of the chosen runs and clusters. A label that is absent, as ray_io_cluster is outside Kubernetes, matches
the variable's `.*`."""
GRAFANA_UNITS: dict[Unit, str] = {
    "": "short", "s": "s", "share": "percentunit", "bytes": "bytes", "tokens/s": "short", "time": "s",
}  # fmt: skip
WIDTH, HEIGHT, COLUMNS = 8, 7, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph."""

    title: str
    metrics: tuple[str, ...] = ()
    """Names of metrics. The kind of each metric decides how it is drawn."""
    queries: tuple[tuple[str, str, Unit], ...] = ()
    """Further queries: (PromQL with `#` in place of FILTER, legend, unit)."""


def _name(name: str) -> str:
    return BY_NAME[name].exported


_PREFIX_HITS = " / ".join(
    f"sum by (run, server) (rate({_name(name)}{{#}}[5m]))"
    for name in ("rl_server_prefix_hits_total", "rl_server_prefix_queries_total")
)
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Learning",
        (
            Panel(title="reward", metrics=("rl_reward_mean",)),
            Panel(
                title="pass rate, solved, no signal", metrics=("rl_pass_rate", "rl_solved_share", "rl_no_signal_share")
            ),
            Panel(title="entropy and gradient norm", metrics=("rl_entropy", "rl_grad_norm")),
        ),
    ),
    (
        "Progress",
        (
            Panel(title="step", metrics=("rl_step", "rl_steps_planned")),
            Panel(title="sampled tokens per second", metrics=("rl_tokens_per_second",)),
            Panel(title="seconds by phase", metrics=("rl_phase_seconds",)),
            Panel(title="idle share by role, MFU", metrics=("rl_idle_share", "rl_mfu")),
            Panel(
                title="age of the last step and checkpoint",
                metrics=("rl_last_step_timestamp_seconds", "rl_last_checkpoint_timestamp_seconds"),
            ),
            Panel(title="trackers that failed", metrics=("rl_tracker_failures_total",)),
        ),
    ),
    (
        "Between rollouts and training",
        (
            Panel(title="groups by state", metrics=("rl_groups",)),
            Panel(title="age of the oldest finished group", metrics=("rl_queue_age_seconds",)),
            Panel(title="staleness", metrics=("rl_staleness_steps",)),
            Panel(title="weight sync", metrics=("rl_weight_sync_seconds",)),
            Panel(title="weights sent", metrics=("rl_weight_sync_bytes",)),
            Panel(title="failed trajectories by cause", metrics=("rl_failed_share", "rl_failed_share_10_steps")),
        ),
    ),
    (
        "Sandboxes",
        (
            Panel(title="in use and waiting", metrics=("rl_sandbox_leased", "rl_sandbox_waiting")),
            Panel(title="wait for a sandbox", metrics=("rl_sandbox_wait_seconds",)),
            Panel(title="seconds of a call by provider", metrics=("rl_sandbox_exec_seconds",)),
            Panel(title="sandboxes by provider", metrics=("rl_sandbox_alive", "rl_sandbox_limit")),
            Panel(title="creations per second", metrics=("rl_sandbox_created_total",)),
            Panel(
                title="failed creations by cause",
                metrics=("rl_sandbox_failures_total", "rl_sandbox_strays_total"),
            ),
        ),
    ),
    (
        "vLLM servers",
        (
            Panel(title="requests", metrics=("rl_server_running", "rl_server_waiting")),
            Panel(title="KV cache in use", metrics=("rl_server_kv_used_share",)),
            Panel(title="preempted for want of KV cache", metrics=("rl_server_preempted_total",)),
            Panel(
                title="prefix cache hits",
                queries=((_PREFIX_HITS, "{{server}}", "share"),),
            ),
        ),
    ),
)


def queries(panel: Panel) -> list[tuple[str, str, Unit]]:
    """Return (PromQL, legend, unit) of every series in a panel."""
    own = [query for name in panel.metrics for query in _queries_of(BY_NAME[name])]
    return [(expr.replace("#", FILTER), legend, unit) for expr, legend, unit in (*own, *panel.queries)]


def _queries_of(metric: Metric) -> list[tuple[str, str, Unit]]:
    by = ", ".join(("run", *metric.labels))
    labels = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    legend = f"{metric.name.removeprefix('rl_')} {labels}".strip()
    if metric.kind == "counter":
        return [(f"sum by ({by}) (rate({metric.exported}{{#}}[5m]))", legend, metric.unit)]
    if metric.kind == "timestamp":
        return [(f"time() - max by ({by}) ({metric.exported}{{#}})", legend.replace("timestamp_seconds", "age"), "s")]
    if metric.kind == "histogram":
        rate = f"sum by (le, {by}) (rate({metric.exported}_bucket{{#}}[5m]))"
        return [(f"histogram_quantile({q}, {rate})", f"{labels} p{q * 100:g}", metric.unit) for q in (0.5, 0.99)]
    return [(f"max by ({by}) ({metric.exported}{{#}})", legend, metric.unit)]


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    return {
        "title": "rayapp",
        "uid": "rayapp",
        "tags": ["ray", "rayapp"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), _variable("cluster", "ray_io_cluster"), _variable("run", "run")]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values({_name('rl_step')}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Any:
    y, number = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": _grid(0, y, 24, 1)}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            x = WIDTH * (index % COLUMNS)
            yield _panel(panel, number, _grid(x, y + HEIGHT * (index // COLUMNS), WIDTH, HEIGHT))
        y += HEIGHT * -(-len(panels) // COLUMNS)


def _grid(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    drawn = queries(panel)
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(f"{BY_NAME[name].help}." for name in panel.metrics),
        "datasource": source,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": GRAFANA_UNITS[drawn[0][2]], "min": None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + index), "expr": expr, "legendFormat": legend, "datasource": source}
            for index, (expr, legend, _) in enumerate(drawn)
        ],
    }
