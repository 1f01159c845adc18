"""A sandbox behind a provider's service: one class for all of them, over the few things in which they differ.

    RemoteSandbox (jobs, deadlines, results) -> Channel (e2b | daytona | mcp): run a program, files, life and death

Code and functions run in a fresh interpreter under a watcher of ours (`watcher.py`), which keeps the deadline and
the caps inside the sandbox. The channel gets that much time and a margin; what takes longer is the provider's failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rayapp.core.errors import SandboxConfigError, SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.core.types import CallReport, ExecResult, SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.loopback import Loopback
from rayapp.sandbox.providers.relay import Converse, relayed
from rayapp.sandbox.verdict import program, results
from rayapp.sandbox.verdict.codec import encode_inputs, off_the_loop
from rayapp.sandbox.verdict.watcher import MAX_FRAME_BYTES

T = TypeVar("T")
_CALLS_OUTPUT_BYTES = 65536


class Channel(Protocol):
    """What one provider can do with one sandbox. Errors are those of `rayapp.core.errors`."""

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        """Run a program with the sandbox's python3, in an interpreter of its own. Returns its stdout.

        Output longer than `max_chars` may be cut, or end it. However the program ended: an exit status is no error. A
        sandbox that died is.
        """
        ...

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run code in the interpreter that lives as long as the sandbox."""
        ...

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None: ...

    async def alive(self, *, timeout_s: float) -> bool: ...

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None: ...

    async def kill(self, *, timeout_s: float) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class RemoteSandbox:
    """See `rayapp.core.protocols.Sandbox`."""

    provider: str
    connection: Connection
    channel: Channel
    spec: SandboxSpec
    margin_s: float
    """For the way to the provider and back, and to start an interpreter there. Not the code's time."""

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
                raise ValueError("stateful code of a remote sandbox reads no stdin: run it with stateful=False")
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
            raise TypeError(f"a command is one text or more, not {argv!r}")
        return await self._run_job({"kind": "command", "argv": list(argv), "stdin": stdin}, timeout_s, max_output_bytes)

    def loopback(self) -> AbstractAsyncContextManager[Loopback]:
        """See `rayapp.sandbox.loopback`."""
        converse: Converse | None = getattr(self.channel, "converse", None)
        if converse is None:
            raise SandboxConfigError(f"sandboxes of {self.provider} run no program that can be talked with")
        return relayed(converse, timeout_s=self.margin_s)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        await self._in_time(self.channel.write_file(path, data, timeout_s=timeout_s), timeout_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        nonce = program.new_nonce()
        job = {"kind": "read", "path": path, "max_bytes": max_bytes, "nonce": nonce}
        found = await self._find_report(job, nonce, timeout_s, max_bytes)
        if found is None:
            raise SandboxProtocolError(f"sandbox {self.id}: reading {path!r} gave no answer")
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
    ) -> results.Answer | ExecResult:
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
        # The program ended and said nothing: the code killed its watcher, or the whole sandbox.
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
            return None  # the watcher writes no such; the code did, past it
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
