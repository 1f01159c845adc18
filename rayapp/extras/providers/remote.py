"""A sandbox behind a provider's service: one class for all providers, over a channel that each provider implements.

    RemoteSandbox (jobs, deadlines, results) -> Channel (e2b | daytona | mcp): run a program, copy files, check and end
                                                the sandbox

Code and functions run in a fresh interpreter under rayapp's watcher (`watcher.py`), which enforces the deadline and the
output limits inside the sandbox. The channel's deadline is longer by a margin; if it passes, the provider has failed.

Stateful code runs in the provider's own interpreter, without the watcher. So `run_session` enforces the deadline and
the output limit from outside. It also makes the code print a last line; output without this line was cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.core.types import CallReport, ExecOutcome, ExecResult, SandboxSpec, StopCause
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.verdict import program, results
from rayapp.sandbox.verdict.codec import clean, encode_inputs, off_the_loop
from rayapp.sandbox.verdict.program import new_nonce
from rayapp.sandbox.verdict.results import failure
from rayapp.sandbox.verdict.watcher import MAX_FRAME_BYTES

T = TypeVar("T")
_CALLS_OUTPUT_BYTES = 65536


class Channel(Protocol):
    """A provider's operations on one sandbox, which raise errors of `rayapp.core.errors`."""

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        """Run a program in a new interpreter of the sandbox's python3, and return its stdout.

        Beyond `max_chars` the output may be cut or the program ended. A nonzero exit status is no error.
        """
        ...

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run code in the sandbox's long-lived interpreter, which keeps variables between calls."""
        ...

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None: ...

    async def alive(self, *, timeout_s: float) -> bool: ...

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None: ...

    async def kill(self, *, timeout_s: float) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class RemoteSandbox:
    """Sandbox that runs jobs through a channel."""

    provider: str
    connection: Connection
    channel: Channel
    spec: SandboxSpec
    margin_s: float  # Seconds beyond the code's time limit, for the network and the start of an interpreter.

    @property
    def id(self) -> str:
        return self.connection.sandbox_id

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        if (problem := results.code_problem(code)) is not None:
            return results.failure(problem, self.provider)
        if stateful:
            if stdin:
                raise ValueError("stateful code in a remote sandbox can't read stdin: run it with stateful=False")
            run = self.channel.run_session(code, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
            return await self._in_time(run, timeout_s + self.margin_s)
        return await self._run_job({"kind": "script", "code": code, "stdin": stdin}, timeout_s, max_output_bytes)

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        packed = encode_inputs(inputs)
        if (problem := results.code_problem(code)) is not None:
            return results.failed_calls(results.failure(problem, self.provider), len(inputs))
        job = {"kind": "calls", "code": code, "function": function, "inputs": packed, "stdin": ""}
        report = await self._report(job, timeout_s, _CALLS_OUTPUT_BYTES)
        if isinstance(report, ExecResult):
            return results.failed_calls(report, len(inputs))
        read = results.call_report
        return await off_the_loop(len(report.frames), lambda: read(report, self.provider, len(inputs)))

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult:
        if not argv or not all(type(part) is str for part in argv):
            raise TypeError(f"a command must be a list of one string or more, not {argv!r}")
        return await self._run_job({"kind": "command", "argv": list(argv), "stdin": stdin}, timeout_s, max_output_bytes)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        await self._in_time(self.channel.write_file(path, data, timeout_s=timeout_s), timeout_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        nonce = program.new_nonce()
        job = {"kind": "read", "path": path, "max_bytes": max_bytes, "nonce": nonce}
        found = await self._find_report(job, nonce, timeout_s, max_bytes)
        if found is None:
            raise SandboxProtocolError(f"sandbox {self.id}: {path!r} can't be read: the sandbox sent no result")
        if (error := found.get("error")) is not None:
            kind = FileNotFoundError if str(error).startswith("FileNotFoundError") else OSError
            raise kind(f"sandbox {self.id}: {path!r} can't be read: {str(error)[:200]}")
        return program.read_bytes(found, "data", max_bytes)

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        try:
            return await self._in_time(self.channel.alive(timeout_s=timeout_s), timeout_s)
        except (SandboxGoneError, SandboxDeadlineError):
            return False

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        await self._in_time(self.channel.extend(ttl_s, timeout_s=timeout_s), timeout_s)

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        await self._in_time(self.channel.kill(timeout_s=timeout_s), timeout_s)

    async def _run_job(self, job: Mapping[str, object], timeout_s: float, max_output_bytes: int) -> ExecResult:
        report = await self._report(job, timeout_s, max_output_bytes)
        if isinstance(report, ExecResult):
            return report
        read = results.script_result
        return await off_the_loop(len(report.frames), lambda: read(report, self.provider))

    async def _report(
        self, job: Mapping[str, object], timeout_s: float, max_output_bytes: int
    ) -> results.RawResult | ExecResult:
        nonce = program.new_nonce()
        full = {
            **job,
            "nonce": nonce,
            "timeout_s": timeout_s,
            "max_output_bytes": max_output_bytes,
            "env": dict(self.spec.env),
        }
        max_bytes = MAX_FRAME_BYTES + 2 * max_output_bytes
        found = await self._find_report(full, nonce, timeout_s + self.margin_s, max_bytes)
        if found is not None:
            return program.read_report(found, max_output_bytes=max_output_bytes)
        # The program ended without a report: the code killed its watcher, or the whole sandbox died.
        if not await self.alive():
            raise SandboxGoneError(f"sandbox {self.id} ended while code ran in it")
        return results.failure(results.NO_REPORT, self.provider, exit_code=-9)

    async def _find_report(
        self, job: Mapping[str, object], nonce: str, timeout_s: float, max_bytes: int
    ) -> dict[str, object] | None:
        max_chars = program.max_report_chars(max_bytes)
        run = self.channel.run_python(program.source(job), timeout_s=timeout_s, max_chars=max_chars)
        said = await self._in_time(run, timeout_s)
        if len(said) > max_chars:
            return None  # the code wrote this line, not the watcher
        return await off_the_loop(len(said), lambda: program.find_report(said, nonce))

    async def _in_time(self, call: Coroutine[object, object, T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError as error:
            if isinstance(error, SandboxDeadlineError):
                raise
            raise SandboxDeadlineError(
                f"sandbox {self.id}: provider {self.provider} did not answer within {timeout_s:g} s"
            ) from None


_PROBE_TIMEOUT_S = 10.0
Sink = Callable[[str], None]
# Function of (code, stdout, stderr) that returns `ValueError: …` if the code raised, else an empty text. The code stops
# if the call is cancelled.
Run = Callable[[str, Sink, Sink], Awaitable[str]]


async def run_session(
    provider: str,
    code: str,
    run: Run,
    alive: Callable[..., Awaitable[bool]],
    *,
    timeout_s: float,
    max_output_bytes: int,
) -> ExecResult:
    """Run code in a session through the function `run`. `alive` checks that the sandbox is alive.

    Raises:
        SandboxGoneError: the sandbox died while the code ran.
        SandboxProtocolError: the output ended before the code's last line.
    """
    mark = new_nonce()
    # Leave room for the mark and for the newline before it.
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
        raise SandboxGoneError(f"sandbox provider {provider}: the sandbox ended while code ran in its session")
    if stopped is None and not is_whole:
        raise SandboxProtocolError(
            f"sandbox provider {provider}: the output of stateful code was cut off before its end"
        )
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
    """Output of code, with a limit for each stream; `is_full` is set when the code prints more."""

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
