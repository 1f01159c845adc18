"""Runs rayapp's functions on a model's text in a separate process, which can be killed and doesn't block this process.

A hostile text can make regular expressions, `ast.parse` and comparisons take forever; they hold the interpreter's lock,
and a thread can't be killed. So each rollout worker has one text process (13 MB, no secrets). The limit is CPU time,
because a verdict must not depend on how busy the machine is. It runs only functions of rayapp: a model's *code* must
run in a sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from rayapp.core.errors import KindError
from rayapp.tasks.text_child import is_held, read_frame, write_call

MAX_TEXT_CHARS = 1 << 20  # about 250,000 tokens; longer texts are not read
# Time limit of a call: a normal answer takes less than a millisecond, 100,000 characters of code about a second.
CPU_LIMIT_S = 2.0
_WALL_LIMIT_S = 60.0  # of one call; beyond it the cause is the machine and not the text
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_PACKAGE_ROOT = Path(__file__).parents[2]


class TextTooCostlyError(KindError):
    """A text is too long, takes too much time to read, or crashes its reader: a verdict on the text. The kind, too_long
    or unreadable, becomes the reward's status."""


class TextReadingFailedError(KindError):
    """A function raised (kind reward_error), or the text process failed (text_process): no verdict on the text."""


@dataclass(slots=True)
class _TextChild:
    process: subprocess.Popen[bytes]
    stream: BufferedRWPair

    @classmethod
    def start(cls) -> _TextChild:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-m", "rayapp.tasks.text_child"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # verl's rules print text
                cwd="/",
                env=_environment(),
            )
        ours.settimeout(_WALL_LIMIT_S)
        with ours:
            return cls(process, ours.makefile("rwb"))

    def end(self) -> int:
        """End the process if it still runs. Return its exit status, or -N if signal N ended it."""
        with contextlib.suppress(OSError):  # the process may have ended before it read the whole call
            self.stream.close()
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass(slots=True)
class TextProcess:
    """Runs calls in a child process, which is started when needed. `on_text` and `holds` share one."""

    cpu_limit_s: float = CPU_LIMIT_S
    _child: _TextChild | None = field(default=None, init=False)
    # Run calls in a separate thread: they stay in order, and no other work waits for a hostile text.
    _thread: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "text-process"))

    async def call(self, function: Callable[..., Any], text: object, *arguments: object) -> Any:
        """Return `function(text, *arguments)`, with the rules and errors of `on_text`."""
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            raise TextTooCostlyError(f"the text has {len(text)} characters, more than {MAX_TEXT_CHARS}", "too_long")
        call = (function, (text, *arguments), self.cpu_limit_s)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, call)

    def run(self, function: Callable[..., Any], value: object, *arguments: object) -> Any:
        """Return `function(value, *arguments)` as `call` does, for callers without an event loop."""
        return self._thread.submit(self._call, (function, (value, *arguments), self.cpu_limit_s)).result()

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """End the child. A later call starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _call(self, call: tuple[Any, ...]) -> Any:
        name = getattr(call[0], "__name__", "a condition")
        try:
            how, value = self._exchange(call) or self._exchange(call) or ("", None)
        except TimeoutError as error:
            self.close()
            raise TextReadingFailedError(
                f"the process that reads the policy's texts took more than {_WALL_LIMIT_S:g} s for {name}",
                "text_process",
            ) from error
        except (TypeError, ValueError, AttributeError, OSError, pickle.PickleError) as error:
            self.close()
            raise TextReadingFailedError(
                f"the text process failed at {name}: {type(error).__name__}: {error}", "text_process"
            ) from error
        if not how:
            raise TextReadingFailedError(
                f"the process that reads the policy's texts was killed from outside twice, during {name}",
                "text_process",
            )
        if how == "raised":
            raise TextReadingFailedError(f"{name}: {value}", "reward_error")
        return value

    def _exchange(self, call: tuple[Any, ...]) -> tuple[str, object] | None:
        """Return kind and value of the answer; None if another program killed the child."""
        if self._child is None:
            self._child = self._started()
        try:
            write_call(self._child.stream, call)
            how, value = read_frame(self._child.stream)
            return how, value
        except (EOFError, ConnectionError):
            status = self._child.end()
            self._child = None
        if status in _ENDED_BY_OTHERS:
            return None
        if status >= 0:
            raise OSError(
                f"the text process ended with status {status}; see its error output, in the worker's log or on the "
                "terminal"
            )
        raise TextTooCostlyError(self._why(status), "unreadable")

    def _started(self) -> _TextChild:
        child = _TextChild.start()
        try:
            read_frame(child.stream)
        except (EOFError, OSError) as error:
            raise OSError(
                f"the text process can't start: status {child.end()}; see its error output, in the worker's log or on "
                "the terminal"
            ) from error
        return child

    def _why(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"reading it took more than {self.cpu_limit_s:g} s of CPU time"
        return f"reading it crashed the text process ({signal.Signals(-status).name})"


_shared = TextProcess()
atexit.register(_shared.close)


async def on_text(function: Callable[..., Any], text: str, *arguments: object) -> Any:
    """Return `function(text, *arguments)`, computed in the text process.

    The function is of a module that imports only the standard library, takes plain data and returns JSON; tuples become
    lists. TextTooCostlyError is a verdict on the text; TextReadingFailedError is not.
    """
    return await _shared.call(function, text, *arguments)


async def holds(condition: Callable[[Any], object], values: object) -> bool:
    """True if a condition holds for values from a sandbox; False if it raises or takes more than CPU_LIMIT_S. It is a
    function, or `partial`, of a module that imports only the standard library."""
    try:
        return bool(await _shared.call(is_held, condition, values))
    except TextTooCostlyError:
        return False


def _environment() -> dict[str, str]:
    """Return the child's variables: no secrets, and a fixed hash seed, so that sets have a fixed order."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    markdown = find_spec("markdown_it")
    assert markdown is not None
    assert markdown.origin is not None
    path = os.pathsep.join([str(_PACKAGE_ROOT), str(Path(markdown.origin).parents[1])])
    return needed | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
