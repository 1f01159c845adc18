"""A tiny model learns to name the colour of a picture, cannot learn it from blank pictures, and resumes to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from rayapp.storage.media import opened
from support.picture_models import picture, save_picture_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 220), "y": (230, 220, 30)}
WITHOUT_LOOKING = 1 / len(COLOURS)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1] == ground_truth)
"""


def rows(folder: Path, *, blank: bool) -> Path:
    noise, found = np.random.default_rng(0), []
    for index in range(64):
        name = list(COLOURS)[index % len(COLOURS)]
        colour = (128, 128, 128) if blank else tuple(np.clip(COLOURS[name] + noise.integers(-25, 26, 3), 0, 255))
        found.append({
            "data_source": "colours",
            "prompt": [{"role": "user", "content": "<image>?"}],
            "images": [{"bytes": picture(tuple(map(int, colour))), "path": None}],
            "reward_model": {"style": "rule", "ground_truth": name},
            "extra_info": {"index": index},
        })  # fmt: skip
    path = folder / ("blank.parquet" if blank else "colours.parquet")
    pq.write_table(pa.Table.from_pylist(found), path)
    return path


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with any of the letters: a warm-up on blank pictures, without the answers."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = save_picture_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2_5_vl")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = dict(processor(images=[[opened(picture((128, 128, 128)))]], text=[text], return_tensors="pt"))
    letters = torch.tensor(processor.tokenizer.convert_tokens_to_ids(list(COLOURS)))
    optimizer = torch.optim.AdamW(model.model.language_model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = -model(**made).logits[0, -1].log_softmax(-1)[letters].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def train(model: Path, data: Path, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run `rayapp train`, and return the metrics of its steps."""
    (folder / "reward.py").write_text(REWARD)
    config = {
        "run": {"name": name, "output_dir": str(folder / "outputs")},
        "model": {"path": str(model)},
        "tasks": [str(data)],
        "agent": {"name": "single_turn_agent"},
        "reward": {"custom": f"{folder / 'reward.py'}:compute_score"},
        "data": {"cache_dir": str(folder / "cache")},
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 16, "max_prompt_tokens": 64, "max_completion_tokens": 1},
        "train": {"num_steps": 40, "groups_per_step": 8},
        "learner": {
            "max_tokens_per_microbatch": 2048, "compute_dtype": "float32", "cpu_threads": 1, "optimizer": {"lr": 2e-3},
        },
        "server": {"kv_cache_gib": 0.1, "cpu_threads": 1, "dtype": "float32"},
        "checkpoint": {"every_steps": 4},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "rayapp", "train", str(file), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    lines = (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_mean(metrics: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([step["reward/mean"] for step in metrics[-5:]]))


def test_a_model_learns_the_colour_only_by_looking(warm_model: Path, tmp_path: Path) -> None:
    seen = train(warm_model, rows(tmp_path, blank=False), tmp_path, "seen")
    blank = train(warm_model, rows(tmp_path, blank=True), tmp_path, "blank")

    assert seen[0]["reward/mean"] < 2 * WITHOUT_LOOKING
    assert last_mean(seen) > 0.8
    assert last_mean(blank) < 2 * WITHOUT_LOOKING
    assert max(step["rollout_probs_diff/max"] for step in seen) < 1e-3
    kept = list((tmp_path / "outputs" / "seen" / "pictures").iterdir())
    assert 0 < len(kept) <= 64


def test_a_run_on_pictures_resumes_to_the_bit(warm_model: Path, tmp_path: Path) -> None:
    data = rows(tmp_path, blank=False)
    whole = train(warm_model, data, tmp_path, "whole", "train.num_steps=7")
    train(warm_model, data, tmp_path, "halted", "train.num_steps=4")
    resumed = train(warm_model, data, tmp_path, "halted", "train.num_steps=7")

    same = [name for name in whole[-1] if name.startswith(("reward/", "actor/", "response_length/"))]
    assert len(same) > 5
    for first, second in zip(whole[4:], resumed[4:], strict=True):
        assert {name: first.get(name) for name in same} == {name: second.get(name) for name in same}
