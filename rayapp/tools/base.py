"""The interface of tools: a JSON schema that the policy reads, and four methods that the agent loop calls.

    create(kwargs of the data row) -> state -> execute(state, arguments) ... -> reward(state) -> release(state)

A tool object serves many trajectories at the same time, so data of one belong in its state (docs/tools.md). A
`ToolCallParser` never raises for a policy's text: an unreadable call is a `RawCall` with a `problem`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from rayapp.core.errors import ConfigError
from rayapp.core.protocols import SandboxSource
from rayapp.core.syntax import answer_of
from rayapp.core.types import ExecRecord
from rayapp.tools.config import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """Name, description and arguments of a tool, as the policy reads them.

    Example: `ToolSchema(name="add", description="Adds two numbers.", parameters={"type": "object", "properties": {"a":
    {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]})`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments. Calls that don't fit it are not passed to the tool."""

    @classmethod
    def from_openai(cls, schema: Mapping[str, Any], *, where: str) -> ToolSchema:
        """Read a schema in OpenAI's form, `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""
        function = schema.get("function")
        if schema.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise ConfigError(
                f"{where}: tool_schema is {schema!r:.200}: it needs `type: function` and `function: {{name: …}}`"
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(name=str(function["name"]), description=str(function.get("description", "")), parameters=parameters)

    def as_openai(self) -> dict[str, Any]:
        """Return the schema in the form that chat templates and tool parsers read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of one call of a tool."""

    text: str
    """Text for the policy; the agent loop cuts it to length."""
    reward: float | None = None
    """The tool's verdict on this call, an intermediate reward; None if it has none."""
    waited_s: float = 0.0
    """Seconds of waiting for a rate limit or a free sandbox, which don't count as the tool's time."""
    execs: tuple[ExecRecord, ...] = ()
    """Executions in sandboxes during the call, for the trace of the rollout."""
    answer: str | None = None
    """The trajectory's answer in place of the policy's last turn. Only for tools with `ends_episode`."""
    pictures: tuple[bytes, ...] = ()
    """Encoded pictures (PNG, JPEG, …), which the policy reads after the text."""


class ToolFailedError(Exception):
    """A call failed. The policy reads the text as the tool's result, and the trajectory continues. `kind` is for
    metrics, e.g. failed or timeout."""

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind

    def __reduce__(self) -> tuple[type[ToolFailedError], tuple[str, str]]:
        return type(self), (str(self), self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Services of the process that its tools can use."""

    sandboxes: SandboxSource | None = None
    """Source of sandboxes, for tools that run code; None if the process has none."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables, from which tools read keys."""


class Tool(Protocol):
    """One tool of the policy. Its methods may run concurrently, for different trajectories and for calls of one turn.

    ToolFailedError: the policy reads the message. RayappError: the trajectory fails and gets no reward. Any other
    exception is a crash of the tool; the policy reads only that the call failed.
    """

    @property
    def schema(self) -> ToolSchema: ...

    @property
    def timeout_s(self) -> float:
        """Deadline of one call in seconds, enforced by the agent loop."""
        ...

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the state for one trajectory, from the row's `extra_info.tools_kwargs.<name>.create_kwargs`. This must
        be cheap: leave expensive work to the first `execute`. InputError: the row lacks a field."""
        ...

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        """Run one call and return its result. The arguments fit the schema."""
        ...

    async def reward(self, state: Any) -> float | None:
        """Return the tool's verdict on the whole trajectory; None if it has none."""
        ...

    async def release(self, state: Any) -> None:
        """Release the resources of the state. Called exactly once, also after failures."""
        ...


class ToolConfig(BaseModel):
    """Section `config` of a tool's entry. A tool with keys of its own has a subclass as its `Config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: str = "native"
    timeout: float | None = Field(None, gt=0)
    """Deadline of one call in seconds. null: `timeout_s` of the tool's class."""


class ToolBase:
    """Base class of most tools. Subclasses add `schema` and `execute`; those with keys of their own `Config`; those
    that keep state `create`, `reward` and `release`. `schema` of the entry replaces the class's."""

    Config: type[ToolConfig] = ToolConfig
    config: ToolConfig
    schema: ToolSchema
    timeout_s: float = 30.0
    ends_episode = False
    """True if an output may contain the trajectory's answer. Calls of such a tool also run in the last turn."""

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        schema: ToolSchema | None = None,
        context: ToolContext | None = None,
    ) -> None:
        self.config = parse(config or {}, self.Config, where=f"config of tool {type(self).__name__}")
        self.context = context or ToolContext()
        if schema is not None:
            self.schema = schema
        if self.config.timeout is not None:
            self.timeout_s = self.config.timeout

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return None

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        raise NotImplementedError(f"{type(self).__name__} has no method execute")

    async def reward(self, state: Any) -> float | None:
        return None

    async def release(self, state: Any) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCall:
    """A tool call as the policy wrote it, before it is checked with a schema."""

    name: str = ""
    arguments: str = "{}"  # JSON text
    problem: str = ""  # why the call is unreadable


class ToolCallParser(Protocol):
    """Parser that finds the tool calls in a turn's text."""

    @property
    def start(self) -> str:
        """Text with which the first call of every turn begins; empty if there is no such text."""
        ...

    def parse(self, text: str) -> tuple[RawCall, ...]:
        """Return all calls in a turn's text, in order. The text includes the model's special tokens."""
        ...

    def words(self, text: str) -> str:
        """Return the part of a turn's text that is outside its calls. The text must contain a call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """A call, with texts in which a model's chat template may write it. It tests whether a parser finds calls."""

    texts: tuple[str, ...]  # an assistant's turn, in one of which the parser must find the call
    name: str
    arguments: dict[str, object]

    def is_found_by(self, parser: ToolCallParser) -> bool:
        return any(self._is_read(parser.parse(answer_of(text))) for text in self.texts)

    def _is_read(self, calls: tuple[RawCall, ...]) -> bool:
        if len(calls) != 1 or calls[0].problem or calls[0].name != self.name:
            return False
        try:
            return bool(json.loads(calls[0].arguments) == self.arguments)
        except ValueError:
            return False


_DECODER = json.JSONDecoder(strict=False)
MAX_CALLS = 64  # read in one turn: even a call of a few tokens costs a parse, a record and a result


def with_whole_strings(text: str, start: str) -> str:
    """Return a turn in which no string of a call (after `start`) contains `<` or `start`, so that a parser doesn't take
    `</tool_call>` in a string for the end of the call. The calls' JSON has the same value."""
    parts, place = list[str](), 0
    for _ in range(MAX_CALLS + 1):
        begin = text.find(start, place) if start else -1
        if begin < 0:
            break
        begin += len(start)
        begin += len(text[begin:]) - len(text[begin:].lstrip()) if text[begin : begin + 1].isspace() else 0
        parts.append(text[place:begin])
        place = begin
        if text[begin : begin + 1] in ("{", "["):
            try:
                _, place = _DECODER.raw_decode(text, begin)
            except (ValueError, RecursionError):
                continue
            hidden = f"\\u{ord(start[0]):04x}{start[1:]}"
            parts.append(text[begin:place].replace("<", "\\u003c").replace(start, hidden))
    return "".join([*parts, text[place:]])
