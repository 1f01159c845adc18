"""The interface of tools: a JSON schema that the policy reads, and four calls per trajectory. Called by the agent loop.

    create(kwargs of the data row) -> state -> execute(state, arguments) ... -> reward(state) -> release(state)

A tool object serves many trajectories at once; what belongs to one trajectory lives in its state. To add a tool, write
one file with one class (see docs/tools.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayapp.core.errors import ConfigError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import ExecRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """Name, description and arguments of a tool, as the policy is told them.

    Example: `ToolSchema(name="add", description="Adds two numbers.", parameters={"type": "object", "properties":
    {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]})`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments; calls that don't fit it never reach the tool."""

    @classmethod
    def from_openai(cls, schema: Mapping[str, Any], *, where: str) -> ToolSchema:
        """Read OpenAI's form, `{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}`.

        Raises:
            ConfigError: it has no such form.
        """
        function = schema.get("function")
        if schema.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise ConfigError(f"{where}: a tool_schema needs type: function and function: {{name: …}}, got {schema!r}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(name=str(function["name"]), description=str(function.get("description", "")), parameters=parameters)

    def as_openai(self) -> dict[str, Any]:
        """The form that chat templates and tool parsers read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """The result of one call."""

    text: str
    """What the policy reads; the loop cuts it to length."""
    reward: float | None = None
    """The tool's own verdict on this call, recorded as an intermediate reward."""
    waited_s: float = 0.0
    """Seconds before the call could start (rate limit, free sandbox): not the tool's own time."""
    execs: tuple[ExecRecord, ...] = ()
    """What ran in sandboxes for it, for the trace of the rollout."""
    answer: str | None = None
    """The trajectory's answer, from a tool with `ends_episode`: it is scored in place of what the policy said last."""


def finite(value: float) -> float:
    """A reward as a float.

    Raises:
        TypeError, ValueError, OverflowError: it is none that can be trained on.
    """
    if not math.isfinite(value):
        raise ValueError(f"a reward of {value}")
    return float(value)


class ToolFailedError(Exception):
    """A call failed in a way that the policy should read: it becomes the tool's result, and the trajectory goes on.

    Args:
        text: what the policy reads.
        kind: counted in the metrics, e.g. failed, timeout.
    """

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind

    def __reduce__(self) -> tuple[type[ToolFailedError], tuple[str, str]]:
        return type(self), (str(self), self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The services that a process offers to its tools."""

    sandboxes: SandboxSource | None = None
    """Source of sandboxes, for tools that run code."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables, for keys."""


class Tool(Protocol):
    """One tool of the policy. All calls may run side by side, for different trajectories and within one turn.

    Raises, from create, execute and reward:
        ToolFailedError: the policy reads the message.
        RayappError: the trajectory fails, and says nothing about the policy.
        Anything else counts as a crash of the tool; the policy reads that it failed.
    """

    @property
    def schema(self) -> ToolSchema: ...

    @property
    def timeout_s(self) -> float:
        """Deadline of one call; the loop keeps it, whatever the tool does."""
        ...

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """State of one trajectory. Cheap: what costs something starts with the first `execute`.

        Args:
            kwargs: `extra_info.tools_kwargs.<name>.create_kwargs` of the data row.
        Raises:
            InputError: the row lacks what this tool needs.
        """
        ...

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        """Run one call; `arguments` fit the schema."""
        ...

    async def reward(self, state: Any) -> float | None:
        """The tool's verdict on the whole trajectory; None when it has none."""
        ...

    async def release(self, state: Any) -> None:
        """Give back what the state holds. Called once, whatever happened before."""
        ...


class ToolBase:
    """Base class of most tools; subclasses add `schema` and `execute`, and the other three if they keep state.

    Args:
        config: the `config` section of the tool's entry; `timeout` is the deadline of one call in seconds.
        schema: the entry's `tool_schema`; None keeps the class's own.
        context: what the process offers to tools.
    """

    schema: ToolSchema
    timeout_s: float = 30.0
    ends_episode = False
    """True for a tool whose output may name the answer, which ends the trajectory. It runs in the last turn, too."""

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        schema: ToolSchema | None = None,
        context: ToolContext | None = None,
    ) -> None:
        self.config = dict(config or {})
        self.context = context or ToolContext()
        if schema is not None:
            self.schema = schema
        if "timeout" in self.config:
            self.timeout_s = float(self.config["timeout"])

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return None

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def reward(self, state: Any) -> float | None:
        return None

    async def release(self, state: Any) -> None:
        return None
