"""MLflow: one MLflow run for a run of ours, on a tracking server or in a database file of the run folder. Metrics,
parameters, and rollouts as traces.

Logged through a client object: MLflow's global "active run" stays untouched, so that a user's own tools can use it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from rayapp.runs.tracking.mlflow_traces import TraceWriter
from rayapp.runs.tracking.resumable import remembered_id
from rayapp.runs.tracking.traces import Decode, TracedRollout

# MLflow sets its loggers up when it is imported, and would then write lines between those of a run's steps.
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.WARNING)
_MAX_PARAM_CHARS = 500
_MAX_PARAMS_AT_ONCE = 100


class MlflowTracker:
    """Logs to one MLflow run, the same one when our run resumes.

    Args:
        folder: the run folder; its name is the run's. Holds `mlflow.db` unless there is a server.
        uri: tracking server; empty takes MLFLOW_TRACKING_URI, else the file.
        experiment: made if missing.
        parameters: the flattened configuration.
        load_decode: gives what makes text of token ids; called with the first trace, as it takes seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        experiment: str,
        parameters: Mapping[str, str],
        load_decode: Callable[[], Decode],
    ) -> None:
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = remembered_id(folder, f"mlflow {uri}", lambda: self._create(folder, uri, experiment, parameters))
        self._client.update_run(self._run_id, status="RUNNING")
        self._uri = uri
        self._load_decode = load_decode
        self._traces: TraceWriter | None = None

    def _create(self, folder: Path, uri: str, experiment: str, parameters: Mapping[str, str]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        # A database file of ours keeps its artifacts beside it; a server knows where it wants them.
        place = (folder.resolve() / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment, place)
        run_id: str = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
        params = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in parameters.items()]
        for start in range(0, len(params), _MAX_PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS_AT_ONCE])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [Metric(key, value, now_ms, step) for key, value in metrics.items() if math.isfinite(value)]
        self._client.log_batch(self._run_id, metrics=values)

    def trace(self, rollouts: Sequence[TracedRollout]) -> None:
        """Each rollout as a trace of this run."""
        if self._traces is None:
            experiment_id = self._client.get_run(self._run_id).info.experiment_id
            self._traces = TraceWriter(
                self._uri, experiment_id=experiment_id, run_id=self._run_id, decode=self._load_decode()
            )
        for rollout in rollouts:
            self._traces.write(rollout)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
