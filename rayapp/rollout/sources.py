"""Where a rollout worker's groups come from: coding tasks, or rows of data with the agent loop. One of the two per run.

    open_groups(config, sandboxes) -> TaskGroups | DataGroups     .assignment(request) -> what `run_group` plays

Called by the rollout worker once; what can't work (a file, a template, a tool's service) is told here, at the start.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rayapp.config.config import Config
from rayapp.core.protocols import SandboxSource
from rayapp.rollout.agent.loops import SINGLE_TURN_AGENT
from rayapp.rollout.data_groups import DataGroups
from rayapp.rollout.group import Assignment
from rayapp.rollout.order import GroupRequest
from rayapp.rollout.prompts import render_prompts
from rayapp.rollout.task_agents import TaskAgents
from rayapp.rollout.task_groups import TaskGroups
from rayapp.storage.models.prefetch import with_local_model
from rayapp.tasks.loading import load_tasks


class Groups(Protocol):
    """See the module."""

    @property
    def num_eval_prompts(self) -> int:
        """Prompts of one evaluation; a request of purpose `eval` names one by its group_id."""
        ...

    @property
    def num_train_prompts(self) -> int:
        """Prompts of one epoch of training."""
        ...

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        """What the trajectories of this group are to do.

        Args:
            seed: the run's: it orders the prompts, and draws what the trajectories are scored by.
        Raises:
            InputError: nothing plays the prompt.
        """
        ...

    async def close(self) -> None: ...


async def open_groups(config: Config, sandboxes: SandboxSource) -> Groups:
    """The groups of a run.

    Raises:
        UserError: a task, a file, the chat template or a tool can't be used.
    """
    config = await asyncio.to_thread(with_local_model, config)
    if config.uses_data:
        return await DataGroups.open(config, sandboxes)
    tasks = load_tasks(config.tasks)
    if config.default_agent == SINGLE_TURN_AGENT:
        return TaskGroups(list(zip(tasks, render_prompts(config, tasks), strict=True)), (), sandboxes)
    agents = TaskAgents.of(config, sandboxes)
    try:
        return TaskGroups(await agents.prompted(tasks), (), sandboxes, agents)
    except BaseException:
        await agents.close()
        raise
