"""One group from prompt to verdicts: G completions sampled side by side, each scored the moment it ends.

Called by the rollout worker; needs no Ray. A trajectory that fails for reasons that are not the policy's is data with
an ERROR_* status, never an exception, so one bad sandbox can't take its group along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayapp.core.errors import EngineDeadError, EngineError, StaleVersionError, first_error
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.summaries import summarize_group
from rayapp.core.types import (
    Completion,
    Group,
    GroupSummary,
    Prompt,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
    TurnRecord,
)
from rayapp.rollout.order import GroupRequest, sampling_of, scoring_seed


async def run_group(
    request: GroupRequest,
    *,
    task: Task,
    prompt: Prompt,
    engine: RolloutEngine,
    sandboxes: SandboxSource,
    sampling: SamplingParams,
    group_size: int,
    seed: int,
    deadline_s: float,
) -> tuple[Group, GroupSummary]:
    """Sample and score `group_size` trajectories of one prompt.

    Args:
        sampling: for every trajectory; its seed and stop texts are filled in here.
        seed: the run's seed.
        deadline_s: trajectories not finished by then are recorded as failed.
    Raises:
        StaleVersionError, EngineDeadError, WeightSyncError: the server can't serve the version asked for; nothing of
            the group is kept.
        SandboxConfigError: no sandbox can ever be had with this configuration.
    """
    started = time.monotonic()
    sampling = replace(sampling, stop=prompt.stop)

    async def one(index: int) -> Trajectory:
        own = sampling_of(request, sampling, index, group_size=group_size, seed=seed)
        request_id = f"{request.purpose}={request.group_id}/trajectory={index}"
        started_at_s = time.time()
        try:
            async with asyncio.timeout(deadline_s):
                completion = await engine.generate(request_id, prompt.token_ids.tolist(), own)
                reward = await task.score(
                    prompt, completion.text, sandboxes, seed=scoring_seed(request.group_id, seed=seed)
                )
        except TimeoutError:
            return late_trajectory(prompt, request, deadline_s)
        except (StaleVersionError, EngineDeadError):
            # Not this trajectory's trouble but its server's: the whole group is sampled again on one that works.
            raise
        except EngineError as error:
            return failed_trajectory(prompt, request, "engine", str(error))
        return _trajectory(prompt, completion, reward, started_at_s)

    trajectories = await gather_trajectories([one(index) for index in range(group_size)])
    group = Group(group_id=request.group_id, prompt=prompt, trajectories=tuple(trajectories))
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


async def gather_trajectories(coroutines: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """All of them, side by side; the first error ends the others and comes out as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [task.result() for task in running]


def _trajectory(prompt: Prompt, completion: Completion, reward: Reward, started_at_s: float) -> Trajectory:
    num_prompt, num_response = prompt.token_ids.size, completion.token_ids.size
    turn = TurnRecord(
        start=num_prompt,
        end=num_prompt + num_response,
        text=completion.text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
        started_at_s=started_at_s,
        queued_s=completion.time_queued_s,
        generate_s=completion.time_generate_s,
        version_spans=completion.version_spans,
    )
    status = RolloutStatus.TRUNCATED if completion.finish_reason == "length" else RolloutStatus.COMPLETED
    if not reward.valid:
        status = RolloutStatus.ERROR_SANDBOX
    return Trajectory(
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
        response_mask=np.concatenate([np.zeros(num_prompt, np.bool_), np.ones(num_response, np.bool_)]),
        rollout_log_probs=np.concatenate([np.zeros(num_prompt, np.float32), completion.log_probs]).astype(np.float32),
        completion_text=completion.text,
        reward=reward,
        status=status,
        min_policy_version=turn.policy_version,
        max_policy_version=turn.max_policy_version,
        time_generate_s=completion.time_queued_s + completion.time_generate_s,
        turns=(turn,),
    )


def late_trajectory(prompt: Prompt, request: GroupRequest, deadline_s: float) -> Trajectory:
    """A trajectory that its group's deadline ended."""
    detail = f"not finished after rollout.group_deadline_s = {deadline_s:g}"
    return failed_trajectory(prompt, request, "deadline", detail)


def failed_trajectory(prompt: Prompt, request: GroupRequest, kind: str, detail: str) -> Trajectory:
    """A trajectory with no response: it keeps its place in the group and carries no signal."""
    return Trajectory(
        token_ids=prompt.token_ids,
        response_mask=np.zeros(prompt.token_ids.size, np.bool_),
        rollout_log_probs=np.zeros(prompt.token_ids.size, np.float32),
        completion_text="",
        reward=Reward.invalid(kind, detail),
        status=RolloutStatus.ERROR_ENGINE,
        min_policy_version=request.policy_version,
        max_policy_version=request.policy_version,
    )
