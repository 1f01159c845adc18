"""Size of the KV cache that an engine gets, on a CPU and on a GPU."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.core.timing import MOST_ITERATIONS, take_engine_trace
from rayapp.engine import vllm_arguments
from rayapp.engine.vllm_arguments import (
    WHOLE_GIB_OF_CACHE,
    _profiler_args,
    check_gpu,
    set_process_environment,
    vllm_args,
)


def cache_bytes(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, **sections: Any) -> int | None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
    return vllm_args(Config.model_validate(sections))["kv_cache_memory_bytes"]


@pytest.mark.parametrize(("gib", "num_bytes"), [(0.1, 107_374_182), (1.5, 3 << 29), (2, 2 << 30)])
def test_a_cpu_takes_the_bytes_of_a_fraction_too(monkeypatch: pytest.MonkeyPatch, gib: float, num_bytes: int) -> None:
    server = {"kv_cache_gib": gib}

    assert cache_bytes(monkeypatch, has_gpu=False, server=server) == num_bytes
    assert cache_bytes(monkeypatch, has_gpu=True, server=server, cluster={"device": "cpu"}) == num_bytes


def test_on_a_gpu_its_share_of_the_memory_decides_if_no_bytes_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_bytes(monkeypatch, has_gpu=True) is None


def test_a_gpus_cache_in_bytes_holds_and_only_it_must_be_free_when_the_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: True)
    monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
    monkeypatch.setattr(vllm_arguments, "gpu_bytes", lambda: 80 << 30)

    args = vllm_args(Config.model_validate({"server": {"kv_cache_gib": 8}}))

    assert (args["kv_cache_memory_bytes"], args["gpu_memory_utilization"]) == (8 << 30, 0.1)


def test_vllm_gets_the_rounding_and_the_further_arguments_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: True)
    monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
    server = {
        "quantization": "fp8_per_block",
        "kv_cache_dtype": "fp8",
        "engine_args": {"attention_backend": "FLASHINFER", "enable_prefix_caching": False},
    }
    sections = {"server": server, "algorithm": {"rollout_correction": {"level": "token"}}}

    args = vllm_args(Config.model_validate(sections))

    assert (args["quantization"], args["kv_cache_dtype"]) == ("fp8_per_block", "fp8")
    assert (args["attention_backend"], args["enable_prefix_caching"]) == ("FLASHINFER", False)
    plain = vllm_args(Config())
    assert (plain["quantization"], plain["kv_cache_dtype"]) == (None, "auto")


@pytest.mark.parametrize(
    ("has_gpu", "deterministic", "set_to"), [(True, True, "1"), (True, False, None), (False, True, None)]
)
def test_a_server_on_a_gpu_computes_batch_invariantly_if_the_run_repeats(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, deterministic: bool, set_to: str | None
) -> None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: has_gpu)
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")

    set_process_environment(Config.model_validate({"run": {"deterministic": deterministic}}))

    assert os.environ.get("VLLM_BATCH_INVARIANT") == set_to


def test_a_server_on_a_gpu_without_the_kernels_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    sections = {"server": {"kv_cache_dtype": "fp8"}, "algorithm": {"rollout_correction": {"level": "token"}}}

    with pytest.raises(ConfigError, match=r"this GPU has 8\.0: use auto"):
        check_gpu(Config.model_validate(sections))


def test_a_gpu_compiles_and_takes_long_prompts_in_larger_parts_than_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*, has_gpu: bool, **server: Any) -> tuple[bool, int | None]:
        monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: has_gpu)
        monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
        args = vllm_args(Config.model_validate({"server": server}))
        return args["enforce_eager"], args["max_num_batched_tokens"]

    assert found(has_gpu=True) == (False, 8192)
    assert found(has_gpu=False) == (True, None)
    assert found(has_gpu=True, enforce_eager=True, max_num_batched_tokens=4096) == (True, 4096)


def test_what_somebody_left_in_the_environment_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")  # so that what is set here is put back
    monkeypatch.setenv(WHOLE_GIB_OF_CACHE, "40")

    set_process_environment(Config())

    assert WHOLE_GIB_OF_CACHE not in os.environ


def test_vllms_profiler_stops_by_itself_and_its_trace_is_taken_once() -> None:
    """vLLM's own profiler with our arguments, around plain torch; the engine's workers call it like this."""
    from vllm.profiler.wrapper import TorchProfilerWrapper

    (config,) = _profiler_args(Config.model_validate({"train": {"profile_steps": [2]}}).train).values()
    folder = Path(config.torch_profiler_dir)
    try:
        for name in ("abc12-rank-0", "dp0_pp0_tp0_dcp0_ep0_rank0"):  # of vLLM's workers on a CPU, and on a GPU
            profiler = TorchProfilerWrapper(config, worker_name=name, local_rank=0, activities=["CPU"])
            profiler.start()
            for _ in range(MOST_ITERATIONS + 1):
                assert profiler.is_running
                profiler.step()
                torch.ones(8, 8) @ torch.ones(8, 8)
            assert not profiler.is_running
            profiler.stop()
            events = json.loads(gzip.decompress(take_engine_trace(folder)))["traceEvents"]
            assert sum(event["name"] == "aten::mm" for event in events) == MOST_ITERATIONS
            assert list(folder.iterdir()) == []
            with pytest.raises(ValueError, match="max"):
                take_engine_trace(folder)
    finally:
        shutil.rmtree(folder)


def test_settings_of_structured_outputs_are_added_to_the_library_that_reads_masks() -> None:
    server = {"engine_args": {"structured_outputs_config": {"disable_any_whitespace": True}}}

    args = vllm_args(Config.model_validate({"server": server}))

    assert args["structured_outputs_config"] == {"backend": "xgrammar", "disable_any_whitespace": True}
