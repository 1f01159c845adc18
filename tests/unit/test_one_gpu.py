"""The benchmark of one GPU reads profiles and compares runs."""

from __future__ import annotations

from benchmarks.one_gpu import busy, differing


def test_a_gpus_share_of_work_counts_overlapping_kernels_once() -> None:
    kernel = {"cat": "kernel", "name": "gemm"}
    events = [
        kernel | {"ts": 0, "dur": 1000},
        kernel | {"ts": 500, "dur": 1000, "name": "copy"},
        kernel | {"ts": 3000, "dur": 1000},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    ]

    found = busy({"traceEvents": events})

    assert (found["kernels"], found["ms"], found["busy"]) == (3, 4.0, 0.625)
    assert found["longest"] == ["2.00 ms in 2: gemm", "1.00 ms in 1: copy"]


def test_two_runs_are_equal_but_for_their_seconds() -> None:
    step = {"timing_s/step": 1.0, "reward/mean": 0.5, "learner/skipped_steps": 0.0}

    assert differing([step, step], [step | {"timing_s/step": 2.0}, step]) == []
    assert differing([step, step], [step, step | {"learner/skipped_steps": 1.0}]) == ["learner/skipped_steps"]
    assert differing([step, step], [step]) == ["steps"]
    assert differing([], []) == ["steps"]
