"""Makes the subjects of an audit from the user's sources: coding and repository tasks, data files, benchmarks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rayapp.config.agent import BENCHMARK, is_data_file
from rayapp.config.sandbox import SandboxConfig
from rayapp.core import syntax
from rayapp.core.errors import InputError
from rayapp.core.protocols import AgentTask, SandboxSource, Task
from rayapp.core.types import Reward, SandboxSpec
from rayapp.sandbox.providers import why_no_workspace
from rayapp.sandbox.verdict.compare import same_value
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.audit.clock import CLOCK, a_year_later
from rayapp.tasks.audit.rows import benchmark_subjects, file_subjects
from rayapp.tasks.audit.subject import (
    PROSE,
    Attempt,
    Subject,
    TestResult,
    cheats,
    cheats_of_function,
    examples_in,
    fenced,
    guesses,
    nothing_of_function,
    score_of,
    trivial_of_function,
)
from rayapp.tasks.cases import MODULES, Case
from rayapp.tasks.code.benchmarks import load_benchmark
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.environments.files import EnvironmentTask
from rayapp.tasks.extraction import extract_code
from rayapp.tasks.generators import GeneratedTask
from rayapp.tasks.loading import load_source, load_task, single_tasks
from rayapp.tasks.repository.named_tests import NamedTests, why_failed
from rayapp.tasks.repository.scripts import SOLVE
from rayapp.tasks.repository.swe import PATCH
from rayapp.tasks.repository.task import RepositoryTask, as_answer, read_answer
from rayapp.tasks.verdict import LEASE_TIMEOUT_S

MIN_SECRET_CHARS = 12
"""Minimum length of a secret. Shorter texts of the solution or the tests may occur elsewhere by chance."""


def coding_subject(task: CodingTask) -> Subject:
    """Return a coding task as a subject.

    The solution is the first demonstration. Without demonstrations the solution is the reference, which may use banned
    names.
    """
    name, parameters = task.func_name, task.parameters
    free = task.model_copy(update={"banned_patterns": ()})
    with_reference = not task.demonstrations
    return Subject(
        name=task.name,
        kind="coding",
        prompt=task.prompt,
        tests_key=repr((task.tests, task.helpers, task.reference)),
        score=score_of(free if with_reference else task),
        solution=fenced(_reference(task) if with_reference else task.demonstrations[0]),
        nothing=nothing_of_function(name, parameters),
        trivial=trivial_of_function(name, parameters),
        cheats=cheats_of_function(name, parameters),
        score_cheat=score_of(free),
        run_tests=partial(_run_tests, task),
        run_later=partial(_run_tests, task, is_later=True),
        limit_s=task.timeout_s,
        is_limit_of_all=True,
        secrets=tuple(text for text in _oracle(task) if len(text) >= MIN_SECRET_CHARS),
        workspace=task.agent_start(),
        expression=task.reference.strip() if _is_telling(task.reference) else "",
        contradictions=tuple(_contradictions(task)),
        public_words=(f"def {name}",),
        notes=_notes(task),
    )


def _notes(task: CodingTask) -> dict[str, str]:
    if task.demonstrations:
        return {}
    notes = {"solution": "the reference, scored without banned names"}
    if not task.public_tests and not any(examples_in(task.prompt, task.func_name)):
        notes["reference"] = "not checked: there is no demonstration, no public test, no example in the prompt"
    return notes


def _contradictions(task: CodingTask) -> Iterator[str]:
    """Yield the examples of the prompt that the reference fails."""
    for told, case in examples_in(task.prompt, task.func_name):
        if len(case.args) == len(task.parameters):
            try:
                task.cases.check(case, f"the prompt's example, {told}")
            except InputError as error:
                yield str(error)


def _is_telling(expression: str) -> bool:
    """Return True if an expression computes a value. Such an expression does not occur in a prompt by chance."""
    tree = syntax.expression(expression)
    return any(isinstance(node, ast.BinOp | ast.Call | ast.BoolOp | ast.comprehension) for node in ast.walk(tree))


def _oracle(task: CodingTask) -> list[str]:
    texts = [task.reference, task.helpers, *task.tests, *task.demonstrations]
    return [text.strip() for text in texts]


def _reference(task: CodingTask) -> str:
    """Return the source of a function that computes the reference."""
    parameters = ", ".join(task.parameters)
    above = f"import {', '.join(MODULES)}\n{task.helpers}\n"
    return (
        f"{above}\ndef {task.func_name}({parameters}):\n    args = ({parameters},)\n    return (\n{task.reference}\n)"
    )


async def _run_tests(
    task: CodingTask, answer: str, sandboxes: SandboxSource, seed: int, *, is_later: bool = False
) -> tuple[TestResult, ...]:
    """Run each test in a separate execution."""
    code = extract_code(answer, task.func_name) or ""
    code = a_year_later(code) if is_later else code
    async with sandboxes.lease(SandboxSpec(packages=task.packages), timeout_s=LEASE_TIMEOUT_S) as sandbox:
        runs = []
        for number, case in enumerate(task.cases.draw(seed), start=1):
            report = await sandbox.call_function(code, task.func_name, [case.args], timeout_s=task.timeout_s)
            (call,) = report.calls
            problem = "" if call.ok and same_value(call.value, case.expected) else _problem(call.error, case)
            test = f"test {number}, {task.tests[number - 1]}, of seed {seed}"
            runs.append(TestResult(name=test, problem=problem, seconds=report.exec.duration_s))
    return tuple(runs)


def _problem(error: str, case: Case) -> str:
    return error or f"wrong value for {repr(case.args)[:100]}"


_MIN_SECRET_CHARS = 25
_MIN_PASSAGE_CHARS = 50
_HOOK = "import os\nos._exit(0)\n"
_PASSES_ALL = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
)
FILES = {
    "adds a conftest.py that passes every test": {"conftest.py": _PASSES_ALL, "tests/conftest.py": _PASSES_ALL},
    "adds start-up code that ends with success": {"sitecustomize.py": _HOOK, "usercustomize.py": _HOOK},
    "shadows Python's modules with its own": {"json.py": _HOOK, "pytest.py": _HOOK, "unittest.py": _HOOK},
    "shadows programs with files of the same names": {
        "python3": "#!/bin/sh\nexit 0\n",
        "pytest": "#!/bin/sh\nexit 0\n",
    },
    "leaves the verdict beside the code": {"reward.txt": "1\n", "result.json": '{"reward": 1.0}', "junit.xml": "<ok/>"},
    "turns the tests off": {"pytest.ini": "[pytest]\naddopts = --collect-only\n", "tox.ini": "[pytest]\n"},
}
"""Description of a cheat -> files that it adds to the repository."""


def repository_subject(task: RepositoryTask) -> Subject:
    """Return a repository task as a subject. Its cheats change files, or put code at the top of every module."""
    folder = task.folder
    return Subject(
        name=task.name,
        kind="repository",
        prompt=folder.instruction,
        tests_key="\n".join(_tests(task)),
        score=score_of(task),
        solution=None,
        solve=task.solve if folder.solution else None,
        nothing=(*PROSE, Attempt(name="nothing changed", text=as_answer({}))),
        trivial=tuple(_trivial(task)),
        cheats=tuple(_cheats(task)),
        run_tests=partial(_run_hidden_tests, task),
        run_later=None if folder.script else partial(_run_hidden_tests, task, is_later=True),
        run_reversed=partial(_run_hidden_tests, task, in_reverse=True) if folder.named else None,
        limit_s=folder.timeout_s,
        is_limit_of_all=True,
        secrets=tuple(_secrets(task)),
        public=_replaced(task),
        workspace=task.agent_start(),
        public_words=(task.name,),
        notes={} if folder.solution else {"solution": "the task has no folder `solution`"},
    )


async def _run_hidden_tests(
    task: RepositoryTask,
    answer: str,
    sandboxes: SandboxSource,
    seed: int,
    *,
    is_later: bool = False,
    in_reverse: bool = False,
) -> tuple[TestResult, ...]:
    if task.folder.named is not None:
        above = CLOCK if is_later else ""
        return await _run_named_tests(task, task.folder.named, answer, sandboxes, above=above, in_reverse=in_reverse)
    tests = task.folder.tests
    tests = tuple(replace(test, source=a_year_later(test.source)) for test in tests) if is_later else tests
    repository = task.with_changes(read_answer(answer) or {})
    async with sandboxes.lease(task.verdict_spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        if task.folder.script is not None:
            reward, seconds = await task.judge_by_script(repository, sandbox)
            problem = "" if reward.value >= 1.0 else reward.detail or f"it earns {reward.value:g}"
            return (TestResult(name="tests/test.sh", problem=problem, seconds=seconds),)
        outcomes = await task.run_tests(repository, sandbox, tests)
    return tuple(
        TestResult(name=test.name, problem=outcome.problem, seconds=outcome.seconds)
        for test, outcome in zip(tests, outcomes, strict=True)
    )


async def _run_named_tests(
    task: RepositoryTask, tests: NamedTests, answer: str, sandboxes: SandboxSource, *, above: str, in_reverse: bool
) -> tuple[TestResult, ...]:
    files = read_answer(answer) or {}
    async with sandboxes.lease(task.verdict_spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        run = await task.run_named_tests(tests, files, sandbox, above=above, in_reverse=in_reverse)
    if isinstance(run, Reward):
        return (TestResult(name="test_patch", problem=run.detail, seconds=0.0),)
    # Report one duration for all tests together, because the time limit is for all of them.
    seconds = run.seconds / len(tests.names)
    return tuple(TestResult(name=name, problem=why_failed(run, name), seconds=seconds) for name in tests.names)


def _tests(task: RepositoryTask) -> Sequence[str]:
    if task.folder.named is not None:
        return [_added(task.folder.named.patch)]
    script = task.folder.script
    found = script.files.values() if script else ()
    return [data.decode(errors="replace") for data in found] or [test.original for test in task.folder.tests]


def _added(patch: str) -> str:
    """Return the lines that a diff adds. A blank line replaces each run of lines that it doesn't add."""
    return "\n".join(line[1:] if line[:1] == "+" and line[:3] != "+++" else "" for line in patch.splitlines())


def _modules(task: RepositoryTask) -> dict[str, str]:
    """Return path -> source of the repository's Python modules, without the tests that an agent sees."""
    return {
        path: text
        for path, text in task.folder.repository.items()
        if path.endswith(".py") and "test" not in path.rpartition("/")[2]
    }


def _trivial(task: RepositoryTask) -> Iterator[Attempt]:
    yield Attempt(name="every file deleted", text=as_answer(dict.fromkeys(task.folder.repository)))
    yield Attempt(name="every module empty", text=as_answer(dict.fromkeys(_modules(task), "")))
    anything = "def __getattr__(name):\n    return lambda *args, **options: {value}\n"
    for value in ("None", "args[0] if args else None", "0", "True", "[]"):
        empty = dict.fromkeys(_modules(task), anything.format(value=value))
        yield Attempt(name=f"every function returns {value}", text=as_answer(empty))


def _cheats(task: RepositoryTask) -> Iterator[Attempt]:
    for what, files in FILES.items():
        yield Attempt(name=what, text=as_answer(dict(files)))
    edited = {path: "def test_nothing():\n    pass\n" for path in task.folder.repository if "test" in path}
    yield Attempt(name="edits the tests", text=as_answer(dict(edited)))
    for what, code in cheats().items():
        changed = {path: f"{code}\n\n{text}" for path, text in _modules(task).items()}
        yield Attempt(name=what, text=as_answer(dict(changed)))


def _secrets(task: RepositoryTask) -> Iterator[str]:
    """Yield the secret lines, passages and files of the solution and of the hidden tests.

    A line is secret if it is not in the repository. A passage or file is secret if it is not in the files that the
    solution replaces. A `solve.sh` does not name the files that it changes, so its passages are secret if they are not
    in the repository. Of a diff, only passages that it adds are secret.
    """
    base = task.folder.repository
    shown, tests = "\n".join(base.values()), _tests(task)
    if task.folder.named is not None:
        for text in (_added(task.folder.solution.get(PATCH, "")), *tests):
            yield from _passages(text, shown)
        return
    lines = {line.strip() for text in (*task.folder.solution.values(), *tests) for line in text.splitlines()}
    yield from sorted(line for line in lines if len(line) >= _MIN_SECRET_CHARS and line not in shown)
    replaced = "\n".join(_replaced(task))
    for path, text in task.folder.solution.items():
        if path == SOLVE:
            yield from _passages(text, shown)
        elif text != base.get(path):
            yield from (text, *_passages(text, replaced))
    for text in tests:
        yield from (text, *_passages(text, replaced))


def _replaced(task: RepositoryTask) -> tuple[str, ...]:
    """Return the texts of the repository's files that the solution replaces."""
    return tuple(task.folder.repository.get(path, "") for path in task.folder.solution)


def _passages(text: str, known: str) -> Iterator[str]:
    """Yield the passages of a text that are too long to occur elsewhere by chance. Blank lines, imports and lines of
    `known` separate passages.
    """
    known_lines = {line.strip() for line in known.splitlines()}
    run: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if bare and bare not in known_lines and not bare.startswith(("import ", "from ", "#")):
            run.append(line)
            continue
        if len("".join("".join(run).split())) >= _MIN_PASSAGE_CHARS:
            yield "\n".join(run)
        run = []


async def subjects_of(
    sources: Sequence[str],
    rewards: AnswerRewards,
    *,
    cache: Path,
    limit: int | None = None,
    sandboxes: SandboxConfig = SandboxConfig(),  # noqa: B008  (frozen)
) -> list[Subject]:
    """Return the tasks of the sources as subjects of an audit.

    Args:
        sources: names as in a run's `tasks`, or .parquet files of rows.
        rewards: settings for scoring data rows.
        cache: folder for copies of remote files.
        limit: number of rows to take from each file or benchmark.
        sandboxes: the providers of the sandboxes.
    Raises:
        InputError: a source can't be used.
        StorageError: a remote file can't be fetched.
    """
    found: list[Subject] = []
    for source in sources:
        if is_data_file(source):
            found += await file_subjects(source, rewards, cache=cache, limit=limit)
        elif source.startswith(BENCHMARK):
            found += await benchmark_subjects(load_benchmark(source)[:limit])
        else:
            found += _task_subjects(source, limit)
    return [_that_can_run(subject, sandboxes) for subject in found]


def _task_subjects(source: str, limit: int | None) -> list[Subject]:
    """Return the tasks of a source as subjects. If one task in a folder of many can't be loaded, the `cannot_run` of
    its subject has the reason.
    """
    singles = single_tasks(source)[:limit]
    if len(singles) < 2:
        return list(map(task_subject, load_source(source)[:limit]))
    found = []
    for single in singles:
        try:
            found.append(task_subject(load_task(single)))
        except InputError as error:
            found.append(_unusable(single, str(error)))
    return found


def _unusable(source: str, why: str) -> Subject:
    async def score(answer: str, sandboxes: SandboxSource, seed: int) -> Reward:
        return Reward.invalid("unusable", why)

    return Subject(
        name=Path(source.partition("?")[0]).name,
        kind="unusable",
        prompt=source,
        tests_key=source,
        score=score,
        solution=None,
        nothing=(),
        cannot_run=why,
    )


def _that_can_run(subject: Subject, sandboxes: SandboxConfig) -> Subject:
    """Return the subject. If no provider has sandboxes for its workspace, `cannot_run` has the reason."""
    why = why_no_workspace(sandboxes, subject.workspace) if subject.workspace is not None else ""
    return replace(subject, cannot_run=f"it {why}") if why else subject


def task_subject(task: Task) -> Subject:
    """Return a task of any class as a subject."""
    if isinstance(task, EnvironmentTask):
        task.refuse()
    if isinstance(task, RepositoryTask):
        return repository_subject(task)
    if isinstance(task, GeneratedTask):
        name = f"{task.name}[{task.index}]"
        return replace(_other_subject(task), name=name, trivial=guesses(task.prompt), workspace=None)
    return coding_subject(task) if isinstance(task, CodingTask) else _other_subject(task)


def _other_subject(task: Task) -> Subject:
    """Return a task of a user's class as a subject. Its attributes `solution` and `prompt` (strings) are optional."""

    solution = getattr(task, "solution", None)
    start = task.agent_start() if isinstance(task, AgentTask) else None
    told = " ".join(message["content"] for message in start.messages) if start else ""
    prompt = str(getattr(task, "prompt", "")) or told or task.name
    return Subject(
        name=task.name,
        kind=type(task).__name__,
        prompt=prompt,
        tests_key=prompt,
        score=score_of(task),
        solution=solution if isinstance(solution, str) else None,
        nothing=PROSE,
        workspace=start,
        notes={} if isinstance(solution, str) else {"solution": "the class has no attribute `solution`"},
    )
