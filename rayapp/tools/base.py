"""The interface of tools: a JSON schema that the policy reads, and four calls per trajectory. Called by the agent loop.

    create(kwargs of the data row) -> state -> execute(state, arguments) ... -> reward(state) -> release(state)

A tool object serves many trajectories at once; data of one trajectory belongs in its state. To add a tool, write one
file with one class (see docs/tools.md).

A `ToolCallParser` finds the tool calls in the policy's text: vLLM's, behind `rayapp.engine.vllm_tool_parser`; tests
without vLLM read the hermes form with `support.hermes`. A parser never raises for a text of the policy: an unreadable
call is a `RawCall` with its `problem`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayapp.core.errors import ConfigError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import ExecRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """Name, description and arguments of a tool, as the policy reads them.

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
            ConfigError: the schema has another form.
        """
        function = schema.get("function")
        if schema.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise ConfigError(f"{where}: a tool_schema needs type: function and function: {{name: …}}, got {schema!r}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(name=str(function["name"]), description=str(function.get("description", "")), parameters=parameters)

    def as_openai(self) -> dict[str, Any]:
        """Return the schema in the form that chat templates and tool parsers read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """The result of one call."""

    text: str
    """Text for the policy; the agent loop cuts it to length."""
    reward: float | None = None
    """The tool's own verdict on this call, recorded as an intermediate reward."""
    waited_s: float = 0.0
    """Seconds before the call could start (rate limit, free sandbox); not part of the tool's own time."""
    execs: tuple[ExecRecord, ...] = ()
    """Executions in sandboxes during the call, for the rollout's trace."""
    answer: str | None = None
    """The trajectory's answer, from a tool with `ends_episode`: it is scored in place of the policy's last turn."""


class ToolFailedError(Exception):
    """Failure of a call that the policy should read: it becomes the tool's result, and the trajectory continues.

    Args:
        text: text for the policy.
        kind: name in the metrics, e.g. failed, timeout.
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
        RayappError: the trajectory fails, without a verdict on the policy.
        Any other exception counts as a crash of the tool; the policy reads that the call failed.
    """

    @property
    def schema(self) -> ToolSchema: ...

    @property
    def timeout_s(self) -> float:
        """Deadline of one call in seconds, enforced by the agent loop."""
        ...

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the state of one trajectory. This must be cheap: expensive work starts with the first `execute`.

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
        """Return the tool's verdict on the whole trajectory; None if it has none."""
        ...

    async def release(self, state: Any) -> None:
        """Release the resources of the state. Called exactly once, also after failures."""
        ...


class ToolBase:
    """Base class of most tools; subclasses add `schema` and `execute`, and the other three if they keep state.

    Args:
        config: the `config` section of the tool's entry; `timeout` is the deadline of one call in seconds.
        schema: the entry's `tool_schema`; None keeps the class's own.
        context: services of the process.
    """

    schema: ToolSchema
    timeout_s: float = 30.0
    ends_episode = False
    """True for a tool whose output may contain the answer, which ends the trajectory. It also runs in the last turn."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCall:
    """A call as the policy wrote it, not yet checked against a schema."""

    name: str = ""
    arguments: str = "{}"
    """JSON text."""
    problem: str = ""
    """Reason why the call is unreadable; empty if it is readable."""


class ToolCallParser(Protocol):
    """Finds tool calls in a turn's text."""

    @property
    def start(self) -> str:
        """Text that begins the first call of every turn with calls; empty: there is no such text."""
        ...

    def parse(self, text: str) -> tuple[RawCall, ...]:
        """Return every call in one turn's text, in order. The text includes the model's special tokens."""
        ...

    def words(self, text: str) -> str:
        """Return the text outside the calls, for a text that has calls."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """One call as a model's chat template writes it, to test whether a parser finds it."""

    texts: tuple[str, ...]
    """Assistant texts that make the call, in the forms of different templates; the model uses one of them."""
    name: str
    arguments: dict[str, object]

    def is_found_by(self, parser: ToolCallParser) -> bool:
        return any(self._is_read(parser.parse(after_thoughts(text))) for text in self.texts)

    def _is_read(self, calls: tuple[RawCall, ...]) -> bool:
        if len(calls) != 1 or calls[0].problem or calls[0].name != self.name:
            return False
        try:
            return bool(json.loads(calls[0].arguments) == self.arguments)
        except ValueError:
            return False


MAX_CALLS = 64
"""Most calls that are read in one turn. A call needs only a few tokens, but costs a parse, a record and a result."""


def thoughts_of(text: str) -> str:
    """Return the turn's thoughts: the text up to the last `</think>`, without the marks."""
    thoughts, end, _ = text.rpartition("</think>")
    if not end:
        return "" if after_thoughts(text) else text.strip().removeprefix("<think>").strip()
    return thoughts.strip().removeprefix("<think>").strip()


def after_thoughts(text: str) -> str:
    """Return the part of a turn after the last `</think>`: only calls in it count, not those quoted in the thoughts."""
    _, end, rest = text.rpartition("</think>")
    return "" if not end and text.lstrip().startswith("<think>") else rest
