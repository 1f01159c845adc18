"""Size of the KV cache that an engine gets, on a CPU and on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.engine import vllm_arguments
from rayapp.engine.vllm_arguments import WHOLE_GIB_OF_CACHE, set_process_environment, vllm_args


def cache_bytes(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, **sections: Any) -> int | None:
    monkeypatch.setattr(vllm_arguments, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {})
    return vllm_args(Config.model_validate(sections))["kv_cache_memory_bytes"]


@pytest.mark.parametrize(("gib", "num_bytes"), [(0.1, 107_374_182), (1.5, 3 << 29), (2, 2 << 30)])
def test_a_cpu_takes_the_bytes_of_a_fraction_too(monkeypatch: pytest.MonkeyPatch, gib: float, num_bytes: int) -> None:
    server = {"kv_cache_gib": gib}

    assert cache_bytes(monkeypatch, has_gpu=False, server=server) == num_bytes
    assert cache_bytes(monkeypatch, has_gpu=True, server=server, cluster={"device": "cpu"}) == num_bytes


def test_on_a_gpu_its_share_of_the_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_bytes(monkeypatch, has_gpu=True) is None


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
