"""Makes subjects of an audit from data rows and benchmark problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.extras.audit.subject import (
    NOTHING_OF_PROGRAM,
    PROSE,
    TRIVIAL_OF_PROGRAM,
    Attempt,
    Score,
    Subject,
    cheats_of_function,
    cheats_of_program,
    nothing_of_function,
    score_of,
    trivial_of_function,
)
from rayapp.tasks.answers import Answer as ScoredAnswer
from rayapp.tasks.answers import AnswerRewards, score_answer
from rayapp.tasks.code.benchmarks import BenchmarkTask
from rayapp.tasks.code.scoring import CodeProblem
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.data.reading import ReadOptions, open_data
from rayapp.tasks.verdict import verdict

_ANY_INPUTS = ("*args",)
MIN_SECRET_CHARS = 40


async def file_subjects(file: str, rewards: AnswerRewards, *, cache: Path, limit: int | None) -> list[Subject]:
    """Return the rows of a data file as subjects. Raises InputError, and StorageError for a remote file."""
    data = await open_data((file,), ReadOptions(shuffle=False), cache=cache, truth_kind=rewards.truth_kind)
    rows = islice(data.rows(), len(data) if limit is None else min(limit, len(data)))
    return [await _row_subject(row, f"{Path(file).name}:{index}", rewards) for index, row in enumerate(rows)]


async def benchmark_subjects(tasks: Sequence[BenchmarkTask]) -> list[Subject]:
    """Return the problems of a benchmark as subjects."""
    return [
        await _code_subject(
            task.problem,
            f"{task.name}:{index}",
            prompt=task.prompt,
            reference=task.reference,
            score=score_of(task),
        )
        for index, task in enumerate(tasks)
    ]


async def _row_subject(row: DataRow, name: str, rewards: AnswerRewards) -> Subject:
    prompt = "\n".join(str(message["content"]) for message in row.messages)
    score = partial(_score_row, row, rewards)
    problem = rewards.code_problem(row.data_source, row.ground_truth)
    if problem is None:
        return Subject(
            name=name,
            kind="row",
            prompt=prompt,
            score=score,
            solution=None,
            nothing=PROSE,
        )
    reference = str(row.extra_info.get("reference") or "")
    return await _code_subject(problem, name, prompt=prompt, reference=reference, score=score)


async def _score_row(row: DataRow, rewards: AnswerRewards, text: str, sandboxes: SandboxSource, seed: int) -> Reward:
    return await score_answer(ScoredAnswer.of(row, text), rewards, sandboxes, seed=seed)


async def _code_subject(problem: CodeProblem, name: str, *, prompt: str, reference: str, score: Score) -> Subject:
    tests = await problem.tests()
    function, language = tests.function, tests.language
    solution = await problem.fenced(reference) if reference else None
    by_share = replace(problem, rules=problem.rules.model_copy(update={"score": "share"}))
    notes = {} if reference else {"solution": "the data set has no solution"}
    if language is not None:
        nothing = Attempt(name="a program that does nothing", text=await problem.fenced(language.nothing))
        return Subject(
            name=name,
            kind="code row",
            prompt=prompt,
            score=score,
            solution=solution,
            nothing=(*PROSE, nothing),
            score_share=_share_of(by_share),
            notes=notes | {"cheats": f"there are no cheats and no trivial answers for {language.name}"},
        )
    return Subject(
        name=name,
        kind="code row",
        prompt=prompt,
        score=score,
        solution=solution,
        nothing=nothing_of_function(function, _ANY_INPUTS) if function else NOTHING_OF_PROGRAM,
        trivial=trivial_of_function(function, _ANY_INPUTS) if function else TRIVIAL_OF_PROGRAM,
        cheats=cheats_of_function(function, _ANY_INPUTS) if function else cheats_of_program(),
        score_share=_share_of(by_share),
        secrets=(reference.strip(),) if len(reference.strip()) >= MIN_SECRET_CHARS else (),
        notes=notes,
    )


def _share_of(problem: CodeProblem) -> Score:
    async def score(text: str, sandboxes: SandboxSource, seed: int) -> Reward:
        return await verdict(lambda: problem.score(text, sandboxes, seed=seed))

    return score
