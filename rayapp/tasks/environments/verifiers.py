"""An environment of the package verifiers in a process of its own, whose Python has that package: ours can't.

    rows_of(environment)              what its prompts are: asked once, before anything starts
    VerifiersProcess(environment)     plays rows, many side by side; one for each source of a rollout worker

The process runs `verifiers_child.py`, which answers in lines of JSON. One that dies fails the trajectories that it
played, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError, ToolUnavailableError
from rayapp.core.programs.kept import end, kept, passed_on
from rayapp.tasks.environments.files import VerifiersEnvironment
from rayapp.tasks.environments.installing import home, python_with
from rayapp.tasks.environments.task import EnvironmentTask

_CHILD = Path(__file__).with_name("verifiers_child.py")
_START_TIMEOUT_S = 600.0
"""For its imports and its data sets."""
_MAX_LINE = 1 << 28
_ALSO_PASSED_ON = (
    *("HF_HOME", "HF_ENDPOINT"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


def verifiers_tasks(environment: VerifiersEnvironment) -> tuple[EnvironmentTask, ...]:
    """Its rows.

    Raises:
        InputError: it can't be installed or loaded.
    """
    try:
        done = subprocess.run(
            _command(environment, plays=False),
            env=_variables(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(environment, str(error)) from error
    rows = _rows(environment, done.stdout.partition("\n")[0] or done.stderr)
    return tuple(
        EnvironmentTask(environment=environment, index=index, messages=_messages(prompt))
        for index, prompt in enumerate(rows)
    )


def _command(environment: VerifiersEnvironment, *, plays: bool) -> list[str]:
    python = environment.beside(environment.python) if environment.python else str(_python(environment))
    given = environment.model_dump(mode="json", include={"id", "options", "split", "size", "folder"}) | {"plays": plays}
    return [python, "-s", str(_CHILD), json.dumps(given)]


def _python(environment: VerifiersEnvironment) -> Path:
    return python_with([environment.beside(package) for package in environment.packages])


def _variables(environment: VerifiersEnvironment) -> dict[str, str]:
    return {**passed_on(*_ALSO_PASSED_ON), "HOME": str(home()), **environment.env}


def _rows(environment: VerifiersEnvironment, line: str) -> list[Any]:
    try:
        said = json.loads(line)
    except ValueError:
        raise _unusable(environment, line.strip()[-400:] or "it said nothing") from None
    if "error" in said:
        raise _unusable(environment, said["error"])
    if not said["rows"]:
        raise _unusable(environment, "it has no rows")
    return list(said["rows"])


def _unusable(environment: VerifiersEnvironment, why: str) -> InputError:
    python = environment.python or f"packages {', '.join(environment.packages)}"
    return InputError(
        f"task {environment.name}: the verifiers environment {environment.id!r} can't be loaded ({python}): {why}. "
        "Name the package that has it in `packages`, or put its module beside the file"
    )


def _messages(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    """For people and for the length of prompts: the environment itself asks the policy."""
    if not isinstance(prompt, list):
        return ({"role": "user", "content": str(prompt or "")},)
    return tuple({"role": str(each.get("role", "user")), "content": str(each.get("content") or "")} for each in prompt)


@dataclass(slots=True)
class VerifiersProcess:
    """See the module. `close` it."""

    environment: VerifiersEnvironment
    _child: asyncio.subprocess.Process | None = field(default=None, init=False)
    _reading: asyncio.Task[None] | None = field(default=None, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = field(default_factory=dict, init=False)
    _numbers: count[int] = field(default_factory=count, init=False)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._child.pid if self._child is not None else None

    async def play(self, row: int, *, url: str, key: str, model: str) -> dict[str, float]:
        """One trajectory.

        Args:
            url: of the policy, as OpenAI's clients take it.
        Returns:
            `reward`, and the environment's metrics.
        Raises:
            ToolUnavailableError: the environment failed or died.
        """
        child = await self._started()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await _tell(child, call=number, row=row, url=url, key=key, model=model)
            said = await answer
        except OSError as error:
            raise ToolUnavailableError(f"{self._what} has died: {error}") from error
        except asyncio.CancelledError:
            with suppress(OSError):
                await _tell(child, cancel=number)
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in said:
            raise ToolUnavailableError(f"{self._what} failed: {said['error']}")
        return {**said["metrics"], "reward": said["reward"]}

    async def close(self) -> None:
        """End the process and what it started. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            await end(child)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def _what(self) -> str:
        return f"the verifiers environment {self.environment.id!r}"

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                self._child = await self._start()
            return self._child

    async def _start(self) -> asyncio.subprocess.Process:
        command = await asyncio.to_thread(_command, self.environment, plays=True)
        child = await asyncio.create_subprocess_exec(
            *kept(command, listens=True),
            env=_variables(self.environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                _rows(self.environment, (await child.stdout.readline()).decode())
        except BaseException as error:
            await asyncio.shield(end(child))
            if isinstance(error, InputError | TimeoutError):
                raise ToolUnavailableError(f"{self._what} can't start: {error}") from error
            raise
        self._reading = asyncio.create_task(self._read(child, child.stdout))
        return child

    async def _read(self, child: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            said = json.loads(line)
            answer = self._waiting.get(said["call"])
            if answer is not None and not answer.done():
                answer.set_result(said)
        await end(child)
        status = child.returncode
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ToolUnavailableError(f"{self._what} has died with {status}"))


async def _tell(child: asyncio.subprocess.Process, **said: object) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(said).encode() + b"\n")
    await child.stdin.drain()
