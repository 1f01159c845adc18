"""Size of the KV cache that an engine gets, on a CPU and on a GPU."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
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

ArgsOf = Callable[..., dict[str, Any]]


@pytest.fixture
def args_of(monkeypatch: pytest.MonkeyPatch) -> ArgsOf:
    """Call it with sections of a config: what vLLM gets on a GPU of 80 GiB, or on a CPU."""

    def given(*, has_gpu: bool = True, **sections: Any) -> dict[str, Any]:
        monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: has_gpu)
        monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
        monkeypatch.setattr(vllm_arguments, "gpu_bytes", lambda: 80 << 30)
        return vllm_args(Config.model_validate(sections))

    return given


@pytest.mark.parametrize(("gib", "num_bytes"), [(0.1, 107_374_182), (1.5, 3 << 29), (2, 2 << 30)])
def test_a_cpu_takes_the_bytes_of_a_fraction_too(args_of: ArgsOf, gib: float, num_bytes: int) -> None:
    for on_cpu in ({"has_gpu": False}, {"cluster": {"device": "cpu"}}):
        assert args_of(server={"kv_cache_gib": gib}, **on_cpu)["kv_cache_memory_bytes"] == num_bytes


def test_a_gpus_cache_in_bytes_holds_and_only_it_must_be_free_when_the_server_starts(args_of: ArgsOf) -> None:
    args = args_of(server={"kv_cache_gib": 8})
    assert (args["kv_cache_memory_bytes"], args["gpu_memory_utilization"]) == (8 << 30, 0.1)
    assert args_of()["kv_cache_memory_bytes"] is None  # its share of the memory decides


def test_vllm_gets_the_rounding_and_the_further_arguments_of_the_run(args_of: ArgsOf) -> None:
    further = {"attention_backend": "FLASHINFER", "structured_outputs_config": {"disable_any_whitespace": True}}
    server = {"quantization": "fp8_per_block", "kv_cache_dtype": "fp8", "engine_args": further}

    args = args_of(server=server, algorithm={"rollout_correction": {"level": "token"}})

    assert (args["quantization"], args["kv_cache_dtype"]) == ("fp8_per_block", "fp8")
    assert args["attention_backend"] == "FLASHINFER"
    # Settings of structured outputs are added to the library that reads masks.
    assert args["structured_outputs_config"] == {"backend": "xgrammar", "disable_any_whitespace": True}


def test_a_gpu_compiles_and_takes_long_prompts_in_larger_parts_than_a_cpu(args_of: ArgsOf) -> None:
    def found(*, has_gpu: bool, **server: Any) -> tuple[bool, int | None]:
        args = args_of(has_gpu=has_gpu, server=server)
        return args["enforce_eager"], args["max_num_batched_tokens"]

    assert found(has_gpu=True) == (False, 8192)
    assert found(has_gpu=False) == (True, None)
    assert found(has_gpu=True, enforce_eager=True, max_num_batched_tokens=4096) == (True, 4096)


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
    monkeypatch.setenv(WHOLE_GIB_OF_CACHE, "40")  # somebody left it there: it does not decide

    set_process_environment(Config.model_validate({"run": {"deterministic": deterministic}}))

    assert os.environ.get("VLLM_BATCH_INVARIANT") == set_to
    assert WHOLE_GIB_OF_CACHE not in os.environ


def test_a_server_on_a_gpu_without_the_kernels_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    sections = {"server": {"kv_cache_dtype": "fp8"}, "algorithm": {"rollout_correction": {"level": "token"}}}

    with pytest.raises(ConfigError, match=r"this GPU has 8\.0: use auto"):
        check_gpu(Config.model_validate(sections))


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
