"""Rollouts as MLflow traces: spans of ours in MLflow's form, written by the one tracker that has the database open.

Not through MLflow's decorators and its global tracer: those note the time at which a span is made, in the process that
makes it. A rollout's times were noted long before, in a worker that must not know the database.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mlflow.entities import Span as MlflowSpan
from mlflow.entities import TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient

from rayapp.runs.tracking.traces import Decode, Span, TracedRollout, to_span, walk

_PREVIEW_CHARS = 1000
_NAME_CHARS = 250
_NS = 1_000_000_000


class TraceWriter:
    """Writes traces to one experiment.

    Args:
        uri: of the tracking store.
        run_id: of the MLflow run that the traces belong to.
        decode: token ids to text.
    """

    def __init__(self, uri: str, *, experiment_id: str, run_id: str, decode: Decode) -> None:
        self._client = TracingClient(uri)
        self._experiment_id = experiment_id
        self._run_id = run_id
        self._decode = decode

    def write(self, rollout: TracedRollout) -> None:
        """One rollout as one trace. Written again, it replaces the first."""
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
    """A span of a trace; its number in the trace is its id."""
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
    """Half of a surrogate pair is nothing that UTF-8 can hold, and no database takes a NUL in a text."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")
