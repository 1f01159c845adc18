"""What an environment is to a trajectory: a scene that is set once, tools that change it, and the verdict at its end.

Stage (one for a source)  --scene()-->  Scene: reset -> observation;  call, call, …;  reward
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rayapp.rollout.agent.episode import Episode
from rayapp.tasks.environments.task import Columns, EnvironmentTask
from rayapp.tools.base import ToolBase, ToolContext, ToolOutput, ToolSchema
from rayapp.tools.calls import RawCall


class Scene(Protocol):
    """One trajectory's environment. What the policy did wrong is a ToolFailedError.

    Raises, from any method:
        ToolUnavailableError: it is lost.
    """

    async def reset(self, columns: Columns) -> str:
        """What it says first, behind the prompt; may be empty."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput: ...

    async def reward(self, task: EnvironmentTask, episode: Episode) -> float: ...


class Stage(Protocol):
    """Gives scenes."""

    async def open(self) -> Sequence[ToolSchema]:
        """The tools that the policy has, the same for all trajectories.

        Raises:
            ConfigError: it can't be used.
        """
        ...

    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """Raises ToolUnavailableError: none can be had."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTurn:
    """Reads a turn as one call of a tool, whose one argument it is. See `ToolCallParser`."""

    tool: str
    argument: str

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return (RawCall(name=self.tool, arguments=json.dumps({self.argument: text.strip()})),)

    def words(self, text: str) -> str:
        return ""


class SceneTool(ToolBase):
    """One of them. Its state is the trajectory's scene.

    Args:
        timeout_s: of the loop; the scene itself gives up before.
    """

    ends_episode = True  # what it does in the last turn counts, too

    def __init__(self, schema: ToolSchema, *, timeout_s: float) -> None:
        super().__init__({}, schema, ToolContext(environ={}))
        self.timeout_s = timeout_s

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return kwargs["scene"]

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        scene: Scene = state
        return await scene.call(self.schema.name, arguments)
