"""Start foreign programs under a supervisor, so that no process of a program outlives this process.

A program gets only the environment variables that it needs for paths, locale and certificates, and never a key.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
AFTER_DEATH_S = 2.0  # that a program may take to end after its pipe closed; its output is read for as long


def supervised(command: Sequence[str], *, listens: bool = False) -> list[str]:
    """Return the arguments that run a command under the supervisor. Give it a pipe as standard input: when it closes,
    the program and all its processes are killed. The program reads the pipe if it `listens`."""
    return [sys.executable, "-I", "-S", _SUPERVISOR, *(["--listens"] if listens else []), *command]


def passed_on(*more: str) -> dict[str, str]:
    """Return the environment of a program: the variables that every program gets, and those named in `more`."""
    return {name: os.environ[name] for name in (*_PASSED_ON, *more) if name in os.environ}


async def end(process: asyncio.subprocess.Process) -> None:
    """End a supervised program with all its processes; return when they are gone. Idempotent."""
    assert process.stdin is not None
    process.stdin.close()  # the supervisor then kills all of the program's processes
    try:
        async with asyncio.timeout(AFTER_DEATH_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
