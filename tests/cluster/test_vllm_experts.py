"""The real vLLM on CPU with a mixture of experts, over one rank and over two: it computes the learner's log-probs after
every sync, and sees what it holds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from actors.vllm_server import VllmServer
from rayapp.config.config import Config, with_values
from rayapp.core.types import FloatArray, Group, RequestId, Reward, SamplingParams, Trajectory
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.buckets import WeightBucket, pack
from rayapp.learner.state.export import sent_weights
from rayapp.learner.supervised import log_probs_of
from rayapp.rollout.recorder import Recorder
from rayapp.storage.models.families import FAMILIES, TINY
from support import family_trial as trial
from support import make
from support.learners import MAX_LOG_PROB_DIFFERENCE, exported

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_FLOAT32_DIFFERENCE = 1e-4
"""A tensor that a sync left as it was moves log-probs by far more, whichever it is."""

TOKENS = [72, 75, 84, 85, 86, 28, 2, 89]


def save_model(folder: Path, tokenizer: Path, *, seed: int) -> Path:
    from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)), hidden_size=128, intermediate_size=128,
            moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=256,
            initializer_range=0.1,
        )
    )  # fmt: skip
    # Not trained, so never sent: what the server read at its start must stay.
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([3.0, -3.0, 3.0, -3.0]))
    model.bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def config_of(model: Path) -> Config:
    return make.config(model, rollout={"group_size": 2}, server={"dtype": "float32"})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_experts_are_the_learners_after_every_sync(
    tiny_model: Path, tmp_path: Path, references: References, ranks: int
) -> None:
    models = [save_model(tmp_path / str(seed), tiny_model, seed=seed) for seed in (0, 1)]
    sent = [exported(config_of(model), TOKENS) for model in models]
    assert np.abs(sent[0][1] - sent[1][1]).max() > 1000 * MAX_FLOAT32_DIFFERENCE
    server = VllmServer(with_values(config_of(models[0]), server={"tensor_parallel_size": ranks}), 0)
    try:
        await server.start()
        for version in (0, 1, 0):
            buckets, expected = sent[version]
            facts = await server.load_weights(version, references(buckets))
            assert facts["num_loaded"] == sum(len(bucket.entries) for bucket in buckets)
            found = (await server.prompt_log_probs([TOKENS]))[0][3:]
            assert np.abs(found - expected).max() < MAX_FLOAT32_DIFFERENCE, f"weights {version}"
    finally:
        await server.close()


async def play(engine: VllmEngine, number: int) -> Trajectory:
    """Two turns with the result of a tool between them."""
    recorder = Recorder(TOKENS)
    for turn in range(2):
        sampling = SamplingParams(max_tokens=60, seed=2 * number + turn)
        await recorder.sample_turn(engine, RequestId("group", 0, number, turn=turn), sampling, lambda said: said.text)
        recorder.add_read([5, 6, 7, number + 8] if turn == 0 else [])
    return replace(recorder.trajectory(), reward=Reward(value=0.0))


@pytest.mark.long
async def test_a_learner_that_replays_the_servers_experts_is_nearer_to_its_log_probs(tmp_path: Path) -> None:
    """With a cache so small that requests are preempted, weights that arrive while they run, and a second turn."""
    values = {"num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    architecture = CONFIG_MAPPING["qwen3_moe"](**TINY | {"vocab_size": 97} | FAMILIES["qwen3_moe"].tiny | values)
    trial.save_tiny(architecture, tmp_path)
    server = {"dtype": "bfloat16", "max_num_seqs": 16, "engine_args": {"block_size": 32}}
    config = with_values(
        trial.trial_config(tmp_path, server=server, router_replay=True, max_tokens_per_microbatch=4096),
        rollout={"max_prompt_tokens": 96, "max_completion_tokens": 100},
    )
    with trial.learner_of(config) as learner:
        (bucket,) = pack(list(sent_weights(learner.model, config.learner.lora, [torch.bfloat16])), 1 << 30)
        engine = await VllmEngine.start(config, num_gpu_blocks_override=20)
        try:
            playing = [asyncio.create_task(play(engine, number)) for number in range(12)]
            while not engine._versions.num_open:
                await asyncio.sleep(0)
            await trial.load_weights(engine, 1, bucket)
            rows = await asyncio.gather(*playing)
            assert engine.load()["preempted"] > 0
        finally:
            engine.close()
        assert {row.max_policy_version for row in rows} == {1}
        group = make.group(*rows)
        replayed = mean_difference(log_probs_of(learner, group), group)
        assert learner.model.replay is not None
        alike, taken = learner.model.replay.take_agreement()
    with trial.learner_of(with_values(config, learner={"router_replay": False})) as learner:
        own = mean_difference(log_probs_of(learner, group), group)
    print(f"with replay {replayed:.5f}, without {own:.5f}, {alike / taken:.4f} of the choices alike")
    assert 0.95 < alike / taken < 1
    assert replayed < own < MAX_LOG_PROB_DIFFERENCE


def mean_difference(found: list[FloatArray], group: Group) -> float:
    expected = np.concatenate([row.rollout_log_probs[row.response_mask] for row in group.trajectories])
    return float(np.abs(np.concatenate(found) - expected).mean())
