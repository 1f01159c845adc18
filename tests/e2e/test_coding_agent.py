"""`configs/coding_agent_cpu.yaml`, whole: an agent with files, tools and hidden tests is trained.

The servers say what a script says; tasks, workspaces, verdicts, learner and the file of trajectories are the real ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayapp.runs.trajectories import read_groups
from rayapp.testing.learners import save_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 900.0
BUBBLE = """def sort_numbers(xs):
    for i in range(len(xs)):
        for j in range(len(xs) - 1):
            if xs[j] < xs[j + 1]:
                xs[j], xs[j + 1] = xs[j + 1], xs[j]
    return xs
"""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WRITE = call("edit", command="create", path="solution.py", file_text=BUBBLE)
RUN = call("bash", command="python3 test_public.py") + call("run_tests", path="solution.py")
MEND = call("edit", command="str_replace", path="solution.py", old_str="xs[j] <", new_str="xs[j] >")
FORGE = call("edit", command="create", path="test_public.py", file_text="print('3 tests passed')")
SUBMIT = call("submit", path="solution.py")
SCRIPTS = [[WRITE, RUN, MEND + RUN, SUBMIT], [WRITE, FORGE, RUN, SUBMIT]]
"""One agent that mends what the tests show, and one that mends the tests."""


@pytest.fixture
def model(tmp_path: Path, chat_tokenizer: Any) -> Path:
    """Random weights over bytes, with room for five tools' schemas."""
    folder = tmp_path / "model"
    chat_tokenizer.save_pretrained(folder)
    return save_llama(
        folder,
        dtype="bfloat16",
        vocab_size=len(chat_tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=chat_tokenizer.eos_token_id,
        pad_token_id=0,
    )


def test_an_agent_is_trained_on_verdicts_of_hidden_tests_and_on_progress_with_the_public_ones(
    tmp_path: Path, model: Path, chat_tokenizer: Any, standing_ray: Any
) -> None:
    end = chat_tokenizer.eos_token_id
    scripts = [[[*chat_tokenizer.encode(turn, add_special_tokens=False), end] for turn in turns] for turns in SCRIPTS]
    overrides = {
        "run.output_dir": tmp_path,
        "model.path": model,
        "tasks": "[sort_numbers]",
        "train.num_steps": 2,
        "train.groups_per_step": 1,
        "rollout.group_size": 6,
        "rollout.max_prompt_tokens": 6000,
        "rollout.max_completion_tokens": 6000,
        "sandbox.max_leases": 6,
        "learner.max_tokens_per_microbatch": 12000,
        "learner.compute_dtype": "float32",
        "tracking.trackers": "[jsonl]",
    }
    file, log = str(ROOT / "configs" / "coding_agent_cpu.yaml"), tmp_path / "log"
    arguments = [file, *(f"{key}={value}" for key, value in overrides.items())]

    done = standing_ray.train(*arguments, log=log, SCRIPTS=json.dumps(scripts)).wait(timeout=DEADLINE_S)

    assert done == 0, log.read_text()
    folder = tmp_path / "coding_agent_cpu"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["rollout/invalid"] == 0 for record in records)
    trajectories = [
        trajectory
        for step in (1, 2)
        for group in read_groups(folder / "trajectories" / f"step={step:06d}.parquet")
        for trajectory in group.trajectories
    ]
    honest = [trajectory for trajectory in trajectories if trajectory.turns[1].text.startswith(RUN[:40])]
    forged = [trajectory for trajectory in trajectories if trajectory.turns[1].text.startswith(FORGE[:40])]
    assert len(honest) + len(forged) == 12
    assert honest
    assert forged
    for trajectory in honest:
        # The hidden tests' 1.0, and a fifth of the public ones'.
        assert (trajectory.reward.value, trajectory.reward.terms["solved"]) == (pytest.approx(1.2), 1.0)
        assert "AssertionError" in trajectory.turns[1].calls[0].output
        assert trajectory.completion_text == f"```python\n{BUBBLE.replace('] <', '] >').rstrip()}\n```\n"
    for trajectory in forged:
        assert trajectory.turns[2].calls[0].output == "3 tests passed"
        assert trajectory.turns[2].calls[1].output.startswith("1 of 3 tests passed")
        assert (trajectory.reward.terms["solved"], trajectory.reward.terms["tool"]) == (0.0, pytest.approx(1 / 3))
        assert trajectory.reward.value < 0.5
    workspaces = [
        {ran.sandbox_id for turn in trajectory.turns for record in turn.calls for ran in record.execs}
        for trajectory in trajectories
    ]
    assert {len(ids) for ids in workspaces} == {1}
    assert len(set.union(*workspaces)) == len(trajectories)
    assert (folder / "final" / "model.safetensors").exists()
