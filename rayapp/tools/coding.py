"""Tools for an agent that writes code (python, bash, edit, run_tests, submit), in the trajectory's workspace.

Coding tasks bring these tools; for other tasks, name them in the tool file.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, UnusableWorkError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import ExecResult, PublicVerdict, StopCause
from rayapp.tools.base import ToolFailedError, ToolOutput, ToolSchema
from rayapp.tools.config import parse
from rayapp.tools.workspace import MAX_FILE_BYTES, Workspace, WorkspaceConfig, WorkspaceTool, open_workspace, read_text


class PythonToolConfig(WorkspaceConfig):
    """Section `config` of the Python tool's entry."""

    stateful: bool = True
    """If false, every call gets a new sandbox, without the workspace's files: fewer sandboxes are enough."""


class PythonTool(WorkspaceTool):
    """Runs Python in the workspace; variables persist between calls."""

    Config = PythonToolConfig
    config: PythonToolConfig
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
        if self.config.stateful:
            return await self._run(state, code)
        workspace = open_workspace([self])
        try:
            return await self._run(workspace, code)
        finally:
            await workspace.close()

    async def _run(self, workspace: Workspace, code: str) -> ToolOutput:
        async def run(sandbox: Sandbox) -> ExecResult:
            return await sandbox.run_code(code, timeout_s=self.config.timeout, stateful=self.config.stateful)

        used = await workspace.use(run)
        text = result_text(used.value, stateful=self.config.stateful)
        return ToolOutput(text=text, waited_s=used.waited_s, execs=(used.ran,))


def result_text(result: ExecResult, *, stateful: bool = False) -> str:
    """Return the result of an execution for the policy: the output, and the cause if it was stopped."""
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


# Function that runs a task's public tests in a sandbox on the text of an answer.
Check = Callable[[str, Sandbox], Awaitable[PublicVerdict]]
_NO_SUCH_PROGRAM = 127
# Bytecode is not cached: Python detects a changed file by size and whole seconds, and an agent may edit twice in one.
_SHELL = ("env", "PYTHONDONTWRITEBYTECODE=1", "bash", "-c")
_PATH = {"type": "string", "description": "Path of a file, relative to your workspace"}


class BashTool(WorkspaceTool):
    """Runs a command line in the workspace. Files persist, shell variables and the current folder don't."""

    schema = ToolSchema(
        name="bash",
        description="Runs a bash command line in your workspace and returns what it prints. Only files stay.",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string", "description": "A command line"}},
            "required": ["command"],
        },
    )

    async def execute(self, state: Workspace, arguments: Mapping[str, Any]) -> ToolOutput:
        command = str(arguments["command"])
        if "\0" in command:
            raise ToolFailedError("the command contains the character NUL", "bad_arguments")

        async def run(sandbox: Sandbox) -> ExecResult:
            if not state.has_shell:
                probe = await sandbox.run_command([*_SHELL, ":"], timeout_s=self.config.timeout)
                if probe.exit_code == _NO_SUCH_PROGRAM and state.is_used:
                    raise ToolFailedError("there is no bash in your workspace")  # earlier calls may have removed it
                _check_shell(probe)
                state.has_shell = True
            return await sandbox.run_command([*_SHELL, command], timeout_s=self.config.timeout)

        used = await state.use(run)
        return ToolOutput(text=_shell_text(used.value), waited_s=used.waited_s, execs=(used.ran,))


def _check_shell(probe: ExecResult) -> None:
    if probe.isolation.startswith("ll"):
        why = "at isolation level ll a program can't start another program"
    elif probe.exit_code == _NO_SUCH_PROGRAM:
        why = f"bash is not installed in them ({probe.stderr.strip()})"
    else:
        return
    raise SandboxConfigError(
        f"the tool bash can't work in this run's sandboxes: {why}. Leave bash out (in a task: tools: [edit, python, "
        "run_tests, submit]), or use nodes or a provider whose sandboxes can run it (docs/tools.md)"
    )


def _shell_text(result: ExecResult) -> str:
    text = result_text(replace(result, error=""))
    if result.ok or result.stopped_for is not None:
        return text
    return f"{text}\n[exit status {result.exit_code}]".lstrip("\n")


class EditTool(WorkspaceTool):
    """Writes a whole file, or replaces a text that occurs exactly once in a file."""

    schema = ToolSchema(
        name="edit",
        description="Writes files of your workspace. create: a file with file_text, in place of what was there. "
        "str_replace: new_str in place of old_str, which must be in the file exactly once.",
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["create", "str_replace"]},
                "path": _PATH,
                "file_text": {"type": "string"},
                "old_str": {"type": "string"},
                "new_str": {"type": "string"},
            },
            "required": ["command", "path"],
        },
    )

    async def execute(self, state: Workspace, arguments: Mapping[str, Any]) -> ToolOutput:
        path = _path(arguments)

        async def edit(sandbox: Sandbox) -> None:
            await _write(sandbox, path, await _edited(sandbox, path, arguments))

        used = await state.use(edit)
        return ToolOutput(text=f"{path} is written", waited_s=used.waited_s, execs=(used.ran,))


async def _edited(sandbox: Sandbox, path: str, arguments: Mapping[str, Any]) -> str:
    if arguments["command"] == "create":
        return _given(arguments, "file_text")
    old, new = _given(arguments, "old_str"), str(arguments.get("new_str", ""))
    text = await read_text(sandbox, path)
    count = text.count(old) if old else 0
    if count != 1:
        way_out = "Give more of the text around it" if count else "Read the file, and copy the text exactly"
        raise ToolFailedError(f"old_str is in {path} {count} times: it must be there exactly once. {way_out}")
    return text.replace(old, new)


async def _write(sandbox: Sandbox, path: str, text: str) -> None:
    data = text.encode()
    if len(data) > MAX_FILE_BYTES:
        raise ToolFailedError(f"{path} would be larger than {MAX_FILE_BYTES >> 10} KiB")
    try:
        await sandbox.write_file(path, data)
    except OSError as error:
        if isinstance(error, SandboxError):
            raise
        # The error's own text is hidden, because it contains the sandbox's id, which differs between runs.
        raise ToolFailedError(f"{path} can't be written: the path is not allowed, or the disk is full") from None


@dataclass(slots=True)
class _Tested:
    workspace: Workspace
    check: Check
    best: float = 0.0

    async def close(self) -> None:
        await self.workspace.close()


class RunTestsTool(WorkspaceTool):
    """Runs the task's public tests on a file of the workspace. A call's reward is the increase of the pass rate over
    the trajectory's best one so far, so the rewards add up to the best."""

    schema = ToolSchema(
        name="run_tests",
        description="Runs the public tests on a file of your workspace and says which pass. Other tests, which you "
        "can't see, decide what your answer is worth.",
        parameters={"type": "object", "properties": {"path": _PATH}, "required": ["path"]},
    )

    async def join(self, workspace: Workspace, kwargs: Mapping[str, Any]) -> _Tested:
        if not callable(kwargs.get("check")):
            raise InputError(
                f"tool {self.schema.name}: the task has no public tests. Add tests (docs/tasks.md), or leave this tool "
                "out"
            )
        return _Tested(workspace, kwargs["check"])

    async def execute(self, state: _Tested, arguments: Mapping[str, Any]) -> ToolOutput:
        path = _path(arguments)

        async def test(sandbox: Sandbox) -> PublicVerdict:
            return await state.check(fenced(await read_text(sandbox, path)), sandbox)

        used = await state.workspace.use(test)
        gain = max(0.0, used.value.pass_rate - state.best)
        state.best += gain
        return ToolOutput(text=used.value.text, reward=gain, waited_s=used.waited_s, execs=(used.ran,))


class SubmitTool(WorkspaceTool):
    """Submits the answer, which ends the trajectory."""

    ends_episode = True
    schema = ToolSchema(
        name="submit",
        description="Hands in your answer and ends your work: a file of your workspace (path), or a text (answer).",
        parameters={
            "type": "object",
            "properties": {"path": _PATH, "answer": {"type": "string", "description": "The answer itself"}},
        },
    )

    async def execute(self, state: Workspace, arguments: Mapping[str, Any]) -> ToolOutput:
        if ("path" in arguments) == ("answer" in arguments):
            raise ToolFailedError("give exactly one of the arguments path and answer", "bad_arguments")
        if "answer" in arguments:
            return ToolOutput(text="handed in", answer=str(arguments["answer"]))
        path = _path(arguments)

        async def read(sandbox: Sandbox) -> str:
            return await read_text(sandbox, path)

        used = await state.use(read)
        return ToolOutput(text="handed in", waited_s=used.waited_s, execs=(used.ran,), answer=fenced(used.value))


@dataclass(slots=True)
class _Work:
    workspace: Workspace
    collect: Callable[[Sandbox], Awaitable[str]]

    async def close(self) -> None:
        await self.workspace.close()


class SubmitWorkTool(WorkspaceTool):
    """`submit` for tasks whose answer is the workspace itself. The task collects the answer's files from it."""

    ends_episode = True
    schema = ToolSchema(name="submit", description="Hands in your workspace as it is and ends your work.")

    async def join(self, workspace: Workspace, kwargs: Mapping[str, Any]) -> _Work:
        if not callable(kwargs.get("collect")):
            raise InputError(
                f"tool {self.schema.name}: the task does not define which files of a workspace are the answer. "
                "Leave this tool out"
            )
        return _Work(workspace, kwargs["collect"])

    async def execute(self, state: _Work, arguments: Mapping[str, Any]) -> ToolOutput:
        try:
            used = await state.workspace.use(state.collect)
        except UnusableWorkError as error:
            raise ToolFailedError(str(error)) from None
        return ToolOutput(text="handed in", waited_s=used.waited_s, execs=(used.ran,), answer=used.value)


def fenced(code: str) -> str:
    """Return a file's content as one code block, whose fence is longer than any fence in the content."""
    longest = max((len(marks) for marks in re.findall("`+|~+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code.rstrip()}\n{fence}\n"


def _path(arguments: Mapping[str, Any]) -> str:
    path = str(arguments["path"])
    if not path or "\0" in path:
        raise ToolFailedError("path must not be empty, and must not contain the character NUL", "bad_arguments")
    return path


def _given(arguments: Mapping[str, Any], name: str) -> str:
    if name not in arguments:
        raise ToolFailedError(f"command {arguments['command']} needs the argument {name}", "bad_arguments")
    return str(arguments[name])
