"""Our own work on text that a model wrote, in a process beside this one: it can be ended, and holds up nothing here.

    await on_text(function, text, …) -> JSON -> text process: function(text, …), its CPU time limited -> JSON -> value

Regular expressions, `ast.parse` and scans can be made to take seconds or for ever; meanwhile they hold the
interpreter's lock, and a thread can't be ended. So one small process per rollout worker (13 MB, the standard library,
no environment) does it, one call after the other. The kernel ends it when a call uses up its CPU time, and the next
call starts another. CPU time, because a verdict must not depend on how busy the machine is. It runs our functions only:
what a model wrote as *code* belongs into a sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from rayapp.core.errors import KindError
from rayapp.tasks.text_child import read_frame, write_frame

MAX_TEXT_CHARS = 1 << 20
"""A longer text is not looked at: it is about 250,000 tokens."""
CPU_LIMIT_S = 2.0
"""CPU time of one call. An honest answer takes under a millisecond; 100,000 characters of pure code about a second."""
_WALL_LIMIT_S = 60.0
"""Clock time of one exchange. Past it the machine, not the text, is in trouble."""
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_PACKAGE_ROOT = Path(__file__).parents[2]


class TextTooCostlyError(KindError):
    """A text is too long, takes too much time, or ends the process that reads it: the text's doing, so a verdict.

    Its kind is too_long or unreadable, for `Reward.status`.
    """


class TextReadingFailedError(KindError):
    """The function raised, or the text process can't do its work: no verdict on the text.

    Its kind is reward_error or text_process.
    """


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    stream: BufferedRWPair

    @classmethod
    def start(cls) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-m", "rayapp.tasks.text_child"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # verl's rules print what they read
                cwd="/",
                env=_environment(),
            )
        ours.settimeout(_WALL_LIMIT_S)
        with ours:
            return cls(process, ours.makefile("rwb"))

    def end(self) -> int:
        """End the process, if it still runs. Returns its exit status; negative is the signal that ended it."""
        with contextlib.suppress(OSError):  # what it was asked has not all been read
            self.stream.close()
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass(slots=True)
class TextProcess:
    """One child, started at the first call and again whenever it has ended. Use `on_text`, which shares one."""

    cpu_limit_s: float = CPU_LIMIT_S
    _child: _Child | None = field(default=None, init=False)
    # One thread of its own: calls keep their order, and no other work waits behind a hostile text.
    _thread: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "text-process"))

    async def call(self, function: Callable[..., Any], text: str, *arguments: object) -> Any:
        """See `on_text`."""
        if len(text) > MAX_TEXT_CHARS:
            raise TextTooCostlyError(f"it has {len(text)} characters, over {MAX_TEXT_CHARS}", "too_long")
        call = (function.__module__, function.__name__, (text, *arguments), self.cpu_limit_s)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, call)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """End the child; a later call starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _call(self, call: tuple[Any, ...]) -> Any:
        name = call[1]
        try:
            how, value = self._exchange(call) or self._exchange(call) or ("", None)
        except TimeoutError as error:
            self.close()
            raise TextReadingFailedError(f"{name}: no answer within {_WALL_LIMIT_S:g} s", "text_process") from error
        except (TypeError, ValueError, OSError) as error:
            self.close()
            raise TextReadingFailedError(f"{name}: {type(error).__name__}: {error}", "text_process") from error
        if not how:
            raise TextReadingFailedError(f"{name}: its process was ended from outside, twice", "text_process")
        if how == "raised":
            raise TextReadingFailedError(f"{name}: {value}", "reward_error")
        return value

    def _exchange(self, call: tuple[Any, ...]) -> tuple[str, object] | None:
        """The answer; None when somebody else ended the process meanwhile."""
        if self._child is None:
            self._child = self._started()
        try:
            write_frame(self._child.stream, call)
            how, value = read_frame(self._child.stream)
            return how, value
        except (EOFError, ConnectionError):
            status = self._child.end()
            self._child = None
        if status in _ENDED_BY_OTHERS:
            return None
        if status >= 0:
            raise OSError(f"the text process ended with status {status}; its error output says why")
        raise TextTooCostlyError(self._why(status), "unreadable")

    def _started(self) -> _Child:
        child = _Child.start()
        try:
            read_frame(child.stream)
        except (EOFError, OSError) as error:
            raise OSError(f"the text process can't start: status {child.end()}; its error output says why") from error
        return child

    def _why(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"reading it took over {self.cpu_limit_s:g} s of CPU time"
        return f"reading it ended the process that did it ({signal.Signals(-status).name})"


_shared = TextProcess()
atexit.register(_shared.close)


async def on_text(function: Callable[..., Any], text: str, *arguments: object) -> Any:
    """`function(text, *arguments)` in the text process.

    Args:
        function: of a module that imports nothing but the standard library. It gets and gives what JSON holds; tuples
            become lists.
    Raises:
        TextTooCostlyError: over MAX_TEXT_CHARS or CPU_LIMIT_S, or the process crashed.
        TextReadingFailedError: the function raised, or the process can't be had.
    """
    return await _shared.call(function, text, *arguments)


def _environment() -> dict[str, str]:
    """The child's environment: no secret of ours, and one hash seed, so that sets have the same order everywhere."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return needed | {"PYTHONPATH": str(_PACKAGE_ROOT), "PYTHONHASHSEED": "0"}
