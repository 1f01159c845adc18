"""Tasks from names, YAML and Python files, and errors about unusable ones."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from rayapp.core.errors import InputError
from rayapp.tasks.banned import screen
from rayapp.tasks.cases import CaseSource
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_task, load_tasks, shipped_tasks

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


def test_shipped_tasks_are_those_of_the_seed() -> None:
    assert [name for name in shipped_tasks() if not name.endswith("_reworded")] == ["max_subarray_sum", "sort_numbers"]


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


def test_an_empty_name_is_refused_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name"):
        load_task(write(tmp_path, GOOD + "name: ''\n"))


def test_a_task_based_on_none_that_ships_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"based_on is 'sort': it must be one of max_subarray_sum"):
        load_task(write(tmp_path, "based_on: sort\n"))


def test_a_demonstration_that_does_not_go_on_from_the_prefill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"demonstration 1 begins with .*it must begin with .*def add\(a, b\):"):
        load_task(write(tmp_path, GOOD + "demonstrations: ['def plus(a, b): return a + b']\n"))


def test_task_file_is_named_after_its_file(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, GOOD))

    assert isinstance(task, CodingTask)
    assert (task.name, task.parameters) == ("add", ("a", "b"))


def test_python_file_binds_a_task(tmp_path: Path) -> None:
    source = (
        "from rayapp.tasks.coding import CodingTask\n"
        "TASK = CodingTask(name='inc', prompt='Write inc(x).', func_name='inc', signature='def inc(x):',\n"
        "                  tests=['rng.randint(0, 9)'], reference='x + 1')\n"
    )

    assert load_task(write(tmp_path, source, "inc.py")).name == "inc"


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


def test_loaded_task_pickles(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, GOOD))

    assert pickle.loads(pickle.dumps(task)) == task


def test_unknown_name_names_the_nearest_task() -> None:
    with pytest.raises(InputError, match=r"no task 'sort_number'; did you mean sort_numbers\?"):
        load_task("sort_number")


def test_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"there is no task file nowhere/x\.yaml"):
        load_task("nowhere/x.yaml")


def test_run_without_tasks_is_refused() -> None:
    with pytest.raises(InputError, match="tasks is empty: name at least one of max_subarray_sum, "):
        load_tasks([])


def test_a_task_that_is_named_twice_is_there_twice() -> None:
    first, second, third = load_tasks(["sort_numbers", "max_subarray_sum", "sort_numbers"])

    assert first is third
    assert second.name == "max_subarray_sum"


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two tasks have the name sort_numbers"):
        load_tasks(["sort_numbers", write(tmp_path, GOOD + "name: sort_numbers\n")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, r"prompt = '': must be text, not empty"),
        ({"prompt": None}, r"prompt is missing"),
        ({"func_name": "not a name"}, r"func_name = 'not a name': must be text, a Python name"),
        ({"signature": ""}, r"neither signature nor prompt has a line `def add\(…\):`"),
        ({"signature": "def add(*a):"}, r"all parameters must be positional"),
        ({"signature": "def add():"}, r"has no parameter"),
        ({"signature": "def add(a, b"}, r"is not a `def` line of Python"),
        ({"tests": []}, r"tests = \[\]: "),
        ({"tests": ["1 +"]}, r"tests\[0\]: '1 \+' is not a Python expression"),
        ({"reference": "a b"}, r"reference: 'a b' is not a Python expression"),
        ({"banned_patterns": ["a b"]}, r"banned_patterns\[0\]: 'a b' is neither a name nor an operator"),
        ({"timeout_s": 0}, r"timeout_s = 0: must be a number, above 0 and at most 600"),
        ({"promt": "x"}, r"unknown key promt; did you mean prompt\?"),
        ({"prompt_format": "completion"}, r"prompt_format is completion, but the prompt has no `def add`"),
        ({"prompt_format": "chat", "prefill": "x"}, r"set prompt_format: chat_prefill"),
    ],
)
def test_bad_field_is_explained(tmp_path: Path, change: dict[str, object], message: str) -> None:
    import yaml

    fields = {key: value for key, value in (yaml.safe_load(GOOD) | change).items() if value is not None}

    with pytest.raises(InputError, match=message):
        load_task(write(tmp_path, yaml.safe_dump(fields)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "a / 0"}, r"task add: the reference, `a / 0`, on test 1, raises ZeroDivisionError"),
        ({"reference": "c"}, r"raises NameError: name 'c' is not defined"),
        ({"reference": "object()"}, r"gives a value of type object; only plain data"),
        ({"tests": ["(1, rng)"]}, r"task add: test 1, `\(1, rng\)`, gives an input of type Random"),
        ({"tests": ["rng.choice([])"]}, r"task add: test 1, `rng\.choice\(\[\]\)`, raises IndexError"),
        ({"tests": ["5"]}, r"gives `5`, but the function takes 2 arguments \(a, b\)"),
        ({"helpers": "1 / 0"}, r"task add: its helpers can't run: ZeroDivisionError"),
    ],
)
def test_reference_and_tests_are_tried_when_the_task_is_loaded(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    import yaml

    with pytest.raises(InputError, match=message):
        load_task(write(tmp_path, yaml.safe_dump(yaml.safe_load(GOOD) | change)))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a: [", "x.yaml", "is not YAML"),
        ("- a", "x.yaml", "a mapping with prompt"),
        ("raise ValueError('no')", "x.py", "can't be imported: ValueError: no"),
        ("TASK = 5", "x.py", "must bind TASK"),
    ],
)
def test_broken_file_is_explained(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_task(write(tmp_path, text, name))


def test_cases_depend_on_the_seed_and_on_nothing_else() -> None:
    source = CaseSource(task="t", tests=("rng.random()",) * 3, reference="x * 2", parameters=("x",))

    assert source.draw(1) == source.draw(1) != source.draw(2)


def test_reference_that_works_in_place_does_not_change_the_input() -> None:
    source = CaseSource(task="t", tests=("[3, 1]",), reference="(xs.sort(), xs)[1]", parameters=("xs",))

    [case] = source.draw(0)

    assert case.args == ([3, 1],)
    assert case.expected == [1, 3]


def test_one_parameter_may_be_a_tuple() -> None:
    source = CaseSource(task="t", tests=("(1, 2)",), reference="sum(pair)", parameters=("pair",))

    assert source.draw(0)[0].args == ((1, 2),)


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

    # Each shipped task has 20 tests: 0.2 is four of them, and no trivial answer passes more than three on average.
    assert sum(shares) / len(shares) < 0.2


@pytest.mark.parametrize("name", ["sort_numbers", "max_subarray_sum"])
def test_shipped_task_has_many_different_tests(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, CodingTask)
    cases = task.cases.draw(0)
    lengths = {len(case.args[0]) for case in cases if isinstance(case.args[0], list)}

    assert len(cases) >= 16
    assert max(lengths) >= 100
    assert any(isinstance(xs := case.args[0], list) and len(set(xs)) < len(xs) for case in cases), "duplicates"
    assert any(isinstance(xs := case.args[0], list) and any(x < 0 for x in xs) for case in cases), "negatives"


def indented_blocks(document: str) -> list[str]:
    """The code blocks of a page, dedented."""
    import textwrap

    blocks: list[list[str]] = [[]]
    for line in document.splitlines():
        if line.startswith("    ") or (not line and blocks[-1]):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [textwrap.dedent("\n".join(block)).strip() for block in blocks if block]


@pytest.mark.parametrize(("marker", "name"), [("func_name: ", "count_vowels.yaml"), ("TASK = ", "add.py")])
def test_example_of_the_docs_loads(tmp_path: Path, marker: str, name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    [example] = [block for block in indented_blocks(page) if marker in block]

    assert load_task(write(tmp_path, example, name)).name == Path(name).stem


def test_a_task_written_in_python_fails_as_one_in_a_file_does() -> None:
    with pytest.raises(InputError, match=r"(?s)tests is missing.*unknown key referense; did you mean reference"):
        CodingTask(name="add", prompt="Add.", func_name="add", signature="def add(a, b):", referense="a + b")  # type: ignore[call-arg]
