"""The number that a checkpoint is kept for: `checkpoint.best_metric` of the step it is saved after.

The driver asks once a step. A name that no step of this run can have would keep nothing and say nothing, so the first
step that was trained on names it, with the nearest that there is. Pure; knows no folder and no checkpoint.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError

TASK, EVAL = "task/", "eval/"


class BestMetric:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self._name = config.checkpoint.best_metric
        self._is_checked = config.checkpoint.keep_best == 0

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """The best_metric of the step with these metrics; None where it is not among them, or not finite.

        Raises:
            ConfigError: no step will ever have it.
        """
        value = metrics.get(self._name)
        if not self._is_checked and _tells(self._name, metrics):
            self._is_checked = True
            if value is None:
                self._check(metrics)
        return value if value is not None and math.isfinite(value) else None

    def _check(self, metrics: Mapping[str, float]) -> None:
        """Raises ConfigError unless a step with groups of another task may have the metric."""
        per_task = {_in_any_task(name) for name in metrics if name.startswith(TASK)}
        if self._name.startswith(TASK) and _in_any_task(self._name) in per_task:
            return
        near = difflib.get_close_matches(self._name, sorted(metrics), n=3, cutoff=0.5)
        meant = f" Did you mean {' or '.join(near)}?" if near else " Names are in metrics.jsonl of the run folder."
        raise ConfigError(
            f"checkpoint.best_metric is {self._name!r}, which is no metric of this run, so checkpoint.keep_best would "
            f"keep nothing.{meant}"
        )


def _tells(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a step with these metrics would have the metric, if there is one of that name.

    A step without an evaluation has none of its numbers, and one that computed nothing lacks many of the learner's.
    """
    if name.startswith(EVAL):
        return any(other.startswith(EVAL) for other in metrics)
    return metrics.get("learner/share_computed", 0.0) > 0


def _in_any_task(name: str) -> str:
    """`task/NAME/reward/mean` -> `reward/mean`. A task's name may be a path with slashes."""
    return name[name.rfind("/reward/") + 1 :] if "/reward/" in name else name
