"""A run whose steps end when enough groups are whole: the others keep their tokens over the sync and go on. Driver,
workers, vLLM and learners are the real ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.whole_runs import groups_of, records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 700.0
SAVED, NUM_STEPS, GROUPS_PER_STEP, MAX_STALENESS = 4, 7, 2, 2
LONG = 220


def test_unfinished_groups_keep_their_tokens_over_syncs_and_a_resumed_run_trains_on_none_twice(
    short_run: Callable[..., dict[str, Any]], letter_tasks: list[str], tmp_path: Path
) -> None:
    config = short_run(
        tmp_path,
        run={"name": "partial"},
        cluster={"dashboard": False},
        rollout={"group_size": 6, "max_completion_tokens": LONG},
        train={
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": MAX_STALENESS,
            "partial_rollouts": True,
            "extra_groups": 3,
        },
        algorithm={"rollout_correction": {"level": "token"}},
        learner={"max_tokens_per_microbatch": 512},
    )
    # Short groups are whole while the long ones that began with them are in their middle.
    del config["tasks"]
    config["sources"] = [
        {"name": name, "ratio": 1, "tasks": letter_tasks, "rollout": {"max_completion_tokens": most}}
        for name, most in (("short", 6), ("long", LONG))
    ]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    for number, num_steps in enumerate((SAVED, NUM_STEPS)):
        log = tmp_path / f"log-{number}"
        command = [sys.executable, "-m", "rayapp", "train", str(file), f"train.num_steps={num_steps}"]
        with log.open("w") as sink:
            done = subprocess.run(command, stdout=sink, stderr=sink, cwd=ROOT, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, log.read_text()[-6000:]

    steps = records(tmp_path / "partial")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert {step["groups/count"] for step in steps} == {float(GROUPS_PER_STEP)}
    assert {step["rollout/invalid"] for step in steps} == {0.0}
    assert max(step["staleness/max"] for step in steps) <= MAX_STALENESS
    groups = groups_of(tmp_path / "partial")
    assert len({group.group_id for group in groups}) == len(groups) == NUM_STEPS * GROUPS_PER_STEP
    kept = 0
    for number, step in enumerate(steps):
        of_step = groups[number * GROUPS_PER_STEP : (number + 1) * GROUPS_PER_STEP]
        trajectories = [each for group in of_step for each in group.trajectories]
        spanning = [each for each in trajectories if each.max_policy_version > each.min_policy_version]
        kept += len(spanning)
        assert step["kept/trajectories"] == pytest.approx(len(spanning) / len(trajectories))
        assert (step["kept/tokens"] > 0) == bool(spanning)
        assert step["kept/tokens"] < 1
        for each in spanning:
            assert each.max_policy_version <= number
            spans = [span for turn in each.turns for span in turn.version_spans]
            assert sum(span.num_tokens for span in spans) == each.response_mask.sum()
            # They would all be 0 or repeated if the tokens behind a sync were not sampled.
            assert (each.rollout_log_probs[each.response_mask] < 0).all()
    assert kept > 0
