"""A tiny model learns to name the colour and the number of squares only by looking, and resumes to the bit."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rayapp.core.types import Group
from rayapp.runs.trajectories import read_groups
from support.picture_models import picture, save_picture_model
from support.whole_runs import records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 220), "y": (230, 220, 30)}
NUM_ROWS, NUM_STEPS, SAVED = 128, 60, 52
WITHOUT_LOOKING = 1 / 4  # of both questions
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1] == ground_truth)
"""


def squares(noise: np.random.Generator, colour: str, number: int) -> bytes:
    """Return a black PNG of 2 x 2 cells, of which `number` have a square of the colour."""
    from PIL import Image

    pixels = np.zeros((56, 56, 3), np.uint8)
    for cell in noise.permutation(4)[:number]:
        top, left = 28 * (cell // 2) + 4, 28 * (cell % 2) + 4
        pixels[top : top + 20, left : left + 20] = np.clip(COLOURS[colour] + noise.integers(-25, 26, 3), 0, 255)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def questions(seed: int, *, blank: bool) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield questions for the colour or the number, their answers and pictures. Each answer is as frequent."""
    noise = np.random.default_rng(seed)
    for index in range(NUM_ROWS):
        colour, number = list(COLOURS)[index // 2 % 4], 1 + index // 8 % 4
        shown = picture((128, 128, 128)) if blank else squares(noise, colour, number)
        question, answer = ("colour", colour) if index % 2 else ("number", str(number))
        yield question, answer, [{"bytes": shown, "path": None}]


def rows(folder: Path, *, blank: bool) -> Path:
    found = [
        {
            "data_source": question,
            "prompt": [{"role": "user", "content": f"<image>{question}?"}],
            "images": images,
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for question, answer, images in questions(0, blank=blank)
    ]
    path = folder / f"rows-{blank}.parquet"
    pq.write_table(pa.Table.from_pylist(found), path)
    return path


def demonstrations(folder: Path, *, blank: bool) -> Path:
    """Write answers to questions about other pictures, for the warm-up."""
    found = [
        {
            "messages": [
                {"role": "user", "content": f"<image>{question}?"},
                {"role": "assistant", "content": answer},
            ],
            "images": images,
        }
        for question, answer, images in questions(1, blank=blank)
    ]
    path = folder / f"demonstrations-{blank}.parquet"
    pq.write_table(pa.Table.from_pylist(found), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_picture_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2_5_vl")


def write_config(folder: Path, name: str, model: Path, **sections: Any) -> Path:
    usual: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder), "deterministic": True},
        "model": {"path": str(model)},
        "agent": {"name": "single_turn_agent"},
        "data": {"cache_dir": str(folder / "cache")},
        "cluster": {"device": "cpu", "dashboard": False},
        "server": {"kv_cache_gib": 0.1, "cpu_threads": 1, "dtype": "float32"},
        "checkpoint": {"every_steps": SAVED, "keep_last": 100, "final_dtype": "float32"},
    }
    learner = {"max_tokens_per_microbatch": 4096, "compute_dtype": "float32", "cpu_threads": 1}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(usual | sections | {"learner": learner | sections.get("learner", {})}))
    return file


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs that differ only in their pictures: `seen` has squares, `blank` has none."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "reward.py").write_text(REWARD)
    for name in ("seen", "blank"):
        blank = name == "blank"
        shown = demonstrations(folder, blank=blank)
        config = write_config(
            folder,
            name,
            model,
            tasks=[str(rows(folder, blank=blank))],
            warmup={"num_steps": 100, "rows_per_step": 32, "lr": 3e-3, "files": [str(shown)]},
            reward={"custom": f"{folder / 'reward.py'}:compute_score"},
            rollout={"group_size": 8, "max_prompt_tokens": 64, "max_completion_tokens": 1},
            train={"num_steps": NUM_STEPS, "groups_per_step": 32},
            learner={"optimizer": {"lr": 1e-3}},
        )
        train(config)
    return folder


def train(config_file: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "rayapp", "train", str(config_file), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)


def last_groups(folder: Path) -> list[Group]:
    """Return the groups of the last ten steps."""
    return [group for path in sorted((folder / "trajectories").glob("step=*"))[-10:] for group in read_groups(path)]


def mean_reward(groups: list[Group], question: str) -> float:
    return float(np.mean([t.reward.value for g in groups if g.prompt.task == question for t in g.trajectories]))


def test_a_model_learns_colours_and_numbers_only_by_looking(outputs: Path) -> None:
    seen, blank = last_groups(outputs / "seen"), last_groups(outputs / "blank")

    assert mean_reward(seen, "colour") > 0.8
    assert mean_reward(seen, "number") > 0.45
    assert max(mean_reward(blank, question) for question in ("colour", "number")) < WITHOUT_LOOKING + 0.1
    steps = records(outputs / "seen")
    assert np.mean([step["reward/mean"] for step in steps[-10:]]) > steps[0]["reward/mean"] + 0.1
    assert max(step["rollout_probs_diff/max"] for step in steps) < 1e-3
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


def test_rows_of_geometry3k_are_prepared_and_train_for_three_steps(model: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    problems = [
        {
            "images": [{"bytes": picture((60 * i, 0, 0)), "path": None}],
            "problem": f"<image>Find x + {i}.",
            "answer": "3",
        }
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(problems), tmp_path / "raw" / "train.parquet")
    options = ["--source", str(tmp_path / "raw"), "--out", str(tmp_path / "data")]
    subprocess.run([sys.executable, "-m", "rayapp", "data", "prepare", "geometry3k", *options], cwd=ROOT, check=True)

    config = write_config(
        tmp_path,
        "geometry",
        model,
        tasks=[str(tmp_path / "data" / "train.parquet")],
        reward={"custom": f"{ROOT / 'configs' / 'geometry3k_reward.py'}:compute_score"},
        algorithm={"entropy_coef": 1e-3},  # learn also where all rewards are 0
        rollout={"group_size": 2, "max_prompt_tokens": 256, "max_completion_tokens": 8},
        train={"num_steps": 3, "groups_per_step": 4},
    )
    train(config)

    steps = records(tmp_path / "geometry")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["learner/grad_norm"] > 0 and step["rollout_probs_diff/max"] < 1e-3 for step in steps)
