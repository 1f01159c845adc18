"""Arguments of vLLM in `server.engine_args`: what a run refuses, and rounding to 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

from rayapp.config.bundles import gpu_problems
from rayapp.config.config import Config
from rayapp.config.engine_args import check_names
from rayapp.config.loading import load_config
from rayapp.core.errors import ConfigError

TOKEN = "algorithm.rollout_correction.level=token"


def loaded(*overrides: str) -> Config:
    return load_config(None, overrides)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("max_num_batched_tokens: 4096", r"set server\.max_num_batched_tokens"),
        ("quantization: fp8", r"set server\.quantization"),
        ("kv_cache_dtype: fp8", r"set server\.kv_cache_dtype"),
        ("data_parallel_size: 2", r"set server\.num_servers"),
        ("seed: 3", r"set run\.seed"),
        ("logprobs_mode: raw_logprobs", "processed_logprobs"),
        ("cpu_offload_gb: 2", "layer-wise reload"),
        ("generation_config: auto", "change the sampled distribution"),
        ("{structured_outputs_config: {backend: guidance}}", "without backend, which is always xgrammar"),
        ("{structured_outputs_config: compact}", "must be a mapping"),
        ("{speculative_config: {rejection_sample_method: synthetic}}", "accepts tokens that the policy did not sample"),
    ],
)
def test_an_argument_that_a_run_cant_have_is_refused_with_the_way_out(argument: str, reason: str) -> None:
    written = argument if argument.startswith("{") else f"{{{argument}}}"
    with pytest.raises(ConfigError, match=reason):
        loaded(f"server.engine_args={written}")


def test_a_server_names_the_argument_that_its_vllm_does_not_have() -> None:
    with pytest.raises(ConfigError, match="async_schedulng; did you mean async_scheduling"):
        check_names({"async_schedulng": True}, ["async_scheduling", "seed"])


@pytest.mark.parametrize("key", ["quantization=fp8_per_block", "kv_cache_dtype=fp8"])
def test_rounding_needs_the_correction_of_every_token(key: str) -> None:
    by_default = loaded(f"server.{key}", "algorithm.rollout_correction.threshold=3")
    assert (by_default.algorithm.rollout_correction.level, by_default.algorithm.rollout_correction.threshold) == (
        "token",
        3.0,
    )
    assert f"servers round what learners don't (server.{key})" in by_default.rounding_note
    assert loaded().algorithm.rollout_correction.level == "none"
    assert loaded().rounding_note == ""
    with pytest.raises(ConfigError, match=r"Set algorithm\.rollout_correction\.level: token"):
        loaded(f"server.{key}", "algorithm.rollout_correction.level=none")
    with pytest.raises(ConfigError, match=r"level is sequence"):
        loaded(f"server.{key}", "algorithm.rollout_correction.level=sequence")

    assert loaded(f"server.{key}", TOKEN).server.is_rounded


@pytest.mark.parametrize(
    ("settings", "capability", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, (8, 0), "kv_cache_dtype is fp8"),
        ({"quantization": "fp8_per_channel"}, (8, 6), "use fp8_per_tensor"),
        ({"quantization": "fp8_per_tensor"}, (8, 0), ""),
        ({"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"}, (9, 0), ""),
        ({"run.deterministic": True}, (7, 5), "compute capability 8.0"),
        ({"run.deterministic": True, "quantization": "fp8_per_block"}, (8, 0), "use only one of the two keys"),
        ({"run.deterministic": True, "quantization": "fp8_per_block"}, (9, 0), ""),
    ],
)
def test_a_gpu_that_vllm_cant_do_it_on_is_named(
    settings: dict[str, Any], capability: tuple[int, int], reason: str
) -> None:
    keys = [f"{key if '.' in key else 'server.' + key}={value}" for key, value in settings.items()]

    problems = gpu_problems(loaded(*keys, TOKEN), capability)

    assert [reason in problem for problem in problems] == ([True] if reason else [])


def test_a_run_that_repeats_is_synchronous_and_uses_kernels_that_dont_depend_on_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_staleness is 1"):
        loaded("run.deterministic=true", "train.max_staleness=1")
    with pytest.raises(ConfigError, match="FLASHINFER, whose results depend on the batch"):
        loaded("run.deterministic=true", "server.engine_args={attention_backend: flashinfer}")
    with pytest.raises(ConfigError, match="speculative_config is set"):
        loaded("run.deterministic=true", "server.engine_args={speculative_config: {method: ngram}}")
    with pytest.raises(ConfigError, match=r"Leave learner\.compile out"):
        loaded("run.deterministic=true", "learner.compile=true")

    assert loaded("run.deterministic=true", "server.engine_args={attention_backend: TRITON_ATTN}").run.deterministic
