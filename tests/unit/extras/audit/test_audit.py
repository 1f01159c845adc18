"""Findings of `rayapp task audit` on sound tasks, and on tasks with one fault each, in real local sandboxes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayapp.cli.main import run
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.extras.audit.checks import TaskReport, audit
from rayapp.extras.audit.subject import Attempt, Subject
from rayapp.extras.audit.subjects import coding_subject, subjects_of
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.coding import CodingTask

pytestmark = pytest.mark.asyncio(loop_scope="module")
DOUBLE: dict[str, Any] = {
    "name": "double",
    "prompt": "Write double(x), which returns twice the integer x.",
    "func_name": "double",
    "signature": "def double(x):",
    "tests": ("-3", "7", "rng.randint(100, 999)", "rng.randint(1000, 9999)"),
    "reference": "2 * x",
}
SLOW = "def double(x):\n    import time\n    time.sleep(2.2)\n    return 2 * x\n"
SOLUTION = "def double(x):\n    twice_the_integer = x + x\n    return twice_the_integer\n"


@dataclass(frozen=True)
class Found:
    reports: list[TaskReport]

    @property
    def said(self) -> list[str]:
        """`check: detail` of every finding."""
        return [f"{each.check}: {each.detail}" for report in self.reports for each in report.findings]


async def audited(sandboxes: SandboxSource, *subjects: Subject, runs: int = 2) -> Found:
    return Found(await audit(subjects, sandboxes, runs=runs))


async def of_task(sandboxes: SandboxSource, runs: int = 2, **changes: Any) -> Found:
    return await audited(sandboxes, coding_subject(CodingTask(**DOUBLE | changes)), runs=runs)


async def test_a_sound_task_has_no_finding(sandboxes: SandboxSource) -> None:
    found = await of_task(sandboxes, files={"notes.txt": "Twice means two times."}, demonstrations=[SOLUTION])
    f: dict[str, Any] = {"prompt": "Write f(x), which returns twice x.", "func_name": "f", "signature": "def f(x):"}

    (report,) = found.reports
    assert found.said == (await of_task(sandboxes, **f)).said == []
    assert (report.nothing, report.solution, report.trivial, report.cheats) == (0.0, "2/2", 0.0, "0/16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tests": ("0", "0", "5")}, "trivial: `return x` earns 0.67, more than 0.5"),
        ({"tests": ("0",), "reference": "0"}, "trivial: `return x` earns 1.00, more than 0.5"),
        ({"reference": "None"}, "nothing: a function that does nothing earns 1"),
        ({"demonstrations": [SOLUTION.replace("x + x", "x")]}, "solution: the solution fails 2 of 2 times: it earns 0"),
        ({"files": {"src/done.py": SOLUTION}, "demonstrations": [SOLUTION]}, "src/done.py in the agent's workspace"),
        ({"prompt": f"Write this:\n{SOLUTION}", "demonstrations": [SOLUTION]}, "oracle: the prompt contains text"),
        ({"demonstrations": [SLOW], "timeout_s": 4.2, "tests": ("4",)}, "slow: the verdict on the solution takes"),
    ],
    ids=["a guess is right", "a constant", "nothing is right", "wrong", "in a file", "in the prompt", "slow"],
)  # fmt: skip
async def test_a_faulty_task_is_told_with_its_fault(sandboxes: SandboxSource, changes: Any, said: str) -> None:
    found = await of_task(sandboxes, runs=2, **changes)

    assert any(said in line for line in found.said), found.said


async def test_a_flaky_task_is_told_with_the_test_that_fails_now_and_then(sandboxes: SandboxSource) -> None:
    sometimes = "def double(x):\n    import os\n    return 2 * x if x != 7 or os.urandom(1)[0] < 128 else None"
    found = await of_task(sandboxes, runs=16, demonstrations=[sometimes])

    (told,) = [line for line in found.said if line.startswith("flaky")]
    assert " of 16 times: it earns 0.75" in told


async def test_a_cheat_that_is_paid_and_a_grader_that_pays_all_are_told(sandboxes: SandboxSource) -> None:
    async def score(answer: str, source: SandboxSource, seed: int) -> Reward:
        return Reward(value=float("os._exit" in answer))

    cheat = Attempt(name="ends its process", text="os._exit(0)")
    subject = Subject(
        name="exits", kind="own", prompt="Do it.", score=score, solution=None,
        nothing=(Attempt(name="an empty answer", text=""),), cheats=(cheat,),
    )  # fmt: skip
    found = await audited(sandboxes, subject)

    assert found.said == ["cheat: an answer that ends its process earns 1"]
    assert found.reports[0].cheats == "1/1"


async def test_an_environment_is_refused_since_only_playing_it_gives_a_verdict(
    sandboxes: SandboxSource, tmp_path: Path
) -> None:
    (tmp_path / "walk.yaml").write_text("{environment: openenv, url: 'http://127.0.0.1:1', size: 1}")
    with pytest.raises(InputError, match="walk is an environment: it scores only trajectories"):
        await audited(sandboxes, *await subjects_of([str(tmp_path / "walk.yaml")], AnswerRewards(), cache=tmp_path))


async def test_rows_of_code_are_audited_as_they_would_be_scored(sandboxes: SandboxSource, tmp_path: Path) -> None:
    sums = {"inputs": ["1 2\n", "30 4\n", "5 6\n"], "outputs": ["3\n", "34\n", "11\n"]}
    zeros = {"inputs": ["1\n", "2\n"], "outputs": ["0\n", "0\n"]}
    right = "print(sum(map(int, input().split())))  # of the two numbers"
    rows = [
        {
            "data_source": "apps",
            "prompt": [{"role": "user", "content": f"Problem {number}"}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
            "extra_info": {"reference": reference},
        }
        for number, (truth, reference) in enumerate([(sums, right), (sums, "print(3)"), (zeros, "print(0)")])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    subjects = await subjects_of([str(tmp_path / "rows.parquet")], AnswerRewards(), cache=tmp_path)
    good, wrong, constant = (await audited(sandboxes, *subjects)).reports

    assert (good.solution, good.cheats, good.findings) == ("2/2", "0/11", ())
    (told,) = wrong.findings
    assert told.check == "solution"
    assert "the solution fails 2 of 2 times: it earns 0 (scored: wrong output: input '30 4\\n'" in told.detail
    assert [finding.check for finding in constant.findings] == ["trivial"]
    assert (constant.trivial, constant.trivial_answer) == (1.0, "print('0')")


PAYS_ALL = """
from rayapp.core.types import Reward


class PaysAll:
    name = "pays_all"

    def render(self, tokenizer): ...

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        return Reward(value=1.0)


TASK = PaysAll()
"""


@pytest.mark.asyncio(loop_scope="function")
async def test_the_command_prints_json_and_exits_with_1_on_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    task = tmp_path / "pays_all.py"
    task.write_text(PAYS_ALL)

    assert await asyncio.to_thread(run, ["task", "audit", str(task), "--json"]) == 1
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)
    assert printed.err == "tasks audited: 0 of 1\ntasks audited: 1 of 1\n"
    assert (report["task"], report["kind"], report["nothing"]) == ("pays_all", "PaysAll", 1.0)
    assert {finding["check"] for finding in report["findings"]} == {"nothing"}
    assert await asyncio.to_thread(run, ["task", "audit", "sort_numbers", "--runs", "1"]) == 0
    assert "1 tasks audited, 0 with findings" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["task", "audit", "sort_number"]) == 2
    assert "did you mean sort_numbers?" in capsys.readouterr().err


def test_an_audit_is_a_gate_with_a_list_of_the_tasks_that_it_keeps(
    namespaces: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = "name: NAME\nprompt: Say one.\nfunc_name: f\nsignature: 'def f(x):'\ntests: ['0']\nreference: '0 * x'\n"
    double = yaml.safe_dump(DOUBLE | {"tests": list(DOUBLE["tests"])})
    for name, text in (("constant", same.replace("NAME", "constant")), ("double", double)):
        (tmp_path / f"{name}.yaml").write_text(text)
    kept = tmp_path / "kept.txt"
    command = ["task", "audit", str(tmp_path / "constant.yaml"), str(tmp_path / "double.yaml"), "--runs", "1"]

    assert run([*command, "--json", "--kept", str(kept)]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [bool(report["findings"]) for report in reports] == [True, False]
    assert reports[1]["solution"] == "1/1"
    assert kept.read_text() == "double\n"
    assert run([*command, "--max-bad-ratio", "0.5"]) == 0
