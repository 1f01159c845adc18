"""The tools of one process, and what each trajectory holds of them. Called by the agent loop and the rollout worker.

ToolSet(tools) --trajectory(start)--> ToolStates --state(name)--> Tool.execute
                                          |--one Workspace for the tools that work in it
                                          '--close: every state is released, whatever happened
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jsonschema.exceptions import SchemaError

from rayapp.core.errors import ConfigError, InputError, RayappError, SandboxError, ToolUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.tools.arguments import ArgumentChecker
from rayapp.tools.base import Tool, ToolFailedError, ToolSchema, finite
from rayapp.tools.workspace import Workspace, WorkspaceTool, open_workspace

log = logging.getLogger(__name__)
_CREATE_TIMEOUT_S = 30.0
_RELEASE_TIMEOUT_S = 30.0


class ToolSet:
    """Tools by name.

    Args:
        tools: names must differ.
        on_close: ends what the tools share, e.g. an MCP session.
    Raises:
        ConfigError: two tools have one name, or a schema is no JSON schema.
    """

    def __init__(self, tools: Sequence[Tool] = (), *, on_close: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._checkers: dict[str, ArgumentChecker] = {}
        self._on_close = tuple(on_close)
        for tool in tools:
            self._add(tool)

    def _add(self, tool: Tool) -> None:
        name = tool.schema.name
        if name in self._tools:
            raise ConfigError(f"tool {name!r} is there twice: leave one out, e.g. by tool_selected_list")
        try:
            self._checkers[name] = ArgumentChecker(tool.schema.parameters)
        except SchemaError as error:
            raise ConfigError(f"tool {name!r}: its parameters are no JSON schema: {error.message}") from error
        self._tools[name] = tool

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(tool.schema for tool in self._tools.values())

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def problem(self, name: str, arguments: object) -> str:
        """Why these arguments don't fit the tool's schema; empty if they do."""
        return self._checkers[name].problem(arguments)

    def ends_episode(self, name: str) -> bool:
        """True for a tool that may name the trajectory's answer."""
        # Not of the protocol: most tools have no such thing.
        return bool(getattr(self._tools.get(name), "ends_episode", False))

    def trajectory(
        self,
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        *,
        files: Mapping[str, str] | None = None,
        packages: tuple[str, ...] = (),
        spec: SandboxSpec | None = None,
        setup: tuple[str, ...] = (),
    ) -> ToolStates:
        """The states that one trajectory has with the tools; enter it before the first call.

        Args:
            files, packages, spec, setup: of its workspace, as `open_workspace` takes them.
        """
        working = [tool for tool in self._tools.values() if isinstance(tool, WorkspaceTool)]
        workspace = open_workspace(working, files=files, packages=packages, spec=spec, setup=setup) if working else None
        return ToolStates(self._tools, tools_kwargs, workspace)

    async def close(self) -> None:
        """End what the tools share. Idempotent."""
        closing, self._on_close = self._on_close, ()
        await asyncio.gather(*(close() for close in closing))


@dataclass(slots=True, eq=False, repr=False)
class ToolStates:
    """See `ToolSet.trajectory`. Example: `async with tools.trajectory(kwargs) as states: states["calc"]`."""

    tools: Mapping[str, Tool]
    kwargs: Mapping[str, Mapping[str, Any]]
    workspace: Workspace | None
    """Whichever of its tools is released first closes it."""
    answer: str | None = None
    """What a tool named as the trajectory's answer; the first one counts."""
    _states: dict[str, Any] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        try:
            for name, tool in self.tools.items():
                self._states[name] = await _guarded(self._create(name, tool), f"tool {name}: create")
        except BaseException:
            await self._release()
            raise
        return self

    async def _create(self, name: str, tool: Tool) -> Any:
        create_kwargs = self.kwargs.get(name, {}).get("create_kwargs") or {}
        if isinstance(tool, WorkspaceTool) and self.workspace is not None:
            return await tool.join(self.workspace, create_kwargs)
        return await tool.create(create_kwargs)

    def __getitem__(self, name: str) -> Any:
        return self._states[name]

    async def rewards(self) -> dict[str, float]:
        """Verdicts on the whole trajectory, from the tools that have one.

        Raises:
            ToolFailedError: a tool crashed, or gave no finite number.
        """
        found = {
            name: await _guarded(_verdict(self.tools[name], state), f"tool {name}: reward")
            for name, state in self._states.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    async def __aexit__(self, *exc: object) -> None:
        # Shield the release: a cancelled trajectory must give its sandboxes back.
        await asyncio.shield(self._release())

    async def _release(self) -> None:
        states, self._states = self._states, {}
        for name, state in states.items():
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await self.tools[name].release(state)
            except Exception as error:  # boundary: one tool's failure must not keep the others' states
                log.warning("tool %s: its state was not released: %s: %s", name, type(error).__name__, error)


def infrastructure(error: RayappError, what: str) -> RayappError:
    """Translate an error of ours that left a tool into one that says nothing about the policy, for the agent loop.

    A lost sandbox pool or another process that died, or does not answer, is the service behind the tool.
    """
    if isinstance(error, SandboxError | ToolUnavailableError | InputError):
        return error
    return ToolUnavailableError(f"{what}: {type(error).__name__}: {error}")


async def _verdict(tool: Tool, state: Any) -> float | None:
    value = await tool.reward(state)
    return None if value is None else finite(value)


async def _guarded(call: Coroutine[Any, Any, Any], what: str) -> Any:
    try:
        async with asyncio.timeout(_CREATE_TIMEOUT_S):
            return await call
    except RayappError as error:
        raise infrastructure(error, what) from error
    except ToolFailedError:
        raise
    except Exception as error:  # boundary: a tool is foreign code, and one trajectory's crash is not the group's
        log.warning("%s crashed", what, exc_info=True)
        raise ToolFailedError(f"{what} crashed: {type(error).__name__}: {error}", "crash") from error
