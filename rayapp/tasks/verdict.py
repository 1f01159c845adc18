"""Computes the verdict on an answer, for training, evaluation, `score`, `try` and `task audit`.

    score() -> Reward -> + format and tool terms -> judges -> a finite reward, or an invalid one with a failure kind

Users' code that raises or returns nonsense fails only one trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayapp.config.agent import RewardSection
from rayapp.core.aio import guarded
from rayapp.core.errors import (
    DeadlineError,
    EngineError,
    KindError,
    ObjectsLostError,
    ProcessDiedError,
    RewardFailedError,
    SandboxConfigError,
    SandboxError,
    WeightSyncError,
    readable_error,
)
from rayapp.core.protocols import Sandbox, SandboxSource, Task
from rayapp.core.trajectories import storable, storable_terms
from rayapp.core.types import Prompt, Reward, SandboxSpec

# Function that scores one answer: of a task, a rule, a user's reward function or an environment.
Scorer = Callable[[], Awaitable[Reward]]
# Errors that concern more than one trajectory: a hopeless configuration, and lost processes of rayapp.
ENDS_GROUP = (
    SandboxConfigError,
    EngineError,
    DeadlineError,
    WeightSyncError,
    ProcessDiedError,
    ObjectsLostError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the terms that are added to a score."""

    format: float = 0.0
    tool: float = 0.0

    @classmethod
    def of(cls, section: RewardSection) -> Weights:
        return cls(format=section.format_weight, tool=section.tool_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRewards:
    calls: float = 0.0  # sum over single tool calls
    verdicts: float = 0.0  # sum over what tools gave for the whole trajectory


PLAIN = Weights()
LEASE_TIMEOUT_S = 120.0  # a busy pool is normal, but one without a free sandbox for two minutes is broken


class Judging(Protocol):
    """The judges of one source: models that score answers (`rayapp.extras.judges`)."""

    @property
    def compares(self) -> bool:
        """True if a judge compares the responses of a group."""
        ...

    @property
    def compare_timeout_s(self) -> float:
        """Seconds to reserve for comparisons within the group's deadline."""
        ...

    async def with_scores(self, prompt: Prompt, completion_text: str, verdict: Reward) -> Reward:
        """Return a response's reward with the judges' scores added."""
        ...

    async def with_comparisons(self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[Reward]) -> list[Reward]:
        """Return the rewards of a group's responses with the scores of comparing judges added."""
        ...


class Judges(Protocol):
    async def check(self) -> None:
        """Ask each judge one question. ConfigError: a judge gives no usable answer."""
        ...

    def of(self, reward: RewardSection) -> Judging:
        """Return the judges that one source uses."""
        ...

    async def close(self) -> None: ...


async def verdict(
    score: Scorer,
    *,
    weights: Weights = PLAIN,
    tools: ToolRewards | None = None,
    judge: Callable[[Reward], Awaitable[Reward]] | None = None,
) -> Reward:
    """Score one answer and return its reward, with finite numbers; `judge` adds the scores of judges.

    If `score` or a judge fails, the reward is invalid, of kind reward_error (an exception), reward_nonsense (a wrong
    type or number), sandbox_gone or the like, or the error's own. Only the errors of `ENDS_GROUP` are raised.
    """
    started = time.perf_counter()
    try:
        reward = settled(await guarded(score, named))
        if reward.valid:
            reward = settled(_weighed(reward, weights, tools))
        if judge is not None:
            asked = reward
            reward = settled(await guarded(lambda: judge(asked), named))
    except RewardFailedError as error:
        reward = Reward.invalid(error.kind, str(error))
    return replace(reward, time_score_s=time.perf_counter() - started)


async def task_verdict(task: Task, prompt: Prompt, text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
    """Return the verdict of a task on a completion, without terms of tools and judges. Raises one of `ENDS_GROUP`."""
    return await verdict(lambda: task.score(prompt, text, sandboxes, seed=seed))


def settled(reward: object) -> Reward:
    """Return the reward with its numbers as plain floats, or an invalid one of kind reward_nonsense."""
    try:
        return _checked(reward)
    except Exception as error:  # boundary: a reward may hold objects of the user's classes
        return Reward.invalid("reward_nonsense", f"the reward can't be used: {readable_error(error)}")


def _checked(reward: object) -> Reward:
    if not isinstance(reward, Reward):
        raise TypeError(f"the verdict is a {type(reward).__name__}, not a Reward")
    value = storable(reward.value) if reward.valid else 0.0
    return replace(reward, value=value, terms=storable_terms(reward.terms), valid=bool(reward.valid))


def _weighed(found: Reward, weights: Weights, tools: ToolRewards | None) -> Reward:
    value = found.value + weights.format * found.terms.get("format", 0.0)
    if tools is None:
        return replace(found, value=value)
    value += weights.tool * tools.calls
    return replace(found, value=value, terms=found.terms | {"tool": tools.calls, "tool_verdict": tools.verdicts})


def named(error: BaseException) -> Exception:
    """Return an error in `ENDS_GROUP` unchanged; any other becomes an error with a failure kind."""
    if isinstance(error, ENDS_GROUP):
        return error
    if isinstance(error, SandboxError):
        return RewardFailedError(str(error), failure_kind(error))
    kind = error.kind if isinstance(error, KindError) else "reward_error"
    told = readable_error(error)
    return RewardFailedError(told if isinstance(error, KindError) else f"{type(error).__name__}: {told}", kind)


async def judged_in_sandbox(
    sandboxes: SandboxSource, spec: SandboxSpec, judge: Callable[[Sandbox], Awaitable[Reward]]
) -> Reward:
    """Call `judge` with a new sandbox; if that fails, once more with another; then the verdict is invalid."""
    failed: SandboxError | None = None
    for _ in range(2):
        try:
            async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
                return await judge(sandbox)
        except SandboxConfigError:
            raise
        except SandboxError as error:
            failed = error
    assert failed is not None
    return Reward.invalid(failure_kind(failed), str(failed))


def failure_kind(error: SandboxError) -> str:
    """`SandboxGoneError` -> `sandbox_gone`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(error).__name__)
    return words.strip("_").removesuffix("_error")
