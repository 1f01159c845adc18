"""Stateful code in a provider's own interpreter: deadline, output cap and a whole answer, kept from outside.

That interpreter is the provider's and knows nothing of our watcher, so what it streams is counted here, and a stream
that ends early is told from one that ended well by a last line of ours. Called by channels.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rayapp.core.errors import SandboxGoneError, SandboxProtocolError
from rayapp.core.types import ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.verdict.codec import clean
from rayapp.sandbox.verdict.program import new_nonce
from rayapp.sandbox.verdict.results import failure

_PROBE_TIMEOUT_S = 10.0
Sink = Callable[[str], None]
Run = Callable[[str, Sink, Sink], Awaitable[str]]
"""(code, stdout, stderr) -> `ValueError: …` when the code raised, else empty. Cancelling it stops the code."""


async def run_session(
    provider: str,
    code: str,
    run: Run,
    alive: Callable[..., Awaitable[bool]],
    *,
    timeout_s: float,
    max_output_bytes: int,
) -> ExecResult:
    """Run code by `run` and say what became of it.

    Args:
        alive: of the sandbox's channel.
    Raises:
        SandboxGoneError: the sandbox died meanwhile.
        SandboxProtocolError: the answer broke off.
    """
    mark = new_nonce()
    # Room for the mark, and for the newline before it.
    output = _CappedOutput(max_output_bytes, len(mark) + 2)
    started = time.monotonic()
    task = asyncio.ensure_future(run(f"{code}\nprint('{mark}')", output.out, output.err))
    flooded = asyncio.ensure_future(output.is_full.wait())
    error, stopped = "", None
    try:
        done, _ = await asyncio.wait({task, flooded}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            error = clean(task.result())
        else:
            stopped = StopCause.OUTPUT if flooded in done else StopCause.TIMEOUT
    finally:
        for pending in (task, flooded):
            pending.cancel()
        await asyncio.gather(task, flooded, return_exceptions=True)
    stdout = output.text("out")
    is_whole = mark in stdout or bool(error)
    in_doubt = stopped is StopCause.TIMEOUT or (stopped is None and not is_whole)
    if in_doubt and not await alive(timeout_s=_PROBE_TIMEOUT_S):
        raise SandboxGoneError("the sandbox ended while code ran in its session")
    if stopped is None and not is_whole:
        raise SandboxProtocolError(f"provider {provider}: the answer of the session broke off")
    ended = failure(error, provider, exit_code=-9 if stopped else int(bool(error)), stopped_for=stopped)
    return replace(
        ended,
        outcome=ended.outcome if stopped or error else ExecOutcome.OK,
        stdout=stdout.replace(f"{mark}\n", "").replace(mark, ""),
        stderr=output.text("err"),
        duration_s=time.monotonic() - started,
        truncated=stopped is StopCause.OUTPUT,
    )


class _CappedOutput:
    """What code printed, up to a limit for each stream; `is_full` once it printed more."""

    def __init__(self, max_bytes: int, num_extra: int) -> None:
        self.is_full = asyncio.Event()
        self._max_bytes = max_bytes
        self._num_extra = num_extra
        self._taken = {"out": bytearray(), "err": bytearray()}

    def out(self, text: str) -> None:
        self._take("out", text)

    def err(self, text: str) -> None:
        self._take("err", text)

    def _take(self, stream: str, text: str) -> None:
        taken = self._taken[stream]
        chunk = text.encode(errors="replace")
        most = self._max_bytes + self._num_extra
        if len(taken) + len(chunk) > most:
            self.is_full.set()
            del taken[self._max_bytes :]
            most = self._max_bytes
        taken += chunk[: max(0, most - len(taken))]

    def text(self, stream: str) -> str:
        return self._taken[stream].decode(errors="replace")
