"""`rayapp score` and `rayapp try tool` report the same as training would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.cli.main import run

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        raise RuntimeError("no")
    return {"score": float(ground_truth in solution_str), "length": len(solution_str)}
"""
TOOL = """
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema

class Counter(ToolBase):
    schema = ToolSchema(name="count", parameters={"type": "object", "properties": {"by": {"type": "integer"}},
                                                  "required": ["by"]})
    async def create(self, kwargs):
        return {"n": kwargs.get("first", 0)}
    async def execute(self, state, arguments):
        state["n"] += arguments["by"]
        return ToolOutput(text=str(state["n"]), reward=0.5)
    async def reward(self, state):
        return state["n"]
"""


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward function, a tool, and two rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "counter.py").write_text(TOOL)
    rows = [
        {
            "prompt": [{"role": "user", "content": "?"}],
            "data_source": "mine",
            "reward_model": {"ground_truth": truth},
            "extra_info": {"tools_kwargs": {"count": {"create_kwargs": {"first": 40}}}},
        }
        for truth in ("four", "five")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return tmp_path


def test_a_function_is_tried_on_rows_with_their_own_ground_truth(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "rewards.py:compute_score", "--data", "rows.parquet"]) == 0
    found = lines(capsys)

    assert [(one["row"], one["answer"], one["reward"]) for one in found] == [
        (0, "four", 1.0),
        (0, "", 0.0),
        (1, "five", 1.0),
        (1, "", 0.0),
    ]
    assert found[0]["terms"]["length"] == 4.0


@pytest.mark.parametrize(
    ("prompt", "code", "reward"),
    [("2 + 2?", 1, 0.0), ("2 + 2? End with #### and the number.", 0, 1.0)],
)
def test_rows_whose_right_answer_earns_nothing_fail(
    desk: Path, prompt: str, code: int, reward: float, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "mine.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 4}))
    assert run(["data", "rows", "mine.jsonl", "--out", "rows", "--data-source", "openai/gsm8k"]) == 0
    capsys.readouterr()

    assert run(["score", "openai/gsm8k", "--data", "rows/train.parquet"]) == code
    said = capsys.readouterr()

    assert json.loads(said.out.splitlines()[0])["reward"] == reward
    assert ("reads answers like '#### 4', and the prompt doesn't ask for this form" in said.err) == bool(code)


def test_a_function_that_gives_its_own_ground_truth_nothing_fails(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "strict.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )

    assert run(["score", "strict.py:f", "--data", "rows.parquet"]) == 1
    assert "row 0: the ground truth 'four' earns 0, not more than an empty answer" in capsys.readouterr().err


@pytest.mark.parametrize("truth", ["# tests\n    assert f(1) == 2", '["assert f(1) == 2"]', "", ["a"], {"a": 1}])
def test_rows_whose_ground_truth_is_no_answer_say_that_no_right_answer_was_tried(
    desk: Path, truth: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(*truths: object) -> list[dict[str, Any]]:
        prompt = [{"role": "user", "content": "?"}]
        return [{"prompt": prompt, "data_source": "mine", "reward_model": {"ground_truth": one}} for one in truths]

    pq.write_table(pa.Table.from_pylist(of(truth)), "tests.parquet")
    assert run(["score", "rewards.py:compute_score", "--data", "tests.parquet"]) == 1
    assert "failed: no right answer was tried on 1 of 1 rows" in capsys.readouterr().err

    if isinstance(truth, str):
        assert run(["score", "rewards.py:compute_score", "--data", "tests.parquet", "--answer", truth]) == 0
        pq.write_table(pa.Table.from_pylist(of("four", truth)), "both.parquet")
        assert run(["score", "rewards.py:compute_score", "--data", "both.parquet"]) == 0
        assert "note: no right answer was tried on 1 of 2 rows" in capsys.readouterr().err


def test_answers_of_ones_own_are_scored_and_one_without_a_verdict_exits_with_1(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "answers.jsonl").write_text('{"completion": "it is four"}\n{"completion": "crash"}\n')
    words = ["--data", "rows.parquet", "--row", "0", "--answer", "two", "answers.jsonl"]

    assert run(["score", "rewards.py:compute_score", *words]) == 1
    found = lines(capsys)

    assert [one["reward"] for one in found] == [0.0, 1.0, None]
    assert found[2]["failure_kind"] == "reward_error"
    assert "RuntimeError: no" in found[2]["detail"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py:f"], "there is no file nowhere.py"),
        (["nobody", "--ground-truth", "1"], "data_source 'nobody' has no scoring rule in rayapp"),
        (["rewards.py:compute_score", "--data", "rows.parquet", "--row", "7"], "has 2 rows, and no row 7"),
        (["rewards.py:compute_score", "--data", "counter.py"], "counter.py can't be read"),
    ],
)
def test_what_cannot_be_tried_is_one_message(
    desk: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_tool_is_shown_and_its_calls_share_a_trajectory_and_end_with_its_verdict(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = ["count", '{"by": 1}', "count", '{"by": 1}']
    assert run(["try", "tool", "counter.py:Counter"]) == 0
    assert [one["function"]["name"] for one in lines(capsys)] == ["count"]

    assert run(["try", "tool", "counter.py:Counter", *calls, "--data", "rows.parquet"]) == 0
    first, second, end = lines(capsys)

    assert (first["output"], second["output"], second["reward"]) == ("41", "42", 0.5)
    assert end == {"verdicts": {"count": 42.0}, "answer": None}
    assert run(["try", "tool", "counter.py:Counter", "count", '{"by": "x"}']) == 1
    assert lines(capsys)[0]["failure"] == "bad_arguments"


def test_shipped_tools_run_in_a_real_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    calls = ["python", '{"code": "x = 2"}', "python", '{"code": "print(x + 40)"}']

    assert run(["try", "tool", "python", *calls]) == 0
    assert lines(capsys)[1]["output"] == "42"
