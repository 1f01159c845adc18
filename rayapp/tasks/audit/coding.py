"""A coding task as the subject of an audit."""

from __future__ import annotations

from functools import partial

from rayapp.core.protocols import SandboxSource
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.verdict.compare import same_value
from rayapp.tasks.audit.batteries import cheats_of_function, fenced, nothing_of_function, trivial_of_function
from rayapp.tasks.audit.subject import Subject, TestRun, score_of
from rayapp.tasks.cases import MODULES, Case
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.extraction import extract_code
from rayapp.tasks.sandboxed import LEASE_TIMEOUT_S

MIN_SECRET_CHARS = 12
"""A shorter text of the oracle may be anywhere by chance."""


def coding_subject(task: CodingTask) -> Subject:
    """The task. Its solution is its first demonstration, or else its reference, which may use what the task bans."""
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
        limit_s=task.timeout_s,
        secrets=tuple(text for text in _oracle(task) if len(text) >= MIN_SECRET_CHARS),
        workspace=task.agent_start(),
        public_words=(name,),
        notes={"solution": "its reference, as if nothing were banned"} if with_reference else {},
    )


def _oracle(task: CodingTask) -> list[str]:
    texts = [task.reference, task.helpers, *task.tests, *task.demonstrations]
    return [text.strip() for text in texts]


def _reference(task: CodingTask) -> str:
    """The reference as source of the function."""
    parameters = ", ".join(task.parameters)
    above = f"import {', '.join(MODULES)}\n{task.helpers}\n"
    return (
        f"{above}\ndef {task.func_name}({parameters}):\n    args = ({parameters},)\n    return (\n{task.reference}\n)"
    )


async def _run_tests(task: CodingTask, answer: str, sandboxes: SandboxSource, seed: int) -> tuple[TestRun, ...]:
    """Each test in an execution of its own."""
    code = extract_code(answer, task.func_name) or ""
    async with sandboxes.lease(SandboxSpec(packages=task.packages), timeout_s=LEASE_TIMEOUT_S) as sandbox:
        runs = []
        for number, case in enumerate(task.cases.draw(seed), start=1):
            report = await sandbox.call_function(code, task.func_name, [case.args], timeout_s=task.timeout_s)
            (call,) = report.calls
            problem = "" if call.ok and same_value(call.value, case.expected) else _problem(call.error, case)
            test = f"test {number}, {task.tests[number - 1]}, of seed {seed}"
            runs.append(TestRun(name=test, problem=problem, seconds=report.exec.duration_s))
    return tuple(runs)


def _problem(error: str, case: Case) -> str:
    return error or f"wrong value for {repr(case.args)[:100]}"
