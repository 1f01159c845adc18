"""Runs environments of the package verifiers in processes with their own virtual environment.

    verifiers_tasks(environment)      reads its rows once, before anything starts
    VerifiersProcess(environment)     plays rows, many concurrently; one for each source of a rollout worker

A process runs `verifiers_child.py`, which answers in lines of JSON. If it dies, its trajectories fail, and the next one
starts another. The requirements of verifiers conflict with rayapp's, so each list of packages has a virtual environment
in $RAYAPP_ENVIRONMENTS_DIR (~/.cache/rayapp/environments).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError, ToolUnavailableError
from rayapp.core.programs import end, passed_on, supervised
from rayapp.extras.environments.files import EnvironmentTask, VerifiersEnvironment, parse_environment, row_tasks

_SHOWN_CHARS = 800


def environment_tasks(data: Mapping[str, Any], file: Path) -> tuple[EnvironmentTask, ...]:
    """Return the rows of the environment that a YAML file describes. Raises InputError."""
    environment = parse_environment(data, file)
    return verifiers_tasks(environment) if isinstance(environment, VerifiersEnvironment) else row_tasks(environment)


def python_with(packages: Sequence[str]) -> Path:
    """Return an interpreter with these pip requirements, which the first call installs in about a minute.
    Raises InputError.
    """
    digest = hashlib.sha256(json.dumps([sorted(packages), sys.version, sys.prefix]).encode()).hexdigest()[:16]
    folder = _root() / digest
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    # Lock: several rollout workers of a machine call this function at the same time. The lock file is beside the
    # folder, not in it, because uv locks a file in it.
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            _install(folder, python, packages)
            stamp.write_text("\n".join(packages))
    return python


def home() -> Path:
    """Return the home of environment processes, which holds what they download."""
    folder = _root() / "home"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _root() -> Path:
    return Path(os.environ.get("RAYAPP_ENVIRONMENTS_DIR") or "~/.cache/rayapp/environments").expanduser()


def _install(folder: Path, python: Path, packages: Sequence[str]) -> None:
    uv = shutil.which("uv")
    venv.EnvBuilder(with_pip=uv is None, clear=False).create(folder)
    command = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    done = subprocess.run(
        [*command, "-q", *packages], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(
            f"the packages {', '.join(packages)} can't be installed into {folder}: "
            f"{' '.join(done.stderr.split())[-_SHOWN_CHARS:]}. Correct `packages`, or install the packages yourself "
            "and set `python` to the interpreter that has them"
        )


log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("verifiers_child.py")
_START_TIMEOUT_S = 600.0  # Seconds for an environment to import its packages and load its data set.
_MAX_LINE = 1 << 28
_ALSO_PASSED_ON = (
    *("HF_HOME", "HF_ENDPOINT"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


def verifiers_tasks(environment: VerifiersEnvironment) -> tuple[EnvironmentTask, ...]:
    """Return the rows of an environment as tasks. Raises InputError: it can't be installed or loaded."""
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
        raise _unusable(environment, line.strip()[-400:] or "its process wrote nothing") from None
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
    """Return a row's messages for display and for the prompt's length; the environment sends the prompt itself."""
    if not isinstance(prompt, list):
        return ({"role": "user", "content": str(prompt or "")},)
    return tuple({"role": str(each.get("role", "user")), "content": str(each.get("content") or "")} for each in prompt)


@dataclass(slots=True)
class VerifiersProcess:
    """One environment's process, which the first call starts."""

    environment: VerifiersEnvironment
    _child: asyncio.subprocess.Process | None = field(default=None, init=False)
    _reading: asyncio.Task[None] | None = field(default=None, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = field(default_factory=dict, init=False)
    _numbers: count[int] = field(default_factory=count, init=False)

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    async def play(self, row: int, *, url: str, key: str, model: str) -> dict[str, float]:
        """Play one trajectory; return `reward`, and the environment's metrics.

        Args:
            url: base URL of the policy for OpenAI clients.
        Raises ToolUnavailableError: the environment failed or died.
        """
        child = await self._started()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await _tell(child, call=number, row=row, url=url, key=key, model=model)
            said = await answer
        except OSError as error:
            raise ToolUnavailableError(f"the process of {self._what} has ended: {error}") from error
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
            *supervised(command, listens=True),
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
                raise ToolUnavailableError(
                    f"{self._what} can't start: {str(error) or f'no answer within {_START_TIMEOUT_S:g} s'}"
                ) from error
            raise
        self._reading = asyncio.create_task(self._read(child, child.stdout))
        return child

    async def _read(self, child: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> None:
        # A line longer than _MAX_LINE raises ValueError. The rest of the stream can't be split into lines then.
        with suppress(ValueError):
            while line := await stream.readline():
                self._answer(line)
        await end(child)
        status = child.returncode
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(
                    ToolUnavailableError(f"the process of {self._what} has ended with exit code {status}")
                )

    def _answer(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            answer = self._waiting.get(said["call"])
        except (ValueError, LookupError, TypeError, RecursionError):
            log.warning("%s wrote a line that is not an answer: %.200r", self._what, line)
            return
        if answer is not None and not answer.done():
            answer.set_result(said)


async def _tell(child: asyncio.subprocess.Process, **said: object) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(said).encode() + b"\n")
    await child.stdin.drain()
