"""A Python interpreter for the policy, in a sandbox on loan. Made by `loading.py`.

Stateful: names live from call to call of one trajectory, in a sandbox that the trajectory holds from its first call to
its end. A first call that finds its sandbox dead is sent to another one; later there are names to lose, so the
trajectory fails instead, and says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rayapp.core.errors import ConfigError, SandboxConfigError, SandboxError
from rayapp.core.protocols import Sandbox, SandboxLease
from rayapp.core.types import ExecRecord, ExecResult, SandboxSpec, StopCause
from rayapp.tools.base import ToolBase, ToolContext, ToolOutput, ToolSchema
from rayapp.tools.config import parse


class PythonToolConfig(BaseModel):
    """`config` of the Python tool's entry."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: str = "native"
    timeout: float = Field(10.0, gt=0)
    """Deadline of one call's code in seconds."""
    lease_timeout: float = Field(120.0, gt=0)
    """Longest wait for a free sandbox in seconds. Trajectories hold theirs to the end: allow as many sandboxes as
    trajectories run at once."""
    stateful: bool = True
    """False gives every call a sandbox of its own: nothing is kept, and fewer sandboxes serve more trajectories."""
    packages: tuple[str, ...] = ()
    memory_mib: int = Field(512, ge=64)


@dataclass(slots=True)
class _State:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: SandboxLease | None = None
    sandbox: Sandbox | None = None
    num_calls: int = 0


class PythonTool(ToolBase):
    """See the module."""

    schema = ToolSchema(
        name="python",
        description="Runs Python code and returns what it prints. Names stay defined from one call to the next.",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source; print what you want to see"}},
            "required": ["code"],
        },
    )

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        schema: ToolSchema | None = None,
        context: ToolContext | None = None,
    ) -> None:
        super().__init__(config, schema, context)
        self._own = parse(self.config, PythonToolConfig, where=f"tool {self.schema.name}: config")
        self._spec = SandboxSpec(packages=self._own.packages, memory_mib=self._own.memory_mib)
        # The wait for a sandbox, the code, and both again when the first sandbox was dead.
        self.timeout_s = 2 * (self._own.timeout + self._own.lease_timeout) + 30.0
        if self.context.sandboxes is None:
            raise ConfigError(f"tool {self.schema.name} needs sandboxes, and this process has none")
        self._sandboxes = self.context.sandboxes

    async def create(self, kwargs: Mapping[str, Any]) -> _State:
        return _State()

    async def execute(self, state: _State, arguments: Mapping[str, Any]) -> ToolOutput:
        code = str(arguments["code"])
        # Calls of one turn share one interpreter: one after the other, in the order they were written.
        async with state.lock:
            try:
                return await self._run(state, code)
            except SandboxConfigError:
                raise
            except SandboxError:
                await self.release(state)
                if state.num_calls and self._own.stateful:
                    raise
                return await self._run(state, code)

    async def _run(self, state: _State, code: str) -> ToolOutput:
        started = time.monotonic()
        sandbox = state.sandbox or await self._borrow(state)
        waited_s = time.monotonic() - started
        started_at_s, started = time.time(), time.monotonic()
        result = await sandbox.run_code(code, timeout_s=self._own.timeout, stateful=self._own.stateful)
        ran = ExecRecord(
            sandbox_id=sandbox.id,
            provider=sandbox.provider,
            outcome=result.outcome.value,
            started_at_s=started_at_s,
            duration_s=time.monotonic() - started,
        )
        state.num_calls += 1
        if not self._own.stateful:
            await self.release(state)
        return ToolOutput(text=result_text(result, stateful=self._own.stateful), waited_s=waited_s, execs=(ran,))

    async def _borrow(self, state: _State) -> Sandbox:
        lease = self._sandboxes.lease(self._spec, timeout_s=self._own.lease_timeout)
        state.lease = lease
        state.sandbox = await lease.__aenter__()
        return state.sandbox

    async def release(self, state: _State) -> None:
        lease, state.lease, state.sandbox = state.lease, None, None
        if lease is not None:
            await lease.__aexit__(None, None, None)


def result_text(result: ExecResult, *, stateful: bool = False) -> str:
    """An execution as text for the policy: as a terminal shows it, and why it was stopped if it was."""
    parts = [result.stdout, result.stderr]
    if result.error and result.error not in result.stderr:
        parts.append(result.error)
    if result.stopped_for is not None:
        what = f"after {result.duration_s:.1f} s" if result.stopped_for is StopCause.TIMEOUT else "for its use of it"
        lost = "; all names are lost" if stateful else ""
        parts.append(f"[the code was stopped: {result.stopped_for.value}, {what}{lost}]")
    elif result.truncated:
        parts.append("[output cut]")
    return "\n".join(part.rstrip("\n") for part in parts if part.strip())
