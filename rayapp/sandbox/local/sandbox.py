"""One sandbox of the local provider: a lease on a slot, through which code runs in fresh confined processes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence

from rayapp.errors import SandboxDeadlineError, SandboxError, SandboxGoneError
from rayapp.sandbox.codec import encode_inputs
from rayapp.sandbox.local.level import Limits
from rayapp.sandbox.local.results import call_report, refusal, script_result
from rayapp.sandbox.local.slot import Answer, Slot
from rayapp.types import CallReport, ExecResult, SandboxSpec

MAX_CODE_CHARS = 1 << 20
"""Longer code is refused unread: nobody writes a megabyte to sort a list, and compiling it takes the memory of others."""


class LocalSandbox:
    """See `rayapp.protocols.Sandbox`. Made by `LocalProvider.create`; calls run one after the other."""

    def __init__(self, sandbox_id: str, slot: Slot, spec: SandboxSpec, on_end: Callable[[LocalSandbox], None]) -> None:
        self._id = sandbox_id
        self._slot = slot
        self._spec = spec
        self._on_end = on_end
        self._turn = asyncio.Lock()
        self._is_ended = False
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def provider(self) -> str:
        return "local"

    @property
    def isolation(self) -> str:
        """Level that keeps the code in."""
        return self._slot.level

    @property
    def slot(self) -> Slot:
        """For the provider, which takes it back."""
        return self._slot

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        if stateful:
            raise NotImplementedError
        if (problem := _problem(code)) is not None:
            return refusal(problem, self.isolation).exec
        job = {"kind": "script", "code": code, "stdin": stdin}
        return script_result(await self._run(job, timeout_s, max_output_bytes), self.isolation)

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        packed = encode_inputs(inputs)
        if (problem := _problem(code)) is not None:
            return refusal(problem, self.isolation, len(inputs))
        job = {"kind": "calls", "code": code, "function": function, "inputs": packed}
        return call_report(await self._run(job, timeout_s, 65536), self.isolation, len(inputs))

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return not self._is_ended and self._slot.is_alive

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        self._check_alive()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(ttl_s, self._end_now)

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            self._slot.cancel()
            async with asyncio.timeout(timeout_s), self._turn:
                pass  # what was running has ended, so the slot is clean
        except TimeoutError:
            self._slot.close()
        finally:
            self._on_end(self)

    def _end_now(self) -> None:
        """The time to live is over: no await here, so whatever runs dies with its slot."""
        if not self._is_ended:
            self._is_ended = True
            self._slot.close()
            self._on_end(self)

    async def _run(self, job: dict[str, object], timeout_s: float, max_output_bytes: int) -> Answer:
        job["env"] = dict(self._spec.env)
        limits = Limits(
            cpu_s=math.ceil(timeout_s) + 1,
            memory_mib=self._spec.memory_mib,
            disk_mib=self._spec.disk_mib,
            max_processes=self._spec.max_processes,
        )
        async with self._turn:
            self._check_alive()
            try:
                return await self._slot.run(
                    json.dumps(job).encode(),
                    limits=limits,
                    timeout_s=timeout_s,
                    max_output_bytes=max_output_bytes,
                    home=False,
                )
            except SandboxDeadlineError:
                raise
            except SandboxError:
                self._slot.close()
                raise

    def _check_alive(self) -> None:
        if self._is_ended or not self._slot.is_alive:
            raise SandboxGoneError(f"sandbox {self._id} has ended; lease another one")


def _problem(code: str) -> str | None:
    if type(code) is not str:
        raise TypeError(f"code has to be text, not {type(code).__name__}")
    if len(code) > MAX_CODE_CHARS:
        return f"ValueError: the code has {len(code)} characters; at most {MAX_CODE_CHARS} are run"
    return None
