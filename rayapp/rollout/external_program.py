"""The program of an external agent: its input (`AgentCall`, docs/agents.md), and how it runs.

On the host it runs as the user of the rollout worker; at its end every process that it started is killed. In a sandbox
it connects to the loopback (`rayapp.sandbox.loopback`), which serves only this trajectory's session: no tunnel, no open
port, no other network.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rayapp.config.agent import ExternalSection
from rayapp.core.errors import SandboxError
from rayapp.core.programs import AFTER_DEATH_S, end, passed_on, supervised
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import ExecResult, SandboxSpec, StopCause
from rayapp.rollout.gateway.limits import MODEL
from rayapp.sandbox.local.levels import level
from rayapp.sandbox.loopback import Accept, loopback_of
from rayapp.tasks.data.pictures import as_marks


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """Input of an external agent: one task, and the address and key of the policy."""

    task: str
    """Name of the task, or data source of the data row."""
    messages: tuple[Mapping[str, Any], ...]
    """Messages of the task, each with role and content: a text, or OpenAI's parts with pictures as data URIs."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path -> text of the task's files, which are in `folder`."""
    folder: Path
    """Folder for this trajectory alone, with `files` and the task file; removed when the trajectory ends."""
    url: str
    """URL of the trajectory's session, below which the APIs are."""
    api_key: str
    """Key of the trajectory's session, valid until the trajectory ends."""
    model: str = MODEL
    """Model name of requests to the policy; `agent.external.models` says what happens to others."""

    @property
    def prompt(self) -> str:
        """Contents of all messages, joined to one text, with `<image>` for a picture."""
        return "\n\n".join(message["content"] for message in as_marks(self.messages))

    @property
    def openai_base_url(self) -> str:
        """Base URL for `openai.AsyncOpenAI(base_url=…)`."""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for `anthropic.AsyncAnthropic(base_url=…)`."""
        return self.url

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with the policy's address, key and model name, and the path of the task file."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_BASE": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "RAYAPP_MODEL": self.model,
            "RAYAPP_TASK_FILE": str(self.task_file),
        }

    @property
    def task_file(self) -> Path:
        """Path of a JSON file that has `task`, `messages` and `prompt`."""
        return self.folder / ".rayapp" / "task.json"

    @property
    def content(self) -> dict[str, str]:
        told = {"task": self.task, "prompt": self.prompt, "messages": [dict(message) for message in self.messages]}
        return {**self.files, str(self.task_file.relative_to(self.folder)): json.dumps(told, ensure_ascii=False)}

    def write(self) -> None:
        """Write the files into the folder. ValueError: a path leads out of it."""
        for name, text in self.content.items():
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):
                raise ValueError(
                    f"task {self.task}: the file path {name!r} leads out of the agent's folder. Give a relative path "
                    "without .."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def filled_in(self, argument: str) -> str:
        values = {
            "{prompt}": self.prompt,
            "{model}": self.model,
            "{url}": self.url,
            "{task_file}": str(self.task_file),
            "{folder}": str(self.folder),
        }
        # Replace each name once, from left to right, so that `{url}` inside the prompt stays unchanged.
        head, name, rest = min((argument.partition(name) for name in values), key=lambda parts: len(parts[0]))
        return f"{head}{values[name]}{self.filled_in(rest)}" if name else argument


log = logging.getLogger(__name__)


class Tail:
    """Keeps the end of a program's output."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._bytes = bytearray()
        self._num_left_out = 0

    def add(self, data: bytes) -> None:
        self._bytes += data
        # A character has at most four bytes.
        excess = len(self._bytes) - 4 * self._max_chars
        if excess > 0:
            del self._bytes[:excess]
            self._num_left_out += excess

    @property
    def text(self) -> str:
        whole = self._bytes.decode("utf-8", "replace").replace("\0", "\ufffd")
        is_whole = not self._num_left_out and len(whole) <= self._max_chars
        return whole if is_whole else "(truncated)..." + whole[-self._max_chars :]

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""


@dataclass(slots=True, kw_only=True)
class Playing:
    """State of an external agent while it plays one trajectory."""

    output: Tail
    answer: str | None = None
    fault: str = ""  # why the agent's own code failed: an exception or an exit status
    failure: str = ""  # why the agent's sandbox or the gateway failed
    ran_out: bool = False  # exceeded its time limit


def environment(folder: Path, own: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: what every program gets, `own`, and `folder` as its home."""
    here = {"HOME": str(folder), "TMPDIR": str(folder), "NO_PROXY": "127.0.0.1,localhost"}
    return passed_on() | here | {"no_proxy": here["NO_PROXY"]} | dict(own)


async def run_program(command: Sequence[str], *, folder: Path, env: Mapping[str, str], output: Tail) -> int:
    """Return the program's exit status, or -N if signal N ended it. At the end all of its processes are killed, also if
    the call is cancelled or this process dies."""
    process = await asyncio.create_subprocess_exec(
        *supervised(command),
        cwd=folder,
        env=dict(env),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reading = asyncio.create_task(_read(process.stdout, output))
    try:
        return await process.wait()
    finally:
        await asyncio.shield(_gone(process, reading))


async def _gone(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    await end(process)
    await asyncio.wait({reading}, timeout=AFTER_DEATH_S)
    reading.cancel()


async def _read(stream: asyncio.StreamReader, output: Tail) -> None:
    while data := await stream.read(1 << 16):
        output.add(data)


def remove_folder(folder: Path) -> None:
    """Remove a folder, however deeply nested. Log a failure instead of raising it."""
    if (problem := level.remove_folder(str(folder))) is not None:
        log.warning("%s can't be removed: %s", folder, problem)


LEASE_TIMEOUT_S = 300.0
_SPEC = SandboxSpec(memory_mib=2048, disk_mib=64, max_processes=64)  # for tasks without a spec of their own
_MOST_OUTPUT_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 1 << 20
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
_IN_FOLDER = ("sh", "-c", 'cd "$0" && exec env "$@"')
Admit = Callable[[Accept], AbstractAsyncContextManager[None]]


async def play(
    call: AgentCall,
    settings: ExternalSection,
    playing: Playing,
    *,
    sandboxes: SandboxSource,
    spec: SandboxSpec | None,
    admit: Admit,
) -> None:
    """Run the program in a sandbox until it ends, and put its output and answer into `playing`. `admit` serves the
    trajectory's session to the sandbox's connections."""
    spec = replace(spec or _SPEC, loopback=True)
    async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        async with loopback_of(sandbox) as loopback, admit(loopback.accept):
            call = replace(call, folder=loopback.folder, url=f"http://127.0.0.1:{loopback.port}{call.url}")
            done = await _run(sandbox, call, settings)
        playing.output.add(f"{done.stdout}{done.stderr}".encode())
        playing.ran_out = done.stopped_for is StopCause.TIMEOUT
        if not done.ok and not playing.ran_out:
            why = (
                f"was stopped for {done.stopped_for}" if done.stopped_for else f"ended with exit code {done.exit_code}"
            )
            playing.fault = f"the agent's program {why}: {playing.output.last_line}"
        if settings.answer_file:
            playing.answer = await _answer(sandbox, str(call.folder / settings.answer_file), may_be_gone=not done.ok)


async def _run(sandbox: Sandbox, call: AgentCall, settings: ExternalSection) -> ExecResult:
    for name, text in call.content.items():
        await sandbox.write_file(str(call.folder / name), text.encode())
    here = {"HOME": str(call.folder), "TMPDIR": str(call.folder)}
    environment = _ENVIRONMENT | here | call.environment | dict(settings.env)
    assignments = [f"{name}={value}" for name, value in environment.items()]
    return await sandbox.run_command(
        # Pass the variables in the command. In the sandbox's spec, they would make each trajectory's spec different, so
        # that the pool could not prepare sandboxes.
        [*_IN_FOLDER, str(call.folder), *assignments, *(call.filled_in(argument) for argument in settings.command)],
        timeout_s=settings.timeout_s,
        max_output_bytes=_MOST_OUTPUT_BYTES,
    )


async def _answer(sandbox: Sandbox, path: str, *, may_be_gone: bool) -> str:
    """Return the answer; empty if the file is missing, or if the agent ended its sandbox."""
    try:
        return (await sandbox.read_file(path, max_bytes=_MAX_ANSWER_BYTES)).decode("utf-8", "replace")
    except (OSError, SandboxError) as error:
        if isinstance(error, SandboxError) and not may_be_gone:
            raise
        return ""
