"""Computes the verdict on an answer, for training, evaluation, `score`, `try` and `task audit`.

    score() -> Reward -> + format and tool terms -> judges -> a finite reward, or an invalid one with a failure kind

Tasks, reward functions and judges may be users' code: if it raises or returns nonsense, only one trajectory fails.

`shape_group` adds DAPO's soft overlong punishment (arXiv:2503.14476, §3.4) to the rewards of a training group, if
`algorithm.overlong.buffer_tokens` is set. Evaluation never adds it. As in verl, the length is the number of all tokens
after the prompt, tool results included; `rollout.max_completion_tokens` limits this length.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayapp.config.agent import RewardSection
from rayapp.config.algorithm import OverlongSection
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
from rayapp.core.trajectories import branches, storable, storable_terms, summarize_group
from rayapp.core.types import Group, GroupSummary, Prompt, Reward, SandboxSpec, Trajectory

Scorer = Callable[[], Awaitable[Reward]]
"""Function that scores one answer. A task, a rule, a user's reward function or an environment supplies it."""
ENDS_GROUP = (
    SandboxConfigError,
    EngineError,
    DeadlineError,
    WeightSyncError,
    ProcessDiedError,
    ObjectsLostError,
)
"""Errors that concern more than one trajectory: a configuration that can never work, and lost processes of rayapp."""


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
    """Rewards that a trajectory's tools gave."""

    calls: float = 0.0
    """Sum of the rewards of single tool calls."""
    verdicts: float = 0.0
    """Sum of the rewards that tools gave for the whole trajectory."""


PLAIN = Weights()
LEASE_TIMEOUT_S = 120.0
"""Maximum wait for a sandbox, in seconds. A busy pool is normal, but a pool that has no free sandbox for two minutes is
broken."""


class Judging(Protocol):
    """The judges of one source: models that score answers (`rayapp.extras.judges`)."""

    @property
    def compares(self) -> bool:
        """True if a judge compares the responses of a group."""
        ...

    @property
    def compare_timeout_s(self) -> float:
        """Minimum time in seconds to reserve for comparisons within the group's deadline."""
        ...

    async def with_scores(self, prompt: Prompt, completion_text: str, verdict: Reward) -> Reward:
        """Return a response's reward with the judges' scores added."""
        ...

    async def with_comparisons(self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[Reward]) -> list[Reward]:
        """Return the rewards of a group's responses with the scores of comparing judges added."""
        ...


class Judges(Protocol):
    """All judges of one process."""

    async def check(self) -> None:
        """Ask each judge one question. Raises ConfigError: a judge gives no usable answer."""
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
    """Score one answer and return its reward.

    Args:
        score: function that scores the answer.
        tools: rewards that tools gave; with None, the reward has no terms for tools.
        judge: function that adds the scores of judges; None if there are no judges.
    Returns:
        A reward with finite numbers. If `score` or a judge fails, the reward is invalid. Its failure kind is
        reward_error for an exception, reward_nonsense for a wrong type or number, sandbox_gone or a similar kind for
        errors of a sandbox, or else the error's own kind.
    Raises:
        One of `ENDS_GROUP`.
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
    """Return the reward, with its numbers as plain floats. If a number is not finite, or the value is not a Reward,
    return an invalid reward of kind reward_nonsense.
    """
    try:
        return _checked(reward)
    except Exception as error:  # boundary: a reward may hold objects of the user's classes
        return Reward.invalid("reward_nonsense", f"the reward can't be used: {readable_error(error)}")


def _checked(reward: object) -> Reward:
    if not isinstance(reward, Reward):
        raise TypeError(f"the verdict is a {type(reward).__name__}, not a Reward")
    for name in ("status", "failure_kind", "detail"):
        if not isinstance(getattr(reward, name), str):
            raise TypeError(f"the Reward's {name} is a {type(getattr(reward, name)).__name__}, not a str")
    value = storable(reward.value) if reward.valid else 0.0
    return replace(reward, value=value, terms=storable_terms(reward.terms), valid=bool(reward.valid))


def _weighed(found: Reward, weights: Weights, tools: ToolRewards | None) -> Reward:
    value = found.value + weights.format * found.terms.get("format", 0.0)
    if tools is None:
        return replace(found, value=value)
    value += weights.tool * tools.calls
    return replace(found, value=value, terms=found.terms | {"tool": tools.calls, "tool_verdict": tools.verdicts})


def named(error: BaseException) -> Exception:
    """Return the error with which a trajectory fails. Errors in `ENDS_GROUP` are returned unchanged; any other error
    becomes an error with a failure kind.
    """
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
    """Call `judge` with a new sandbox and return its verdict. If the sandbox fails, `judge` is called once more with
    another sandbox. If that fails too, the verdict is invalid.

    Raises:
        SandboxConfigError: this configuration can never give a sandbox.
    """
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
    """Return an invalid reward's failure kind, made from the class of the error: `SandboxGoneError` ->
    `sandbox_gone`.
    """
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(error).__name__)
    return words.strip("_").removesuffix("_error")


PENALTY_TERM = "overlong_penalty"


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return the term to add to the reward. It is 0 up to `max_tokens - buffer_tokens`, and then decreases linearly.

    From `max_tokens` on, the term is -penalty.

    Example: with max_tokens 120, buffer_tokens 20 and penalty 1, the terms for 90, 100, 110 and 120 tokens are 0, 0,
        -0.5 and -1.
    """
    if buffer_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0.0, excess / buffer_tokens))


def shape_group(
    group: Group, summary: GroupSummary, overlong: OverlongSection, max_tokens: int
) -> tuple[Group, GroupSummary]:
    """Add the overlong penalty to the rewards of a group, and record it as a term. Return the group unchanged if the
    penalty is not configured.
    """
    if overlong.buffer_tokens == 0:
        return group, summary
    shaped = replace(group, trajectories=tuple(_shaped(t, overlong, max_tokens) for t in group.trajectories))
    return shaped, summarize_group(shaped, time_total_s=summary.time_total_s)


def _response_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens after the prompt, in the longest branch. Each branch is a separate conversation."""
    sampled = (trajectory.response_mask[branch] for branch in branches(trajectory.num_tokens, trajectory.forks))
    return max(mask.size - int(mask.argmax()) if mask.any() else 0 for mask in sampled)


def _shaped(trajectory: Trajectory, section: OverlongSection, max_tokens: int) -> Trajectory:
    if not trajectory.reward.valid:
        return trajectory
    reward = trajectory.reward
    change = overlong_penalty(
        _response_tokens(trajectory),
        max_tokens=max_tokens,
        buffer_tokens=section.buffer_tokens,
        penalty=section.penalty,
    )
    terms = reward.terms | {PENALTY_TERM: change}
    return replace(trajectory, reward=replace(reward, value=reward.value + change, terms=terms))
