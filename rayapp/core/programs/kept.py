"""Programs of others that this process starts, under a keeper: nothing that they start outlives this process.

Of our environment they get only what programs need to be found and to speak their language: never a key of the trainer.
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
_KEEPER = str(Path(__file__).with_name("keeper.py"))
AFTER_DEATH_S = 2.0
"""For the end of what has been told to end, and for what it left in a pipe."""


def kept(command: Sequence[str], *, listens: bool = False) -> list[str]:
    """Arguments that run a command under its keeper. Standard input has to be a pipe: when that closes, all ends.

    Args:
        listens: the command reads that pipe. Else it has no standard input.
    """
    return [sys.executable, "-I", "-S", _KEEPER, *(["--listens"] if listens else []), *command]


def passed_on(*more: str) -> dict[str, str]:
    """Our variables that programs get, and these."""
    return {name: os.environ[name] for name in (*_PASSED_ON, *more) if name in os.environ}


async def end(process: asyncio.subprocess.Process) -> None:
    """End a kept program and all that it started, and wait until they are gone. Idempotent."""
    assert process.stdin is not None
    process.stdin.close()  # the keeper kills them all
    try:
        async with asyncio.timeout(AFTER_DEATH_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
