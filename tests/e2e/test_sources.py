"""A run of three sources, coding tasks, rows of data with tools, and an environment's server: killed in a step and gone
on with, it takes the prompts that it would have taken. The servers are scripted: vLLM is not the subject."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.core.types import Group
from rayapp.rollout.order import Mixing
from rayapp.runs.trajectories import read_groups
from support.stubs.openenv_stub import MOVE, OpenEnvStub
from support.whole_runs import groups_of, records, wait_until, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

DEADLINE_S = 600.0
NUM_STEPS, GROUPS_PER_STEP, KILL_AFTER = 6, 2, 3
RATIOS = (2, 1, 1)
NUM_ROWS = 3
NUM_SAID = 24
TOOLS = {"tools": [{"class_name": "rayapp.tools.coding.PythonTool", "config": {"type": "native", "stateful": False}}]}


def config_of(folder: Path, model: Path, tasks: list[str], server: str) -> dict[str, Any]:
    walk = {"environment": "openenv", "url": server, "prompt": "Walk.", "size": 3, "seed": 40}
    (folder / "walk.yaml").write_text(yaml.safe_dump(walk))
    (folder / "tools.yaml").write_text(yaml.safe_dump(TOOLS))
    questions = (f"Problem {number}: what is 6 times 7?" for number in range(NUM_ROWS))
    file = write_rows(folder / "rows.parquet", *questions)
    return {
        "run": {"name": "sources", "output_dir": str(folder), "seed": 5},
        "model": {"path": str(model)},
        "cluster": {"device": "cpu"},
        "sources": [
            {"name": "code", "ratio": RATIOS[0], "tasks": tasks,
             "rollout": {"max_completion_tokens": 12}},
            {"name": "rows", "ratio": RATIOS[1], "tasks": [file],
             "agent": {"tool_file": str(folder / "tools.yaml"), "chat_template": "chatml_hermes"},
             "eval": {"tasks": [file], "max_problems": 2, "samples_per_task": 3}},
            {"name": "walks", "ratio": RATIOS[2], "tasks": [str(folder / "walk.yaml")],
             "agent": {"chat_template": "chatml_hermes"}},
        ],
        "rollout": {"group_size": 3, "max_prompt_tokens": 3000, "max_completion_tokens": NUM_SAID},
        "train": {"num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP},
        "eval": {"every_steps": NUM_STEPS, "samples_per_task": 2},
        "learner": {"max_tokens_per_microbatch": 8192, "compute_dtype": "float32"},
        "checkpoint": {"every_steps": 2},
    }  # fmt: skip


@dataclass(frozen=True)
class Resumed:
    """A run that was killed after step 3 and went on from the checkpoint of step 2."""

    folder: Path
    before: Path
    """Trajectories as they were when it was killed."""


@pytest.fixture(scope="module")
def resumed(
    chat_model: Path, letter_tasks: list[str], standing_ray: Any, tmp_path_factory: pytest.TempPathFactory
) -> Resumed:
    folder = tmp_path_factory.mktemp("sources")
    file, run, before, log = folder / "config.yaml", folder / "sources", folder / "before", folder / "log"
    with OpenEnvStub({"action": MOVE}).running_in_thread() as server:  # it outlives the run that is killed
        file.write_text(yaml.safe_dump(config_of(folder, chat_model, letter_tasks, server)))
        return killed_and_resumed(standing_ray, file, run, before, log)


def killed_and_resumed(standing_ray: Any, file: Path, run: Path, before: Path, log: Path) -> Resumed:
    process = standing_ray.train(str(file), log=log)
    try:
        # A checkpoint is written beside training: after step 3 that of step 2 may not be whole yet.
        saved = run / "checkpoints" / "step=000002" / "manifest.json"
        wait_until(lambda: len(records(run)) >= KILL_AFTER and saved.exists(), process, log.read_text)
    finally:
        process.kill()
        process.wait()
    shutil.copytree(run / "trajectories", before)
    standing_ray.wait_until_gone()
    assert standing_ray.train(str(file), log=log).wait(timeout=DEADLINE_S) == 0, log.read_text()
    assert "resumed from step" in log.read_text()
    return Resumed(run, before)


def test_a_killed_run_of_three_sources_takes_the_prompts_that_it_would_have_taken(resumed: Resumed) -> None:
    groups = groups_of(resumed.folder)
    mixing = Mixing(RATIOS, seed=5)

    assert [group.group_id for group in groups] == list(range(NUM_STEPS * GROUPS_PER_STEP))
    names = [("code", "rows", "walks")[mixing.place(group.group_id)[0]] for group in groups]
    assert [group.prompt.source for group in groups] == names
    assert set(names) == {"code", "rows", "walks"}
    # Each row once before any comes again.
    asked = [group.prompt.text.partition("Problem ")[2][:1] for group in groups if group.prompt.source == "rows"]
    assert Counter(asked[:NUM_ROWS]) == {str(number): 1 for number in range(NUM_ROWS)}
    # The environment's rows, too; what it says first is in the tokens.
    walked = [group.trajectories[0].token_ids.tolist() for group in groups if group.prompt.source == "walks"]
    assert len({str(tokens[:-NUM_SAID]) for tokens in walked}) == len(walked) == 3
    before = [group for step in sorted(resumed.before.glob("step=*")) for group in read_groups(step)]
    assert len(before) >= KILL_AFTER * GROUPS_PER_STEP
    assert [said(group) for group in before] == [said(group) for group in groups[: len(before)]]


def said(group: Group) -> tuple[int, str, str, list[list[int]]]:
    prompt, tokens = group.prompt, [trajectory.token_ids.tolist() for trajectory in group.trajectories]
    return group.group_id, prompt.source, prompt.text, tokens


def test_each_source_is_played_and_evaluated_in_its_own_way(resumed: Resumed) -> None:
    by_source = {group.prompt.source: group for group in groups_of(resumed.folder)}
    lengths = {name: group.trajectories[0].num_response_tokens for name, group in by_source.items()}
    found = records(resumed.folder)

    assert lengths == {"code": 12, "rows": NUM_SAID, "walks": NUM_SAID}
    assert '"name": "python"' in by_source["rows"].prompt.text
    assert by_source["code"].prompt.text.endswith(": write")
    played = {name for record in found for name in ("code", "rows", "walks") if f"source/{name}/reward/mean" in record}
    assert played == {"code", "rows", "walks"}
    last = found[-1]
    keys = ("code/first", "code/second", "rows/openai/gsm8k", "walks/walk")
    assert {key: last[f"eval/pass_prompts/{key}"] for key in keys} == dict(zip(keys, (1, 1, 2, 3), strict=True))
    assert "eval/pass_at_3/rows/openai/gsm8k" in last
    assert "eval/pass_at_3/code/first" not in last
    assert max(record["learner/grad_norm"] for record in found if "learner/grad_norm" in record) > 0.0
    assert last["eval/source/rows/groups/count"] == 2
