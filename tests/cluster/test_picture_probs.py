"""The real vLLM on a CPU: it reads pictures as the learner does, also after a sync that leaves out the frozen tower."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayapp.config.config import Config, with_values
from rayapp.core.types import Group, Prompt, RequestId, Reward, SamplingParams, Trajectory
from rayapp.engine.vllm import VllmEngine
from rayapp.learner.state.export import sent_weights
from rayapp.learner.step import PolicyLearner
from rayapp.learner.supervised import log_probs_of
from rayapp.storage.models.pictures import PictureProcessor, load_pictures
from support import family_trial as trial
from support.picture_models import save_picture_model

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_PROBS_DIFF = 1e-3
SIZES = ((84, 56), (56, 112), (60, 70))


def noise(seed: int, size: tuple[int, int]) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def prompt_of(processor: PictureProcessor, number: int) -> tuple[Prompt, dict[str, bytes]]:
    """Return a prompt with `number` pictures between text."""
    shown = [noise(10 * number + i, SIZES[i]) for i in range(number)]
    ids = [5, 9, 30]
    for i in range(number):
        ids += [processor.token_id, 40 + i, 50]
    expanded, media = processor.expand(ids, shown, SIZES[:number])
    prompt = Prompt(task="t", text="", token_ids=np.array(expanded, np.int32), media=media)
    return prompt, {picture.sha256: encoded for picture, encoded in zip(media, shown, strict=True)}


async def sampled(engine: VllmEngine, prompt: Prompt, pictures: dict[str, bytes], number: int) -> Group:
    sampling = SamplingParams(max_tokens=12, media=prompt.media, pictures=pictures)
    ids = prompt.token_ids.tolist()
    rows = []
    for index in range(4):
        answer = await engine.generate(RequestId("group", number, index), ids, sampling)
        tokens = np.concatenate([prompt.token_ids, answer.token_ids])
        mask = np.arange(tokens.size) >= len(ids)
        log_probs = np.concatenate([np.zeros(len(ids), np.float32), answer.log_probs])
        made = Trajectory.of_tokens(tokens, mask, reward=Reward(value=index % 2), log_probs=log_probs)
        rows.append(replace(made, media=prompt.media))
    return Group(group_id=number, prompt=prompt, trajectories=tuple(rows), pictures=pictures)


def differences_of(learner: PolicyLearner, group: Group) -> tuple[float, float]:
    """Return the largest differences of probability and log-prob of a sampled token between engine and learner."""
    rollout = np.concatenate([t.rollout_log_probs[t.response_mask] for t in group.trajectories])
    own = np.concatenate(log_probs_of(learner, group))
    return float(np.abs(np.exp(rollout) - np.exp(own)).max()), float(np.abs(rollout - own).max())


async def compared(config: Config, learner: PolicyLearner) -> list[tuple[float, float]]:
    """Return differences before and after a sync, for prompts with none to three pictures."""
    processor = load_pictures(config.model)
    prompts = [prompt_of(processor, number) for number in range(4)]
    engine = await VllmEngine.start(config)
    try:
        found = []
        for version in (0, 1):
            if version:
                groups = [await sampled(engine, *prompts[1], number=90), await sampled(engine, *prompts[3], number=91)]
                trial.take_step(learner, groups)
                sent = list(sent_weights(learner.model, config.learner.lora, [torch.float32]))
                await trial.load_weights(engine, version, trial.bucket_of(sent))
            for number, (prompt, pictures) in enumerate(prompts):
                group = await sampled(engine, prompt, pictures, number=10 * version + number)
                found.append(differences_of(learner, group))
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize(("rank", "quantization"), [(0, "none"), (4, "none"), (4, "nf4")])
def test_vllm_and_learner_agree_on_pictures_before_and_after_a_sync(
    tmp_path: Path, family: str, rank: int, quantization: str
) -> None:
    folder = save_picture_model(tmp_path / family, family)
    lora = {"rank": rank, "alpha": 16}
    config = trial.trial_config(folder, max_tokens_per_microbatch=512, optimizer={"lr": 1e-2}, lora=lora)
    config = with_values(config, rollout={"max_prompt_tokens": 160}, model={"quantization": quantization})
    with trial.learner_of(config) as learner:
        differences = asyncio.run(compared(config, learner))

    of_probs, of_log_probs = (max(each) for each in zip(*differences, strict=True))
    assert of_probs < MAX_PROBS_DIFF
    assert of_log_probs < trial.MAX_ENGINE_ERROR["float32"]
