"""Makes the subjects of an audit from the user's sources: coding and repository tasks, data files, own classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rayapp.config.agent import is_data_file
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import InputError
from rayapp.core.names import load_extra
from rayapp.core.protocols import AgentTask, EnvironmentRow, SandboxSource, Task
from rayapp.core.types import Reward
from rayapp.extras.audit.repositories import repository_subject
from rayapp.extras.audit.rows import file_subjects
from rayapp.extras.audit.subject import (
    PROSE,
    Subject,
    cheats_of_function,
    fenced,
    nothing_of_function,
    score_of,
    trivial_of_function,
)
from rayapp.sandbox.providers import why_no_workspace
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.cases import MODULES
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_source, load_task, single_tasks

MIN_SECRET_CHARS = 12  # Shorter texts of the solution or the tests may occur elsewhere by chance.


def coding_subject(task: CodingTask) -> Subject:
    """Return a coding task whose solution is the first demonstration, or the reference, which may use banned names."""
    name, parameters = task.func_name, task.parameters
    free = task.model_copy(update={"banned_patterns": ()})
    with_reference = not task.demonstrations
    return Subject(
        name=task.name,
        kind="coding",
        prompt=task.prompt,
        score=score_of(free if with_reference else task),
        solution=fenced(_reference(task) if with_reference else task.demonstrations[0]),
        nothing=nothing_of_function(name, parameters),
        trivial=trivial_of_function(name, parameters),
        cheats=cheats_of_function(name, parameters),
        score_cheat=score_of(free),
        limit_s=task.timeout_s,
        secrets=tuple(text for text in _oracle(task) if len(text) >= MIN_SECRET_CHARS),
        workspace=task.agent_start(),
        notes=_notes(task),
    )


def _notes(task: CodingTask) -> dict[str, str]:
    if task.demonstrations:
        return {}
    notes = {"solution": "the reference, scored without banned names"}
    if not task.public_tests:
        notes["reference"] = "not checked: there is no demonstration and no public test"
    return notes


def _oracle(task: CodingTask) -> list[str]:
    texts = [task.reference, task.helpers, *task.tests, *task.demonstrations]
    return [text.strip() for text in texts]


def _reference(task: CodingTask) -> str:
    parameters = ", ".join(task.parameters)
    above = f"import {', '.join(MODULES)}\n{task.helpers}\n"
    return (
        f"{above}\ndef {task.func_name}({parameters}):\n    args = ({parameters},)\n    return (\n{task.reference}\n)"
    )


async def subjects_of(
    sources: Sequence[str],
    rewards: AnswerRewards,
    *,
    cache: Path,
    limit: int | None = None,
    sandboxes: SandboxConfig = SandboxConfig(),  # noqa: B008  (frozen)
) -> list[Subject]:
    """Return the tasks of the sources as subjects.

    Args:
        sources: names as in a run's `tasks`, or .parquet files of rows.
        cache: folder for copies of remote files.
        limit: number of rows to take from each file, or of tasks from each source.
    Raises InputError and StorageError: a source can't be used.
    """
    found: list[Subject] = []
    for source in sources:
        if is_data_file(source):
            found += await file_subjects(source, rewards, cache=cache, limit=limit)
        else:
            found += _task_subjects(source, limit)
    return [_that_can_run(subject, sandboxes) for subject in found]


def _task_subjects(source: str, limit: int | None) -> list[Subject]:
    """Return the tasks of a source; if one of many in a folder can't be loaded, its `cannot_run` has the reason."""
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
        score=score,
        solution=None,
        nothing=(),
        cannot_run=why,
    )


def _that_can_run(subject: Subject, sandboxes: SandboxConfig) -> Subject:
    why = why_no_workspace(sandboxes, subject.workspace) if subject.workspace is not None else ""
    return replace(subject, cannot_run=f"it {why}") if why else subject


def task_subject(task: Task) -> Subject:
    if isinstance(task, EnvironmentRow):
        task.refuse()
    if isinstance(task, load_extra("repositories.task:RepositoryTask")):
        return repository_subject(task)
    return coding_subject(task) if isinstance(task, CodingTask) else _other_subject(task)


def _other_subject(task: Task) -> Subject:
    """Return a task of a user's class, whose attributes `solution` and `prompt` (strings) are optional."""

    solution = getattr(task, "solution", None)
    start = task.agent_start() if isinstance(task, AgentTask) else None
    told = " ".join(message["content"] for message in start.messages) if start else ""
    prompt = str(getattr(task, "prompt", "")) or told or task.name
    return Subject(
        name=task.name,
        kind=type(task).__name__,
        prompt=prompt,
        score=score_of(task),
        solution=solution if isinstance(solution, str) else None,
        nothing=PROSE,
        workspace=start,
        notes={} if isinstance(solution, str) else {"solution": "the class has no attribute `solution`"},
    )
