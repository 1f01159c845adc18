"""`rayapp gpu-check`: the verdict of each check on its figures; a check that fails, dies or hangs is a row in the
table.

The checks that need no engine run for real, on the CPU. All of them together are in the test marked long.
"""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayapp.cli.gpu_check import hardware
from rayapp.cli.gpu_check.checks import BY_NAME, CHECKS, CheckContext, CheckResult, GpuCheck, first_devices
from rayapp.cli.gpu_check.command import ResultRow, chosen, print_rows, report_of, run_check
from rayapp.cli.gpu_check.engine import judge_engine, judge_memory
from rayapp.cli.gpu_check.hardware import bus_gb_s, judge_versions
from rayapp.cli.gpu_check.training import judge_run, passed_on, run_config
from rayapp.cli.main import run
from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.learner.memory.shape import GIB

STEP = {"learner/grad_norm": 1.0, "weight_sync/bytes": 1e9, "weight_sync/load_s": 0.5, "timing_s/step": 3.0,
        "rollout_probs_diff/mean": 0.001}  # fmt: skip


def context_of(folder: Path, *, num_gpus: int = 0, model: str = "") -> CheckContext:
    return CheckContext(device="gpu" if num_gpus else "cpu", num_gpus=num_gpus, model=model, folder=folder)


def test_every_check_has_its_code_and_ends_in_time() -> None:
    from importlib import import_module

    for check in CHECKS:
        module, _, function = check.function.partition(":")
        assert callable(getattr(import_module(f"rayapp.cli.gpu_check.{module}"), function))
        assert 60 <= check.deadline_s <= 1200


def test_a_machine_with_one_gpu_leaves_out_what_needs_two(tmp_path: Path) -> None:
    left_out = {check.name: check.why_not(context_of(tmp_path, num_gpus=1)) for check in CHECKS}
    assert {name for name, why in left_out.items() if why == "needs 2 GPUs"} == {
        "p2p", "all-reduce", "vllm-tp2", "split", "split-store", "async",
    }  # fmt: skip
    assert {check.name for check in CHECKS if check.why_not(context_of(tmp_path)) == "needs a GPU"} == {
        "p2p", "memory", "vllm-eager", "vllm-fp8", "vllm-tp2",
    }  # fmt: skip


def test_checks_run_in_processes_of_their_own_and_their_figures_come_back(tmp_path: Path) -> None:
    rows = [run_check(BY_NAME[name], context_of(tmp_path)) for name in ("gemm", "all-reduce", "p2p")]
    assert [row.outcome.level for row in rows] == ["ok", "ok", "left out"]
    assert "TFLOP/s" in rows[0].outcome.figure
    assert rows[1].outcome.figure.startswith("gloo, 2 ranks")
    assert list(tmp_path.iterdir()) == []


def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, deadline_s: float = 60.0) -> GpuCheck:
    """A check whose process runs this body."""
    program = tmp_path / "check.py"
    program.write_text(body)
    monkeypatch.setattr("rayapp.cli.gpu_check.command.COMMAND", (sys.executable, str(program)))
    return GpuCheck(name="made-up", what="", function="", deadline_s=deadline_s)


def test_a_check_that_hangs_is_a_row_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = "import signal, time\nprint('waiting for rank 1', flush=True)\ntime.sleep(1000)\n"
    row = run_check(made_up(monkeypatch, tmp_path, body, deadline_s=4.0), context_of(tmp_path))
    assert row.outcome.level == "problem"
    assert row.outcome.figure == "no result within 4 s; its last line: waiting for rank 1"
    assert "NCCL_DEBUG=INFO rayapp gpu-check --only made-up" in row.outcome.cure


def test_what_a_run_prints_is_there_while_it_still_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = tmp_path / "seen"
    # It ends when its line has been read; if lines came only at the end, it would never end.
    program = (
        f"import os, sys, time\nprint('step 1')\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)\nsys.exit(3)"
    )
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(passed_on, [sys.executable, "-c", program], {})
        while "step 1" not in capfd.readouterr().out:
            assert not ended.done()
        seen.touch()
        assert ended.result() == (3, ["step 1\n"])


def test_a_check_that_dies_is_a_row_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = f"import os\nprint('CUDA error', flush=True)\nos.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    row = run_check(made_up(monkeypatch, tmp_path, body), context_of(tmp_path))
    assert row.outcome.figure == "ended with exit code -9: CUDA error"
    assert row.outcome.details["log"] == "CUDA error\n"


def test_a_check_that_raises_is_a_row_with_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rayapp.cli.gpu_check.command import main

    def broken(context: CheckContext) -> CheckResult:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(hardware, "gemm", broken)
    given, result = tmp_path / "context.json", tmp_path / "result.json"
    given.write_text(json.dumps({"device": "cpu", "num_gpus": 0, "model": "", "folder": str(tmp_path)}))
    main("gemm", str(given), str(result))
    found = json.loads(result.read_text())
    assert (found["level"], found["figure"]) == ("problem", "RuntimeError: no kernel image")
    assert "is available" in found["details"]["log"]


@pytest.mark.parametrize(
    ("driver", "cuda", "num_found", "problem"),
    [
        ("580.65.06", "13.0", 8, ""),
        ("570.1", "13.0", 8, "CUDA 13.0 needs driver 580"),
        ("570.1", "12.9", 8, ""),
        ("unknown (no nvidia-smi)", "13.0", 8, "CUDA 13.0 needs driver 580"),
        ("580.1", None, 8, "torch is the CPU build"),
        ("580.1", "13.0", 1, "2 GPUs were requested"),
    ],
)
def test_versions_that_can_not_work_are_named(driver: str, cuda: str | None, num_found: int, problem: str) -> None:
    found, cure = judge_versions(driver, cuda, num_found, 2)
    assert found == problem
    assert bool(cure) == bool(problem)


def test_bandwidth_is_counted_as_nccl_tests_do() -> None:
    assert bus_gb_s(8 * 10**9, 8, 0.1) == pytest.approx(140.0)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "nccl 2 GB/s"),
        ({"rollout_probs_diff/mean": 0.4}, "problem", "servers sample from other weights"),
        ({"rollout_probs_diff/mean": float("nan")}, "problem", "servers sample from other weights"),
        ({"learner/grad_norm": float("inf")}, "problem", "a gradient is not finite"),
    ],
)
def test_a_run_is_judged_by_its_metrics(changes: dict[str, float], level: str, words: str) -> None:
    outcome = judge_run("nccl", [STEP, STEP, STEP | changes])
    assert outcome.level == level
    assert words in outcome.figure
    assert bool(outcome.cure) == (level == "problem")
    without = {key: value for key, value in STEP.items() if key != "rollout_probs_diff/mean"}
    assert "servers sample from other weights" in judge_run("nccl", [STEP, STEP, without]).figure
    assert "1 of 3 steps have a gradient's norm" in judge_run("nccl", [STEP]).figure


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"log_prob_difference": 0.2}, "more than 0.05 from the learner's"),
        ({"log_prob_difference": float("nan")}, "more than 0.05 from the learner's"),
        ({"freed_gib": -0.1}, "sleep freed no memory"),
    ],
)
def test_an_engine_is_judged_by_its_log_probs_and_by_what_its_sleep_gives_back(
    changes: dict[str, float], words: str
) -> None:
    found = {"start_s": 30.0, "tokens_per_s": 1e4, "log_prob_difference": 0.004, "sleep_s": 1.0, "wake_s": 1.0,
             "freed_gib": 20.0}  # fmt: skip
    outcome = judge_engine(found | changes)
    assert outcome.level == ("problem" if words else "ok")
    assert words in outcome.figure


def test_memory_is_judged_beside_the_plan() -> None:
    gib = int(GIB)
    assert judge_memory(10 * gib, 11 * gib, gib, gib).level == "ok"
    assert "off by 20%" in judge_memory(12 * gib, 10 * gib, gib, gib).figure
    assert "CUDA takes more than twice" in judge_memory(10 * gib, 10 * gib, 3 * gib, gib).figure


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 8])
@pytest.mark.parametrize(("placement", "transport"), [("split", "nccl"), ("colocated", "ipc")])
def test_the_runs_use_all_gpus_and_are_configs_of_ours(
    tmp_path: Path, num_gpus: int, placement: str, transport: str
) -> None:
    if placement == "split" and num_gpus == 1:
        pytest.skip("needs two")
    found = run_config(context_of(tmp_path, num_gpus=num_gpus), "m", placement, transport)
    (tmp_path / "letters.py").write_text("")
    config = Config.model_validate(found)
    learners, servers = config.learner.num_learners, config.server.num_servers
    used = learners if placement == "colocated" else learners + servers
    assert used == (num_gpus or (1 if placement == "colocated" else 2))


def test_the_first_gpus_that_this_process_may_use_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_devices(3) == "0,1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,GPU-cc")
    assert first_devices(2) == "GPU-aa,GPU-bb"


def test_the_table_and_the_report_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = CheckResult(level="problem", figure="12 GB/s", cure="see the topology", details={"gb_s": 12})
    row = ResultRow(name="all-reduce", what="collectives", outcome=bad, seconds=3.2)
    rows = print_rows([row])
    assert " ".join(capsys.readouterr().out.split()) == "problem all-reduce 12 GB/s [3 s] do: see the topology"
    report = report_of(rows, context_of(tmp_path, num_gpus=2))
    assert report["rows"][0]["details"] == {"gb_s": 12}
    assert str(tmp_path) not in json.dumps(report)


def test_an_unknown_check_or_device_and_missing_gpus_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"--only nvlink: no such check\. There are versions, gemm"):
        chosen(["nvlink"])
    assert [check.name for check in chosen(["gemm", "versions"])] == ["versions", "gemm"]
    assert run(["gpu-check", "--device", "tpu"]) == 2
    monkeypatch.setattr("rayapp.cli.gpu_check.command.gpus_here", lambda: 1)
    assert run(["gpu-check", "--gpus", "2"]) == 2
    assert "--gpus 2: torch finds 1 GPUs" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(3000)
def test_all_that_a_cpu_can_do_is_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    code = run(["gpu-check", "--device", "cpu", "--out", str(report)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found: dict[str, Any] = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert {row["level"] for row in found.values()} == {"ok", "left out"}
    assert found["vllm"]["details"]["log_prob_difference"] < 0.05
    assert {name: found[name]["details"]["gb_s"] > 0 for name in ("split", "split-store", "colocated")} == {
        "split": True, "split-store": True, "colocated": True,
    }  # fmt: skip
