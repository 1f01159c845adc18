"""A run whose steps end when enough groups are whole: the others keep their tokens over the sync and go on. Driver,
workers, vLLM and learners are the real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.core.types import Group, Trajectory
from rayapp.runs.trajectories import read_groups

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 700.0
SAVED, NUM_STEPS, GROUPS_PER_STEP, MAX_STALENESS = 4, 7, 2, 2
LONG = 220


@pytest.fixture(scope="module")
def folder(
    short_run: Callable[..., dict[str, Any]], letter_tasks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of four steps, and its resume, which takes three more."""
    output = tmp_path_factory.mktemp("partial")
    config = short_run(
        output,
        run={"output_dir": str(output), "name": "partial"},
        cluster={"device": "cpu", "dashboard": False},
        rollout={"group_size": 6, "max_prompt_tokens": 32, "max_completion_tokens": LONG},
        train={
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": MAX_STALENESS,
            "partial_rollouts": True,
            "extra_groups": 3,
        },
        algorithm={"rollout_correction": {"level": "token"}},
        learner={"max_tokens_per_microbatch": 512, "compute_dtype": "float32", "cpu_threads": 1},
        checkpoint={"every_steps": 2},
    )
    # Short groups are whole while the long ones that began with them are in their middle.
    del config["tasks"]
    config["sources"] = [
        {"name": name, "ratio": 1, "tasks": letter_tasks, "rollout": {"max_completion_tokens": most}}
        for name, most in (("short", 6), ("long", LONG))
    ]
    file = output / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    for number, num_steps in enumerate((SAVED, NUM_STEPS)):
        log = output / f"log-{number}"
        command = [sys.executable, "-m", "rayapp", "train", str(file), f"train.num_steps={num_steps}"]
        with log.open("w") as sink:
            done = subprocess.run(command, stdout=sink, stderr=sink, cwd=ROOT, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, log.read_text()[-6000:]
    return output / "partial"


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def groups_of(folder: Path, step: int) -> list[Group]:
    return read_groups(folder / "trajectories" / f"step={step:06d}.parquet")


def test_every_step_trains_on_whole_groups_that_are_young_enough(records: list[dict[str, float]]) -> None:
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert {record["groups/count"] for record in records} == {float(GROUPS_PER_STEP)}
    assert {record["rollout/invalid"] for record in records} == {0.0}
    assert max(record["staleness/max"] for record in records) <= MAX_STALENESS


def test_tokens_are_kept_over_syncs_with_the_versions_that_sampled_them(
    folder: Path, records: list[dict[str, float]]
) -> None:
    kept = 0
    for record in records:
        step = int(record["step"])
        trajectories = [t for group in groups_of(folder, step) for t in group.trajectories]
        spanning = [t for t in trajectories if t.max_policy_version > t.min_policy_version]
        kept += len(spanning)
        assert record["kept/trajectories"] == pytest.approx(len(spanning) / len(trajectories))
        assert (record["kept/tokens"] > 0) == bool(spanning)
        assert record["kept/tokens"] < 1
        for trajectory in spanning:
            assert trajectory.max_policy_version < step
            assert sum(span.num_tokens for span in spans(trajectory)) == trajectory.response_mask.sum()
            # They would all be 0 or repeated if the tokens behind a sync were not sampled.
            assert (trajectory.rollout_log_probs[trajectory.response_mask] < 0).all()
    assert kept > 0


def spans(trajectory: Trajectory) -> list[Any]:
    return [span for turn in trajectory.turns for span in turn.version_spans]


def test_a_resumed_run_generates_unfinished_groups_again_and_trains_on_none_twice(folder: Path) -> None:
    ids = [group.group_id for step in range(1, NUM_STEPS + 1) for group in groups_of(folder, step)]

    assert len(ids) == len(set(ids)) == NUM_STEPS * GROUPS_PER_STEP
