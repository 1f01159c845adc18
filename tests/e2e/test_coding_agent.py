"""`configs/coding_agent_cpu.yaml`, whole: an agent with files, tools and hidden tests is trained.

The servers say what a script says; tasks, workspaces, verdicts, learner and the file of trajectories are the real ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.core.types import Group
from rayapp.runs.trajectories import read_groups
from support.images import MachineImages
from support.learners import save_llama
from support.swe_rows import SOLVED, image_with_repository, make_mirrors, row, write

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
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


def answer(operator: str, order: str) -> str:
    """Answer both rows: a block runs as it is, so without input the program below the function does nothing."""
    program = (
        f"import sys\n\nif words := sys.stdin.read().split():\n    a, b = map(int, words)\n    print(a {operator} b)"
    )
    return f"```python\ndef order(items):\n    return sorted(items, reverse={order})\n\n{program}\n```\n"


ROWS = [
    ("openai/stdin", "Write a program.", {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}),
    (
        "openai/function",
        "Write the function order.",
        {"inputs": [[[3, 1]], [[]]], "outputs": [[1, 3], []], "fn_name": "order"},
    ),
]
WRITE = call("edit", command="create", path="solution.py", file_text=BUBBLE)
RUN = call("bash", command="python3 test_public.py") + call("run_tests", path="solution.py")
MEND = call("edit", command="str_replace", path="solution.py", old_str="xs[j] <", new_str="xs[j] >")
FORGE = call("edit", command="create", path="test_public.py", file_text="print('3 tests passed')")
SUBMIT = call("submit", path="solution.py")
SCRIPTS = [
    [answer("+", "False") + WRITE, RUN, MEND + RUN, SUBMIT],
    [answer("-", "True") + WRITE, FORGE, RUN, SUBMIT],
]
"""One agent that mends what the tests show, and one that mends the tests. Their first turn alone answers rows."""


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
        num_attention_heads=2,  # heads of 32: vLLM's attention on a CPU has none of 16
        num_key_value_heads=2,
        intermediate_size=64,
        num_hidden_layers=1,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=chat_tokenizer.eos_token_id,
        pad_token_id=0,
    )


def sources(folder: Path) -> str:
    """The agent's task beside rows of code problems, which are answered in one turn."""
    rows = [
        {
            "data_source": source,
            "agent_name": "single_turn_agent",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        }
        for source, prompt, truth in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    reward = {"code": {"sources": [source for source, _, _ in ROWS]}}
    return json.dumps(
        [
            {"name": "agent", "tasks": ["sort_numbers"]},
            {"name": "rows", "tasks": [str(folder / "rows.parquet")], "reward": reward},
        ]
    )


def trained(
    folder: Path, model: Path, ray: Any, tokenizer: Any, scripts: list[list[str]], **changes: object
) -> list[Group]:
    """What `configs/coding_agent_cpu.yaml` with two sources trained on, after two steps of one group of each."""
    overrides = {
        "run.output_dir": folder,
        "model.path": model,
        "sources": sources(folder),
        "train.num_steps": 2,
        "train.groups_per_step": 2,
        "rollout.group_size": 6,
        "rollout.max_prompt_tokens": 6000,
        "rollout.max_completion_tokens": 6000,
        "sandbox.max_leases": 12,
        "learner.max_tokens_per_microbatch": 12000,
        "learner.compute_dtype": "float32",
        "tracking.trackers": "[jsonl]",
    } | changes
    file, log = str(ROOT / "configs" / "coding_agent_cpu.yaml"), folder / "log"
    ids = [
        [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns]
        for turns in scripts
    ]
    keys = [f"{key}={value}" for key, value in overrides.items()]
    done = ray.train(file, *keys, log=log, SCRIPTS=json.dumps(ids)).wait(timeout=DEADLINE_S)

    assert done == 0, log.read_text()
    run = folder / "coding_agent_cpu"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["rollout/invalid"] == 0 for record in records)
    assert (run / "final" / "model.safetensors").exists()
    files = [run / "trajectories" / f"step={step:06d}.parquet" for step in (1, 2)]
    return [group for file in files for group in read_groups(file)]


def test_an_agent_and_rows_of_code_are_trained_on_verdicts_of_hidden_tests_and_on_progress_with_the_public_ones(
    tmp_path: Path, model: Path, chat_tokenizer: Any, standing_ray: Any
) -> None:
    groups = trained(tmp_path, model, standing_ray, chat_tokenizer, SCRIPTS)

    of_rows = [group for group in groups if group.prompt.source == "rows"]
    assert {group.prompt.task for group in of_rows} == {source for source, _, _ in ROWS}
    for trajectory in (trajectory for group in of_rows for trajectory in group.trajectories):
        is_right = "reverse=False" in trajectory.completion_text
        assert (trajectory.reward.value, trajectory.reward.terms["solved"], trajectory.num_turns) == (is_right,) * 2 + (
            1,
        )
        assert trajectory.reward.status == "scored"
    trajectories = [each for group in groups if group.prompt.source == "agent" for each in group.trajectories]
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


def issues(folder: Path, images: MachineImages) -> str:
    """One source: a data set in SWE-bench's form with one issue, whose repository is in an image."""
    folder.mkdir()
    mirrors = make_mirrors(folder)
    image = image_with_repository(Path(images.cache).parent / "issue", mirrors)
    source = f"swe:{write(folder, row(mirrors, image=image))}?memory_mib=1024&disk_mib=64"
    return json.dumps([{"name": "agent", "tasks": [source]}])


@pytest.mark.long  # tests/unit/rollout/test_task_agents.py has the same agents without a run around them
def test_an_agent_is_trained_on_an_issue_whose_tests_pass_only_after_its_solution(
    tmp_path: Path, model: Path, chat_tokenizer: Any, standing_ray: Any, images: MachineImages
) -> None:
    look = call("bash", command="git log --oneline; ls tests; cat stats.py")
    mend = call("edit", command="create", path="stats.py", file_text=SOLVED)
    skip = call("edit", command="create", path="tests/test_stats.py", file_text="def test_mean():\n    pass\n")
    scripts = [[look, mend, call("submit")], [look, skip, call("submit")]]
    source = issues(tmp_path / "issues", images)
    changes = {"train.groups_per_step": 1, "sandbox.providers": f"[{{type: local, image_cache: {images.cache}}}]"}
    groups = trained(tmp_path, model, standing_ray, chat_tokenizer, scripts, sources=source, **changes)

    trajectories = [each for group in groups for each in group.trajectories]
    assert len(trajectories) == 12
    rewards = {turns[1].text[:60]: each.reward for each in trajectories if (turns := each.turns)}
    assert {each.reward.value for each in trajectories} == {0.0, 1.0}, rewards
    for each in trajectories:
        has_mended = "no values" in each.turns[1].text
        assert each.reward.value == each.reward.terms["fail_to_pass"] == has_mended
        assert each.reward.terms["pass_to_pass"] == 1.0
        assert "As handed out" in each.turns[0].calls[0].output
        assert "test_even" not in json.dumps([call.output for turn in each.turns for call in turn.calls])
