"""From what a user names to the subjects of an audit: tasks, files of rows, benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rayapp.core.protocols import AgentTask, Task
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.audit.batteries import PROSE, guesses
from rayapp.tasks.audit.coding import coding_subject
from rayapp.tasks.audit.repository import repository_subject
from rayapp.tasks.audit.rows import benchmark_subjects, file_subjects
from rayapp.tasks.audit.subject import Subject, score_of
from rayapp.tasks.code.benchmarks import PREFIX, load_benchmark
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.generators import GeneratedTask
from rayapp.tasks.loading import load_source
from rayapp.tasks.repository.task import RepositoryTask


async def subjects_of(
    sources: Sequence[str], rewards: AnswerRewards, *, cache: Path, limit: int | None = None
) -> list[Subject]:
    """What is audited.

    Args:
        sources: as in a run's `tasks`, and .parquet files of rows.
        rewards: how rows are scored.
        cache: folder for copies of remote files.
        limit: rows taken of each file or benchmark.
    Raises:
        InputError: one of them can't be used.
        StorageError: a remote file can't be fetched.
    """
    found: list[Subject] = []
    for source in sources:
        if source.endswith(".parquet"):
            found += await file_subjects(source, rewards, cache=cache, limit=limit)
        elif source.startswith(PREFIX):
            found += await benchmark_subjects(load_benchmark(source)[:limit])
        else:
            found += map(task_subject, load_source(source)[:limit])
    return found


def task_subject(task: Task) -> Subject:
    """A task, by its class."""
    if isinstance(task, RepositoryTask):
        return repository_subject(task)
    if isinstance(task, GeneratedTask):
        name = f"{task.name}[{task.index}]"
        return replace(_other_subject(task), name=name, trivial=guesses(task.prompt), workspace=None)
    return coding_subject(task) if isinstance(task, CodingTask) else _other_subject(task)


def _other_subject(task: Task) -> Subject:
    """A task of another class. `solution` and `prompt`, texts, are attributes that it may have."""

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
