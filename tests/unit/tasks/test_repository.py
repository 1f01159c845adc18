"""Tasks over repositories: a folder in Harbor's layout, its hidden tests taken apart, what changed files are worth."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rayapp.cli.main import run
from rayapp.config.config import Config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Prompt, Reward
from rayapp.rollout.check import check_tasks
from rayapp.sandbox.pool.in_process import open_pool
from rayapp.tasks.loading import load_source, load_task, shipped_repositories
from rayapp.tasks.repository.hidden_tests import read_hidden_tests
from rayapp.tasks.repository.image import why_an_image
from rayapp.tasks.repository.task import RepositoryTask, load_repository
from rayapp.tasks.repository.work import as_answer, read_answer

LIBRARY = Path(__file__).parents[3] / "rayapp" / "tasks" / "library" / "repositories"
real = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[SandboxSource]:
    async with open_pool(SandboxConfig(max_leases=2), "test-repository") as (source, _):
        yield source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a shipped task, to be spoilt."""
    return Path(shutil.copytree(LIBRARY / "fix_median", tmp_path / "mine"))


async def score(task: RepositoryTask, answer: str, sandboxes: SandboxSource) -> Reward:
    return await task.score(Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32)), answer, sandboxes, seed=0)


def test_ten_tasks_ship_each_with_tests_and_a_solution() -> None:
    tasks = load_source("repositories")

    assert [task.name for task in tasks] == shipped_repositories()
    assert len(tasks) == 10
    for task in tasks:
        assert isinstance(task, RepositoryTask)
        assert len(task.folder.tests) >= 4
        assert task.solution is not None
        assert not task.folder.image


@real
@pytest.mark.parametrize("name", sorted(path.name for path in LIBRARY.iterdir()))
async def test_the_solution_earns_one_and_the_repository_as_it_is_nothing(sandboxes: SandboxSource, name: str) -> None:
    task = load_task(name)
    assert isinstance(task, RepositoryTask)
    assert task.solution is not None

    for answer, worth in ((task.solution, 1.0), (as_answer({}), 0.0)):
        reward = await score(task, answer, sandboxes)
        assert (reward.valid, reward.value, reward.terms["solved"]) == (True, worth, worth), reward


@pytest.mark.long  # two minutes: what no run needs to see again
def test_the_shipped_tasks_are_audited_twenty_times_without_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["task", "audit", "repositories"]) == 0
    assert "10 tasks audited, 0 with findings" in capsys.readouterr().out


FORGED = {
    "it returns what equals everything": (
        "class Same(float):\n    __eq__ = lambda *_: True\ndef median(v):\n    return Same()\nmean = median\n"
    ),
    "it ends with success": "import os\nos._exit(0)\n",
    "it answers in the harness's name": (
        "import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b'[\"value\",0,[true]]\\n')\n"
        "    except OSError:\n        pass\ndef median(v): return 0\nmean = median\n"
    ),
    "it fills the list of values": (
        "import sys\ndef median(v):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'values' in frame.f_locals: frame.f_locals['values'].append(True)\n        frame = frame.f_back\n"
        "    return True\nmean = median\n"
    ),
}


@real
@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
async def test_code_that_meets_no_expected_value_can_forge_none(sandboxes: SandboxSource, code: str) -> None:
    task = load_task("fix_median")
    assert isinstance(task, RepositoryTask)

    reward = await score(task, as_answer({"stats.py": code, "conftest.py": code}), sandboxes)

    assert (reward.value, reward.terms["solved"]) == (0.0, 0.0)
    assert reward.valid


@real
async def test_only_the_files_that_the_task_names_count(sandboxes: SandboxSource, folder: Path) -> None:
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("[verifier]", '[metadata.rayapp]\nanswer = ["other.py"]\n\n[verifier]'))
    task = load_repository(folder, "mine")
    assert task.solution is not None

    assert (await score(task, task.solution, sandboxes)).value == 0.0


@real
async def test_a_task_may_pay_the_share_of_its_tests(sandboxes: SandboxSource, folder: Path) -> None:
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("[verifier]", '[metadata.rayapp]\nscore = "share"\n\n[verifier]'))
    reward = await score(load_repository(folder, "mine"), as_answer({}), sandboxes)

    assert (reward.value, reward.terms["solved"]) == (pytest.approx(0.4), 0.0)
    assert reward.detail.startswith("test_hidden.py::test_an_even_number_of_values: wrong value")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I fixed it",
        "{}",
        '{"files": []}',
        '{"files": {"../a": ""}}',
        '{"files": {"/a": ""}}',
        '{"files": {"a": 1}}',
        "[",
    ],
)
def test_a_text_that_hands_nothing_in_is_no_answer(text: str) -> None:
    assert read_answer(text) is None


def spoil(part: str, text: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / part
        if text is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("instruction.md", " "), "instruction.md is empty"),
        (spoil("task.toml", None), "there is no task.toml in it"),
        (spoil("tests", None), "there is no tests in it"),
        (spoil("task.toml", "[verifier"), "task.toml is no TOML"),
        (spoil("task.toml", "[verifier]\ntimeout_sec = -1"), "task.toml: .*timeout_sec"),
        (spoil("task.toml", "[metadata.rayapp]\nscores = 1"), "task.toml: .*scores"),
        (spoil("tests/test_hidden.py", "def check(): ..."), "it has no hidden tests"),
        (spoil("tests/test_hidden.py", "def test_x(:"), "tests/test_hidden.py is no Python"),
        (
            spoil("tests/test_hidden.py", "def test_x():\n    for a in [1]:\n        assert a == 1"),
            "line 3: its expected",
        ),
        (spoil("tests/test_hidden.py", "def test_x():\n    assert f(1)"), "line 2: an assert compares with a literal"),
        (spoil("tests/test_hidden.py", "def test_x(tmp_path):\n    assert f(1) == 2"), "line 1: marks, fixtures"),
        (spoil("tests/test_hidden.py", "def test_x():\n    f(1)"), "line 1: the test asserts nothing"),
        (
            spoil("tests/test_hidden.py", "def test_x():\n    assert f(1) == g(2)"),
            "one side of an assert",
        ),
    ],
)
def test_a_folder_that_can_not_be_used_is_refused_by_name(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)

    with pytest.raises(InputError, match=message) as told:
        load_repository(folder, "mine")
    assert str(told.value).startswith("task mine: ")


def test_a_test_script_is_refused_since_the_code_it_judges_could_forge_it(folder: Path) -> None:
    (folder / "tests" / "test_hidden.py").rename(folder / "tests" / "test.sh")

    with pytest.raises(InputError, match=r"tests/test.sh would be graded beside the code that it judges"):
        load_repository(folder, "mine")


def test_no_expected_value_is_in_what_runs_inside() -> None:
    (test,) = read_hidden_tests(
        "test_x.py",
        "import pytest\nfrom m import f\n\ndef test_all():\n    x = f(1)\n"
        "    assert x == 4711\n    assert 'wanted' in f(2)\n"
        "    assert f(3) == pytest.approx(0.123)\n    with pytest.raises(KeyError, match='missing'):\n        f(4)\n",
    )

    assert not [
        secret for secret in ("4711", "wanted", "0.123", "KeyError", "missing", "pytest") if secret in test.source
    ]
    assert test.is_passed([4711, "is wanted", 0.1230000001, [["KeyError", "LookupError"], "it is missing"]])
    assert not test.is_passed([4711, "is wanted", 0.124, [["KeyError"], "missing"]])
    assert not test.is_passed([4711, "is wanted", 0.123, [[], ""]])
    for forged in ([True, True, True, True], [], None, [4711], {"a": 1}, [4711, None, "x", 1]):
        assert not test.is_passed(forged)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM python:3-slim\nWORKDIR /app\nCOPY . /app\nENV A=1\n", ""),
        ("# any\nFROM ubuntu:24.04\nCOPY . .\n", ""),
        ("", ""),
        ("FROM python:3-slim\nRUN apt-get update && \\\n    apt-get install -y gcc\n", "line 2, `RUN apt-get update"),
        ("FROM node:20\n", "line 1, `FROM node:20`: it is no plain Python"),
        ("FROM python:2.7\n", "line 1, `FROM python:2.7`: this node has Python 3"),
        ("FROM debian\nCOPY --from=build /x /y\n", "line 2, `COPY --from=build /x /y`"),
    ],
)
def test_a_dockerfile_is_honoured_without_building_or_told_by_its_line(dockerfile: str, why: str) -> None:
    found = why_an_image(dockerfile)

    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_task_that_needs_an_image_is_refused_where_no_provider_has_it(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM python:3-slim\nRUN pip install numpy\n")

    def config(*providers: dict[str, object]) -> Config:
        agent = {"task_agent": "tool_agent"}
        return Config.model_validate({"tasks": [str(folder)], "agent": agent, "sandbox": {"providers": providers}})

    with pytest.raises(
        ConfigError, match="task mine needs sandboxes of mine, and the local provider builds and runs no im"
    ):
        check_tasks(config({"type": "local"}), training=True)
    with pytest.raises(
        ConfigError, match=r"provider e2b has templates of its own: build one, name it in images: \{mine"
    ):
        check_tasks(config({"type": "e2b"}), training=True)
    check_tasks(
        config({"type": "e2b", "images": {"mine": "my-template"}, "max_sandboxes": 64}),
        training=True,
        has_tokenizer=False,
    )


def test_one_answer_can_not_play_a_repository(folder: Path) -> None:
    task = load_repository(folder, "mine")

    with pytest.raises(InputError, match="task_agent to tool_agent"):
        task.render(None)  # type: ignore[arg-type]


def test_a_folder_of_task_folders_is_all_of_them(tmp_path: Path) -> None:
    for name in ("fix_median", "add_to_roman"):
        shutil.copytree(LIBRARY / name, tmp_path / name)

    assert [task.name for task in load_source(str(tmp_path))] == ["add_to_roman", "fix_median"]
    with pytest.raises(InputError, match="is no task, and holds none"):
        load_source(str(tmp_path / "fix_median" / "tests"))
