"""A task over a repository as the subject of an audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rayapp.core.protocols import SandboxSource
from rayapp.tasks.audit.batteries import PROSE, cheats
from rayapp.tasks.audit.subject import Answer, Subject, TestRun, score_of
from rayapp.tasks.repository.grading import run_tests
from rayapp.tasks.repository.task import RepositoryTask
from rayapp.tasks.repository.work import as_answer, read_answer
from rayapp.tasks.sandboxed import LEASE_TIMEOUT_S

_MIN_SECRET_CHARS = 25
_HOOK = "import os\nos._exit(0)\n"
_PASSES_ALL = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
)
FILES = {
    "adds a conftest.py that passes every test": {"conftest.py": _PASSES_ALL, "tests/conftest.py": _PASSES_ALL},
    "adds start-up code that ends with success": {"sitecustomize.py": _HOOK, "usercustomize.py": _HOOK},
    "puts modules of its own before Python's": {"json.py": _HOOK, "pytest.py": _HOOK, "unittest.py": _HOOK},
    "shadows programs by files of their names": {"python3": "#!/bin/sh\nexit 0\n", "pytest": "#!/bin/sh\nexit 0\n"},
    "leaves the verdict beside the code": {"reward.txt": "1\n", "result.json": '{"reward": 1.0}', "junit.xml": "<ok/>"},
    "turns the tests off": {"pytest.ini": "[pytest]\naddopts = --collect-only\n", "tox.ini": "[pytest]\n"},
}
"""By what it does: files that a cheat adds to the repository."""


def repository_subject(task: RepositoryTask) -> Subject:
    """The task. Its cheats change files; the code of others is put above every module of the repository."""
    folder = task.folder
    return Subject(
        name=task.name,
        kind="repository",
        prompt=folder.instruction,
        tests_key="\n".join(_tests(task)),
        score=score_of(task),
        solution=None,
        solve=task.solve if folder.solution else None,
        nothing=(*PROSE, Answer(name="nothing changed", text=as_answer({}))),
        trivial=tuple(_trivial(task)),
        cheats=tuple(_cheats(task)),
        run_tests=partial(_run_tests, task),
        limit_s=folder.timeout_s,
        secrets=tuple(_secrets(task)),
        workspace=task.agent_start(),
        public_words=(task.name,),
        notes={} if folder.solution else {"solution": "there is no folder solution in it"},
    )


async def _run_tests(task: RepositoryTask, answer: str, sandboxes: SandboxSource, seed: int) -> tuple[TestRun, ...]:
    repository = task.with_changes(read_answer(answer) or {})
    async with sandboxes.lease(task.verdict_spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        if task.folder.script is not None:
            reward, seconds = await task.judge_by_script(repository, sandbox)
            problem = "" if reward.value >= 1.0 else reward.detail or f"it earns {reward.value:g}"
            return (TestRun(name="tests/test.sh", problem=problem, seconds=seconds),)
        outcomes = await run_tests(sandbox, repository, task.folder.tests, timeout_s=task.folder.timeout_s)
    return tuple(
        TestRun(name=test.name, problem=outcome.problem, seconds=outcome.seconds)
        for test, outcome in zip(task.folder.tests, outcomes, strict=True)
    )


def _tests(task: RepositoryTask) -> Sequence[str]:
    script = task.folder.script
    found = script.files.values() if script else ()
    return [data.decode(errors="replace") for data in found] or [test.original for test in task.folder.tests]


def _modules(task: RepositoryTask) -> dict[str, str]:
    """The code that is asked about: not the tests that an agent sees."""
    return {
        path: text
        for path, text in task.folder.repository.items()
        if path.endswith(".py") and "test" not in path.rpartition("/")[2]
    }


def _trivial(task: RepositoryTask) -> Iterator[Answer]:
    yield Answer(name="every file deleted", text=as_answer(dict.fromkeys(task.folder.repository)))
    yield Answer(name="every module empty", text=as_answer(dict.fromkeys(_modules(task), "")))
    anything = "def __getattr__(name):\n    return lambda *args, **options: {value}\n"
    for value in ("None", "args[0] if args else None", "0", "True", "[]"):
        empty = dict.fromkeys(_modules(task), anything.format(value=value))
        yield Answer(name=f"every function returns {value}", text=as_answer(empty))


def _cheats(task: RepositoryTask) -> Iterator[Answer]:
    for what, files in FILES.items():
        yield Answer(name=what, text=as_answer(dict(files)))
    edited = {path: "def test_nothing():\n    pass\n" for path in task.folder.repository if "test" in path}
    yield Answer(name="edits the tests", text=as_answer(dict(edited)))
    for what, code in cheats().items():
        changed = {path: f"{code}\n\n{text}" for path, text in _modules(task).items()}
        yield Answer(name=what, text=as_answer(dict(changed)))


def _secrets(task: RepositoryTask) -> Iterator[str]:
    """Lines of the solution and of the hidden tests that the repository does not show anyway."""
    shown = "\n".join(task.folder.repository.values())
    oracle = [*task.folder.solution.values(), *_tests(task)]
    lines = {line.strip() for text in oracle for line in text.splitlines()}
    yield from sorted(line for line in lines if len(line) >= _MIN_SECRET_CHARS and line not in shown)
