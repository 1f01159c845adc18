"""Makes subjects of an audit from data rows."""

from __future__ import annotations

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
    trivial_of_function,
)
from rayapp.tasks.answers import Answer as ScoredAnswer
from rayapp.tasks.answers import AnswerRewards, score_answer
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
    by_share = replace(problem, rules=problem.rules.model_copy(update={"score": "share"}))
    subject = Subject(
        name=name,
        kind="code row",
        prompt=prompt,
        score=score,
        solution=await problem.fenced(reference) if reference else None,
        nothing=PROSE,
        score_share=_share_of(by_share),
        secrets=(reference.strip(),) if len(reference.strip()) >= MIN_SECRET_CHARS else (),
        notes={} if reference else {"solution": "the data set has no solution"},
    )
    if (language := tests.language) is not None:
        nothing = Attempt(name="a program that does nothing", text=await problem.fenced(language.nothing))
        why = f"there are no cheats and no trivial answers for {language.name}"
        return replace(subject, nothing=(*PROSE, nothing), notes={**subject.notes, "cheats": why})
    if not (function := tests.function):
        return replace(subject, nothing=NOTHING_OF_PROGRAM, trivial=TRIVIAL_OF_PROGRAM, cheats=cheats_of_program())
    return replace(
        subject,
        nothing=nothing_of_function(function, _ANY_INPUTS),
        trivial=trivial_of_function(function, _ANY_INPUTS),
        cheats=cheats_of_function(function, _ANY_INPUTS),
    )


def _share_of(problem: CodeProblem) -> Score:
    async def score(text: str, sandboxes: SandboxSource, seed: int) -> Reward:
        return await verdict(lambda: problem.score(text, sandboxes, seed=seed))

    return score
