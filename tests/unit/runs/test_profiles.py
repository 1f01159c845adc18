"""Profiles of steps: what a trace says of operators and phases."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rayapp.runs.profiles import Profile, profile_lines, summarize, trace_events, write_profile


def gpu_trace() -> bytes:
    """Half a second on a GPU, in two streams that overlap for a tenth of a second; times in microseconds."""

    def event(name: str, category: str, track: int, start_s: float, seconds: float) -> dict[str, Any]:
        times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": track} | times

    events = [
        {"ph": "M", "name": "process_name", "pid": 0},
        event("aten::linear", "cpu_op", 1, 0.0, 0.2),
        event("aten::mm", "cpu_op", 1, 0.05, 0.1),
        event("gemm", "kernel", 7, 0.1, 0.2),
        event("gemm", "kernel", 7, 0.3, 0.1),
        event("all_gather<script>", "kernel", 8, 0.35, 0.15),
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
    return gzip.compress(text.encode())


def test_a_profile_of_a_gpu_counts_kernels_and_the_time_without_any(tmp_path: Path) -> None:
    timings = {"timing_s/step": 2.0, "timing_s/rollout": 0.5, "timing_s/train": 1.5, "timing_s/learner/optimizer": 0.5}
    profile = Profile(process="learner-0", trace=gpu_trace(), covers="8 of 9 micro-batches", paused_s=0.1)
    found = write_profile(tmp_path, 7, [profile], timings)

    (process,) = found.processes
    assert [(one.name, one.calls) for one in process.operators] == [("gemm", 2), ("all_gather<script>", 1)]
    assert [one.share for one in process.operators] == pytest.approx([2 / 3, 1 / 3])
    assert (process.device, process.recorded_s, process.busy_s) == ("gpu", pytest.approx(0.4), pytest.approx(0.4))
    assert list(profile_lines(found, "runs/x/profiles")) == [
        "profile of step 7, 2.0 s: train 75%, optimizer 25%, rollout 25%",
        "learner-0: gpu busy for 100% of 0.4 s (8 of 9 micro-batches): gemm 67%, all_gather<script> 33%",
        "traces for chrome://tracing or Perfetto: runs/x/profiles",
    ]


def test_an_operators_own_time_is_without_the_operators_that_it_calls() -> None:
    events = [event for event in trace_events(gpu_trace()) if event.get("cat") != "kernel"]
    trace = gzip.compress(json.dumps({"traceEvents": events}).replace("[{", "[ {", 1).encode())
    found = summarize(Profile(process="learner-0", trace=trace, covers=""))

    assert {one.name: round(one.seconds, 6) for one in found.operators} == {"aten::linear": 0.1, "aten::mm": 0.1}
    assert (found.device, found.busy_s) == ("cpu", pytest.approx(0.2))
