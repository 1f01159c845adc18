"""Tasks from names, YAML and Python files, and errors about unusable ones."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.core.errors import InputError
from rayapp.tasks.banned import screen
from rayapp.tasks.cases import CaseSource
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_task, load_tasks

GOOD = """
prompt: Write add(a, b).
func_name: add
signature: "def add(a, b):"
tests: ["(rng.randint(0, 9), 1)", "(0, 0)"]
reference: a + b
"""


def write(folder: Path, text: str, name: str = "add.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["max_subarray_sum", "sort_numbers"])
def test_every_shipped_demonstration_solves_its_task_without_a_banned_name(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, CodingTask)
    assert len(task.demonstrations) == len(set(task.demonstrations)) == 12
    for text in task.demonstrated_completions:
        code, status, detail = screen(text, task.func_name, task.answer_prefix, task.banned_patterns)
        assert not status, detail
        names: dict[str, Any] = {}
        exec(code, names)
        for case in [*task.cases.draw(0), *task.cases.draw(1)]:
            assert names[task.func_name](*copy.deepcopy(case.args)) == case.expected, text


def test_a_task_based_on_a_shipped_one_differs_in_what_it_says(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, "based_on: sort_numbers\nprompt: Sort it.\n"))
    base = load_task("sort_numbers")
    assert isinstance(task, CodingTask)
    assert isinstance(base, CodingTask)
    assert (task.name, task.prompt) == ("add", "Sort it.")
    assert task.model_copy(update={"name": base.name, "prompt": base.prompt}) == base


def test_a_task_may_be_based_on_one_that_is_based_on_another(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, "based_on: sort_numbers_reworded\nsystem: Be brief.\n"))
    assert isinstance(task, CodingTask)
    assert (task.func_name, task.demonstrations, task.system) == ("sort_numbers", (), "Be brief.")


def test_task_class_of_a_python_file_travels_by_value(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n"
        "    name: 'str' = 'mine'\n"
        "    def render(self, tokenizer): ...\n"
        "    async def score(self, prompt, completion_text, sandboxes, *, seed): ...\n"
        "TASK = Mine()\n"
    )
    import cloudpickle

    task = load_task(write(tmp_path, source, "mine.py"))

    # What Ray does with an argument of a remote call, in a process that has never seen the file.
    assert pickle.loads(cloudpickle.dumps(task)).name == "mine"


def test_a_task_that_is_named_twice_is_there_twice() -> None:
    first, second, third = load_tasks(["sort_numbers", "max_subarray_sum", "sort_numbers"])

    assert first is third
    assert second.name == "max_subarray_sum"


def test_cases_depend_on_the_seed_and_on_nothing_else() -> None:
    source = CaseSource(task="t", tests=("rng.random()",) * 3, reference="x * 2", parameters=("x",))

    assert source.draw(1) == source.draw(1) != source.draw(2)


def test_reference_that_works_in_place_does_not_change_the_input() -> None:
    source = CaseSource(task="t", tests=("[3, 1]",), reference="(xs.sort(), xs)[1]", parameters=("xs",))

    [case] = source.draw(0)

    assert case.args == ([3, 1],)
    assert case.expected == [1, 3]


TRIVIAL = {
    "sort_numbers": ["xs", "[]", "xs[::-1]", "list(set(xs))", "[min(xs), max(xs)]", "None"],
    "max_subarray_sum": ["sum(xs)", "max(xs)", "0", "xs", "len(xs)", "sum(x for x in xs if x > 0)", "xs[0]", "None"],
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in TRIVIAL.items() for answer in answers]
)
def test_trivial_answers_earn_little(name: str, answer: str) -> None:
    task = load_task(name)
    assert isinstance(task, CodingTask)

    def passes(args: tuple[object, ...], expected: object) -> bool:
        try:
            return bool(eval(answer, {"xs": args[0]}) == expected)
        except (ValueError, IndexError):
            return False

    shares = [
        sum(passes(case.args, case.expected) for case in cases) / len(cases)
        for cases in (task.cases.draw(seed) for seed in range(50))
    ]

    # Each shipped task has 20 tests: 0.2 is four of them, and no trivial answer passes more on average.
    assert sum(shares) / len(shares) <= 0.2 + 1e-9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "name"),
        ({"prompt": ""}, r"prompt = ''"),
        ({"prompt": None}, "prompt is missing"),
        ({"func_name": "not a name"}, "func_name = 'not a name'"),
        ({"signature": ""}, r"neither signature nor prompt has a line `def add\(…\):`"),
        ({"signature": "def add(*a):"}, "positional"),
        ({"signature": "def add():"}, "no parameter"),
        ({"signature": "def add(a, b"}, "not a `def` line"),
        ({"tests": []}, r"tests = \[\]: "),
        ({"tests": ["1 +"]}, r"tests\[0\]: '1 \+'"),
        ({"tests": ["(1, rng)"]}, r"test 1, `\(1, rng\)`, .*Random"),
        ({"tests": ["rng.choice([])"]}, r"test 1, `rng\.choice\(\[\]\)`, raises IndexError"),
        ({"tests": ["5"]}, r"gives `5`, .* 2 arguments \(a, b\)"),
        ({"reference": "a b"}, "reference: 'a b'"),
        ({"reference": "a / 0"}, "reference, `a / 0`, on test 1, raises ZeroDivisionError"),
        ({"reference": "c"}, "NameError: name 'c'"),
        ({"reference": "object()"}, "type object"),
        ({"helpers": "1 / 0"}, "helpers can't run: ZeroDivisionError"),
        ({"demonstrations": ["def plus(a, b): return a + b"]}, r"demonstration 1 .*def add\(a, b\):"),
        ({"banned_patterns": ["a b"]}, r"banned_patterns\[0\]: 'a b'"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"promt": "x"}, r"promt; did you mean prompt\?"),
        ({"prompt_format": "completion"}, "prompt_format is completion"),
        ({"prompt_format": "chat", "prefill": "x"}, "prompt_format: chat_prefill"),
    ],
)
def test_a_task_that_can_not_be_used_names_the_field(tmp_path: Path, change: dict[str, object], said: str) -> None:
    fields = {key: value for key, value in (yaml.safe_load(GOOD) | change).items() if value is not None}

    with pytest.raises(InputError, match=said):
        load_task(write(tmp_path, yaml.safe_dump(fields)))


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: [", "x.yaml", "YAML"),
        ("- a", "x.yaml", "mapping"),
        ("based_on: sort\n", "x.yaml", "based_on is 'sort': .*max_subarray_sum"),
        ("raise ValueError('no')", "x.py", "ValueError: no"),
        ("TASK = 5", "x.py", "TASK"),
        ("from rayapp import CodingTask\nTASK = CodingTask(name='a', referense='')", "x.py", "did you mean reference"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_task(write(tmp_path, text, name))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "max_subarray_sum"),
        (["sort_number"], r"did you mean sort_numbers\?"),
        (["nowhere/x.yaml"], r"nowhere/x\.yaml"),
        (["sort_numbers", "{same}"], "two tasks have the name sort_numbers"),
    ],
)
def test_a_list_of_tasks_that_can_not_be_used_is_explained(tmp_path: Path, names: list[str], said: str) -> None:
    same = write(tmp_path, GOOD + "name: sort_numbers\n")
    with pytest.raises(InputError, match=said):
        load_tasks([name.format(same=same) for name in names])
