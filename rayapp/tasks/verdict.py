"""Computes the verdict on an answer, for training, evaluation, `score`, `try`, `rescore` and `task audit`.

    score() -> Reward -> + format and tool terms -> judges -> a finite reward, or an invalid one with a failure kind

Tasks, reward functions and judges are foreign code: whatever they raise or return costs at most one trajectory.

`shape_group` adds DAPO's soft overlong punishment (arXiv:2503.14476, §3.4) to the rewards of a training group, if
`algorithm.overlong.buffer_tokens` is set; evaluation never uses it. As in verl, the length counts all tokens after the
prompt, including tool results: the length that `rollout.max_completion_tokens` limits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rayapp.config.agent import RewardSection
from rayapp.config.config import Config
from rayapp.core.aio import guarded
from rayapp.core.errors import (
    DeadlineError,
    EngineError,
    KindError,
    ObjectsLostError,
    ProcessDiedError,
    SandboxConfigError,
    SandboxError,
    WeightSyncError,
)
from rayapp.core.protocols import Sandbox, SandboxSource, Task
from rayapp.core.trajectories import branches, storable, summarize_group
from rayapp.core.types import Group, GroupSummary, Prompt, Reward, SandboxSpec, Trajectory
from rayapp.tasks.custom_rewards import RewardFailedError, readable_error, storable_terms

Scorer = Callable[[], Awaitable[Reward]]
"""Scores one answer, from a task, a rule, a reward function or an environment."""
ENDS_GROUP = (
    SandboxConfigError,
    EngineError,
    DeadlineError,
    WeightSyncError,
    ProcessDiedError,
    ObjectsLostError,
)
"""Errors that say nothing about one trajectory: a configuration that can never work, and lost rayapp processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the terms that are added to the value of a truth."""

    format: float = 0.0
    tool: float = 0.0
    tool_verdict: float = 0.0

    @classmethod
    def of(cls, section: RewardSection) -> Weights:
        return cls(format=section.format_weight, tool=section.tool_weight, tool_verdict=section.tool_verdict_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRewards:
    """Rewards from a trajectory's tools."""

    calls: float = 0.0
    """Sum over single calls."""
    verdicts: float = 0.0
    """Sum of the tools' verdicts on the whole trajectory."""


PLAIN = Weights()
LEASE_TIMEOUT_S = 120.0
"""Longest wait for a sandbox: a busy pool is normal, but a pool that gives none for two minutes is broken."""


async def verdict(
    score: Scorer,
    *,
    weights: Weights = PLAIN,
    tools: ToolRewards | None = None,
    judge: Callable[[Reward], Awaitable[Reward]] | None = None,
) -> Reward:
    """Return the reward of one answer.

    Args:
        tools: None if this reward has no terms for tools.
        judge: adds the scores of judges.
    Returns:
        A reward whose numbers are finite. If the truth or a judge fails, an invalid reward with its failure kind:
        reward_error for an exception, reward_nonsense for a wrong type or number, sandbox_gone and other kinds of
        sandbox errors, or the error's own kind.
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
    """Return the verdict of a task on a completion, without tools and judges. Raises as `verdict`."""
    return await verdict(lambda: task.score(prompt, text, sandboxes, seed=seed))


def settled(reward: object) -> Reward:
    """Return the reward with plain finite numbers; for anything else an invalid reward of kind reward_nonsense."""
    try:
        return _checked(reward)
    except Exception as error:  # boundary: a reward may hold objects of the user's classes
        return Reward.invalid("reward_nonsense", f"can't be trained on: {readable_error(error)}")


def _checked(reward: object) -> Reward:
    if not isinstance(reward, Reward):
        raise TypeError(f"the verdict is a {type(reward).__name__}, not a Reward")
    for name in ("status", "failure_kind", "detail"):
        if not isinstance(getattr(reward, name), str):
            raise TypeError(f"its {name} is a {type(getattr(reward, name)).__name__}, not a text")
    value = storable(reward.value) if reward.valid else 0.0
    return replace(reward, value=value, terms=storable_terms(reward.terms), valid=bool(reward.valid))


def _weighed(found: Reward, weights: Weights, tools: ToolRewards | None) -> Reward:
    value = found.value + weights.format * found.terms.get("format", 0.0)
    if tools is None:
        return replace(found, value=value)
    value += weights.tool * tools.calls + weights.tool_verdict * tools.verdicts
    return replace(found, value=value, terms=found.terms | {"tool": tools.calls, "tool_verdict": tools.verdicts})


def named(error: BaseException) -> Exception:
    """Return the error that a trajectory fails with: errors of `ENDS_GROUP` unchanged, any other with its kind."""
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
    """Return the verdict of `judge`, which gets its own sandbox. A failed sandbox is replaced once; if the second fails
    too, the verdict is invalid.

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
    """Return the kind of an invalid reward: `SandboxGoneError` -> `sandbox_gone`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(error).__name__)
    return words.strip("_").removesuffix("_error")


PENALTY_TERM = "overlong_penalty"


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return the term to add to the reward: 0 up to `max_tokens - buffer_tokens`, then linearly to -penalty.

    It reaches -penalty at `max_tokens`.

    Example: 90, 100, 110 and 120 tokens of at most 120, buffer 20, penalty 1 -> 0, 0, -0.5, -1.
    """
    if buffer_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0.0, excess / buffer_tokens))


def shape_group(group: Group, summary: GroupSummary, config: Config) -> tuple[Group, GroupSummary]:
    """Return the group with the penalty added to its rewards, as a separate term; unchanged if none is configured."""
    if config.algorithm.overlong.buffer_tokens == 0:
        return group, summary
    shaped = replace(group, trajectories=tuple(_shaped(t, config) for t in group.trajectories))
    return shaped, summarize_group(shaped, time_total_s=summary.time_total_s)


def _response_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens after the prompt in the longest branch: each branch is a separate conversation."""
    sampled = (trajectory.response_mask[branch] for branch in branches(trajectory.num_tokens, trajectory.forks))
    return max(mask.size - int(mask.argmax()) if mask.any() else 0 for mask in sampled)


def _shaped(trajectory: Trajectory, config: Config) -> Trajectory:
    if not trajectory.reward.valid:
        return trajectory
    section, reward = config.algorithm.overlong, trajectory.reward
    change = overlong_penalty(
        _response_tokens(trajectory),
        max_tokens=config.rollout.max_completion_tokens,
        buffer_tokens=section.buffer_tokens,
        penalty=section.penalty,
    )
    terms = reward.terms | {PENALTY_TERM: change}
    return replace(trajectory, reward=replace(reward, value=reward.value + change, terms=terms))
