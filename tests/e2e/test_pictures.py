"""A tiny model learns to name the colour of a picture, cannot learn it from blank pictures, and resumes to the bit.

Rows of Geometry3K's form go through `data prepare`, a warm-up on demonstrations with pictures, and three steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rayapp.storage.media import opened
from support.picture_models import picture, save_picture_model
from support.whole_runs import records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 220), "y": (230, 220, 30)}
NUM_ROWS, NUM_STEPS, SAVED = 64, 28, 24
WITHOUT_LOOKING = 1 / len(COLOURS)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1] == ground_truth)
"""


def rows(folder: Path, *, blank: bool) -> Path:
    noise, found = np.random.default_rng(0), []
    for index in range(NUM_ROWS):
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


@pytest.fixture(scope="module")
def outputs(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs that differ only in their pictures: `seen` has colours, `blank` has none."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "reward.py").write_text(REWARD)
    for name in ("seen", "blank"):
        config = {
            "run": {"name": name, "output_dir": str(folder), "deterministic": True},
            "model": {"path": str(warm_model)},
            "tasks": [str(rows(folder, blank=name == "blank"))],
            "agent": {"name": "single_turn_agent"},
            "reward": {"custom": f"{folder / 'reward.py'}:compute_score"},
            "data": {"cache_dir": str(folder / "cache")},
            "cluster": {"device": "cpu", "dashboard": False},
            "rollout": {"group_size": 8, "max_prompt_tokens": 64, "max_completion_tokens": 1},
            "train": {"num_steps": NUM_STEPS, "groups_per_step": 32},
            "learner": {
                "max_tokens_per_microbatch": 2048,
                "compute_dtype": "float32",
                "cpu_threads": 1,
                "optimizer": {"lr": 5e-3},
            },
            "server": {"kv_cache_gib": 0.1, "cpu_threads": 1, "dtype": "float32"},
            "checkpoint": {"every_steps": SAVED, "keep_last": 100, "final_dtype": "float32"},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        train(folder / f"{name}.yaml")
    return folder


def train(config_file: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "rayapp", "train", str(config_file), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)


def rewards(folder: Path) -> list[float]:
    return [record["reward/mean"] for record in records(folder)]


def test_a_model_learns_the_colour_only_by_looking(outputs: Path) -> None:
    seen, blank = rewards(outputs / "seen"), rewards(outputs / "blank")

    assert seen[0] < 2 * WITHOUT_LOOKING
    assert np.mean(seen[-5:]) > 0.8
    assert np.mean(blank[-5:]) < 2 * WITHOUT_LOOKING
    assert max(record["rollout_probs_diff/max"] for record in records(outputs / "seen")) < 1e-3
    assert len(list((outputs / "seen" / "pictures").iterdir())) == NUM_ROWS


def test_a_run_on_pictures_resumes_to_the_bit(outputs: Path) -> None:
    seen, before = outputs / "seen", outputs / "before"
    shutil.copytree(seen, before)
    shutil.rmtree(seen / "final")
    for checkpoint in (seen / "checkpoints").iterdir():
        if checkpoint.name != f"step={SAVED:06d}":
            shutil.rmtree(checkpoint)
    train(outputs / "seen.yaml")

    same = ("reward/", "learner/", "rollout_probs_diff/", "length/")
    for first, second in zip(records(before), records(seen), strict=True):
        assert {k: v for k, v in first.items() if k.startswith(same)} == {
            k: v for k, v in second.items() if k.startswith(same)
        }
    weights, again = (load_file(folder / "final" / "model.safetensors") for folder in (before, seen))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_geometry3k_rows_train_after_a_warm_up_on_pictures(warm_model: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    images = [[{"bytes": picture((60 * i, 0, 0)), "path": None}] for i in range(4)]
    problems = [{"images": shown, "problem": "<image>Find x.", "answer": "3"} for shown in images]
    pq.write_table(pa.Table.from_pylist(problems), tmp_path / "raw" / "train.parquet")
    options = ["--source", str(tmp_path / "raw"), "--out", str(tmp_path / "data")]
    subprocess.run([sys.executable, "-m", "rayapp", "data", "prepare", "geometry3k", *options], cwd=ROOT, check=True)
    asked, said = {"role": "user", "content": "<image>Find x."}, {"role": "assistant", "content": "3"}
    pq.write_table(
        pa.Table.from_pylist([{"messages": [asked, said], "images": shown} for shown in images]),
        tmp_path / "shown.parquet",
    )
    config = {
        "run": {"name": "geometry", "output_dir": str(tmp_path)},
        "model": {"path": str(warm_model)},
        "tasks": [str(tmp_path / "data" / "train.parquet")],
        "agent": {"name": "single_turn_agent"},
        "reward": {"custom": f"{ROOT / 'configs' / 'geometry3k_reward.py'}:compute_score"},
        "data": {"cache_dir": str(tmp_path / "cache")},
        "cluster": {"device": "cpu", "dashboard": False},
        "warmup": {"num_steps": 3, "files": [str(tmp_path / "shown.parquet")], "lr": 1e-3},
        "algorithm": {"entropy_coef": 1e-3},  # a gradient also where all rewards are 0
        "rollout": {"group_size": 2, "max_prompt_tokens": 256, "max_completion_tokens": 8},
        "train": {"num_steps": 3, "groups_per_step": 4},
        "learner": {"compute_dtype": "float32", "cpu_threads": 1, "max_tokens_per_microbatch": 2048},
        "server": {"kv_cache_gib": 0.1, "cpu_threads": 1, "dtype": "float32"},
    }
    (tmp_path / "geometry.yaml").write_text(yaml.safe_dump(config))
    train(tmp_path / "geometry.yaml")

    shown_losses = [record["sft/loss"] for record in records(tmp_path / "geometry-sft")]
    steps = records(tmp_path / "geometry")
    assert len(shown_losses) == 3
    assert shown_losses[2] < shown_losses[0]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["learner/grad_norm"] > 0 and step["rollout_probs_diff/max"] < 1e-3 for step in steps)
