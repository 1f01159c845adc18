"""An episode and its verdict as what training takes, and the numbers that metrics count. Pure; called by the groups.

Reward of the last turn --with_terms(episode)--> Reward --.
Episode --------------------------------------------------+--> Trajectory
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rayapp.core.types import Reward, RolloutStatus, Trajectory
from rayapp.rollout.recorder import Episode
from rayapp.tasks.verdict import ToolRewards

_FAILURE_KINDS = {
    RolloutStatus.ERROR_TOOL: "tool_unavailable",
    RolloutStatus.ERROR_SANDBOX: "sandbox",
    RolloutStatus.ERROR_TASK: "task",
}


def failure_of(episode: Episode) -> Reward:
    """Return the invalid reward of an episode that failed."""
    return Reward.invalid(_FAILURE_KINDS.get(episode.status, "unscored"), episode.failure)


def with_terms(reward: Reward, episode: Episode) -> Reward:
    """Return the reward with `episode_terms` added."""
    return replace(reward, terms={**reward.terms, **episode_terms(episode)})


def tool_rewards(episode: Episode) -> ToolRewards:
    """Return the sums of the rewards that the episode's tools gave."""
    calls = sum(call.reward for call in episode.calls if call.reward is not None)
    return ToolRewards(calls=calls, verdicts=sum(episode.tool_rewards.values()))


def to_trajectory(episode: Episode, reward: Reward, *, asked_version: int = 0) -> Trajectory:
    """Return the trajectory of an episode.

    Args:
        asked_version: policy version of an episode that ended before the policy spoke.
    """
    oldest = [turn.policy_version for turn in episode.turns] or [asked_version]
    newest = [turn.max_policy_version for turn in episode.turns] or [asked_version]
    trajectory = Trajectory(
        token_ids=episode.token_ids,
        response_mask=episode.response_mask,
        rollout_log_probs=episode.rollout_log_probs,
        completion_text=episode.final_text,
        reward=reward,
        status=episode.status,
        min_policy_version=min(oldest),
        max_policy_version=max(newest),
        num_turns=len(episode.turns),
        turns=episode.turns,
        forks=episode.forks,
        agent_output=episode.agent_output,
        routed_experts=episode.routed_experts,
        time_generate_s=sum(turn.queued_s + turn.generate_s for turn in episode.turns),
    )
    return with_reward(trajectory, reward)


def with_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Return the trajectory with this reward; an invalid reward makes a trajectory that had not failed a failed one."""
    status = trajectory.status
    if not reward.valid and not status.is_error:
        is_own = reward.failure_kind.startswith(("reward_", "judge_"))
        status = RolloutStatus.ERROR_REWARD if is_own else RolloutStatus.ERROR_SANDBOX
    return replace(trajectory, reward=reward, status=status)


def episode_terms(episode: Episode) -> dict[str, float]:
    """Return numbers about the episode that are recorded beside the reward's own terms.

    Example: {"num_turns": 3, "tool/calls": 2, "tool/failed": 1, "tool/failed/timeout": 1, "tool/time_s": 0.4,
    "tool/wait_s": 0, "tool/reward/calc_gsm8k_reward": 1.0, "tool/step_reward": -0.05}.
    """
    calls = episode.calls
    failures = Counter(call.failure for call in calls if call.failure)
    step_rewards = [call.reward for call in calls if call.reward is not None]
    terms: dict[str, float] = {
        "num_turns": float(len(episode.turns)),
        "tool/calls": float(len(calls)),
        "tool/failed": float(sum(failures.values())),
        "tool/time_s": sum(call.duration_s - call.waited_s for call in calls),
        "tool/wait_s": sum(call.waited_s for call in calls),
    }
    terms |= {f"tool/failed/{kind}": float(count) for kind, count in failures.items()}
    terms |= {f"tool/reward/{name}": value for name, value in episode.tool_rewards.items()}
    if step_rewards:
        terms["tool/step_reward"] = float(sum(step_rewards))
    return terms
