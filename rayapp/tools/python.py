"""`python`: an interpreter for the policy, in the trajectory's workspace. Made by `loading.py`.

Stateful: names live from call to call of one trajectory, beside the files of its workspace. With `stateful: false` each
call has a sandbox of its own, and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayapp.core.protocols import Sandbox
from rayapp.core.types import ExecResult, StopCause
from rayapp.tools.base import ToolOutput, ToolSchema
from rayapp.tools.config import parse
from rayapp.tools.workspace import Workspace, WorkspaceConfig, WorkspaceTool, open_workspace


class PythonToolConfig(WorkspaceConfig):
    """`config` of the Python tool's entry."""

    stateful: bool = True
    """False gives every call a sandbox of its own: nothing is kept, and fewer sandboxes serve more trajectories."""


class PythonTool(WorkspaceTool):
    """See the module."""

    Config = PythonToolConfig
    own: PythonToolConfig
    schema = ToolSchema(
        name="python",
        description="Runs Python code and returns what it prints. Names stay defined from one call to the next.",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source; print what you want to see"}},
            "required": ["code"],
        },
    )

    @classmethod
    def holds_sandbox(cls, config: Mapping[str, Any], *, where: str) -> bool:
        return parse(config, cls.Config, where=where).stateful

    async def execute(self, state: Workspace, arguments: Mapping[str, Any]) -> ToolOutput:
        code = str(arguments["code"])
        if self.own.stateful:
            return await self._run(state, code)
        workspace = open_workspace([self])
        try:
            return await self._run(workspace, code)
        finally:
            await workspace.close()

    async def _run(self, workspace: Workspace, code: str) -> ToolOutput:
        async def run(sandbox: Sandbox) -> ExecResult:
            return await sandbox.run_code(code, timeout_s=self.own.timeout, stateful=self.own.stateful)

        used = await workspace.use(run)
        text = result_text(used.value, stateful=self.own.stateful)
        return ToolOutput(text=text, waited_s=used.waited_s, execs=(used.ran,))


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
