"""What an audit asks of one task. Each check scores answers as training would and says what it found.

Called by `audit.py`. A verdict that infrastructure failed to give is no evidence, so it is a finding of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rayapp.core.aio import side_by_side
from rayapp.core.errors import SandboxConfigError, SandboxError, UnusableWorkError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.tasks.audit.hunt import places_of, texts_in_sandbox
from rayapp.tasks.audit.subject import Answer, Score, Subject, TestRun

Check = Literal["nothing", "solution", "flaky", "slow", "oracle", "trivial", "cheat", "duplicate", "verdict"]
SLOW_SHARE = 0.5
"""Of its limit that a test of the solution may take: more, and a busy machine fails right answers."""
_TRIVIAL_SEEDS = range(3)
_MOST_FAILED_SEEDS = 3
"""Seeds of failed solutions that are run test by test, to name the tests."""
_MOST_NAMED = 3
_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a task that would train a policy wrongly."""

    task: str
    check: Check
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """What the audit of one task found."""

    task: str
    kind: str
    nothing: float | None = None
    """Most that a no-op or an empty answer earned."""
    solution: str = ""
    """How often the solution earned 1, e.g. `20/20`; why it was not tried where there is none."""
    trivial: float | None = None
    """Most that an answer earned which anybody would guess, the mean over a few seeds."""
    trivial_answer: str = ""
    cheats: str = ""
    """How many of the cheats were paid, e.g. `0/17`."""
    findings: tuple[Finding, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Audits one task.

    Args:
        runs: times that the solution and answers that do nothing are scored, each with another seed.
        max_trivial: more than this share is too much for an answer that anybody would guess.
    """

    subject: Subject
    sandboxes: SandboxSource
    runs: int
    max_trivial: float
    _findings: list[Finding] = field(default_factory=list)

    async def report(self) -> TaskReport:
        """All checks.

        Raises:
            SandboxConfigError: no sandbox can ever be had.
            InputError: the task can't be scored at all.
        """
        await self._solve()
        subject = self.subject
        nothing = await self._nothing()
        solution = await self._solution()
        await self._slow()
        share, guess = await self._trivial()
        cheats = await self._cheats(max(0.0, nothing))
        await self._oracle()
        return TaskReport(
            task=subject.name,
            kind=subject.kind,
            nothing=nothing,
            solution=solution,
            trivial=share,
            trivial_answer=guess,
            cheats=cheats,
            findings=tuple(self._findings),
            notes=dict(subject.notes),
        )

    async def _solve(self) -> None:
        if self.subject.solve is None:
            return
        try:
            self.subject = replace(self.subject, solution=await self.subject.solve(self.sandboxes))
        except SandboxConfigError:
            raise
        except (SandboxError, UnusableWorkError) as error:
            self._found("verdict", f"its solution could not be made: {type(error).__name__}: {error}")

    def _found(self, check: Check, detail: str) -> None:
        self._findings.append(Finding(task=self.subject.name, check=check, detail=detail))

    async def _verdict(self, score: Score, answer: Answer, seed: int = 0) -> Reward:
        reward = await score(answer.text, self.sandboxes, seed)
        if not reward.valid:
            self._found("verdict", f"{answer.name}: no verdict: {reward.failure_kind}: {reward.detail}")
        return reward

    async def _nothing(self) -> float:
        most = -1.0
        for answer in self.subject.nothing:
            rewards = [await self._verdict(self.subject.score, answer, seed) for seed in range(self.runs)]
            paid = [each.value for each in rewards if each.valid and (each.value > _TINY or _is_solved(each))]
            if paid:
                self._found("nothing", f"{answer.name} earns {max(paid):g}, {len(paid)} of {self.runs} times")
            most = max([most, *(reward.value for reward in rewards if reward.valid)])
        return most

    async def _solution(self) -> str:
        if self.subject.solution is None:
            return "none"
        answer = Answer(name="the solution", text=self.subject.solution)
        rewards = [await self._verdict(self.subject.score, answer, seed) for seed in range(self.runs)]
        failed = [seed for seed, reward in enumerate(rewards) if reward.valid and not _is_solved(reward)]
        if failed:
            first = rewards[failed[0]]
            times = f"{len(failed)} of {self.runs} times"
            detail = f"it earns {first.value:g} ({first.status}{': ' if first.detail else ''}{first.detail})"
            detail += await self._failed_tests(failed)
            self._found("solution" if len(failed) == self.runs else "flaky", f"the solution fails {times}: {detail}")
        return f"{sum(map(_is_solved, rewards))}/{self.runs}"

    async def _failed_tests(self, seeds: Sequence[int]) -> str:
        runs = [run for seed in seeds[:_MOST_FAILED_SEEDS] for run in await self._run_tests(seed) if run.problem]
        named = [f"{run.name}: {run.problem}" for run in runs[:_MOST_NAMED]]
        return f"; {'; '.join(named)}" if named else ""

    async def _run_tests(self, seed: int) -> tuple[TestRun, ...]:
        if self.subject.run_tests is None or self.subject.solution is None:
            return ()
        try:
            return await self.subject.run_tests(self.subject.solution, self.sandboxes, seed)
        except SandboxConfigError:
            raise
        except SandboxError as error:
            self._found("verdict", f"its tests, one by one: {type(error).__name__}: {error}")
            return ()

    async def _slow(self) -> None:
        limit_s = self.subject.limit_s * SLOW_SHARE
        for run in await self._run_tests(seed=0):
            if limit_s and run.seconds > limit_s:
                self._found("slow", f"{run.name}: the solution takes {run.seconds:.2f} of {2 * limit_s:g} s")

    async def _trivial(self) -> tuple[float | None, str]:
        shares: dict[str, float] = {}
        for answer in self.subject.trivial:
            shares[answer.name] = await self._share(answer)
        guess = max(shares, key=lambda name: shares[name], default="")
        if guess and shares[guess] > self.max_trivial:
            self._found("trivial", f"`{guess}` is worth {shares[guess]:.2f}, more than {self.max_trivial:g}")
        return shares.get(guess), guess if shares.get(guess) else ""

    async def _share(self, answer: Answer) -> float:
        score = self.subject.score_share or self.subject.score
        rewards = [await self._verdict(score, answer, seed) for seed in _TRIVIAL_SEEDS]
        values = [max(0.0, reward.value) for reward in rewards if reward.valid]
        return sum(values) / len(values) if values else 0.0

    async def _cheats(self, floor: float) -> str:
        score, paid = self.subject.score_cheat or self.subject.score, 0
        for cheat in self.subject.cheats:
            # What ends its sandbox gets no verdict, and so no pay.
            reward = await score(cheat.text, self.sandboxes, 0)
            if reward.valid and (_is_solved(reward) or reward.value > floor + _TINY):
                paid += 1
                self._found("cheat", f"an answer that {cheat.name} earns {reward.value:g}")
        return f"{paid}/{len(self.subject.cheats)}" if self.subject.cheats else ""

    async def _oracle(self) -> None:
        subject = self.subject
        if places_of(subject.secrets, {"prompt": subject.prompt}):
            self._found("oracle", "its prompt holds text of the solution or of the hidden tests")
        if subject.workspace is None:
            return
        try:
            texts = await texts_in_sandbox(subject.workspace, subject.public_words, self.sandboxes)
        except SandboxConfigError:
            raise
        except SandboxError as error:
            self._found("verdict", f"the search for the oracle: {type(error).__name__}: {error}")
            return
        for path in places_of(subject.secrets, texts):
            self._found("oracle", f"{path} in its sandbox holds text of the solution or of the hidden tests")


def _is_solved(reward: Reward) -> bool:
    return reward.valid and reward.terms.get("solved", reward.value) >= 1.0


def duplicates(subjects: Sequence[Subject]) -> list[Finding]:
    """Tasks that ask the same as an earlier one, white space and case aside."""
    found = _repeated(subjects, lambda subject: " ".join(subject.prompt.lower().split()))
    return [Finding(task=name, check="duplicate", detail=f"it asks the same as {first}") for name, first in found]


def shared_tests(subjects: Sequence[Subject]) -> dict[str, str]:
    """By task: the earlier one with the same hidden tests. No fault where one is held out on purpose."""
    return dict(_repeated(subjects, lambda subject: subject.tests_key))


def _repeated(subjects: Sequence[Subject], key: Callable[[Subject], str]) -> list[tuple[str, str]]:
    """Names of those whose key an earlier one has, each with that one's name."""
    first: dict[str, Subject] = {}
    pairs = ((subject, first.setdefault(key(subject), subject)) for subject in subjects)
    return [(subject.name, earlier.name) for subject, earlier in pairs if earlier is not subject]


async def audit(
    subjects: Sequence[Subject],
    sandboxes: SandboxSource,
    *,
    runs: int = 20,
    max_trivial: float = 0.5,
    at_once: int = 4,
) -> list[TaskReport]:
    """Reports in the order of the tasks.

    Raises:
        SandboxConfigError, InputError: as `Auditor.report`.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(subject: Subject) -> TaskReport:
        async with turns:
            return await Auditor(subject=subject, sandboxes=sandboxes, runs=runs, max_trivial=max_trivial).report()

    reports = await side_by_side(map(one, subjects))
    twice, alike = duplicates(subjects), shared_tests(subjects)
    return [_with_others(report, twice, alike) for report in reports]


def _with_others(report: TaskReport, twice: Sequence[Finding], alike: dict[str, str]) -> TaskReport:
    mine = tuple(finding for finding in twice if finding.task == report.task)
    notes = report.notes | ({"tests": f"the same as {alike[report.task]}'s"} if report.task in alike else {})
    return replace(report, findings=(*report.findings, *mine), notes=notes)
