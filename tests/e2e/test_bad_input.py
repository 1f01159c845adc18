"""What can't work stops with one message and exit code 2 or 1, before or after the actors started; nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def train(tmp_path: Path, tiny_model: Path, tasks: list[str], *overrides: str, **env: str) -> tuple[int, str]:
    """Run `rayapp train`. Returns its exit code and all it printed."""
    config = {
        "run": {"output_dir": str(tmp_path / "outputs")},
        "model": {"path": str(tiny_model)},
        "tasks": tasks,
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 8},
        "train": {"num_steps": 1, "groups_per_step": 1},
        "server": {"kv_cache_gib": 1},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "rayapp", "train", str(file), *overrides],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | env,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_ray_that_does_not_answer_is_named(tmp_path: Path, tiny_model: Path, letter_tasks: list[str]) -> None:
    code, output = train(tmp_path, tiny_model, letter_tasks, RAY_ADDRESS="127.0.0.1:1")
    assert code == 2, output
    assert "no Ray answers at '127.0.0.1:1'" in output
    assert "ray start --head" in output


def test_a_missing_model_is_found_before_any_actor_starts(tmp_path: Path, letter_tasks: list[str]) -> None:
    code, output = train(tmp_path, tmp_path / "nowhere", letter_tasks)
    assert code == 2, output
    assert "there is no such folder" in output


def test_a_prompt_longer_than_the_limit_is_found_before_any_actor_starts(
    tmp_path: Path, tiny_model: Path, letter_tasks: list[str]
) -> None:
    code, output = train(tmp_path, tiny_model, letter_tasks, "rollout.max_prompt_tokens=4")
    assert code == 2, output
    assert "task 'first': its prompt has 12 tokens, rollout.max_prompt_tokens is 4" in output


def test_no_task_at_all_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    code, output = train(tmp_path, tiny_model, [])
    assert code == 2, output
    assert "tasks is empty" in output


@pytest.mark.slow
def test_a_server_that_dies_at_start_ends_the_run_with_its_reason(
    tmp_path: Path, tiny_model: Path, letter_tasks: list[str]
) -> None:
    code, output = train(tmp_path, tiny_model, letter_tasks, "server.kv_cache_gib=100000")
    assert code == 1, output
    assert "vLLM did not start" in output
    assert not list((tmp_path / "outputs" / "run").glob("checkpoints/*"))
