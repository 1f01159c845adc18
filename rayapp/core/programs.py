"""Start foreign programs under a supervisor, so that none of their processes outlives this one.

They get only those environment variables that programs need for paths, locale and certificates: never a key of the
trainer.
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
AFTER_DEATH_S = 2.0
"""Seconds for which a program may take to end after its pipe closed, and for which its remaining output is read."""


def supervised(command: Sequence[str], *, listens: bool = False) -> list[str]:
    """Return the arguments that run a command under the supervisor. Give it a pipe as standard input: when the pipe
    closes, the program and all its processes are killed.

    Args:
        listens: the command reads that pipe; otherwise it has no standard input.
    """
    return [sys.executable, "-I", "-S", _SUPERVISOR, *(["--listens"] if listens else []), *command]


def passed_on(*more: str) -> dict[str, str]:
    """Return the environment of a program: the variables that every program gets, and the given ones."""
    return {name: os.environ[name] for name in (*_PASSED_ON, *more) if name in os.environ}


async def end(process: asyncio.subprocess.Process) -> None:
    """End a supervised program and all its processes, and wait until they are gone. Idempotent."""
    assert process.stdin is not None
    process.stdin.close()  # the supervisor then kills all of the program's processes
    try:
        async with asyncio.timeout(AFTER_DEATH_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
