"""A program run to its end or until nobody waits for it: what it writes is kept, and all that it started is killed.

It runs on the host as the user of the rollout worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.programs.kept import AFTER_DEATH_S, end, kept, passed_on


class Tail:
    """The end of what a program writes.

    Args:
        max_chars: characters that are kept.
    """

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._bytes = bytearray()
        self._num_left_out = 0

    def add(self, data: bytes) -> None:
        self._bytes += data
        # Four bytes a character at most.
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
    """One trajectory's agent under way."""

    output: Tail
    answer: str | None = None
    failure: str = ""
    ran_out: bool = False
    """Its time is up."""


def environment(folder: Path, own: Mapping[str, str]) -> dict[str, str]:
    """All that a program sees: a home of its own, and what it is given."""
    here = {"HOME": str(folder), "TMPDIR": str(folder), "NO_PROXY": "127.0.0.1,localhost"}
    return passed_on() | here | {"no_proxy": here["NO_PROXY"]} | dict(own)


async def run_program(command: Sequence[str], *, folder: Path, env: Mapping[str, str], output: Tail) -> int:
    """Its exit status; negative is the signal that ended it. Whatever happens, nothing that it started outlives this,
    nor this process.

    Raises:
        OSError: it can't be started.
    """
    process = await asyncio.create_subprocess_exec(
        *kept(command),
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
