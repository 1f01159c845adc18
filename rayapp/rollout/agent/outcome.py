"""Numbers about a trajectory that metrics count and rewards take, and its verdict. Pure; called by the groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rayapp.core.types import Reward, RolloutStatus, Trajectory
from rayapp.tasks.verdict import ToolRewards


def with_terms(reward: Reward, played: Trajectory) -> Reward:
    """Return the reward with `play_terms` added."""
    return replace(reward, terms={**reward.terms, **play_terms(played)})


def tool_rewards(played: Trajectory) -> ToolRewards:
    """Return the sums of the rewards that the trajectory's tools gave."""
    calls = sum(call.reward for call in played.calls if call.reward is not None)
    return ToolRewards(calls=calls, verdicts=sum(played.tool_rewards.values()))


def with_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Return the trajectory with this reward; an invalid reward makes a trajectory that had not failed a failed one."""
    status = trajectory.status
    if not reward.valid and not status.is_error:
        is_own = reward.failure_kind.startswith(("reward_", "judge_"))
        status = RolloutStatus.ERROR_REWARD if is_own else RolloutStatus.ERROR_SANDBOX
    return replace(trajectory, reward=reward, status=status)


def play_terms(played: Trajectory) -> dict[str, float]:
    """Return numbers about the play that are recorded beside the reward's own terms.

    Example: {"num_turns": 3, "tool/calls": 2, "tool/failed": 1, "tool/failed/timeout": 1, "tool/time_s": 0.4,
    "tool/wait_s": 0, "tool/reward/calc_gsm8k_reward": 1.0, "tool/step_reward": -0.05}.
    """
    calls = played.calls
    failures = Counter(call.failure for call in calls if call.failure)
    step_rewards = [call.reward for call in calls if call.reward is not None]
    terms: dict[str, float] = {
        "num_turns": float(len(played.turns)),
        "tool/calls": float(len(calls)),
        "tool/failed": float(sum(failures.values())),
        "tool/time_s": sum(call.duration_s - call.waited_s for call in calls),
        "tool/wait_s": sum(call.waited_s for call in calls),
    }
    terms |= {f"tool/failed/{kind}": float(count) for kind, count in failures.items()}
    terms |= {f"agent/{name}": value for name, value in played.agent_counts.items()}
    terms |= {f"tool/reward/{name}": value for name, value in played.tool_rewards.items()}
    if step_rewards:
        terms["tool/step_reward"] = float(sum(step_rewards))
    return terms
