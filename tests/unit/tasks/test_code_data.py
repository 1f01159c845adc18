"""Code data sets as rows and benchmarks: HumanEval from its package, the others in the hub's form."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rayapp.cli.main import run
from rayapp.config.loading import load_config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import InputError
from rayapp.rollout.agents import render_prompts
from rayapp.rollout.check import check_data
from rayapp.sandbox.pool.build import open_pool
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.code.benchmarks import load_benchmark
from rayapp.tasks.code.hidden_cases import InsideTest
from rayapp.tasks.code.languages import LANGUAGES
from rayapp.tasks.data.preparing import Preparation, prepare
from rayapp.tasks.data.rows import DATASETS, MAX_TEST_CHARS, apps_row, default_source
from rayapp.tasks.loading import load_tasks

MBPP = {
    "task_id": 1,
    "text": "Write a function to double a number.",
    "code": "def double(x):\n  return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
    "test_setup_code": "",
}
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
SUM = "print(sum(map(int, input().split())))"
APPS = {"question": "Add two numbers.", "solutions": json.dumps(["print 1", SUM]), "input_output": SUMS}
CASES = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
EXAMPLES: dict[str, dict[str, Any]] = {
    "mbpp": MBPP,
    "apps": APPS,
    "taco": APPS | {"starter_code": ""},
    "codecontests": {
        "description": "Add two numbers.",
        "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
        "private_tests": {"input": ["3 4\n"], "output": ["7\n"]},
        "generated_tests": {"input": [], "output": []},
        "solutions": {"language": [2, 3], "solution": ["int main() {}", SUM]},
    },
    "livecodebench": {
        "question_content": "Add two numbers.",
        "starter_code": "",
        "public_test_cases": CASES,
        "private_test_cases": CASES,
        "metadata": "{}",
    },
}


def write(path: Path, *examples: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_code_data_set_becomes_rows_that_can_be_scored(name: str, tmp_path: Path) -> None:
    job = Preparation(name=name, source=write(tmp_path / "raw.jsonl", EXAMPLES[name]), out=str(tmp_path / "out"))

    (report,) = await prepare(job)

    assert (report.num_written, report.bad) == (1, [])
    (row,) = pq.read_table(tmp_path / "out" / f"{report.split}.parquet").to_pylist()
    assert row["data_source"] == DATASETS[name][0]
    problem = AnswerRewards().code_problem(row["data_source"], row["reward_model"]["ground_truth"])
    assert problem is not None
    assert len((await problem.tests()).tests) == 2
    assert len(row["prompt"]) == 1


async def test_a_row_whose_own_solution_fails_its_tests_is_named(tmp_path: Path) -> None:
    wrong = MBPP | {"code": "def double(x):\n  return x"}
    job = Preparation(name="mbpp", source=write(tmp_path / "raw.jsonl", MBPP, wrong), out=str(tmp_path / "out"))

    with pytest.raises(InputError, match=r"1 of 2 rows .* First: line 2: its reference fails its tests: wrong value"):
        await prepare(job)


async def test_one_odd_row_among_many_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    odd = [
        {"input_output": '{"inputs": null, "outputs": null}'}, {"solutions": "no JSON"}, {"input_output": "{}"}
    ]  # fmt: skip
    examples = [APPS] * 20 + [APPS | fields for fields in odd] + [APPS] * 20
    source = write(tmp_path / "raw.jsonl", *examples)
    job = Preparation(name="apps", source=source, out=str(tmp_path / "out"), max_bad_ratio=0.1, check_references=False)

    (report,) = await prepare(job)

    assert report.num_written == 40
    assert [line.partition(":")[0] for line in report.bad] == ["line 21", "line 22", "line 23"]


async def test_a_row_whose_own_solution_is_a_lambda_is_kept(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": [["1"]], "outputs": [["11"]], "fn_name": "twice"})
    lambdas = {"solutions": json.dumps(["twice = lambda text: text * TIMES\nTIMES = 2"]), "input_output": tests}
    job = Preparation(name="apps", source=write(tmp_path / "raw.jsonl", APPS | lambdas), out=str(tmp_path / "out"))

    (report,) = await prepare(job)

    assert (report.num_written, report.bad) == (1, [])


def test_tests_beyond_a_megabyte_are_left_out() -> None:
    long = "1 " * (MAX_TEST_CHARS // 4)
    tests = json.dumps({"inputs": [long] * 4, "outputs": ["1"] * 4})

    row = apps_row({"question": "?", "input_output": tests}, 0, "train", "apps")

    assert len(json.loads(row["reward_model"]["ground_truth"])["inputs"]) == 1


async def test_every_test_of_humaneval_is_read_and_its_own_solutions_are_right_in_any_form(chat_tokenizer: Any) -> None:
    tasks = load_benchmark("benchmark:humaneval:completion")
    tests = [await task.problem.tests() for task in tasks]

    assert len(tasks) == 164
    # All but seven are judged outside the sandbox, test by test.
    assert sum(any(isinstance(test, InsideTest) for test in each.tests) for each in tests) == 7
    prompt = tasks[0].render(chat_tokenizer)
    assert prompt.text == prompt.prefill == tasks[0].prompt
    body = "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])\n"
    async with open_pool(SandboxConfig(), "humaneval") as (sandboxes, _):
        begun = await tasks[0].score(prompt, body + "\nprint(has_close_elements([], 1))", sandboxes, seed=0)
        wrong = await tasks[0].score(prompt, "    return True\n", sandboxes, seed=0)
        chat = load_benchmark("benchmark:humaneval:chat")[0]
        whole = f"Sure!\n```python\n{chat.prompt.partition('List')[2].lstrip()}{body}```\nThis works."
        said = await chat.score(
            prompt.__class__(task="x", text="", token_ids=prompt.token_ids), whole, sandboxes, seed=0
        )

    assert (begun.value, wrong.value, said.value) == (1.0, 0.0, 1.0)


def test_a_benchmark_is_evaluated_under_one_name_and_crosses_processes(tmp_path: Path, tiny_model: Path) -> None:
    source = f"benchmark:mbpp={write(tmp_path / 'mbpp.jsonl', MBPP, MBPP)}"
    config = load_config(None, [f"model.path={tiny_model}", f"tasks=['{source}']"])

    tasks = load_tasks(config.tasks)
    tokenizer = load_tokenizer(config.model, config.agent.chat_template_kwargs)
    prompts = render_prompts(tasks, tokenizer, config.rollout.max_prompt_tokens)

    assert [prompt.task for prompt in prompts] == ["mbpp", "mbpp"]
    assert prompts[0].text.startswith("You are an expert Python programmer, and here is your task: Write a function to")
    assert pickle.loads(pickle.dumps(tasks)) == tasks


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("benchmark:gsm8k", "is not a benchmark: write benchmark:NAME"),
        ("benchmark:mbpp", "there is no file google-research-datasets/mbpp. Name the benchmark's file"),
        ("benchmark:mbpp={bad}", r"bad\.jsonl, line 2: column 'test_list' must be a list of asserts"),
        ("benchmark:mbpp={torn}", "is not JSON"),
    ],
)
def test_a_benchmark_that_cannot_be_read_says_why(source: str, why: str, tmp_path: Path) -> None:
    files = {"bad": write(tmp_path / "bad.jsonl", MBPP, MBPP | {"test_list": None}), "torn": str(tmp_path / "torn")}
    (tmp_path / "torn").write_text('{"text": ')

    with pytest.raises(InputError, match=why):
        load_tasks([source.format(**files)])


def test_rayapp_eval_asks_the_benchmark_in_place_of_the_configs_data(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    # HumanEval's longest prompts exceed this limit, which is reported before anything starts: so the benchmark was
    # read.
    config.write_text(
        f"model: {{path: {tiny_model}}}\neval: {{tasks: [none.parquet]}}\n"
        "rollout: {max_prompt_tokens: 100, max_completion_tokens: 100}\n"
    )

    assert run(["eval", str(config), "--benchmark", "humaneval"]) == 2

    assert "its prompt has" in capsys.readouterr().err


async def test_humaneval_is_prepared_from_its_package(tmp_path: Path) -> None:
    job = Preparation(
        name="humaneval", source=default_source("humaneval"), out=str(tmp_path), limit=3, check_references=False
    )

    (report,) = await prepare(job)

    assert (report.split, report.num_written) == ("test", 3)


CPP_SUM = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


@pytest.mark.parametrize(
    ("name", "example", "language", "reference"),
    [
        ("codecontests", {"solutions": {"language": [3, 2], "solution": [SUM, CPP_SUM]}}, "cpp", CPP_SUM),
        ("codecontests", {"solutions": {"language": [3], "solution": [SUM]}}, "C++17", ""),
        ("taco", {"solutions": json.dumps([CPP_SUM]), "language": "C++"}, "", CPP_SUM),
    ],
)
@pytest.mark.usefixtures("namespaces")
async def test_a_row_asks_for_its_language_and_its_solution_in_it_is_checked(
    name: str, example: dict[str, Any], language: str, reference: str, tmp_path: Path
) -> None:
    if shutil.which("g++", path="/usr/bin") is None:
        pytest.skip("no g++ in /usr/bin")
    raw = write(tmp_path / "raw.jsonl", EXAMPLES[name] | example)
    (report,) = await prepare(Preparation(name=name, source=raw, out=str(tmp_path / "out"), language=language))

    assert (report.num_written, report.bad) == (1, [])
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert "Write a C++ program" in row["prompt"][0]["content"]
    assert "```cpp" in row["prompt"][0]["content"]
    assert json.loads(row["reward_model"]["ground_truth"])["language"] == (language or "C++")
    assert row["extra_info"]["reference"] == reference


@pytest.mark.usefixtures("namespaces")
async def test_a_solution_in_another_language_that_fails_its_tests_is_named(tmp_path: Path) -> None:
    if shutil.which("g++", path="/usr/bin") is None:
        pytest.skip("no g++ in /usr/bin")
    wrong = EXAMPLES["taco"] | {"solutions": json.dumps([CPP_SUM.replace("+ b;", "- b;")]), "language": "cpp"}
    job = Preparation(name="taco", source=write(tmp_path / "raw.jsonl", wrong), out=str(tmp_path / "out"))

    with pytest.raises(InputError, match="line 1: its reference fails its tests: wrong output: input '1 2"):
        await prepare(job)


def test_a_language_that_is_not_known_or_that_a_data_set_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write(tmp_path / "raw.jsonl", MBPP)
    for name, language, why in (
        ("taco", "cobol", "unknown language 'cobol': known are python, cpp, c,"),
        ("mbpp", "cpp", "--language cpp can't be used with mbpp"),
    ):
        argv = ["data", "prepare", name, "--source", raw, "--out", str(tmp_path / "out"), "--language", language]
        assert run(argv) == 2
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("namespaces")
def test_a_run_whose_rows_need_a_missing_compiler_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = replace(LANGUAGES[0], compile=("no-such-g++", "main.cpp"))
    monkeypatch.setattr("rayapp.tasks.code.languages.LANGUAGES", (none,))
    truth = json.dumps({"inputs": ["1"], "outputs": ["1"], "language": "cpp"})
    row = {"data_source": "taco", "prompt": [{"role": "user", "content": "Echo."}],
           "reward_model": {"style": "rule", "ground_truth": truth}}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(None, [f"tasks=[{tmp_path}/rows.jsonl]", f"data.cache_dir={tmp_path}/cache"])

    with pytest.raises(InputError) as caught:
        check_data(config, config.tasks)
    assert str(caught.value) == (
        "rows that need C++ can't be scored: C++: sandboxes of local have no no-such-g++, which compiles and "
        "runs its programs: install it on this machine, in /usr/bin"
    )
