"""What an audit has to know of a task, whatever kind it is: answers to try, how they are scored, what must stay secret.

Made by `coding.py`, `rows.py` and `repository.py`; read by `checks.py`. Data, but for `score_of`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, Reward

Score = Callable[[str, SandboxSource, int], Awaitable[Reward]]
"""From an answer and a seed, which draws the hidden tests, to what the task pays for it."""


def score_of(task: Task) -> Score:
    """The task's own score, of a text that follows no prompt."""
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))

    async def score(answer: str, sandboxes: SandboxSource, seed: int) -> Reward:
        return await task.score(prompt, answer, sandboxes, seed=seed)

    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """One hidden test on one answer."""

    __test__ = False  # no test of pytest's
    name: str
    """For a person: what the test is, without what it expects."""
    problem: str
    """Why it is failed; empty where it is passed."""
    seconds: float


RunTests = Callable[[str, SandboxSource, int], Awaitable[tuple[TestRun, ...]]]
"""As `Score`, test by test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to try."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One task under audit."""

    name: str
    kind: str
    prompt: str
    """What the policy is told, for the search for duplicates and for the oracle in it."""
    tests_key: str
    """Equal for tasks with the same hidden tests."""
    score: Score
    solution: str | None
    """An answer that must earn 1; None where the task comes with none."""
    nothing: tuple[Answer, ...]
    """No-op and empty answers: none may earn more than 0."""
    trivial: tuple[Answer, ...] = ()
    """Answers that anybody would guess, as `return xs`."""
    solve: Callable[[SandboxSource], Awaitable[str | None]] | None = None
    """Makes that answer, where it has to be made in a sandbox."""
    cheats: tuple[Answer, ...] = ()
    """Answers that try to be paid for nothing."""
    score_cheat: Score | None = None
    """In place of `score`, without rules that are about style (banned names): a cheat must fail by isolation."""
    score_share: Score | None = None
    """In place of `score` for trivial answers, where that is all or nothing: the share of tests."""
    run_tests: RunTests | None = None
    limit_s: float = 0.0
    """For one test, or for all of them together; 0 where there is none."""
    secrets: tuple[str, ...] = ()
    """Texts of the oracle, long enough not to be anywhere by chance."""
    workspace: AgentStart | None = None
    """What an agent finds, where one can play the task."""
    public_words: tuple[str, ...] = field(default=())
    """Words of the task that anybody knows: files that hold them are read in the search for the oracle."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """By check: what it can't say here, and why."""
