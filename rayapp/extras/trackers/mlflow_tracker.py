"""MLflow: metrics, parameters and traces of a run, on a tracking server or in a database file of the run folder.

Metrics are logged through a client object, so MLflow's global "active run" stays free for a user's own tools. Traces
are made from rayapp's spans: MLflow's decorators record the time and process in which a span is made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, TraceInfo, TraceLocation, TraceState
from mlflow.entities import Span as MlflowSpan
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from rayapp.config.config import Config
from rayapp.core.types import Group
from rayapp.extras.trackers.traces import Decode, Span, TracedRollout, chosen_rollouts, to_span, walk
from rayapp.runs.tracking.background import remembered_id
from rayapp.runs.tracking.trackers import flattened
from rayapp.storage.models.tokenizer import load_tokenizer

_PREVIEW_CHARS = 1000
_NAME_CHARS = 250
_NS = 1_000_000_000


class TraceWriter:
    def __init__(self, uri: str, *, experiment_id: str, run_id: str, decode: Decode) -> None:
        self._client = TracingClient(uri)
        self._experiment_id = experiment_id
        self._run_id = run_id
        self._decode = decode

    def write(self, rollout: TracedRollout) -> None:
        """Write one rollout as one trace; a repeated write replaces it."""
        root = to_span(rollout, self._decode)
        number = hashlib.sha256(f"{self._run_id}/{rollout.key}".encode()).hexdigest()[:32]
        trace_id = f"tr-{number}"
        self._client.start_trace(self._info(trace_id, root, rollout))
        self._client.log_spans(self._experiment_id, [to_mlflow(trace_id, *found) for found in walk(root)])

    def _info(self, trace_id: str, root: Span, rollout: TracedRollout) -> TraceInfo:
        return TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=int(root.start_s * 1000),
            execution_duration=int((root.end_s - root.start_s) * 1000),
            state=TraceState.ERROR if root.error else TraceState.OK,
            request_preview=_storable(rollout.group.prompt.text[-_PREVIEW_CHARS:]),
            response_preview=_storable(rollout.trajectory.completion_text[-_PREVIEW_CHARS:]),
            trace_metadata={"mlflow.sourceRun": self._run_id, "mlflow.trace_schema.version": "3"},
            tags={
                "mlflow.traceName": _storable(rollout.group.prompt.task[:250]),
                **({"source": rollout.group.prompt.source} if rollout.group.prompt.source else {}),
                "step": str(rollout.step),
                "group": str(rollout.group.group_id),
                "trajectory": str(rollout.index),
                "reward": f"{rollout.trajectory.reward.value:g}",
                "status": rollout.trajectory.status.value,
            },
        )


def to_mlflow(trace_id: str, number: int, parent: int | None, span: Span) -> MlflowSpan:
    """Convert a span; its number in the trace becomes its id."""
    attributes = {
        **span.attributes,
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": span.kind,
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
    }
    status = "STATUS_CODE_ERROR" if span.error else "STATUS_CODE_OK"
    return MlflowSpan.from_dict(
        {
            "trace_id": trace_id,
            "span_id": _span_id(number),
            "parent_span_id": None if parent is None else _span_id(parent),
            "name": _storable(span.name[:_NAME_CHARS]),
            "start_time_unix_nano": int(span.start_s * _NS),
            "end_time_unix_nano": int(span.end_s * _NS),
            "status": {"code": status, "message": _storable(span.error)},
            "attributes": {key: _json(value) for key, value in attributes.items() if value is not None},
            "events": [],
        }
    )


def _span_id(number: int) -> str:
    return f"{number + 1:016x}"


def _json(value: Any) -> str:
    return json.dumps(_clean(value), default=str)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _storable(value)
    if isinstance(value, dict):
        return {_storable(str(key)): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value


def _storable(text: str) -> str:
    """Replace unstorable characters: UTF-8 can't encode half of a surrogate pair, and databases refuse NUL."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")


# MLflow sets up its loggers at import; without this they would write lines between those of a run's steps.
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.WARNING)
_MAX_PARAM_CHARS = 500
_MAX_PARAMS_AT_ONCE = 100


def mlflow(config: Config, path: Path, first_step: int) -> MlflowTracker:
    section = config.tracking
    return MlflowTracker(
        path,
        uri=os.environ.get("MLFLOW_TRACKING_URI", ""),
        experiment=section.project,
        parameters=flattened(config.model_dump(mode="json")),
        load_decode=lambda: partial(load_tokenizer(config.model).decode, skip_special_tokens=False),
        trace_ratio=section.trace_ratio,
        seed=config.run.seed,
    )


class MlflowTracker:
    """Logs to one MLflow run, also after a resume.

    Args:
        folder: the run folder, which holds `mlflow.db` unless there is a server.
        uri: tracking server; empty takes MLFLOW_TRACKING_URI, else the file.
        load_decode: gives the function from token ids to text; called with the first trace, as it takes seconds.
        trace_ratio: share of all rollouts that become traces, drawn by `seed`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        experiment: str,
        parameters: Mapping[str, str],
        load_decode: Callable[[], Decode],
        trace_ratio: float = 0.0,
        seed: int = 0,
    ) -> None:
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = remembered_id(folder, f"mlflow {uri}", lambda: self._create(folder, uri, experiment, parameters))
        self._client.update_run(self._run_id, status="RUNNING")
        self._uri = uri
        self._load_decode = load_decode
        self._ratio, self._seed = trace_ratio, seed
        self._traces: TraceWriter | None = None

    def _create(self, folder: Path, uri: str, experiment: str, parameters: Mapping[str, str]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        # Artifacts of the run's own database file are stored beside it; a server has its own location for them.
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

    def trace(self, step: int, groups: Sequence[Group]) -> None:
        chosen = chosen_rollouts(step, groups, self._ratio, seed=self._seed)
        if chosen and self._traces is None:
            experiment_id = self._client.get_run(self._run_id).info.experiment_id
            self._traces = TraceWriter(
                self._uri, experiment_id=experiment_id, run_id=self._run_id, decode=self._load_decode()
            )
        for rollout in chosen:
            assert self._traces is not None
            self._traces.write(rollout)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
