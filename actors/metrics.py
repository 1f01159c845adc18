"""Reports a run's scalars to Ray's metrics endpoint, which Prometheus scrapes.

`actors.operator_metrics` lists the metrics. Every series has the run's name as a label, and no label with
many values, such as prompts, sandboxes or groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from actors.operator_metrics import BY_NAME, METRICS, Metric, of_step, samples

Labels = tuple[tuple[str, str], ...]
REPEAT_EVERY_S = 5.0


class Reporter:
    """Reports the scalars of one process; `clock` returns Unix time, for metrics that are the time of an event."""

    def __init__(self, run_name: str, clock: Callable[[], float] = time.time) -> None:
        self._run_name = run_name
        self._clock = clock
        self._made: dict[str, Any] = {}
        self._reported: dict[str, set[Labels]] = {}
        self._last: dict[tuple[str, Labels], float] = {}
        self._lock = threading.Lock()

    def report(self, scalars: Mapping[str, float]) -> None:
        present: dict[str, set[Labels]] = {}
        with self._lock:
            for sample in samples(scalars, now=self._clock()):
                self._set(sample.metric, sample.labels, sample.value)
                present.setdefault(sample.metric.name, set()).add(sample.labels)
            for metric in METRICS:
                if metric.is_zero_when_absent:
                    self._clear_absent(metric, present.get(metric.name, set()))

    def repeat(self) -> None:
        """Report the last values again, because Ray drops a gauge that was not set for a while."""
        with self._lock:
            for (name, labels), value in self._last.items():
                self._set(BY_NAME[name], labels, value)

    def _set(self, metric: Metric, labels: Labels, value: float) -> None:
        self._last[metric.name, labels] = value
        self._metric(metric).set(value, tags=self._tags(labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        metric = BY_NAME[name]
        self._metric(metric).observe(value, tags=self._tags(tuple(labels.items())))

    def _clear_absent(self, metric: Metric, present: set[Labels]) -> None:
        """Set series that are no longer present to 0, e.g. a cause of failures that no longer occurs."""
        before = self._reported.setdefault(metric.name, set())
        for labels in before - present:
            self._set(metric, labels, 0.0)
        before |= present

    def _tags(self, labels: Labels) -> dict[str, str]:
        return {"run": self._run_name, **dict(labels)}

    def _metric(self, metric: Metric) -> Any:
        if metric.name not in self._made:
            options: dict[str, Any] = {"description": metric.help, "tag_keys": ("run", *metric.labels)}
            if metric.kind == "histogram":
                made: Any = ray_metrics.Histogram(metric.name, boundaries=list(metric.buckets), **options)
            else:
                # Use gauges for counters too: Ray's counters can't start at 0, so Prometheus would miss the first
                # increment.
                made = ray_metrics.Gauge(metric.name, **options)
            self._made[metric.name] = made
        return self._made[metric.name]


class MetricsTracker:
    """The driver's tracker for Ray's metrics endpoint. Make it after connecting to Ray."""

    def __init__(self, run_name: str, num_steps: int) -> None:
        self._reporter = Reporter(run_name)
        # Count the start as a save, so that the alert on old checkpoints also covers runs that have never saved.
        self._reporter.report(
            {"run/num_steps": float(num_steps), "timing_s/checkpoint_write": 0.0, "timing_s/step": 0.0}
        )

        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat_for_ever, name="repeat metrics", daemon=True)
        self._thread.start()

    def _repeat_for_ever(self) -> None:
        # Repeat the values, because a step may take an hour, and Ray drops gauges that are not set.
        while not self._closed.wait(REPEAT_EVERY_S):
            self._reporter.repeat()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._reporter.report(of_step(step, metrics))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
