"""The real vLLM on a CPU reads pictures: the tokens of the learner's processor, and transformers' log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayapp.config.config import Config
from rayapp.core.errors import EngineError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import moved, opened
from rayapp.storage.models.pictures import load_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from support.picture_models import picture, save_picture_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}, {"type": "image"}]},
]


def config_of(folder: Path) -> Config:
    return Config.model_validate({
        "model": {"path": str(folder)},
        "cluster": {"device": "cpu"},
        "rollout": {"max_prompt_tokens": 200, "max_completion_tokens": 16},
        "learner": {"compute_dtype": "float32"},
        "server": {"cpu_threads": 1, "kv_cache_gib": 0.1, "dtype": "float32"},
    })  # fmt: skip


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3_vl", "smolvlm"))]
)
async def test_vllm_reads_the_learners_tokens_and_samples_with_transformers_log_probs(
    family: str, tmp_path: Path
) -> None:
    config = config_of(save_picture_model(tmp_path / "model", family))
    processor, tokenizer = load_pictures(config.model), load_tokenizer(config.model)
    text: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)  # type: ignore[attr-defined]
    shown, sizes = [picture(), picture((0, 0, 255), (112, 56))], [(56, 56), (112, 56)]
    ids, media = processor.expand(tokenizer.encode(text, add_special_tokens=False), shown, sizes)
    sampling = SamplingParams(
        max_tokens=8, temperature=1.0, seed=1, media=media, pictures={hash_bytes(each): each for each in shown}
    )
    engine = await VllmEngine.start(config)
    try:
        completion = await engine.generate(RequestId("group", 0), ids, sampling)
        again = await engine.generate(RequestId("group", 1), ids, sampling)
        # A tool's picture after the sampled turn: vLLM reads the same ids, or the engine raises.
        more, media = processor.expand([5, processor.token_id, 6], [picture((0, 255, 0))], [(56, 56)])
        turns = [*ids, *completion.token_ids.tolist()]
        seen = (*sampling.media, *moved(media, len(turns)))
        known = {**sampling.pictures, media[0].sha256: picture((0, 255, 0))}
        await engine.generate(RequestId("group", 3), [*turns, *more], replace(sampling, media=seen, pictures=known))
        with pytest.raises(EngineError, match="expands the prompt's 2 pictures to"):
            await engine.generate(RequestId("group", 2), [*ids[:5], ids[5], *ids[5:]], sampling)
    finally:
        engine.close()

    for each in (completion, again):  # the second time vLLM has the pictures in its cache
        expected = transformers_log_probs(str(tmp_path / "model"), text, shown, each.token_ids)
        assert np.abs(each.log_probs - expected).max() < 1e-3


def transformers_log_probs(path: str, text: str, shown: list[bytes], sampled: Any) -> Any:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    made = AutoProcessor.from_pretrained(path)(
        images=[[opened(each) for each in shown]], text=[text], add_special_tokens=False, return_tensors="pt"
    )
    inputs, new = dict(made), torch.from_numpy(sampled.astype(np.int64))[None]
    num_prompt = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], new], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        types = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(new, dtype=types.dtype)], 1)
    for name in ("rows", "cols"):
        inputs.pop(name, None)
    with torch.no_grad():
        log_probs = model(**inputs).logits[0].log_softmax(-1)
    return log_probs[num_prompt - 1 : -1].gather(1, new[0][:, None])[:, 0].numpy()
