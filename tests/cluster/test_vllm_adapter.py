"""The real vLLM on CPU with an adapter of the learner's: it computes the learner's log-probs, sync after sync."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.learner import Learner
from actors.vllm_server import VllmServer
from rayapp.config.config import Config, with_number_formats, with_values
from rayapp.core.errors import WeightSyncError
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, RequestId, SamplingParams
from rayapp.engine.weights.buckets import WeightBucket
from rayapp.learner.shares import Share
from rayapp.storage.models.adapters import EXPORTED
from support import make
from support.family_trial import rounded_copy
from support.learners import MAX_LOG_PROB_DIFFERENCE

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

merged, base, adapter, tokens = *sys.argv[1:4], json.loads(sys.argv[4])
usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 32, "max_num_seqs": 2}
settings = SamplingParams(max_tokens=1, prompt_logprobs=0)
for folder, lora in ((merged, None), (base, LoRARequest("policy", 1, adapter))):
    llm = LLM(folder, enable_lora=lora is not None, max_lora_rank=8, **usual)
    [found] = llm.generate([{"prompt_token_ids": tokens}], settings, lora_request=lora)
    print("LOG_PROBS", *(found.prompt_logprobs[i][tokens[i]].logprob for i in range(1, len(tokens))))
    del llm
"""
TOKENS = [72, 75, 84, 85, 86, 28, 2, 89]


def make_config(tiny_model: Path, quantization: str) -> Config:
    learner = {"lora": {"rank": 4, "alpha": 16}, "optimizer": {"lr": 3e-2}}
    config = make.config(tiny_model, rollout={"group_size": 2}, learner=learner)
    return with_values(config, model={"quantization": quantization})


def group_of(rewards: tuple[float, float]) -> Group:
    """Two completions of one prompt; the first is TOKENS."""
    sequences = [TOKENS, [*TOKENS[:4], 40, 41, 42, 43]]
    scored = zip(sequences, rewards, strict=True)
    return make.group(*(make.trajectory(ids, 4, reward=reward, log_prob=-4.0) for ids, reward in scored))


def after_each_step(config: Config, num_steps: int) -> list[tuple[list[WeightBucket], np.ndarray]]:
    """What is sent after each step, the first before any, and the learner's log-probs of TOKENS's response then."""
    learner, group = Learner(config, 0, 1, "", 0), group_of((1.0, 0.0))
    summary = summarize_group(group, time_total_s=0.0)
    found = []
    try:
        for step in range(num_steps + 1):
            if step:
                learner.train_step(step, (summary,), ((Share(0),),), group)
            found.append((list(learner.export_weights(0, 100_000)), learner.log_probs_of(group)[0]))
    finally:
        learner.close()
    return found


@pytest.mark.parametrize("quantization", ["none", "nf4"])
async def test_each_adapter_gives_the_learners_log_probs_and_replaces_the_last(
    tiny_model: Path, references: References, quantization: str
) -> None:
    config = make_config(tiny_model, quantization)
    size = {"float32": 4, "bfloat16": 2}[with_number_formats(config, on_gpu=False).server.dtype]
    steps = after_each_step(config, 2)
    first, *_, last = (log_probs for _, log_probs in steps)
    assert np.abs(last - first).max() > 4 * MAX_LOG_PROB_DIFFERENCE  # training moved what is looked at
    server = VllmServer(config, 0)
    try:
        await server.start()
        for version, (buckets, expected) in enumerate(steps):
            facts = await server.load_weights(version, references(buckets))
            # 2 layers of rank 4: 2 x 4 x (2 x 256 + 2 x 192 + 3 x 384) numbers, each tensor on a cache line.
            assert facts["bytes"] == size * 2 * 4 * (2 * 256 + 2 * 192 + 3 * 384)
            found = (await server.prompt_log_probs([TOKENS]))[0][3:]
            assert np.abs(found - expected).max() < MAX_LOG_PROB_DIFFERENCE, f"version {version}"
            completion = await server.generate(
                RequestId("group", version, 0), TOKENS[:4], SamplingParams(max_tokens=4, seed=1)
            )
            again = (await server.prompt_log_probs([[*TOKENS[:4], *completion.token_ids.tolist()]]))[0][3:]
            assert np.abs(again - completion.log_probs).max() < MAX_LOG_PROB_DIFFERENCE
        await _refuses_what_has_no_place(server, steps[0][0], references)
    finally:
        await server.close()


async def _refuses_what_has_no_place(server: VllmServer, buckets: list[WeightBucket], references: References) -> None:
    """vLLM itself would leave such tensors out and go on."""
    name, *rest = buckets[0].entries[0]
    renamed = (name.replace("layers.0", "layers.7"), *rest)
    torn = WeightBucket(entries=(renamed, *buckets[0].entries[1:]), data=buckets[0].data, checksums={})  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=r"lacks 1 of the \d+ modules that the adapter changes: model\.layers\.7"):
        await server.load_weights(9, references([torn, *buckets[1:]]))


def trained_final(config: Config, final: Path) -> tuple[np.ndarray, np.ndarray]:
    """Train a step and export. Return the learner's log-probs of TOKENS's response before and after it."""
    learner, group = Learner(config, 0, 1, "", 0), group_of((1.0, 0.0))
    try:
        before = learner.log_probs_of(group)[0]
        learner.train_step(1, (summarize_group(group, time_total_s=0.0),), ((Share(0),),), group)
        trained = learner.log_probs_of(group)[0]
        learner.export_hf(str(final))
    finally:
        learner.close()
    (final / EXPORTED).touch()
    return before, trained


async def test_a_run_in_4_bits_goes_on_from_another_ones_final_folder_with_its_adapter(
    tiny_model: Path, tmp_path: Path, references: References
) -> None:
    config, final = make_config(tiny_model, "nf4"), tmp_path / "final"
    before, trained = trained_final(config, final)
    later = make_config(final, "nf4")
    [(buckets, found)] = after_each_step(later, 0)
    assert np.abs(before - trained).max() > 4 * MAX_LOG_PROB_DIFFERENCE
    assert np.abs(found - trained).max() < MAX_LOG_PROB_DIFFERENCE

    alone = with_values(later, model={"quantization": "none"})
    for config, sent in ((later, buckets), (alone, None)):
        server = VllmServer(config, 0)
        try:
            await server.start()
            if sent is not None:
                await server.load_weights(0, references(sent))
            found = (await server.prompt_log_probs([TOKENS]))[0][3:]
            assert np.abs(found - trained).max() < MAX_LOG_PROB_DIFFERENCE
        finally:
            await server.close()


@pytest.mark.long
def test_plain_vllm_computes_the_learners_log_probs_from_the_final_folder_of_4_bits_and_from_its_adapter(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = with_values(
        make_config(tiny_model, "nf4"), learner={"compute_dtype": "float32"}, checkpoint={"final_dtype": "float32"}
    )
    final = tmp_path / "final"
    before, trained = trained_final(config, final)

    base = rounded_copy(tiny_model, tmp_path / "rounded")
    arguments = [str(final), str(base), str(final / "adapter"), json.dumps(TOKENS)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN_VLLM, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("LOG_PROBS")]
    assert len(lines) == 2
    assert np.abs(before - trained).max() > 0.05
    for line in lines:
        assert np.abs(np.array(line[3:], float) - trained).max() < 1e-4
