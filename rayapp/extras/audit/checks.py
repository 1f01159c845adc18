"""The checks of a task audit. Each check scores answers as training does, and reports findings.

If infrastructure fails, so that a verdict is missing, the report has a finding of the kind `verdict`: the failure says
nothing about the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from rayapp.core.aio import side_by_side
from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, UnusableWorkError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.extras.audit.subject import Attempt, Score, Subject

Check = Literal[
    "nothing", "solution", "flaky", "slow", "oracle", "trivial", "cheat", "verdict",
]  # fmt: skip
# Largest share of the tests' time limit that the solution's verdict takes: slower ones fail right answers on a busy
# machine.
SLOW_SHARE = 0.5
_TRIVIAL_SEEDS = range(3)
MAX_TRIVIAL = 0.5  # largest mean reward of an obvious guess
_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """A defect of a task that would mislead training."""

    task: str
    check: Check
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """Result of the audit of one task."""

    task: str
    kind: str
    nothing: float | None = None  # Highest reward of the no-op and empty answers.
    solution: str = ""  # Runs in which the solution earned 1 and all runs, e.g. `20/20`; `none` without a solution.
    trivial: float | None = None  # Highest mean reward of a trivial answer, over a few seeds.
    trivial_answer: str = ""
    cheats: str = ""  # Cheats that earned a reward and all cheats, e.g. `0/17`.
    findings: tuple[AuditFinding, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Audits one task.

    Args:
        runs: number of seeds with which the solution and the no-op answers are scored.
    """

    subject: Subject
    sandboxes: SandboxSource
    runs: int
    _findings: list[AuditFinding] = field(default_factory=list)

    async def report(self) -> TaskReport:
        """Run all checks. Raises SandboxConfigError, and InputError if the task can't be scored at all."""
        await self._solve()
        subject = self.subject
        nothing = await self._nothing()
        solution = await self._solution()
        share, guess = await self._trivial()
        cheats = await self._cheats(max(0.0, nothing))
        self._oracle()
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
            self._found("verdict", f"the solution could not be made: {type(error).__name__}: {error}")

    def _found(self, check: Check, detail: str) -> None:
        self._findings.append(AuditFinding(task=self.subject.name, check=check, detail=detail))

    async def _verdict(self, score: Score, answer: Attempt, seed: int = 0) -> Reward:
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
        answer = Attempt(name="the solution", text=self.subject.solution)
        rewards = [await self._verdict(self.subject.score, answer, seed) for seed in range(self.runs)]
        valid = [reward for reward in rewards if reward.valid]
        if failed := [reward for reward in valid if not _is_solved(reward)]:
            first = failed[0]
            detail = f"it earns {first.value:g} ({first.status}{': ' if first.detail else ''}{first.detail})"
            check: Check = "solution" if len(failed) == self.runs else "flaky"
            self._found(check, f"the solution fails {len(failed)} of {self.runs} times: {detail}")
        longest_s, limit_s = max((reward.time_score_s for reward in valid), default=0.0), self.subject.limit_s
        if limit_s and longest_s > limit_s * SLOW_SHARE:
            self._found("slow", f"the verdict on the solution takes {longest_s:.2f} of {limit_s:g} s")
        return f"{sum(map(_is_solved, rewards))}/{self.runs}"

    async def _trivial(self) -> tuple[float | None, str]:
        shares: dict[str, float] = {}
        for answer in self.subject.trivial:
            shares[answer.name] = await self._share(answer)
        guess = max(shares, key=lambda name: shares[name], default="")
        if guess and shares[guess] > MAX_TRIVIAL:
            self._found("trivial", f"`{guess}` earns {shares[guess]:.2f}, more than {MAX_TRIVIAL:g}")
        return shares.get(guess), guess if shares.get(guess) else ""

    async def _share(self, answer: Attempt) -> float:
        score = self.subject.score_share or self.subject.score
        rewards = [await self._verdict(score, answer, seed) for seed in _TRIVIAL_SEEDS]
        values = [max(0.0, reward.value) for reward in rewards if reward.valid]
        return sum(values) / len(values) if values else 0.0

    async def _cheats(self, floor: float) -> str:
        score, paid = self.subject.score_cheat or self.subject.score, 0
        for cheat in self.subject.cheats:
            # A cheat that ends its sandbox gets no verdict, and therefore no reward.
            reward = await score(cheat.text, self.sandboxes, 0)
            if reward.valid and (_is_solved(reward) or reward.value > floor + _TINY):
                paid += 1
                self._found("cheat", f"an answer that {cheat.name} earns {reward.value:g}")
        return f"{paid}/{len(self.subject.cheats)}" if self.subject.cheats else ""

    def _oracle(self) -> None:
        subject = self.subject
        workspace = subject.workspace.files if subject.workspace is not None else {}
        texts = {f"{path} in the agent's workspace": text for path, text in workspace.items()}
        for place, text in {"the prompt": subject.prompt, **texts}.items():
            if _holds(text, subject.secrets):
                self._found("oracle", f"{place} contains text of the solution or of the hidden tests")


def _holds(text: str, secrets: Sequence[str]) -> bool:
    """Return True if a text contains one of the secrets, ignoring white space."""
    bare = "".join(text.split())
    return any("".join(secret.split()) in bare for secret in secrets)


def _is_solved(reward: Reward) -> bool:
    return reward.valid and reward.terms.get("solved", reward.value) >= 1.0


async def audit(
    subjects: Sequence[Subject],
    sandboxes: SandboxSource,
    *,
    runs: int = 20,
    at_once: int = 4,
    progress: Callable[[int], None] = lambda num_done: None,
) -> list[TaskReport]:
    """Return a report per subject, in order. If a task can't be audited, its finding has the reason."""
    turns, done = asyncio.Semaphore(at_once), count(1)

    async def one(subject: Subject) -> TaskReport:
        report = await audited(subject)
        progress(next(done))
        return report

    async def audited(subject: Subject) -> TaskReport:
        if subject.cannot_run:
            return _unusable(subject, subject.cannot_run)
        async with turns:
            try:
                return await Auditor(subject=subject, sandboxes=sandboxes, runs=runs).report()
            except (SandboxConfigError, InputError) as error:
                return _unusable(subject, str(error))

    return await side_by_side(map(one, subjects))


def _unusable(subject: Subject, why: str) -> TaskReport:
    finding = AuditFinding(task=subject.name, check="verdict", detail=why)
    return TaskReport(task=subject.name, kind=subject.kind, findings=(finding,))
